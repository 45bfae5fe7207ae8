"""Finds the identity that a token or certificate proves, from ``keys.toml``, and holds the server's certificate.

A look-up is one SHA-256 and one dictionary; it opens no file. `Keyring.reload` reads changed files: a broken file
changes nothing, so that a mistake in an editor neither opens nor closes the bus.
"""

from __future__ import annotations

import hashlib
import logging
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from toolbus.bus.access.identity import How, Identity, Scopes, day_of
from toolbus.bus.keys.keys_file import CA, FILE, SERVER, KeyRecord, KeysFile, Kind, parse_keys
from toolbus.bus.keys.private_files import Stamp, check_directory, read_private, stamp_of
from toolbus.common.text import quote
from toolbus.errors import SetupError, Unauthenticated

SETTLE_SECONDS = (
    0.1  # an editor that writes in place may be halfway: such a file is read once it has not changed for so long
)
RETRY_SECONDS = 86_400.0  # between two attempts to renew a certificate that cannot be renewed

_TOKEN_ID = re.compile(r"tbk_([0-9a-f]{8})_")
_HOW: Mapping[Kind, How] = {"token": "token", "certificate": "cert"}
_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----\n?", re.DOTALL)

log = logging.getLogger("toolbus.keys")


class ServerCertificate(NamedTuple):
    """The certificates and the key of a TLS server of the bus, each as PEM.

    Attributes:
        key: its private key.
        chain: its certificate, and those between it and a root.
        roots: the certificates that clients' certificates have to lead to.
    """

    key: bytes
    chain: bytes
    roots: bytes


@dataclass(frozen=True, slots=True)
class Changed:
    """The changes of a reload; false where it changed nothing that is in force.

    Attributes:
        identities: names of those whose scopes changed, or that were removed.
        keys: ids of those that were revoked, removed or replaced, or whose expiry changed.
        server: whether the server's certificate or the roots changed.
    """

    identities: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    server: bool = False

    def __bool__(self) -> bool:
        return bool(self.identities or self.keys or self.server)


NOTHING = Changed()


@dataclass(frozen=True, slots=True)
class _State:
    """The content of the files. Replaced as a whole, so that other threads may look things up meanwhile.

    Attributes:
        by_id: the identities of keys in force, by the key's id.
        known: all keys by kind and SHA-256 in hex.
    """

    file: KeysFile
    server: ServerCertificate
    by_id: dict[str, Identity] = field(default_factory=dict)
    known: dict[tuple[Kind, str], KeyRecord] = field(default_factory=dict)

    def proof_of(self, key_id: str) -> tuple[object, ...] | None:
        """Returns the fields of a key that prove an identity; None where it is not in force."""
        return _proof(self.file.keys[key_id]) if key_id in self.by_id else None


@runtime_checkable
class Renewer(Protocol):
    """Renews the server's certificate, where it has the authority's key."""

    def renew_server(self) -> tuple[bool, float]:
        """Renews it if it is due.

        Returns:
            Whether it was renewed, and when to look again, in seconds since the epoch.

        Raises:
            SetupError: it is due, and cannot be renewed.
        """


