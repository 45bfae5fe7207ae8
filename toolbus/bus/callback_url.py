"""Validates callback URLs: only http and https URLs that lead to this machine pass (REST-30, REST-31).

Pure text in, a `CallbackUrl` or an error out: no name is resolved and no connection is opened. A URL is parsed by a
strict grammar of its own, because libraries strip tabs, read `127.1` or fullwidth digits as addresses and disagree
about a second `@`: where two of them disagree, an address outside of this machine slips through. The URL that is
requested (`CallbackUrl.url`) is built anew from the parts that were checked, so that every library reads it alike.
"""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from toolbus.bus.loopback import loopback_host, mask, parse_port
from toolbus.common.text import quote as quote_text

MAX_URL = 2048  # characters; what browsers and proxies took as the longest for decades, and ten times what tools use
MAX_SHOWN = 200  # characters of a refused URL that its error repeats

_PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"(?i:(https?))://([^/?#]*)([^#]*)(?:#.*)?", re.ASCII)
_AUTHORITY = re.compile(r"(?:([^@\[\]]*)@)?(\[[^@\[\]]*\]|[^@:\[\]]*)(?::([0-9]{0,5}))?", re.ASCII)

# REST-31: C0, DEL and C1 controls, white space of any kind, backslashes; and surrogates, which UTF-8 cannot hold.
_UNFIT = re.compile(r"[\x00-\x20\x7f-\xa0\\\ud800-\udfff\s]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


@dataclass(frozen=True, slots=True)
class CallbackUrl:
    """A callback URL that leads to this machine.

    Attributes:
        text: as it was registered, password included: for the store only.
        url: what is requested: without user info and fragment, with the path as it was registered, but for characters
            outside of ASCII, which are percent-encoded. Take it as encoded: requoting would change it.
        scheme: `http` or `https`.
        host: an IPv4 literal, an IPv6 literal without brackets (`::1` or `::ffff:127.0.0.1`), or `localhost`.
        port: the URL's, else the default port of the scheme.
        user, password: percent-decoded, "" where the URL has none.
        shown: as it may be listed, logged and echoed: the text with `***` for the password (REST-8).
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
        """Scheme, host and port: all callbacks of one origin are online or offline together (REST-43)."""
        return self.scheme, self.host, self.port

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request to it: Basic auth where the URL has a user or a password."""
        if not (self.user or self.password):
            return {}
        named = f"{self.user}:{self.password}".encode()
        return {"Authorization": f"Basic {b64encode(named).decode()}"}

    def meets(self, other: CallbackUrl) -> bool:
        """Returns whether both may lead to one listener: `localhost` may be of either address family (REST-32)."""
        return self.port == other.port and not self._hosts().isdisjoint(other._hosts())

    def _hosts(self) -> set[str]:
        return {"127.0.0.1", "::1"} if self.host == "localhost" else {self.host.removeprefix("::ffff:")}


def parse_callback_url(text: str) -> CallbackUrl:
    """Parses and validates a callback URL.

    Raises:
        ValueError: it breaks REST-30 or REST-31; the message has the URL (without its password), the rule and how to
            fix it.
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
    port = parse_port(pieces[3]) if pieces else None
    if pieces is None or port is None:
        raise _refusal(
            text,
            # Without a URL and an at sign: the error would be masked as if it held a password.
            "does not name HOST or HOST:PORT with a port from 1 to 65535: correct it. USER:PASSWORD and an at sign "
            "may stand before the host: percent-encode every other at sign, colon, slash, question mark, number sign "
            "and bracket there",
        )
    host = loopback_host(pieces[2])
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
    url = f"{scheme}://{where}{_NOT_ASCII.sub(lambda match: quote(match[0]), path)}"
    shown = text
    if ":" in info:
        begin = parts.start(2)
        shown = f"{text[:begin]}{info.partition(':')[0]}:***{text[begin + len(info) :]}"
    return CallbackUrl(text, url, scheme, host, port or _PORTS[scheme], user, password, shown)


def _refusal(text: str, rule: str) -> ValueError:
    return ValueError(f"callback_url {quote_text(mask(text), MAX_SHOWN)} {rule}")


def _credentials(text: str, info: str) -> tuple[str, str]:
    raw_user, _, raw_password = info.partition(":")
    try:
        user, password = unquote(raw_user, errors="strict"), unquote(raw_password, errors="strict")
    except UnicodeDecodeError:
        raise _refusal(
            text, "percent-encodes bytes in user or password that are not UTF-8: encode the text as UTF-8 first"
        ) from None
    if ":" in user or _CONTROL.search(user + password):
        raise _refusal(
            text, "has a colon in its user or a control character in user or password, which Basic auth cannot carry"
        )
    return user, password
