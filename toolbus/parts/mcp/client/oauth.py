"""Gets a token for a mount by OAuth and writes its token file: a login of a user, or a refresh in a process of its own.

    python -m toolbus.parts.mcp.client.oauth < REQUEST

Each request is a line of JSON with the fields of `TokenRequest`; standard output gets `{"done": true}` or
`{"error": TEXT}` for it, with its `id`. A request with a `redirect_uri` logs a user in: standard output first gets
`{"page": URL}`, where the user agrees, and a line with the `id` and the `answer` of that page goes on; one without an
answer ends the login, as the end of standard input ends all. The bus never imports this. The SDK's provider is a
generator of HTTP requests, which begins with a refusal: here the one that the bus received. Its requests follow the
rules of those to servers: no proxies, no private addresses unless the operator wrote one.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import sys
import time
import webbrowser
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import httpx2
import msgspec
from aiohttp import web
from mcp.client.auth import OAuthClientProvider, OAuthFlowError
from mcp.client.auth.exceptions import OAuthRegistrationError, OAuthTokenError
from mcp.shared.auth import (
    AuthorizationCodeResult,
    OAuthClientInformationFull,
    OAuthClientMetadata,
    OAuthMetadata,
    OAuthToken,
    ProtectedResourceMetadata,
)
from pydantic import BaseModel, ValidationError

from toolbus.bus.keys.private_files import locked, make_directory
from toolbus.common.text import clean_line, quote, shorten
from toolbus.errors import SetupError
from toolbus.parts.mcp.client.authorization import query_field, read_document, token_path, tokens_of, write_document
from toolbus.parts.mcp.client.http_link import MAX_ERROR_BYTES, is_private_host, open_session, read_body
from toolbus.parts.mcp.client.transport import Challenge
from toolbus.parts.mcp.messages import eras, headers, jsonrpc

MAX_BODY_BYTES = 1024 * 1024  # of an answer of an authorization server
BODY_HEADERS = {"Content-Encoding", "Transfer-Encoding", "Content-Length"}  # wrong for a body that is read already
SEND_SECONDS = 30.0

Record = TypeVar("Record", bound=BaseModel)


class TokenStore:
    """The token file of one mount, as the SDK's `TokenStorage`.

    Attributes:
        document: its content.
    """

    def __init__(self, path: Path | None, url: str) -> None:
        self._path = path
        document = read_document(path) if path is not None else {}
        self.document: dict[str, Any] = document if document.get("url") == url else {"url": url}

    async def get_tokens(self) -> OAuthToken | None:
        return _read(OAuthToken, self.document.get("tokens"))

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.document["tokens"] = tokens.model_dump(mode="json", exclude_none=True)
        self.document["expires_at"] = time.time() + float(tokens.expires_in) if tokens.expires_in else 0
        self.save()

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return _read(OAuthClientInformationFull, self.document.get("client"))

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.document["client"] = client_info.model_dump(mode="json", exclude_none=True)
        self.save()

    def save(self) -> None:
        if self._path is not None:
            write_document(self._path, self.document)


class StoredProvider(OAuthClientProvider):
    """Logs in and refreshes; stores the metadata of the servers for the next process."""

    def __init__(
        self,
        url: str,
        store: TokenStore,
        redirect_uri: str,
        show: Callable[[str], Awaitable[None]] | None = None,
        wait: Callable[[], Awaitable[AuthorizationCodeResult]] | None = None,
        *,
        client_metadata_url: str | None = None,
        expired: bool = False,
    ) -> None:
        about = {"client_name": "toolbus", "redirect_uris": [redirect_uri], "response_types": ["code"]}
        about["grant_types"] = ["authorization_code", "refresh_token"]
        metadata = OAuthClientMetadata.model_validate(about)
        super().__init__(url, metadata, store, show, wait, client_metadata_url)
        self._store = store
        self._expired = expired

    async def _initialize(self) -> None:
        await super()._initialize()
        document, context = self._store.document, self.context
        context.oauth_metadata = _read(OAuthMetadata, document.get("authorization_server"))
        context.protected_resource_metadata = _read(ProtectedResourceMetadata, document.get("resource"))
        context.auth_server_url = document.get("authorization_server_url")
        if self._expired and context.current_tokens is not None:
            context.token_expiry_time = 1.0  # so that it is refreshed

    def remember(self) -> None:
        """Stores the metadata of the servers, for the next process."""
        document, context = self._store.document, self.context
        for key, value in (
            ("authorization_server", context.oauth_metadata),
            ("resource", context.protected_resource_metadata),
        ):
            if value is not None:
                document[key] = value.model_dump(mode="json", exclude_none=True)
        document["authorization_server_url"] = context.auth_server_url
        self._store.save()


async def authorize(provider: OAuthClientProvider, url: str, challenge: Challenge) -> str:
    """Has a provider answer a refusal; returns the new Authorization header.

    Raises:
        OAuthFlowError, httpx2.HTTPError: the provider got no token.
    """
    request = httpx2.Request("POST", url, headers={headers.VERSION: challenge.version} if challenge.version else {})
    flow = provider.async_auth_flow(request)
    refusal = httpx2.Response(
        challenge.status,
        headers=[(name, value) for name, value in challenge.headers if name.title() not in BODY_HEADERS],
        content=challenge.body,
        request=request,
    )
    has_seen = False
    async with open_session([url], trusts_private=is_private_host(urlsplit(url).hostname or "")) as session:
        try:
            outgoing = await anext(flow)
            while True:
                if outgoing is request:
                    header = request.headers.get("Authorization", "")
                    if header and (has_seen or header != challenge.used):
                        return header
                    if has_seen:
                        break
                    has_seen, response = True, refusal
                else:
                    response = await _send(session, outgoing, url)
                outgoing = await flow.asend(response)
        except StopAsyncIteration:
            pass
        finally:
            await flow.aclose()
    raise OAuthFlowError("the authorization server gave no token")


async def _send(session: aiohttp.ClientSession, request: httpx2.Request, server: str) -> httpx2.Response:
    """Makes a request of the SDK."""
    url = str(request.url)
    host = request.url.host
    shown = quote(shorten(url, 200))
    if is_private_host(host) and not is_private_host(urlsplit(server).hostname or ""):
        raise OAuthFlowError(f"the server names {shown}, which is not a public address: nothing is sent")
    if request.url.scheme != "https" and not is_private_host(host):
        raise OAuthFlowError(f"the server names {shown}, which is not https: nothing is sent")
    body = await request.aread()
    headers = {name: value for name, value in request.headers.items() if name.lower() not in ("host", "content-length")}
    headers["accept-encoding"] = "identity"
    try:
        async with session.request(
            request.method, url, data=body or None, headers=headers, allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=SEND_SECONDS),
        ) as response:  # fmt: skip
            content = await read_body(response, MAX_BODY_BYTES)
            plain = [(name, value) for name, value in response.headers.items() if name.title() not in BODY_HEADERS]
            return httpx2.Response(response.status, headers=plain, content=content, request=request)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise OAuthFlowError(f"{shown} does not answer: {error}") from None


def _read(kind: type[Record], document: object) -> Record | None:
    if not isinstance(document, Mapping):
        return None
    try:
        return kind.model_validate(document)
    except ValidationError:
        return None


# -- the login of a user -----------------------------------------------------------------------------------------------

ANSWER_SECONDS = 20.0  # for the server's first answer


def login(
    directory: Path,
    name: str,
    url: str,
    *,
    show: Callable[[str], object] = print,
    open_browser: Callable[[str], object] = webbrowser.open,
    client: tuple[str, str] = ("", ""),
) -> bool:
    """Logs in, and writes the tokens into the data directory, where the bus finds them.

    Args:
        directory: the data directory.
        show: prints a text for the user.
        client: id and secret of a client that was registered by hand; "" if the server registers one itself.

    Returns:
        False if the server requires no login; nothing was done then.

    Raises:
        SetupError: the login failed; the text says how to fix it.
    """

    async def agree(page: str) -> None:
        if page.startswith(("https://", "http://")) and page.isprintable():
            show(f"Agree in the browser; if none opens, visit\n  {page}")
            await asyncio.to_thread(open_browser, page)

    async def log_in() -> bool:
        challenge = await _challenge_of(url)
        if challenge is None:
            return False
        disabled = logging.root.manager.disable
        logging.disable()  # the SDK's log could contain tokens
        try:
            await get_token(TokenRequest(url, token_path(directory, name), challenge, client=client), agree)
        except ERRORS as error:
            raise SetupError(f"the login at {url} failed: {failure_of(error)}") from None
        finally:
            logging.disable(disabled)
        return True

    return asyncio.run(log_in())


async def _challenge_of(url: str) -> Challenge | None:
    """Returns the refusal of a server that requires a login; None if it requires none.

    Raises:
        SetupError: the server does not answer.
    """
    written = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        headers.VERSION: eras.NEWEST,
        headers.METHOD: "server/discover",
    }
    message = jsonrpc.request(1, "server/discover", {"_meta": {eras.META_VERSION: eras.NEWEST}})
    try:
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            open_session([url]) as session,
            session.post(url, data=message, headers=written, allow_redirects=False) as response,
        ):
            if response.status not in (401, 403):
                return None
            body = await read_body(response, MAX_ERROR_BYTES)
            return Challenge(response.status, tuple(response.headers.items()), body, "", eras.NEWEST)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        why = str(error) or "in time"
        raise SetupError(f"{url} does not answer ({why}): correct the url, or try again later") from None


# -- the program -------------------------------------------------------------------------------------------------------

LOGIN_SECONDS = 300.0  # for a user to agree
REFRESH_SECONDS = 60.0
ERRORS = (  # of `get_token`
    *(OAuthFlowError, OAuthRegistrationError, OAuthTokenError),
    *(httpx2.HTTPError, SetupError, TimeoutError),
)
_PAGE = "<!doctype html><meta charset=utf-8><title>toolbus</title><p>{text} You can close this page."


class Relay:
    """Receives the code through the bus, which listens and compares the state.

    Attributes:
        redirect_uri: where the browser is sent.
    """

    def __init__(self, redirect_uri: str) -> None:
        self.redirect_uri = redirect_uri
        self._result: asyncio.Future[AuthorizationCodeResult] = asyncio.get_running_loop().create_future()

    async def open(self, registered: str) -> None:
        """Listens, if possible where the registered redirect URI leads."""

    def expect(self, page: str) -> None:
        """Waits for the redirect of this page."""

    def answer(self, fields: Mapping[str, str]) -> None:
        """Takes the parameters of the redirect, once."""
        if self._result.done():
            return
        if "code" in fields:
            known = {name: fields[name] for name in ("code", "state", "iss") if name in fields}
            self._result.set_result(AuthorizationCodeResult.model_validate(known))
            return
        why = shorten(clean_line(fields.get("error_description") or fields.get("error") or "it gave no code"), 200)
        self._result.set_exception(OAuthFlowError(f"the authorization server refused: {why}"))

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

    async def close(self) -> None:
        """Ends the wait."""
        self._result.cancel()


class Loopback(Relay):
    """Receives the code from the browser, on a port of this machine (RFC 8252)."""

    def __init__(self) -> None:
        super().__init__("")
        self._state = ""  # of the login that waits
        app = web.Application()
        app.router.add_get("/callback", self._take)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def open(self, registered: str) -> None:
        """Listens on the port of the registered redirect URI if it is free, else on another one."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, "127.0.0.1", urlsplit(registered).port or 0).start()
        except OSError:
            await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.redirect_uri = f"http://127.0.0.1:{self._runner.addresses[-1][1]}/callback"

    def expect(self, page: str) -> None:
        """Waits for the redirect of this page: only one with its state, which no other program knows, counts."""
        self._state = query_field(page, "state")

    async def close(self) -> None:
        """Stops listening."""
        await super().close()
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        fields, status = dict(request.query), 200
        if not {"code", "error"} & fields.keys():
            status, text = 404, "This page does not exist."
        elif not hmac.compare_digest(fields.get("state", "").encode(), self._state.encode()):
            status, text = 400, "This is not the login that waits."
        elif self._result.done():
            status, text = 409, "The login has ended already."
        else:
            self.answer(fields)
            text = "You are logged in." if "code" in fields else "The login was refused."
        policy = {"Content-Security-Policy": "default-src 'none'"}
        return web.Response(status=status, text=_PAGE.format(text=text), content_type="text/html", headers=policy)


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """What token is needed.

    Attributes:
        url: of the server.
        path: of the token file.
        challenge: the refusal of the server.
        client: id and secret of a client that was registered by hand; "" if the server registers one itself.
        shared: the file with the client of all users of a mount; None where the tokens are not of one of them.
        about: more fields for the file of the tokens.
    """

    url: str
    path: Path
    challenge: Challenge
    client: tuple[str, str] = ("", "")
    shared: Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)


