"""Gets a token for a mount by OAuth and writes its token file: a login of a user, or a refresh in a process of its own.

    python -m toolbus.parts.mcp.client.oauth_program < REQUEST

The request of a refresh is one JSON object with the fields of `TokenRequest`; standard output gets `{"done": true}` or
`{"error": TEXT}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
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
ERRORS = (
    OAuthFlowError,
    OAuthRegistrationError,
    OAuthTokenError,
    httpx2.HTTPError,
    SetupError,
    TimeoutError,
)  # of `get_token`
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


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """What token is needed.

    Attributes:
        url: of the server.
        path: of the token file.
        challenge: the refusal of the server.
        client: id and secret of a client that was registered by hand; "" if the server registers one itself.
    """

    url: str
    path: Path
    challenge: Challenge
    client: tuple[str, str] = ("", "")


async def get_token(request: TokenRequest, show: Callable[[str], Awaitable[None]] | None = None) -> None:
    """Writes a new token into the file.

    Args:
        show: gets the URL of the page on which a user agrees; None: no user can log in, so the token is refreshed.

    Raises:
        OAuthFlowError, OAuthRegistrationError, OAuthTokenError, httpx2.HTTPError, SetupError: it got no token.
    """
    url, challenge = request.url, request.challenge
    make_directory(request.path.parent)
    store = TokenStore(request.path, url)
    tokens = tokens_of(store.document)
    if show is None and tokens is not None and tokens.access and f"Bearer {tokens.access}" != challenge.used:
        return  # another helper was faster
    loopback = Loopback()
    try:
        if show is not None:
            await loopback.open(_registered_redirect(store))
            await _prepare_client(store, request.client, loopback.redirect_uri)
        provider = StoredProvider(
            url,
            store,
            loopback.redirect_uri or _registered_redirect(store) or "http://127.0.0.1:1/callback",
            show,
            loopback.wait if show is not None else None,
            expired=challenge.status == 401 and show is None,
        )
        async with asyncio.timeout((0 if show is None else LOGIN_SECONDS) + REFRESH_SECONDS):
            await authorize(provider, url, challenge)
        provider.remember()
    finally:
        loopback.close()


async def _prepare_client(store: TokenStore, by_hand: tuple[str, str], redirect_uri: str) -> None:
    """Stores a client that an operator registered by hand, and forgets one whose port is in use."""
    client = store.document.get("client")
    if by_hand[0]:
        client = {
            "client_id": by_hand[0],
            "client_secret": by_hand[1] or None,
            "token_endpoint_auth_method": "client_secret_post" if by_hand[1] else "none",
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


def failure_of(error: BaseException) -> str:
    """Returns why there is no token."""
    return shorten(clean_line(str(error) or type(error).__name__), 500)


def main() -> int:
    """Reads the request of a refresh and answers it."""
    logging.disable()  # the SDK's log could contain tokens
    written = json.loads(sys.stdin.readline())
    refusal = written["challenge"]
    challenge = Challenge(
        int(refusal["status"]),
        tuple((str(name), str(value)) for name, value in refusal["headers"]),
        str(refusal["body"]).encode(),
        str(refusal["used"]),
        str(refusal["version"]),
    )
    path = Path(written["path"])
    try:
        make_directory(path.parent)
        with locked(path.parent, REFRESH_SECONDS):  # some refresh tokens are valid once
            asyncio.run(get_token(TokenRequest(str(written["url"]), path, challenge)))
    except ERRORS as error:
        print(json.dumps({"error": failure_of(error)}))
        return 1
    print(json.dumps({"done": True}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
