"""Answers the console's requests over HTTP: the files of its page, the stream of digests, logins, and the identity.

The gateway passes admitted requests on. The page's files are the same for all and hold nothing of the bus; each request
of its scripts needs a permission.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import random
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from toolbus.bus.access.identity import Identity, Principal, Scopes
from toolbus.bus.audit import Audit
from toolbus.bus.gateway.gateway_parts import IDENTITY
from toolbus.bus.gateway.http_connection import CONNECTION, peer_of
from toolbus.bus.gateway.remote_access import BY_COOKIE
from toolbus.bus.keys.doorman import Doorman
from toolbus.bus.keys.seal import BrokenSeal, Sealer
from toolbus.bus.web_paths import Headers, Message, Receive, Send, disconnected, respond
from toolbus.common.cancellation import wait_first
from toolbus.common.version import VERSION
from toolbus.errors import Unauthenticated
from toolbus.parts.console.feed import DigestFeed, Ended, TooMany, TooSlow

# A browser must not hold a credential. `toolbus console` exchanges it for a code, and the browser the code for a
# cookie. The cookie holds no secret of the key: the bus seals it, it names its key and ends with it. With a data
# directory it is valid after a restart of the bus too.

COOKIE = "__Host-toolbus"  # a browser takes a cookie of such a name only from HTTPS, for one host and all its paths
COOKIE_SECONDS = 12 * 3600.0
CODE_SECONDS = 60.0
CODE_BYTES = 24
MAX_CODES = 1_000  # unused; beyond it the oldest is dropped
_PURPOSE = "console cookie"
_AGAIN = "make a new one with `toolbus console --bus ADDRESS`"
_NO_SCOPES = Scopes()  # of a cookie until its key is looked up


class Logins:
    """The codes and cookies of one bus.

    Args:
        doorman: tells whether a key is still in force.
        data_dir: holds the key that seals cookies; None: they end with the bus.
        shared: the key of several buses, which counts before that.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        doorman: Doorman,
        data_dir: Path | None,
        clock: Callable[[], float] = time.time,
        shared: bytes | None = None,
    ) -> None:
        self._doorman = doorman
        self._data_dir = data_dir
        self._shared = shared
        self._clock = clock
        self._made: Sealer | None = None  # None until it is needed
        self._codes: dict[bytes, tuple[Identity, float]] = {}  # by the SHA-256 of a code: its identity, and its end

    def __repr__(self) -> str:
        return f"<Logins codes={len(self._codes)}>"

    @property
    def _sealer(self) -> Sealer:
        if self._made is None:
            self._made = Sealer.of(self._data_dir, self._clock, self._shared)
        return self._made

    def code_for(self, identity: Identity) -> str:
        """Returns a code that lets a browser act as an identity."""
        now = self._clock()
        self._codes = {digest: each for digest, each in self._codes.items() if each[1] > now}
        while len(self._codes) >= MAX_CODES:
            del self._codes[next(iter(self._codes))]
        code = secrets.token_urlsafe(CODE_BYTES)
        self._codes[_digest(code)] = identity, now + CODE_SECONDS
        return code

    def exchange(self, code: str) -> tuple[Identity, str]:
        """Returns the identity of a code, and the header that sets the cookie; the code is used up.

        Raises:
            Unauthenticated: the code is unknown, was used or has expired, or its key has ended.
        """
        identity, end = self._codes.pop(_digest(code), (None, 0.0))
        if identity is None or end <= self._clock():
            raise Unauthenticated(
                f"the code is unknown: it is good once, for {CODE_SECONDS:g} s, and ends with the bus; {_AGAIN}"
            )
        self._doorman.current(identity)
        seconds = min(COOKIE_SECONDS, identity.expires - self._clock())
        ends = self._clock() + seconds
        fields = [identity.name, identity.key, identity.how, identity.proof, min(identity.expires, 1e15), ends]
        sealed = self._sealer.seal(json.dumps(fields).encode(), _PURPOSE, seconds=seconds)
        attributes = f"Path=/; Secure; HttpOnly; SameSite=Strict; Max-Age={int(seconds)}"
        return identity, f"{COOKIE}={sealed}; {attributes}"

    def identity_in(self, header: str) -> Identity | None:
        """Returns the identity that a Cookie header proves, with the scopes of now; None without a cookie of the bus.

        The identity expires with the cookie.

        Raises:
            Unauthenticated: the cookie has expired or is not of this bus, or its key has ended.
        """
        pairs = (pair.strip().partition("=") for pair in header.split(";"))
        cookie = next((value for name, _, value in pairs if name == COOKIE), "")
        if not cookie:
            return None
        try:
            content = self._sealer.open(cookie, _PURPOSE)
        except BrokenSeal as error:
            raise Unauthenticated(f"the login of this browser has ended ({error}): {_AGAIN}") from None
        name, key, how, proof, expires, ends = json.loads(content)
        return replace(self._doorman.current(Identity(name, _NO_SCOPES, key, how, expires, proof)), expires=ends)


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode("utf-8", "surrogatepass")).digest()


