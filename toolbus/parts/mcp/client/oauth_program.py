"""Logs in at an MCP server, or refreshes its token, in a process of its own; writes the mount's token file.

    python -m toolbus.parts.mcp.client.oauth_program < REQUEST

The request is one JSON object: `name`, `url`, `path` of the token file, `challenge` (the server's refusal), and
`interactive`, whether a user can log in. Standard output has one JSON object a line: `{"open": URL}` for the page on
which the user agrees, and at the end `{"done": true}` or `{"error": TEXT}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
from mcp.client.auth import OAuthFlowError
from mcp.client.auth.exceptions import OAuthRegistrationError, OAuthTokenError
from mcp.shared.auth import AuthorizationCodeResult, OAuthClientInformationFull

from toolbus.bus.keys.private_files import locked, make_directory
from toolbus.common.text import clean_line, shorten
from toolbus.errors import SetupError
from toolbus.parts.mcp.client.http_link import Challenge
from toolbus.parts.mcp.client.oauth import StoredProvider, TokenStore, authorize
from toolbus.parts.mcp.client.token_file import tokens_of

LOGIN_SECONDS = 300.0  # for a user to agree
REFRESH_SECONDS = 60.0
MAX_HEAD_BYTES = 16 * 1024
_PAGE = "<!doctype html><meta charset=utf-8><title>toolbus</title><p>{text} You can close this page."


class Loopback:
    """Receives the code from the browser, on a port of this machine (RFC 8252).

    Attributes:
        redirect_uri: where the browser is sent.
    """

    def __init__(self) -> None:
        self.redirect_uri = ""
        self._server: asyncio.Server | None = None  # None until open
        self._result: asyncio.Future[AuthorizationCodeResult] = asyncio.get_running_loop().create_future()

    async def open(self, registered: str) -> None:
        """Listens on the port of the registered redirect URI if it is free, else on another one."""
        port = urlsplit(registered).port or 0
        try:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        except OSError:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.redirect_uri = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/callback"

    async def wait(self) -> AuthorizationCodeResult:
        """Returns the parameters of the redirect.

        Raises:
            OAuthFlowError: the login was refused, or no user agreed in time.
        """
        try:
            async with asyncio.timeout(LOGIN_SECONDS):
                return await self._result
        except TimeoutError:
            raise OAuthFlowError(f"no user agreed within {LOGIN_SECONDS:.0f} s: log in again") from None

    def close(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()
        self._result.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            async with asyncio.timeout(10):
                head = await reader.readuntil(b"\r\n\r\n")
                status, text = self._take(head[:MAX_HEAD_BYTES])
                body = _PAGE.format(text=text).encode()
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
                    "Content-Security-Policy: default-src 'none'\r\nConnection: close\r\n\r\n".encode()
                    + body
                )
                await writer.drain()
        writer.close()

    def _take(self, head: bytes) -> tuple[str, str]:
        """Reads a request; returns the status and the text of the answer."""
        method, _, rest = head.decode("latin-1").partition(" ")
        target = urlsplit(rest.partition(" ")[0])
        fields = {name: values[0] for name, values in parse_qs(target.query).items()}
        if method != "GET" or target.path != "/callback" or not {"code", "error"} & set(fields):
            return "404 Not Found", "This page does not exist."
        if self._result.done():
            return "409 Conflict", "The login has ended already."
        if "code" not in fields:
            why = shorten(clean_line(fields.get("error_description") or fields["error"]), 200)
            self._result.set_exception(OAuthFlowError(f"the authorization server refused: {why}"))
            return "200 OK", "The login was refused."
        result = {name: fields[name] for name in ("code", "state", "iss") if name in fields}
        self._result.set_result(AuthorizationCodeResult.model_validate(result))
        return "200 OK", "You are logged in."


async def run(request: dict[str, Any]) -> None:
    """Answers one request.

    Raises:
        OAuthFlowError, OAuthRegistrationError, OAuthTokenError, httpx2.HTTPError, SetupError: it got no token.
    """
    url, path = str(request["url"]), Path(request["path"])
    challenge = Challenge(
        int(request["challenge"]["status"]),
        tuple((str(name), str(value)) for name, value in request["challenge"]["headers"]),
        str(request["challenge"]["body"]).encode(),
        str(request["challenge"]["used"]),
        str(request["challenge"]["version"]),
    )
    make_directory(path.parent)
    store = TokenStore(path, url)
    interactive = bool(request["interactive"])
    tokens = tokens_of(store.document)
    if not interactive and tokens is not None and tokens.access and f"Bearer {tokens.access}" != challenge.used:
        return  # another helper was faster
    loopback = Loopback()
    try:
        if interactive:
            await loopback.open(_registered_redirect(store))
            await _prepare_client(store, request, loopback.redirect_uri)
        provider = StoredProvider(
            url,
            store,
            loopback.redirect_uri or _registered_redirect(store) or "http://127.0.0.1:1/callback",
            _show if interactive else None,
            loopback.wait if interactive else None,
            expired=challenge.status == 401 and not interactive,
        )
        async with asyncio.timeout((LOGIN_SECONDS if interactive else 0) + REFRESH_SECONDS):
            await authorize(provider, url, challenge)
        provider.remember()
    finally:
        loopback.close()


async def _prepare_client(store: TokenStore, request: dict[str, Any], redirect_uri: str) -> None:
    """Stores a client that an operator registered by hand, and forgets one whose port is in use."""
    client = store.document.get("client")
    if request.get("client_id"):
        has_secret = bool(request.get("client_secret"))
        client = {
            "client_id": request["client_id"],
            "client_secret": request.get("client_secret") or None,
            "token_endpoint_auth_method": "client_secret_post" if has_secret else "none",
        }
        store.document["by_hand"] = True
    elif not isinstance(client, dict) or redirect_uri in client.get("redirect_uris", ()):
        return
    elif not store.document.get("by_hand"):
        del store.document["client"]  # the provider registers a new one, with the current port
        return
    await store.set_client_info(OAuthClientInformationFull.model_validate({**client, "redirect_uris": [redirect_uri]}))


def _registered_redirect(store: TokenStore) -> str:
    client = store.document.get("client")
    uris = client.get("redirect_uris") if isinstance(client, dict) else None
    return str(uris[0]) if isinstance(uris, list) and uris else ""


async def _show(url: str) -> None:
    _write({"open": url})


def _write(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Reads the request and answers it."""
    logging.disable()  # the SDK's log could contain tokens
    request = json.loads(sys.stdin.readline())
    try:
        folder = Path(request["path"]).parent
        make_directory(folder)
        # Some refresh tokens are valid once. A login waits for a user and replaces the file, so it takes no lock.
        with contextlib.nullcontext() if request["interactive"] else locked(folder, REFRESH_SECONDS):
            asyncio.run(run(request))
    except (
        OAuthFlowError,
        OAuthRegistrationError,
        OAuthTokenError,
        httpx2.HTTPError,
        SetupError,
        TimeoutError,
    ) as error:
        _write({"error": shorten(clean_line(str(error) or type(error).__name__), 500)})
        return 1
    _write({"done": True})
    return 0


if __name__ == "__main__":
    sys.exit(main())
