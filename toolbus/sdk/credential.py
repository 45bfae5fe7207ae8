"""Reads a credential: the file with which a peer reaches a bus on another machine and proves who it is.

The file is TOML, written by ``toolbus keys add``. It holds secrets, so it must belong to this user (or root), and no
other user may read it. Of its values, error texts, log lines and ``repr`` show only the address, the name and the day
on which it expires.
"""

from __future__ import annotations

import binascii
import os
import re
import shlex
import ssl
import stat
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from toolbus.common.reader import Keys, Reader
from toolbus.errors import SetupError
from toolbus.sdk.bus_address import BusAddress, is_several

if TYPE_CHECKING:
    import grpc


MAX_BYTES = 262_144  # of a file: certificates have some kilobytes each
TOKEN = re.compile(r"[!-~]{1,8192}")  # the texts that a header can hold
_PEM = re.compile(r"-----BEGIN ([A-Z0-9 ]{1,40})-----([A-Za-z0-9+/=\s]*)-----END \1-----", re.ASCII)
_FIX = "write the file anew with `toolbus keys renew`"


@dataclass(frozen=True, slots=True)
class Credential:
    """The address of a bus on another machine, the authority that signs its certificate, and this peer's own keys.

    Attributes:
        address: where the bus is: ``tls:HOST:PORT``, ``mtls:HOST:PORT``, an https URL; "" if it is set elsewhere.
        token: sent with every request; "" for none.
        ca: certificates that sign the bus's, as PEM; "" trusts the authorities that grpc comes with.
        certificate: this peer's, as PEM, followed by those that sign it; "" for none.
        key: the private key of the certificate, as PEM.
        expires: when the bus stops accepting it; None if that is not known.
        name: the identity that it proves, for messages.
        path: the file from which it was read; None if a program made it.

    Raises:
        SetupError: from the constructor; a value breaks its rule.
    """

    address: str = ""
    token: str = field(default="", repr=False)
    ca: str = field(default="", repr=False)
    certificate: str = field(default="", repr=False)
    key: str = field(default="", repr=False)
    expires: datetime | None = None
    name: str = ""
    path: Path | None = None

    def __post_init__(self) -> None:
        if self.token and not TOKEN.fullmatch(self.token):
            raise self._error("token", "it must be up to 8192 visible ASCII characters without blanks")
        for key, kind in (("ca", "CERTIFICATE"), ("certificate", "CERTIFICATE"), ("key", "PRIVATE KEY")):
            if (text := getattr(self, key)) and not _holds_pem(text, kind):
                raise self._error(key, f"it must be PEM with -----BEGIN {kind}-----, not encrypted")
        if bool(self.certificate) != bool(self.key):
            missing, present = ("key", "certificate") if self.certificate else ("certificate", "key")
            raise SetupError(f"{self.place} has {present} and no {missing}: a certificate needs its key; {_FIX}")
        if not self.token and not self.certificate:
            raise SetupError(f"{self.place} has neither token nor certificate, so it proves nothing: {_FIX}")
        if self.address and not self.address.startswith("https://") and not is_several(self.address):
            try:
                BusAddress.parse(self.address)
            except SetupError as error:
                raise SetupError(f"{self.place}: {error}") from None

    def __repr__(self) -> str:
        parts = [part for part in ("token", "ca", "certificate", "key") if getattr(self, part)]
        return f"<Credential {self.name or 'unnamed'} of {self.path or 'this program'} with {', '.join(parts)}>"

    @classmethod
    def read(cls, path: str | Path) -> Credential:
        """Reads a credential file.

        Raises:
            SetupError: the file cannot be read, others may read it too, or a value of it breaks its rule.
        """
        import tomllib  # most peers have no credential

        path = Path(path).expanduser()
        content = _read_private(path)
        try:
            table = tomllib.loads(content.decode("utf-8-sig"))
        except ValueError as error:
            raise SetupError(f"{path}: it cannot be parsed: {error}: {_FIX}") from None
        return cls(**Reader(table, str(path)).record(_KEYS), path=path)

    @property
    def place(self) -> str:
        """The credential, for a sentence."""
        return f"the credential {self.path}" if self.path is not None else "the credential"

    @property
    def day(self) -> str:
        """The day (UTC) on which it expires, for a sentence; "" if that is not known."""
        return self.expires.astimezone(UTC).strftime("%Y-%m-%d") if self.expires is not None else ""

    @property
    def has_expired(self) -> bool:
        """Whether it has expired, by the clock of this machine."""
        return self.expires is not None and self.expires <= datetime.now(UTC)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every request."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    @property
    def renew_command(self) -> str:
        """The command that writes it again, for a sentence."""
        return f"toolbus keys renew {self.name or 'NAME'}"

    def renewed(self) -> Credential:
        """Returns the credential as its file has it now; itself if it has no file.

        Raises:
            SetupError: as `read`.
        """
        return self if self.path is None else Credential.read(self.path)

    def check_for(self, address: BusAddress) -> None:
        """Checks that the credential can be used at an address.

        Raises:
            SetupError: its token would cross the network in plain text, or the address needs a certificate.
        """
        if self.token and not address.tls and not address.is_local:
            raise SetupError(
                f"the bus's address {address} is not of this machine, and the token of {self.place} would be sent "
                f"there in plain text: write tls:{address} or mtls:{address}"
            )
        if address.mtls and not self.certificate:
            raise SetupError(
                f"the bus at {address} asks for a client certificate, and {self.place} has none: write one with "
                "`toolbus keys add NAME -o FILE`"
            )

    def _error(self, key: str, rule: str) -> SetupError:
        """Returns the error that a secret breaks a rule; it does not show the secret."""
        return SetupError(f"{self.place}: {key} (not shown) breaks its rule, {rule}: {_FIX}", (key,))


