"""Reads the address of a bus: the transport, and the target that grpc connects to."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass

from toolbus.common.text import quote
from toolbus.errors import SetupError

ADDRESS = "127.0.0.1:48930"
FORMS = "HOST:PORT, tls:HOST:PORT, mtls:HOST:PORT or unix:PATH"  # or several, see `is_several`
MAX_SOCKET_PATH = 107 if sys.platform.startswith("linux") else 103  # bytes that the kernel's sockaddr_un holds
_SEVERAL = re.compile(r"dns:|.*?,\s*([^\s:/,]+:|\[)", re.DOTALL)
_HOST = re.compile(r"\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]|[^\s:/?#@\[\]]+")


@dataclass(frozen=True, slots=True)
class BusAddress:
    """The address of a bus.

    Attributes:
        text: as it was written.
        target: the address for grpc: ``HOST:PORT`` or ``unix:PATH``.
        tls: whether the connection is encrypted, and the bus shows a certificate.
        mtls: whether the bus also asks for a certificate of the client.
        name: the one in the certificate, where it is not the host: ``tls:NAME@HOST:PORT``; "" for the host.
    """

    text: str
    target: str
    tls: bool = False
    mtls: bool = False
    name: str = ""

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> BusAddress:
        """Reads an address.

        Raises:
            SetupError: a gRPC peer cannot use it.
        """
        prefix, _, rest = text.partition(":")
        if prefix == "unix" and rest:
            if (size := len(os.fsencode(rest.removeprefix("//")))) > MAX_SOCKET_PATH:
                raise _error(text, f"its path has {size} bytes and may have {MAX_SOCKET_PATH}: use a shorter one")
            return cls(text, text)
        tls = prefix in ("tls", "mtls")
        target = rest if tls else text
        name, _, target = target.rpartition("@") if tls else ("", "", target)
        host, _, port = target.rpartition(":")
        if not _HOST.fullmatch(host) or not (port.isascii() and port.isdecimal() and 0 < int(port) <= 65535):
            raise _error(text, _problem(text, target))
        if not _can_be_looked_up(host):
            raise _error(text, "whose host is not a name: each of its parts between dots has 1 to 63 characters")
        return cls(text, target, tls, prefix == "mtls", name)

    @property
    def is_unix(self) -> bool:
        """Whether this is the address of a unix socket."""
        return self.target.startswith("unix:")

    @property
    def host(self) -> str:
        """The host, an IPv6 address without brackets."""
        return self.target.rpartition(":")[0].strip("[]")

    @property
    def server_name(self) -> str:
        """The name that the certificate of the bus has to show."""
        return self.name or self.host

    @property
    def port(self) -> int:
        """The port; not of a unix socket."""
        return int(self.target.rpartition(":")[2])

    @property
    def is_local(self) -> bool:
        """Whether messages to this address stay on this machine, as far as its text shows."""
        if self.is_unix or self.host.lower() == "localhost":
            return True
        from ipaddress import ip_address  # most peers send no secret and never need it

        try:
            return ip_address(self.host).is_loopback
        except ValueError:  # a name
            return False


def is_several(text: str) -> bool:
    """Tells whether a text names several buses: addresses with commas between them, or ``dns:`` before one."""
    return _SEVERAL.match(text) is not None


def written_address(text: str) -> str:
    """Returns an address, or several, as written.

    Raises:
        SetupError: a gRPC peer cannot use it; of several the connections find that out.
    """
    return text if is_several(text) else BusAddress.parse(text).text


def _can_be_looked_up(host: str) -> bool:
    """Tells whether the system can be asked for a name: of others a look-up raises no OSError."""
    if host.isascii():
        return all(0 < len(part) <= 63 for part in host.removesuffix(".").split("."))
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def _error(text: str, rule: str) -> SetupError:
    return SetupError(f"the bus's address is {quote(text)}, {rule}")


def _problem(text: str, target: str) -> str:
    """Returns the rule that an address breaks, and how to fix it."""
    scheme, slashes, _ = text.partition("://")
    if scheme in ("http", "https") and slashes:
        return f"which is one for HTTP: hosts and plugins over gRPC take {FORMS}"
    fix = f"write for example {ADDRESS}"
    if slashes:
        fix = f"write it without {scheme}://"
    elif _HOST.fullmatch(target):
        fix = f"add the port, for example {ADDRESS}"
    elif target.count(":") > 1 and re.fullmatch(r"[0-9A-Fa-f:.]+", target):
        fix = "write an IPv6 address in brackets, for example [::1]:48930"
    return f"it must be {FORMS}: {fix}"
