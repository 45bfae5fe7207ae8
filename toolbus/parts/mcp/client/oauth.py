"""Gets tokens for an MCP server by OAuth, with the client of the official SDK.

The bus never imports this: `oauth_program.py` runs it in a process of its own, since the SDK takes some 55 MB. The
SDK's provider is a generator of HTTP requests, which begins with a refusal: here the one that the bus received. Its
requests follow the rules of those to servers: no proxies, no private addresses unless the operator wrote one.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import httpx2
from mcp.client.auth import OAuthClientProvider, OAuthFlowError
from mcp.shared.auth import (
    AuthorizationCodeResult,
    OAuthClientInformationFull,
    OAuthClientMetadata,
    OAuthMetadata,
    OAuthToken,
    ProtectedResourceMetadata,
)
from pydantic import BaseModel, ValidationError

from toolbus.common.text import quote, shorten
from toolbus.parts.mcp.client.http_link import Challenge, read_body
from toolbus.parts.mcp.client.http_session import is_private_host, open_session
from toolbus.parts.mcp.client.token_file import read_document, write_document

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
        """Writes the file."""
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
        metadata = OAuthClientMetadata.model_validate(
            {
                "client_name": "toolbus",
                "redirect_uris": [redirect_uri],
                "grant_types": ["authorization_code", "refresh_token"],
                "response_types": ["code"],
            }
        )
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
    request = httpx2.Request(
        "POST", url, headers={"MCP-Protocol-Version": challenge.version} if challenge.version else {}
    )
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
    if is_private_host(host) and not is_private_host(urlsplit(server).hostname or ""):
        raise OAuthFlowError(
            f"the server names {quote(shorten(url, 200))}, which is not a public address: nothing is sent"
        )
    if request.url.scheme != "https" and not is_private_host(host):
        raise OAuthFlowError(f"the server names {quote(shorten(url, 200))}, which is not https: nothing is sent")
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
        raise OAuthFlowError(f"{quote(shorten(url, 200))} does not answer: {error}") from None


def _read(kind: type[Record], document: object) -> Record | None:
    if not isinstance(document, Mapping):
        return None
    try:
        return kind.model_validate(document)
    except ValidationError:
        return None