# Holds the files of the console's page as they are served, and the headers that make a browser trust nothing else.
#
# All files are read once, at the first request. A path is looked up in a dictionary, so none leads out of the
# folder. Below a version, which is a digest of all contents, they never change; elsewhere a browser checks for
# changes. The page refers to the files below the version, so it always loads files that belong together. Its head
# names all modules, so that a browser requests them at once instead of import after import.

PAGE_PATH = "/console"
HOME = f"{PAGE_PATH}/"
INDEX = "index.html"
# Scripts come from files of ours alone, and none can make markup out of a text: what plugins write stays text.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".webp": "image/webp",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
}
_ASK = "no-cache"
_NEVER_CHANGES = "public, max-age=31536000, immutable"
_PRELOAD = b'<link rel="modulepreload" href="%b">\n'
_REFERENCE = re.compile(rb'\b(href|src)="(?:/console/|\./)?([^":/#?][^":#?]*)"')


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file.

    Attributes:
        content_type: of the file, "" where no browser has to know it.
        etag: identifies its content, with its quotes.
    """

    content: bytes
    content_type: str
    etag: str


class PageFiles:
    """The files of a folder and of the folders in it.

    Args:
        folder: has an `index.html`; without one there is no page.
    """

    def __init__(self, folder: Path) -> None:
        contents = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.suffix in TYPES and path.is_file()
        }
        whole = hashlib.sha256()
        for name, content in contents.items():
            whole.update(b"%b\0%d\0%b" % (name.encode(), len(content), content))
        self.version = whole.hexdigest()[:16]
        if INDEX in contents:
            modules = b"".join(_PRELOAD % name.encode() for name in contents if name.endswith(".mjs"))
            index = contents[INDEX].replace(b"</head>", modules + b"</head>", 1)
            contents[INDEX] = self._versioned(index, frozenset(contents))
        self._files = {name: _file(name, content) for name, content in contents.items()}

    def __repr__(self) -> str:
        return f"<PageFiles {self.version} files={len(self._files)}>"

    def find(self, path: str) -> tuple[PageFile, str] | None:
        """Returns the file of a path below `HOME`, and its Cache-Control; None where no such file exists."""
        name = path.removeprefix(HOME)
        version, slash, rest = name.partition("/")
        is_versioned = bool(slash) and version == self.version
        file = self._files.get((rest if is_versioned else name) or INDEX)
        if file is None or (is_versioned and not rest):
            return None
        return file, _NEVER_CHANGES if is_versioned else _ASK

    def _versioned(self, index: bytes, names: frozenset[str]) -> bytes:
        """Returns the page with its references to files of the folder below the version."""

        def below(match: re.Match[bytes]) -> bytes:
            if match[2].decode("utf-8", "replace") not in names:
                return match[0]
            return b'%b="%b%b/%b"' % (match[1], HOME.encode(), self.version.encode(), match[2])

        return _REFERENCE.sub(below, index)


def _file(name: str, content: bytes) -> PageFile:
    digest = hashlib.sha256(content).hexdigest()[:32]
    return PageFile(content, TYPES[Path(name).suffix], f'"{digest}"')


API_PATH = "/api/console"
STREAM_PATH = f"{API_PATH}/stream"
ME_PATH = f"{API_PATH}/me"
CODE_PATH = f"{API_PATH}/code"
LOGIN_PATH = f"{API_PATH}/login"
_METHODS = {ME_PATH: ("GET", "HEAD"), STREAM_PATH: ("GET", "HEAD"), CODE_PATH: ("POST",), LOGIN_PATH: ("POST",)}
PATHS = (  # method and path of each request that is answered
    *(("GET", path) for path in (PAGE_PATH, HOME, f"{HOME}{{file:rest}}")),
    *((methods[0], path) for path, methods in _METHODS.items()),
)
MAX_LOGIN_BYTES = 4_096
_NO_LOGIN = "programs and browsers of this machine need no login: open /console"
SEND_SECONDS = 10.0
RETRY_SECONDS = (1.0, 3.0)  # until a client should reconnect, drawn between these
BUSY_RETRY_SECONDS = (10.0, 20.0)  # the same for one stream too many
_BUSY = "there are as many consoles as the bus serves at the same time: it will be tried again"
_SLOW = "the digests were not read as fast as they were made: the stream begins again"

_JSON = (b"content-type", b"application/json")
_NO_STORE = (b"cache-control", b"no-store")
_NO_REFERRER = (b"referrer-policy", b"no-referrer")


class ConsoleApp:
    """The ASGI application below `PAGE_PATH` and `API_PATH`.

    Args:
        folder: of the page's files, which are read at the first request.
        logins: logs browsers in over HTTPS.
        audit: records logins.
        bus_id: as in the handshake of sessions.
        send_seconds: a client that takes no bytes for so long is cut off.
    """

    def __init__(
        self,
        folder: Path,
        feed: DigestFeed,
        logins: Logins,
        audit: Audit,
        bus_id: str,
        send_seconds: float = SEND_SECONDS,
    ) -> None:
        self._folder = folder
        self._feed = feed
        self._logins = logins
        self._audit = audit
        self._bus_id = bus_id
        self._send_seconds = send_seconds
        self._files: PageFiles | None = None  # None until the first request

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path == PAGE_PATH or path.startswith(HOME):
            await self._file(scope, send)
        elif path not in _METHODS:
            await _refuse(scope, send, 404, f"there is no {method} {path}")
        elif method not in _METHODS[path]:
            allowed = ", ".join(_METHODS[path])
            await _refuse(scope, send, 405, f"{path} takes {allowed}, not {method}", [(b"allow", allowed.encode())])
        elif path == STREAM_PATH:
            await self._stream(scope, receive, send)
        elif path == ME_PATH:
            await respond(scope, send, 200, orjson.dumps(self._me(scope[IDENTITY])), [_JSON, _NO_STORE])
        elif path == CODE_PATH:
            await self._code(scope, send)
        else:
            await self._login(scope, receive, send)

    # -- the page ----------------------------------------------------------------------------------------------------

    async def _file(self, scope: Message, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            why = f"the console's files are read with GET, not with {scope['method']}"
            await _refuse(scope, send, 405, why, [(b"allow", b"GET, HEAD")])
            return
        if scope["path"] == PAGE_PATH:  # so that relative references of the page work
            query = scope["query_string"]
            target = HOME.encode() + (b"?" + query if query else b"")
            await respond(scope, send, 307, b"", [(b"location", target), _NO_STORE, _NO_REFERRER])
            return
        if self._files is None:
            self._files = await asyncio.to_thread(PageFiles, self._folder)
        match = self._files.find(scope["path"])
        if match is None:
            await _refuse(scope, send, 404, f"the console has no file {scope['path']}")
            return
        file, cache = match
        etag = file.etag.encode()
        headers: Headers = [(b"etag", etag), (b"cache-control", cache.encode()), _NO_REFERRER]
        known = b",".join(value for name, value in scope["headers"] if name == b"if-none-match")
        if etag in {each.strip().removeprefix(b"W/") for each in known.split(b",")}:
            await respond(scope, send, 304, b"", headers)
            return
        await respond(scope, send, 200, file.content, [(b"content-type", file.content_type.encode()), *headers])

    # -- logging in over HTTPS ---------------------------------------------------------------------------------------

    async def _code(self, scope: Message, send: Send) -> None:
        """Answers a program that has a key with a code for a browser."""
        if scope["scheme"] != "https":
            await _refuse(scope, send, 404, _NO_LOGIN)
        elif scope.get(BY_COOKIE):
            await _refuse(scope, send, 403, "a login of a browser makes no further ones: use `toolbus console`")
        else:
            code = self._logins.code_for(scope[IDENTITY])
            answer = orjson.dumps({"code": code, "seconds": CODE_SECONDS})
            await respond(scope, send, 200, answer, [_JSON, _NO_STORE])

    async def _login(self, scope: Message, receive: Receive, send: Send) -> None:
        """Exchanges a code for a cookie."""
        if scope["scheme"] != "https":
            await _refuse(scope, send, 404, _NO_LOGIN)
            return
        body = b""
        async for chunk in _body(receive):
            body += chunk
            if len(body) > MAX_LOGIN_BYTES:
                await _refuse(scope, send, 413, f"the body has more than {MAX_LOGIN_BYTES} bytes: send a code")
                return
        try:
            code = orjson.loads(body)["code"]
            identity, cookie = self._logins.exchange(str(code))
        except (ValueError, LookupError, TypeError):
            await _refuse(scope, send, 422, 'the body is not {"code": "…"}')
        except Unauthenticated as error:
            self._audit.refuse(peer_of(scope), f"POST {LOGIN_PATH}", str(error))
            await _refuse(scope, send, 401, str(error))
        else:
            self._audit.record("login", Principal(identity=identity), target=PAGE_PATH, peer=peer_of(scope))
            headers = [_JSON, _NO_STORE, (b"set-cookie", cookie.encode())]
            await respond(scope, send, 200, orjson.dumps({"identity": identity.name}), headers)

    # -- for its scripts ---------------------------------------------------------------------------------------------

    def _me(self, identity: Identity) -> dict[str, Any]:
        scopes = identity.scopes
        return {
            "identity": identity.name,
            "expires": None if math.isinf(identity.expires) else identity.expires,
            "administer": ["*"] if scopes is None else sorted(scopes.administer),
            "version": VERSION,
            "bus_id": self._bus_id,
            "home": socket.gethostname(),
        }

    async def _stream(self, scope: Message, receive: Receive, send: Send) -> None:
        headers: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), _NO_STORE]
        headers.append((b"x-accel-buffering", b"no"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        await wait_first(disconnected(receive), self._follow(scope, send))

    async def _follow(self, scope: Message, send: Send) -> None:
        """Sends digests until the bus stops, or the client takes no more."""

        async def put(data: bytes, more: bool = True) -> None:
            async with asyncio.timeout(self._send_seconds):
                await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            try:
                async with contextlib.aclosing(self._feed.stream()) as frames:
                    await put(_retry(RETRY_SECONDS))
                    async for frame in frames:
                        await put(frame.event)
            except TooMany:
                await put(_retry(BUSY_RETRY_SECONDS) + _event("busy", {"detail": _BUSY}))
            except TooSlow:
                await put(_event("busy", {"detail": _SLOW}))
            except Ended:
                pass
            await put(b"", more=False)
        except TimeoutError:
            connection = scope.get(CONNECTION)
            if connection is not None:  # closing it would wait until the client has read everything
                connection.transport.abort()


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    """Yields the body of a request; ends early where its client has disconnected."""
    while True:
        message = await receive()
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


def _retry(seconds: tuple[float, float]) -> bytes:
    """Returns a line that sets when a client reconnects: drawn, so that not all clients do so at once."""
    return b"retry: %d\n\n" % (random.uniform(*seconds) * 1000)


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))


async def _refuse(scope: Message, send: Send, status: int, detail: str, headers: Headers | None = None) -> None:
    await respond(scope, send, status, orjson.dumps({"detail": detail}), [_JSON, _NO_STORE, *(headers or ())])
