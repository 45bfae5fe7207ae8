"""Decides which hosts, peers and headers belong to this machine, and masks passwords in URLs (REST-20 to REST-22).

Pure text in, an answer out: no name is resolved. Only the spellings of loopback addresses that every library reads
alike count; callback URLs are validated with these rules in `callback_url`.
"""

from __future__ import annotations

import re
from ipaddress import IPv6Address

_HEADER = re.compile(r"(\[[^@\[\]]*\]|[^@:\[\]]*)(?::([0-9]{1,5}))?", re.ASCII)
_ORIGIN = re.compile(r"(?i:https?)://([^/?#]*)", re.ASCII)
_DEFAULT_PORTS = {"http": 80, "https": 443}  # browsers leave them out
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = re.compile(rf"127(?:\.{_OCTET}){{3}}", re.ASCII)
_LOCALHOST = re.compile("localhost", re.ASCII | re.IGNORECASE)  # ASCII: or `ſ` would count as `s`
_IPV6 = re.compile(r"[0-9A-Fa-f:.]{2,45}", re.ASCII)  # no scope id: `::1%lo`

# A URL inside a longer text starts a user info of its own. A password with a blank and `http://` in it is not handled.
_NEXT_URL = re.compile(r"""(?<=[\s"'(<\[=,])(?=https?://)""", re.ASCII | re.IGNORECASE)
_SCHEME = re.compile(r"[^/\\@:]*:[/\\]{2,}|[^/\\@:]*\bhttps?:[/\\]*", re.ASCII | re.IGNORECASE)
_ATS = ("@", "%40", "＠", "﹫")  # spellings of an at sign by broken clients


def is_loopback_host(host: str) -> bool:
    """Returns whether a host (IPv6 without brackets) is this machine, by its spelling alone (REST-30)."""
    return bool(_LOCALHOST.fullmatch(host)) or is_loopback_peer(host)


def is_loopback_peer(address: str) -> bool:
    """Returns whether an address, as a socket reports it, is loopback (REST-20)."""
    return bool(_IPV4.fullmatch(address)) or _ipv6(address) is not None


def is_allowed_host_header(value: str) -> bool:
    """Returns whether a `Host` header names this machine; a DNS rebinding attack cannot forge that (REST-21)."""
    pieces = _HEADER.fullmatch(value)
    return pieces is not None and loopback_host(pieces[1]) is not None and parse_port(pieces[2]) is not None


def is_allowed_origin(value: str) -> bool:
    """Returns whether an `Origin` header names a page that this machine served itself (REST-21)."""
    match = _ORIGIN.fullmatch(value)
    return match is not None and is_allowed_host_header(match[1])


def is_own_origin(value: str, host: str, scheme: str, port: int) -> bool:
    """Returns whether an `Origin` header names a page of the listener itself, as a browser spells it (REST-22).

    Args:
        host: the `Host` header of the request, which is allowed.
        port: of the listener.
    """
    pieces = _HEADER.fullmatch(host)
    if pieces is None or value.lower() != f"{scheme}://{host}".lower():
        return False
    return (parse_port(pieces[2]) or _DEFAULT_PORTS[scheme]) == port


def parse_port(digits: str | None) -> int | None:
    """Returns a port number; 0 for an empty text, None for a number that is not a port."""
    if not digits:
        return 0
    port = int(digits)
    return port if 1 <= port <= 65535 else None


def loopback_host(spelling: str) -> str | None:
    """Returns a loopback host of a URL in its canonical spelling; None for any other host."""
    if spelling.startswith("["):
        return _ipv6(spelling[1:-1])
    if _IPV4.fullmatch(spelling):
        return spelling
    return "localhost" if _LOCALHOST.fullmatch(spelling) else None


def _ipv6(spelling: str) -> str | None:
    if not _IPV6.fullmatch(spelling):
        return None
    try:
        address = IPv6Address(spelling)
    except ValueError:
        return None
    if int(address) == 1:
        return "::1"
    # Spelled here, because versions of Python differ. No other range that embeds an IPv4 address (6to4, NAT64,
    # IPv4-compatible) counts: routers, not this machine, decide where those lead.
    mapped = address.ipv4_mapped
    return f"::ffff:{mapped}" if mapped is not None and mapped.is_loopback else None


def mask(text: str) -> str:
    """Returns a text with `***` for every password of a URL in it, broken URLs included.

    Where it is unclear at which `@` of a broken URL the password ends, everything up to the last one is hidden.
    """
    return "".join(map(_mask, _NEXT_URL.split(text)))


def _mask(part: str) -> str:
    end = max(map(part.rfind, _ATS))
    if end < 0:
        return part
    scheme = _SCHEME.match(part, 0, end)
    colon = part.find(":", scheme.end() if scheme else 0, end)
    return part if colon < 0 else f"{part[: colon + 1]}***{part[end:]}"
