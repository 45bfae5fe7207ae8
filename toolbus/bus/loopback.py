"""Which callback URLs, peers and headers belong to this machine (REST-20, REST-21, REST-30, REST-31).

Pure text in, verdicts out: no name is resolved and nothing is connected to. A callback URL is taken apart here by a
grammar of its own, stricter than any library's: libraries strip tabs, read `127.1` or fullwidth digits as addresses and
disagree about a second `@`, and where two of them disagree an address outside of this machine slips through. What is
requested (`CallbackUrl.url`) is put together anew from the parts that were checked, so that every library reads it
alike.
"""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from urllib.parse import quote, unquote

MAX_URL = 2048  # characters; what browsers and proxies took as the longest for decades, and ten times what tools use
MAX_ECHO = 200  # characters of a refused value that its error repeats

_PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"(?i:(https?))://([^/?#]*)([^#]*)(?:#.*)?", re.ASCII)
_AUTHORITY = re.compile(r"(?:([^@\[\]]*)@)?(\[[^@\[\]]*\]|[^@:\[\]]*)(?::([0-9]{0,5}))?", re.ASCII)
_HEADER = re.compile(r"(\[[^@\[\]]*\]|[^@:\[\]]*)(?::([0-9]{1,5}))?", re.ASCII)
_ORIGIN = re.compile(r"(?i:https?)://([^/?#]*)", re.ASCII)
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = re.compile(rf"127(?:\.{_OCTET}){{3}}", re.ASCII)
_LOCALHOST = re.compile("localhost", re.ASCII | re.IGNORECASE)  # ASCII: or `ſ` would count as `s`
_IPV6 = re.compile(r"[0-9A-Fa-f:.]{2,45}", re.ASCII)  # no scope id: `::1%lo`

# REST-31: C0, DEL and C1 controls, white space of any kind, backslashes; and surrogates, which UTF-8 cannot hold.
_UNFIT = re.compile(r"[\x00-\x20\x7f-\xa0\\\ud800-\udfff\s]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")

# A URL inside a longer text starts a user info of its own. A password with a blank and `http://` in it is no case.
_NEXT_URL = re.compile(r"""(?<=[\s"'(<\[=,])(?=https?://)""", re.ASCII | re.IGNORECASE)
_SCHEME = re.compile(r"[^/\\@:]*:[/\\]{2,}|[^/\\@:]*\bhttps?:[/\\]*", re.ASCII | re.IGNORECASE)
_ATS = ("@", "%40", "＠", "﹫")  # what a broken client writes for one


@dataclass(frozen=True, slots=True)
class CallbackUrl:
    """A callback URL that leads to this machine.

    Attributes:
        text: as it was given, password included: for the store only.
        url: what is requested: without user info and fragment, with the path as it was given, but for characters
            outside of ASCII, which are percent-encoded. Take it as encoded: requoting would change it.
        scheme: `http` or `https`.
        host: an IPv4 literal, an IPv6 literal without brackets (`::1` or `::ffff:127.0.0.1`), or `localhost`.
        port: the given one, or the scheme's.
        user, password: percent-decoded, "" where there are none.
        shown: as it may be listed, logged and echoed: as it was given, with `***` for the password (REST-8).
    """

    text: str = field(repr=False)
    url: str = field(repr=False)
    scheme: str
    host: str
    port: int
    user: str = field(repr=False)
    password: str = field(repr=False)
    shown: str

    @property
    def origin(self) -> tuple[str, str, int]:
        """Scheme, host and port: what is online or offline as one (REST-43)."""
        return self.scheme, self.host, self.port

    @property
    def headers(self) -> dict[str, str]:
        """What a request to it carries: Basic auth where user or password were given."""
        if not (self.user or self.password):
            return {}
        named = f"{self.user}:{self.password}".encode()
        return {"Authorization": f"Basic {b64encode(named).decode()}"}

    def meets(self, other: CallbackUrl) -> bool:
        """Whether both may lead to one listener: `localhost` may be either family's loopback address (REST-32)."""
        return self.port == other.port and not self._hosts().isdisjoint(other._hosts())

    def _hosts(self) -> set[str]:
        return {"127.0.0.1", "::1"} if self.host == "localhost" else {self.host.removeprefix("::ffff:")}