def tls_credentials(credential: Credential | None) -> grpc.ChannelCredentials:
    """Returns the trusted authorities and the client certificate of a channel over TLS."""
    import grpc

    if credential is None:
        return grpc.ssl_channel_credentials()
    parts = (credential.ca, credential.key, credential.certificate)
    return grpc.ssl_channel_credentials(*(part.encode() or None for part in parts))


def _read_private(path: Path) -> bytes:
    """Returns the content of a file that only we can read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # opening a pipe must not hang
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise SetupError(f"the credential {path} is not a file: name one that `toolbus keys add` wrote")
            if os.name == "posix":
                _check_private(path, status)
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SetupError(
            f"the credential {path} cannot be read ({error.strerror or error}): name a file that "
            "`toolbus keys add NAME -o FILE` wrote"
        ) from None
    if len(content) > MAX_BYTES:
        raise SetupError(f"the credential {path} has more than {MAX_BYTES} bytes: it is some other file, name another")
    return content


def _check_private(path: Path, status: os.stat_result) -> None:
    from toolbus.common.path_ownership import check_path  # most peers have no credential

    quoted = shlex.quote(str(path))
    if status.st_uid not in (os.geteuid(), 0):
        raise SetupError(
            f"the credential {path} belongs to user {status.st_uid}, it must belong to this one ({os.geteuid()}) or "
            f"root: chown {os.geteuid()} {quoted}"
        )
    if mode := stat.S_IMODE(status.st_mode) & 0o077:
        raise SetupError(
            f"the credential {path} is open to other users (mode {mode | stat.S_IMODE(status.st_mode):04o}), only its "
            f"owner may read it: chmod 600 {quoted}"
        )
    check_path(path, f"the credential {path}")


def _holds_pem(text: str, kind: str) -> bool:
    """Tells whether a text holds PEM blocks, all of them complete, none encrypted, one of a kind."""
    blocks = _PEM.findall(text)
    if text.count("-----BEGIN ") != len(blocks) or not any(label.endswith(kind) for label, _ in blocks):
        return False
    if any("ENCRYPTED" in label for label, _ in blocks):
        return False
    try:
        return all(binascii.a2b_base64(content) for _, content in blocks)
    except binascii.Error:
        return False


def _secret(reader: Reader) -> str:
    """Reads text that no message may show."""
    if not isinstance(reader.value, str):
        reader = replace(reader, value="(not shown)")
        raise reader.error("it must be text", "put it in quotes")
    return reader.value


def _moment(reader: Reader) -> datetime:
    value = reader.value
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise reader.error("it must be a day or time as in 2027-01-31T12:00:00Z") from None
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        raise reader.error("it must be a day or time as in 2027-01-31T12:00:00Z")
    return value if value.tzinfo is not None else value.replace(tzinfo=UTC)


def _name(reader: Reader) -> str:
    name = reader.text()
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        raise reader.error("it must be 1 to 64 of A-Z a-z 0-9 _ . -")
    return name


_KEYS: Keys = {
    **{key: (key, _secret) for key in ("token", "ca", "certificate", "key")},
    "address": ("address", Reader.text),
    "expires": ("expires", _moment),
    "name": ("name", _name),
}


def client_context(credential: Credential | None) -> ssl.SSLContext:
    """Returns the trusted authorities and the certificate of a TLS client with a credential.

    Raises:
        OSError: the key is not that of the certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if credential is None or not credential.ca:
        context.load_default_certs()
    else:
        context.load_verify_locations(cadata=credential.ca)
    if credential is not None and credential.certificate and os.path.isdir("/dev/fd"):
        files = [_pipe(credential.certificate), _pipe(credential.key)]
        try:
            context.load_cert_chain(f"/dev/fd/{files[0]}", f"/dev/fd/{files[1]}", password="")
        finally:
            for file in files:
                os.close(file)
    return context


def _pipe(text: str) -> int:
    """Returns the reading end of a pipe with a text: ssl reads keys from files only, and no secret goes to the disk."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError), open(writing, "wb", buffering=0) as file:  # ssl refuses a text that a pipe cuts off
        file.write(text.encode())
    return reading
