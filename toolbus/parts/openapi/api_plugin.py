"""Offers the operations of an API on a bus: `from_openapi`, and the `ApiPlugin` that it returns."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolbus.common.text import list_names
from toolbus.errors import SetupError
from toolbus.functions.reply import Reply
from toolbus.functions.tool_spec import HandlerKind, ToolSpec
from toolbus.parts.openapi.api import Api, ApiTool, read_api
from toolbus.parts.openapi.api_client import ApiClient, ApiUnreachable, load_httpx, read_response
from toolbus.parts.openapi.api_request import ApiRequest, ArgumentFault, build_request
from toolbus.parts.openapi.api_settings import (  # fmt: skip
    MAX_IN_FLIGHT,
    MAX_RESPONSE_BYTES,
    MAX_TOOLS,
    TIMEOUT_SECONDS,
    ApiSettings,
    Auth,
    Patterns,
    Secret,
    read_secret,
    source_of,
)
from toolbus.parts.openapi.document import Document
from toolbus.parts.openapi.document_loader import fetch_document, load_document, source_of_url, url_of
from toolbus.sdk.plugin_client import Plugin

log = logging.getLogger("toolbus.openapi.api_plugin")

FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0  # between attempts to get a document


class ApiPlugin(Plugin):
    """A plugin whose tools are operations of an API; made by `from_openapi`.

    Args:
        source: whose tools these are.
        settings: what the operator says about the API.
        document: None where it could not be fetched yet: it is fetched from the URL, with backoff, after the start.
        url: where the document is; "" for none.
        options: as for `Plugin`.

    Attributes:
        api: what is offered and what is left out; None before the document is there.

    Raises:
        SetupError: the document or a setting cannot be used, or no operation would be offered.
    """

    def __init__(
        self, source: str, settings: ApiSettings, document: Document | None = None, url: str = "", **options: Any
    ) -> None:
        self.api: Api | None = None if document is None else read_api(document, settings)
        notice = f"waits for {url}" if self.api is None else self.api.summary
        super().__init__(source, **{"max_in_flight": MAX_IN_FLIGHT, "notices": (notice,), **options})
        self._api_settings = settings
        self._url = url
        self._client: ApiClient | None = None  # None before the first call; of the loop that the plugin runs on
        self._loading: asyncio.Task[None] | None = None  # None unless the document has to be waited for
        if self.api is not None:
            self._offer(self.api)

    async def start(self, *, address: str | None = None) -> None:
        """Begins to connect, and to fetch the document where it is not there yet; see `Plugin.start`."""
        await super().start(address=address)
        if self.api is None:
            self._loading = asyncio.create_task(self._load())

    async def ready(self) -> None:
        """Waits until the document is there, and the bus has answered for its tools; see `Plugin.ready`.

        Raises:
            SetupError: the document cannot be used.
        """
        if self._loading is not None:
            await asyncio.wait((self._loading,))
            _raise_problem(self._loading)
        await super().ready()

    async def ended(self) -> None:
        """Waits until the connection has ended for good, or the document turns out to be of no use."""
        ending = asyncio.ensure_future(super().ended())
        try:
            if self._loading is not None:
                await asyncio.wait((ending, self._loading), return_when=asyncio.FIRST_COMPLETED)
                _raise_problem(self._loading)
            await ending
        finally:
            ending.cancel()

    async def close(self, grace_seconds: float = 10.0, *, reason: str = "closed") -> None:
        """Shuts down gracefully, and closes the connections to the API; see `Plugin.close`."""
        if self._loading is not None:
            self._loading.cancel()
        await super().close(grace_seconds, reason=reason)
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    async def _load(self) -> None:
        """Fetches the document until it is there."""
        pause = FIRST_PAUSE
        while True:
            await asyncio.sleep(pause)
            try:
                document = await fetch_document(self._url)
                break
            except ApiUnreachable as problem:
                pause = min(pause * 2, MAX_PAUSE)
                log.info("%s: %s; next attempt in %g s", self.source, problem, pause)
        self.api = read_api(document, self._api_settings)
        self._offer(self.api)

    def _offer(self, api: Api) -> None:
        for warning in api.warnings:
            log.warning("%s: %s", self.source, warning)
        if not api.tools:
            reasons = list_names((f"{each.title} ({each.reason})" for each in api.left_out), 3)
            if not api.left_out:
                reasons = "the document has none, in `paths`"
            raise SetupError(f"{api.base_url}: no operation can be offered: {reasons}")
        log.info("%s: %s", self.source, api.summary)
        for each in api.tools:
            handler = functools.partial(self._call, each)
            self.add_tool(ToolSpec(each.tool, handler, HandlerKind.ASYNC, takes_dict=True))

    async def _call(self, tool: ApiTool, arguments: dict[str, Any]) -> Reply:
        """Runs one call of a tool: one request."""
        settings = self._api_settings
        try:
            request = build_request(tool.operation, arguments, slashes=settings.slashes)
            request, headers, secrets = await _with_credentials(request, tool, settings.headers)
            if self._client is None:
                self._client = ApiClient(tool.base_url, self._settings.max_in_flight)
            response = await self._client.send(
                tool.base_url, request, headers, settings.timeout, settings.max_response_bytes
            )
        except (ArgumentFault, ApiUnreachable, SetupError) as problem:
            return Reply(is_error=True, error=str(problem))
        return read_response(response, settings.max_response_bytes, secrets)


def from_openapi(
    document: str | Path | Mapping[str, Any],
    *,
    source: str | None = None,
    base_url: str | None = None,
    allow: Patterns | None = None,
    deny: Patterns = (),
    auth: Auth = None,
    headers: Mapping[str, Secret] | None = None,
    prefix: str = "",
    max_tools: int = MAX_TOOLS,
    timeout: float = TIMEOUT_SECONDS,
    max_response_bytes: int = MAX_RESPONSE_BYTES,
    slashes: bool = False,
    output_schemas: bool = False,
    **options: Any,
) -> ApiPlugin:
    """Returns a plugin whose tools are the operations of an OpenAPI document.

    A document that cannot be fetched because its server does not answer is fetched after the start: the order in which
    programs start does not matter.

    Args:
        document: its URL, its file (JSON or YAML), or the mapping that it was parsed to.
        source: whose tools these are; None takes the host of the URL, or the document's title.
        base_url: where requests go; None: to the server that the document names, if that is where it came from.
        allow: patterns of operations: an id (`get*`), a method and path (`GET /pets/*`) or a tag (`tag:pets`). None
            offers those that only read, GET and HEAD.
        deny: patterns of operations that are never offered.
        auth: secrets by security scheme, or one for the only scheme; see `env`.
        headers: sent with each request; a value may be a secret.
        prefix: begins the name of each tool.
        max_tools: how many tools there may be; the others are left out.
        timeout: seconds that a request may take.
        max_response_bytes: of the body of a response.
        slashes: whether a model may write slashes into values of the path, sent as %2F. Servers that decode them first
            may take the value for several steps, and run another operation than the one that was allowed.
        output_schemas: whether tools promise the schema of the response. Many APIs do not keep to theirs, and clients
            then refuse the result.
        options: as for `Plugin`; `max_in_flight` is 16 by default, also the number of connections.

    Raises:
        SetupError: the document or an argument cannot be used; the text says how to fix it.
    """
    settings = ApiSettings(
        base_url=base_url or "",
        allow=allow,
        deny=deny,
        auth=auth,
        headers=headers or {},
        prefix=prefix,
        max_tools=max_tools,
        timeout=timeout,
        max_response_bytes=max_response_bytes,
        slashes=slashes,
        output_schemas=output_schemas,
    )
    load_httpx()  # a plugin whose calls would all fail is not offered
    if url := url_of(document):
        return ApiPlugin(source or source_of_url(url), settings, _fetch_now(url), url, **options)
    read = load_document(document)
    return ApiPlugin(source or source_of(read), settings, read, **options)


def _fetch_now(url: str) -> Document | None:
    try:
        return load_document(url)
    except ApiUnreachable as problem:
        log.warning("%s; the document is fetched as soon as it can be", problem)
        return None


def _raise_problem(loading: asyncio.Task[None]) -> None:
    """Raises why the document is of no use; a plugin that was closed before it came has ended in order."""
    if loading.done() and not loading.cancelled():
        loading.result()


async def _with_credentials(
    request: ApiRequest, tool: ApiTool, headers: Mapping[str, Secret]
) -> tuple[ApiRequest, list[tuple[str, str]], list[str]]:
    """Returns the request with the credentials that go into its path, the operator's headers, and all secrets."""
    sent: list[tuple[str, str]] = []
    secrets: list[str] = []
    query: list[tuple[str, str]] = []
    cookies = [value for name, value in request.headers if name == "Cookie"]
    for name, secret in headers.items():
        value = await read_secret(secret)
        sent.append((name, value))
        secrets.append(value)
    for placement in tool.placements:
        value, secret = await placement.value()
        secrets += [value, secret]
        if placement.location == "header":
            sent.append((placement.name, value))
        elif placement.location == "cookie":
            cookies.append(f"{placement.name}={value}")
        else:
            query.append((placement.name, value))
    if len(cookies) > 1 or (cookies and tool.placements):
        sent.append(("Cookie", "; ".join(cookies)))
    return request.with_query(query), sent, secrets
