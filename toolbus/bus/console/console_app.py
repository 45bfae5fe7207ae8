"""Answers the console's requests over HTTP: the files of its page, the stream of digests, logins, and the identity.

The gateway passes admitted requests on. The page's files are the same for all and hold nothing of the bus; each request
of its scripts needs a permission.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson

from toolbus.bus.access.identity import Identity
from toolbus.bus.access.principal import Principal
from toolbus.bus.audit.audit import Audit
from toolbus.bus.console.console_login import CODE_SECONDS, Logins
from toolbus.bus.console.digest_feed import DigestFeed, Ended, TooMany, TooSlow
from toolbus.bus.console.page_files import HOME, PAGE_PATH, PageFiles
from toolbus.bus.gateway.gateway_parts import IDENTITY
from toolbus.bus.gateway.http_connection import CONNECTION, peer_of
from toolbus.bus.gateway.remote_access import BY_COOKIE
from toolbus.bus.web_paths import Message, Receive, Send
from toolbus.cancellation import wait_first
from toolbus.errors import Unauthenticated
from toolbus.version import VERSION

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

Headers = list[tuple[bytes, bytes]]

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
        """Answers a request."""
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
            await _respond(scope, send, 200, orjson.dumps(self._me(scope[IDENTITY])), [_JSON, _NO_STORE])
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
            await _respond(scope, send, 307, b"", [(b"location", target), _NO_STORE, _NO_REFERRER])
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
            await _respond(scope, send, 304, b"", headers)
            return
        await _respond(scope, send, 200, file.content, [(b"content-type", file.content_type.encode()), *headers])

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
            await _respond(scope, send, 200, answer, [_JSON, _NO_STORE])

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
            await _respond(scope, send, 200, orjson.dumps({"identity": identity.name}), headers)

    # -- for its scripts ---------------------------------------------------------------------------------------------

    def _me(self, identity: Identity) -> dict[str, Any]:
        scopes = identity.scopes
        return {
            "identity": identity.name,
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
        await wait_first(_disconnected(receive), self._follow(scope, send))

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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _retry(seconds: tuple[float, float]) -> bytes:
    """Returns a line that sets when a client reconnects: drawn, so that not all clients do so at once."""
    return b"retry: %d\n\n" % (random.uniform(*seconds) * 1000)


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))


async def _respond(scope: Message, send: Send, status: int, body: bytes, headers: Headers) -> None:
    """Sends a response; to HEAD without its body."""
    if status != 304:
        headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


async def _refuse(scope: Message, send: Send, status: int, detail: str, headers: Headers | None = None) -> None:
    await _respond(scope, send, status, orjson.dumps({"detail": detail}), [_JSON, _NO_STORE, *(headers or ())])