class Keyring:
    """The keys of one bus.

    Args:
        directory: holds `keys.toml`, the server's certificate and the authority's.
        clock: tells seconds since the epoch.

    Attributes:
        settling: whether the last `reload` did not read a file because it may be half written.

    Raises:
        SetupError: from the constructor: a file is missing, broken, or others may read it.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._clock = clock
        self._paths = (directory / FILE, directory / CA, directory / SERVER)
        self._stamps = tuple(map(stamp_of, self._paths))  # of the files as they were read, broken or not
        self.settling = False
        self._revoked: Mapping[str, str] = {}  # by id of a key the day, whatever the file says
        self._looked_at = 0.0  # when it was looked at last: a clock that goes back makes a certificate not valid yet
        self._renew_at = 0.0  # when to look at the server's certificate again; 0: now
        self._state = self._read(None)

    def __repr__(self) -> str:
        file = self._state.file
        return f"<Keyring {self._directory} identities={len(file.identities)} keys={len(file.keys)}>"

    # -- identities ---------------------------------------------------------------------------------------------------

    def identity_of_token(self, token: str) -> Identity:
        """Returns the identity that a token proves.

        Raises:
            Unauthenticated: the token is unknown, has expired or was revoked. The error does not show it.
        """
        return self._identity("token", hashlib.sha256(token.encode("utf-8", "replace")).hexdigest(), token)

    def identity_of_certificate(self, fingerprint: str) -> Identity:
        """Returns the identity that a certificate proves.

        Args:
            fingerprint: SHA-256 of its DER form, in lower-case hex.

        Raises:
            Unauthenticated: the certificate is not listed, has expired or was revoked.
        """
        return self._identity("certificate", fingerprint)

    def current(self, identity: Identity) -> Identity:
        """Returns the same key's identity as it is now, for a session that proved it earlier.

        Raises:
            Unauthenticated: the key is no longer in force.
        """
        now = self._state.by_id.get(identity.key)
        if now is not None and now.proof == identity.proof and self._clock() < now.expires:
            return now
        key = self._state.file.keys.get(identity.key)
        if key is None or key.sha256 != identity.proof:  # the id may stand for another secret now
            raise Unauthenticated(
                f"key {identity.key} of identity {identity.name!r} was removed from the bus or replaced: ask an "
                f"operator for a new credential (`toolbus keys renew {identity.name}`)"
            )
        raise Unauthenticated(self._why_ended(key))

    @property
    def identities(self) -> Mapping[str, Scopes]:
        """The scopes of each identity by its name."""
        return self._state.file.identities

    @property
    def keys(self) -> Mapping[str, KeyRecord]:
        """The keys by id, those that have ended too."""
        return self._state.file.keys

    def _identity(self, kind: Kind, digest: str, token: str = "") -> Identity:
        state = self._state
        key = state.known.get((kind, digest))
        if key is not None:
            identity = state.by_id.get(key.id)
            if identity is not None and self._clock() < identity.expires:
                return identity
            raise Unauthenticated(self._why_ended(key))
        shown = f"this certificate (SHA-256 {digest[:16]}…)"
        if kind == "token":
            shown = f"the token {match[1]}" if (match := _TOKEN_ID.match(token)) else "this token"
        raise Unauthenticated(
            f"{shown} is not a key of this bus: use the credential of this bus, or ask an operator for one "
            "(`toolbus keys add NAME` or `toolbus keys renew NAME`)"
        )

    def _why_ended(self, key: KeyRecord) -> str:
        shown = f"key {key.id} of identity {key.identity!r}"
        if key.revoked:
            return (
                f"{shown} was revoked on {key.revoked}: ask an operator of the bus for a new credential "
                f"(`toolbus keys renew {key.identity}`)"
            )
        if key.identity not in self._state.file.identities:
            return f"{shown} ended: an operator removed that identity from {FILE}; ask for a new credential"
        return f"{shown} expired on {day_of(key.expires)}: renew it with `toolbus keys renew {key.identity}`"

    # -- changes -----------------------------------------------------------------------------------------------------

    def revoke(self, days: Mapping[str, str]) -> None:
        """Takes keys for revoked since a day, by their ids, whatever the file says; the next `reload` does it."""
        if days != self._revoked:
            self._revoked, self._stamps = days, (None,) * len(self._paths)

    def reload(self) -> Changed:
        """Reads the files that changed since the last time; costs a few microseconds if none did.

        A broken file is logged once, and changes nothing. May be called on any thread.
        """
        stamps = tuple(map(stamp_of, self._paths))
        if stamps == self._stamps:
            self.settling = False
            return NOTHING
        pairs = zip(self._stamps, stamps, strict=True)
        self.settling = any(_is_settling(old, new, self._clock()) for old, new in pairs)
        if self.settling:
            return NOTHING
        before, self._stamps = self._state, stamps
        try:
            after = self._read(before)
        except SetupError as error:
            log.error("keys not reloaded, the earlier ones stay in force: %s", error)
            return NOTHING
        self._state = after
        if after.server != before.server or after.file.names != before.file.names:
            self._renew_at = 0.0
        changed = _compare(before, after)
        log.info(
            "keys reloaded identities=%d keys=%d changed=%s",
            len(after.file.identities),
            len(after.file.keys),
            ",".join(sorted(changed.identities | changed.keys)) or "-",
        )
        return changed

    def _read(self, before: _State | None) -> _State:
        check_directory(self._directory)
        (keys, _), (roots, _), (server, _) = map(read_private, self._paths)
        file = parse_keys(keys, str(self._paths[0]))
        revoked = {name: key.revoked or self._revoked.get(name, "") for name, key in file.keys.items()}
        file = replace(file, keys={name: replace(key, revoked=revoked[name]) for name, key in file.keys.items()})
        certificate = _server_certificate(self._paths[2], server, roots)
        if before is not None and before.server == certificate:
            certificate = before.server  # its users compare objects
        return _state(file, certificate, before)

    # -- the server's certificate ------------------------------------------------------------------------------------

    def server_certificate(self) -> ServerCertificate:
        """Returns the server's certificate, from memory: may be called at each handshake, on any thread."""
        return self._state.server

    def renew_if_due(self, renewer: Renewer) -> bool:
        """Renews the server's certificate if it is due and the authority's key is here. Blocks.

        Returns:
            Whether it was renewed; the next `reload` reads the new one.
        """
        now = self._clock()
        if self._looked_at <= now < self._renew_at:
            return False
        self._looked_at = now
        try:
            renewed, self._renew_at = renewer.renew_server()
        except SetupError as error:
            self._renew_at = now + RETRY_SECONDS
            log.warning("the server's certificate cannot be renewed: %s", error)
            return False
        return renewed