async def get_token(
    request: TokenRequest, show: Callable[[str], Awaitable[None]] | None = None, relay: Relay | None = None
) -> None:
    """Writes a new token into the file.

    Args:
        show: gets the URL of the page on which a user agrees; None: no user can log in, so the token is refreshed.
        relay: receives the code; None: a port of this machine does.

    Raises:
        OAuthFlowError, OAuthRegistrationError, OAuthTokenError, httpx2.HTTPError, SetupError: it got no token.
    """
    url, challenge = request.url, request.challenge
    make_directory(request.path.parent)
    store = TokenStore(request.path, url)
    tokens = tokens_of(store.document)
    if show is None and tokens is not None and tokens.access and f"Bearer {tokens.access}" != challenge.used:
        return  # another helper was faster
    store.document.update(request.about)
    if relay is not None:
        store.document.pop("tokens", None)
    if request.shared is not None and "client" not in store.document:
        store.document.update(_client_in(read_document(request.shared), url))
    loopback = relay or Loopback()

    async def begin(page: str) -> None:
        loopback.expect(page)
        if show is not None:
            await show(page)

    try:
        if show is not None:
            await loopback.open(_registered_redirect(store))
            await _prepare_client(store, request.client, loopback.redirect_uri)
        provider = StoredProvider(
            url,
            store,
            loopback.redirect_uri or _registered_redirect(store) or "http://127.0.0.1:1/callback",
            begin if show is not None else None,
            loopback.wait if show is not None else None,
            expired=challenge.status == 401 and show is None,
        )
        async with asyncio.timeout((0 if show is None else LOGIN_SECONDS) + REFRESH_SECONDS):
            await authorize(provider, url, challenge)
        provider.remember()
        if request.shared is not None and not request.client[0]:
            write_document(request.shared, {"url": url, **_client_in(store.document, url)})
    finally:
        await loopback.close()


