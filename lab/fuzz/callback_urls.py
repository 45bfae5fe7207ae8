"""Reads callback URLs, Host and Origin headers: what is taken leads to this machine, however it is read.

A URL that is taken is read again by urllib, by yarl (which aiohttp requests with) and by httptools (a third grammar);
if one of them saw another host, a request could leave the machine.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from ipaddress import ip_address
from urllib.parse import urlsplit

import httptools
from aiohttp.helpers import is_ip_address
from pydantic import ValidationError
from yarl import URL

from lab.fuzz.choices import Choices
from lab.fuzz.json_texts import text_of
from lab.fuzz.target import VECTORS, Target, hold
from toolbus.bus.callback_url import MAX_URL, CallbackUrl, parse_callback_url
from toolbus.bus.gateway.contract_models import RegisterBody
from toolbus.bus.loopback import is_allowed_host_header, is_allowed_origin, is_loopback_host, is_loopback_peer, mask

SECRET = "s3cr3t-w0rd"
# An input of the second kind joins these, so that two grammars can be made to disagree about what is where.
_SYNTAX = r"http:// https:// HTTP:// // / \ ? # @ : [ ] %40 %2f %00 . 0 1"
_HOSTS = "127.0.0.1 127.1 0x7f.0.0.1 ::1 [::1] [::ffff:127.0.0.1] [::ffff:7f00:1] [::1%25lo] localhost evil.example"
_MORE_HOSTS = "10.0.0.1 2130706433 localhost."
_REST = ":80 :443 :65535 :0 :99999 cb .. ; & = 127.0.0.1.evil.example 0177.0.0.1"
PIECES = (
    *(*_SYNTAX.split(), *_HOSTS.split(), *_MORE_HOSTS.split()),
    *("ſ", "１", "。", "\t", "\n", " ", "\u200b", "é", "\udc80", "user", SECRET, *_REST.split()),
)


def _is_here(host: str | None) -> bool:
    """Returns whether a host is this machine, by the standard library alone."""
    if host is None:
        return False
    if host.lower() == "localhost":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _check_taken(taken: CallbackUrl, text: str) -> None:
    shown = f"{text!r} is requested as {taken.url!r}"
    split, requested = urlsplit(taken.url), URL(taken.url, encoded=True)
    wire = httptools.parse_url(taken.url.encode("ascii"))
    wire_host = wire.host.decode().strip("[]") if wire.host else None
    for reader, scheme, host, port, user in (
        ("urllib", split.scheme, split.hostname, split.port, split.username or split.password),
        ("yarl", requested.scheme, requested.host, requested.explicit_port, requested.user or requested.password),
        ("httptools", wire.schema.decode(), wire_host, wire.port, wire.userinfo),
    ):
        hold(scheme in ("http", "https") and scheme == taken.scheme, f"{reader} reads the scheme {scheme!r}: {shown}")
        hold(_is_here(host), f"{reader} reads the host {host!r}: {shown}")
        hold(port in (None, taken.port), f"{reader} reads the port {port!r}: {shown}")
        hold(not user, f"{reader} reads credentials: {shown}")
    # aiohttp connects to an address as it is, and asks the resolver for a name; ours knows only localhost.
    hold(is_ip_address(requested.raw_host) or requested.raw_host == "localhost", f"a name would be looked up: {shown}")
    path = taken.url[taken.url.index("/", len("https://")) :]
    path = path[:-1] if path.endswith("?") and path.count("?") == 1 else path  # yarl leaves out an empty query
    hold(requested.raw_path_qs == path, f"aiohttp asks for {requested.raw_path_qs!r}: {shown}")
    if taken.user or taken.password:
        sent = b64decode(taken.headers["Authorization"].removeprefix("Basic ")).decode()
        hold(sent == f"{taken.user}:{taken.password}", f"the credentials are sent as {sent!r}: {shown}")
    hold(_is_here(taken.host) and is_loopback_host(taken.host), f"the host is {taken.host!r}: {shown}")
    if len(taken.url) <= MAX_URL:  # percent-encoding may have made it longer
        hold(parse_callback_url(taken.url).url == taken.url, f"what is requested is not taken as it is: {shown}")
    info = text.partition("://")[2].partition("@")[0]
    is_elsewhere = SECRET in taken.user or SECRET in text.replace(info, "", 1)  # where it may be shown
    if SECRET in taken.password and not is_elsewhere:
        hold(SECRET not in taken.shown + repr(taken), f"the password is shown: {taken.shown!r}")


def run(data: bytes) -> None:
    """Reads a URL, and the same text as headers and addresses."""
    choose = Choices(data)
    pieces = [choose.pick(PIECES) for _ in range(len(data) - 1)] if choose.flag() else []
    text = "".join(pieces) or text_of(data[1:])
    taken: CallbackUrl | None = None
    try:
        taken = parse_callback_url(text)
    except ValueError as refusal:
        hold(str(refusal).startswith("callback_url "), f"a refusal without its subject: {refusal}")
    if taken is not None:
        _check_taken(taken, text)
    hold((taken is not None) == _gateway_takes(text), f"the gateway and the parser are not of one mind about {text!r}")
    if is_loopback_peer(text):
        hold(_is_here(text), f"{text!r} passes for a peer of this machine")
    if is_allowed_host_header(text):
        hold(_is_here(urlsplit(f"//{text}").hostname), f"{text!r} passes for a Host of this machine")
    if is_allowed_origin(text):
        hold(_is_here(urlsplit(text).hostname), f"{text!r} passes for an Origin of this machine")
    if "@" in text and "://" in text and ":" not in text.partition("://")[2].partition("@")[0]:
        return  # no password
    hold(mask(mask(text)) == mask(text), f"{text!r} is masked otherwise the second time")


def _gateway_takes(text: str) -> bool:
    try:
        RegisterBody(name="t", callback_url=text)
    except ValidationError:
        return False
    return True


def seeds() -> Iterator[bytes]:
    """The vectors, and one play of every piece behind a good beginning."""
    for line in (VECTORS / "callback_urls.jsonl").read_text("utf-8").splitlines():
        yield b"\0" + json.loads(line)["url"].encode("utf-8", "surrogatepass")
    index = PIECES.index
    yield bytes([1, *map(index, ("https://", SECRET, ":", SECRET, "@", "[::1]", "#"))])  # the user has the same name
    for piece in range(len(PIECES)):
        yield bytes([1, index("http://"), piece, index("127.0.0.1"), index("/"), index("cb")])
        yield bytes([1, index("http://"), index("127.0.0.1"), piece, index("/"), piece])
        yield bytes([1, index("https://"), index("user"), index(":"), index(SECRET), index("@"), index("[::1]"), piece])


TARGET = Target(
    "callback_urls", "what is taken leads to this machine for every reader, and shows no password", run, seeds, 512
)