def _is_settling(old: Stamp, new: Stamp, now: float) -> bool:
    """Tells whether a file was written in place just now; one that was moved here is complete.

    Where two were moved here in turn, the second may have the inode of the first, and looks as if written in place.
    """
    if old is None or new is None or old[0] == new[0] or old[3] != new[3]:
        return False
    return abs(now - new[0] / 1e9) < SETTLE_SECONDS


def _state(file: KeysFile, server: ServerCertificate, before: _State | None) -> _State:
    """Builds the state; unchanged scopes are the same objects as before, because caches compare objects."""
    old = before.file.identities if before else {}
    identities = {
        name: old[name] if name in old and old[name].as_table() == scopes.as_table() else scopes
        for name, scopes in file.identities.items()
    }
    state = _State(KeysFile(identities, file.keys, file.names, file.address), server)
    for key in file.keys.values():
        state.known[key.kind, key.sha256] = key
        scopes = identities.get(key.identity)
        if scopes is None or key.revoked:
            continue
        known = before.by_id.get(key.id) if before else None
        if known is None or known.scopes is not scopes or before is None or before.proof_of(key.id) != _proof(key):
            known = Identity(key.identity, scopes, key.id, _HOW[key.kind], key.expires, key.sha256)
        state.by_id[key.id] = known
    return state


def _proof(key: KeyRecord) -> tuple[object, ...]:
    """Returns the fields whose change makes a key another one, besides the scopes of its identity."""
    return key.identity, key.kind, key.sha256, key.expires


def _compare(before: _State, after: _State) -> Changed:
    old, new = before.file.identities, after.file.identities
    names = frozenset(name for name, scopes in old.items() if new.get(name) is not scopes)
    keys = frozenset(key_id for key_id in before.by_id if before.proof_of(key_id) != after.proof_of(key_id))
    return Changed(names, keys, before.server != after.server)


def _server_certificate(path: Path, content: bytes, roots: bytes) -> ServerCertificate:
    """Splits a file of a private key and certificates, and checks that they fit each other."""
    blocks = [(match[1], match[0]) for match in _BLOCK.finditer(content)]
    key = b"".join(block for label, block in blocks if label.endswith(b"PRIVATE KEY"))
    chain = b"".join(block for label, block in blocks if label == b"CERTIFICATE")
    fix = "make it anew with `toolbus keys init`"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(path, password=lambda: b"none")
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=roots.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        reason = quote(getattr(error, "reason", None) or str(error))
        raise SetupError(f"{path} or {path.with_name(CA)} cannot be used ({reason}): {fix}") from None
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror}: {fix}") from None
    return ServerCertificate(key, chain, roots)