def parse_callback_url(text: str) -> CallbackUrl:
    """Takes a callback URL apart.

    Raises:
        ValueError: it breaks REST-30 or REST-31; the sentence names the value (without its password), the rule and
            the cure.
    """
    if len(text) > MAX_URL:
        raise _refusal(text, f"has {len(text)} characters, more than {MAX_URL}: shorten it")
    if _UNFIT.search(text):
        raise _refusal(
            text, "holds white space, a control character, a backslash or half of a surrogate pair: percent-encode it"
        )
    parts = _URL.fullmatch(text)
    if parts is None:
        raise _refusal(text, "does not begin with http:// or https://: give the whole URL, http://127.0.0.1:PORT/PATH")
    scheme, authority, target = parts[1].lower(), parts[2], parts[3]
    pieces = _AUTHORITY.fullmatch(authority)
    port = _port(pieces[3]) if pieces else None
    if pieces is None or port is None:
        raise _refusal(
            text,
            "is not of the form http://[USER:PASSWORD@]HOST[:PORT]/PATH with a port from 1 to 65535: correct it, and "
            "percent-encode `@`, `:`, `/`, `?`, `#`, `[` and `]` in user and password",
        )
    host = _host(pieces[2])
    if host is None:
        raise _refusal(
            text,
            "leads away from this machine, or spells its address in an unusual way: the host must be 127.0.0.1 (or "
            "another of 127.0.0.0/8), [::1] or localhost",
        )
    info = pieces[1] or ""
    user, password = _credentials(text, info)
    where = f"[{host}]" if ":" in host else host
    if port:
        where += f":{port}"
    path = target if target.startswith("/") else f"/{target}"
    url = f"{scheme}://{where}{_NOT_ASCII.sub(lambda found: quote(found[0]), path)}"
    shown = text
    if ":" in info:
        begin = parts.start(2)
        shown = f"{text[:begin]}{info.partition(':')[0]}:***{text[begin + len(info) :]}"
    return CallbackUrl(text, url, scheme, host, port or _PORTS[scheme], user, password, shown)


def is_loopback_host(host: str) -> bool:
    """Tells whether a host, an IPv6 one without brackets, is this machine by its spelling alone (REST-30)."""
    return bool(_LOCALHOST.fullmatch(host)) or is_loopback_peer(host)


def is_loopback_peer(address: str) -> bool:
    """Tells whether an address, as a socket reports it, is loopback (REST-20)."""
    return bool(_IPV4.fullmatch(address)) or _ipv6(address) is not None


def is_allowed_host_header(value: str) -> bool:
    """Tells whether a `Host` header names this machine: what DNS rebinding cannot forge (REST-21)."""
    pieces = _HEADER.fullmatch(value)
    return pieces is not None and _host(pieces[1]) is not None and _port(pieces[2]) is not None


def is_allowed_origin(value: str) -> bool:
    """Tells whether an `Origin` header is of a page that this machine served itself (REST-21)."""
    found = _ORIGIN.fullmatch(value)
    return found is not None and is_allowed_host_header(found[1])


def mask(text: str) -> str:
    """Returns a text with `***` for every password of a URL in it, broken URLs included.

    Where a broken URL does not tell where the password ends, everything up to its last `@` is hidden.
    """
    return "".join(map(_mask, _NEXT_URL.split(text)))


def _mask(part: str) -> str:
    end = max(map(part.rfind, _ATS))
    if end < 0:
        return part
    scheme = _SCHEME.match(part, 0, end)
    colon = part.find(":", scheme.end() if scheme else 0, end)
    return part if colon < 0 else f"{part[: colon + 1]}***{part[end:]}"


def _refusal(text: str, rule: str) -> ValueError:
    shown = mask(text)
    if len(shown) > MAX_ECHO:
        shown = shown[: MAX_ECHO - 1] + "…"
    return ValueError(f"callback_url {shown!r} {rule}")


def _port(digits: str | None) -> int | None:
    """Returns a port, 0 where none is given and None where there is no such port."""
    if not digits:
        return 0
    port = int(digits)
    return port if 1 <= port <= 65535 else None


def _host(spelling: str) -> str | None:
    """Returns a loopback host, as URLs spell it, in its one spelling; None for any other host."""
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


def _credentials(text: str, info: str) -> tuple[str, str]:
    raw_user, _, raw_password = info.partition(":")
    try:
        user, password = unquote(raw_user, errors="strict"), unquote(raw_password, errors="strict")
    except UnicodeDecodeError:
        raise _refusal(text, "percent-encodes bytes in user or password that are no UTF-8: encode them so") from None
    if ":" in user or _CONTROL.search(user + password):
        raise _refusal(
            text, "has a colon in its user or a control character in user or password, which Basic auth cannot carry"
        )
    return user, password