def _client_in(document: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Returns the client of a file, if it is one for this server."""
    return {"client": document["client"]} if document.get("url") == url and "client" in document else {}


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
    """Reads requests and answers them."""
    logging.disable()  # the SDK's log could contain tokens
    return asyncio.run(_serve())


async def _serve() -> int:
    relays: dict[str, Relay] = {}  # of the logins, by the id of the request
    tasks: dict[str, asyncio.Task[bool]] = {}  # by the same
    while line := await asyncio.to_thread(sys.stdin.readline):
        written = json.loads(line)
        id = str(written.get("id", ""))
        if id in relays:
            if "answer" in written:
                relays[id].answer(written["answer"])
            else:
                tasks[id].cancel()
        elif "redirect_uri" in written:
            relays[id] = Relay(str(written["redirect_uri"]))
            tasks[id] = asyncio.create_task(_answered(id, _log_in(written, relays[id])))
        else:
            tasks[id] = asyncio.create_task(_answered(id, _refresh(written)))
    for id in relays:
        tasks[id].cancel()
    return 0 if all(await asyncio.gather(*tasks.values())) else 1


async def _answered(id: str, work: Awaitable[None]) -> bool:
    """Does some work and writes its outcome; tells whether it succeeded."""
    try:
        await work
    except (*ERRORS, asyncio.CancelledError) as error:
        print(json.dumps({"id": id, "error": failure_of(error)}), flush=True)
        return False
    print(json.dumps({"id": id, "done": True}), flush=True)
    return True


async def _refresh(written: Mapping[str, Any]) -> None:
    path = Path(written["path"])
    make_directory(path.parent)
    with locked(path.parent, REFRESH_SECONDS):  # some refresh tokens are valid once
        await get_token(TokenRequest(str(written["url"]), path, msgspec.convert(written["challenge"], Challenge)))


async def _log_in(written: Mapping[str, Any], relay: Relay) -> None:
    async def show(page: str) -> None:
        print(json.dumps({"id": written["id"], "page": page}), flush=True)

    url = str(written["url"])
    challenge = msgspec.convert(written["challenge"], Challenge | None) or await _challenge_of(url)
    if challenge is None:
        raise SetupError(f"{url} requires no login")
    client = (str(written["client"][0]), str(written["client"][1]))
    path, shared = Path(written["path"]), Path(written["shared"])
    await get_token(TokenRequest(url, path, challenge, client, shared, written["about"]), show, relay)


if __name__ == "__main__":
    sys.exit(main())
