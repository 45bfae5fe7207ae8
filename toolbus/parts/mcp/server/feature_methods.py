"""Answers the methods for prompts, resources, templates and completions of mounted servers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from msgspec import Raw

from toolbus.common.text import quote
from toolbus.parts.mcp.features import FeatureProvider, Requester
from toolbus.parts.mcp.messages.eras import META_SERVER
from toolbus.parts.mcp.messages.hops import with_hop
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError
from toolbus.parts.mcp.server.calls import ProgressReport
from toolbus.parts.mcp.server.feature_view import Declaration
from toolbus.parts.mcp.server.input import NOT_BOUND, NotAnswered, Questions, run_with_input
from toolbus.parts.mcp.server.mcp_listing import TTL_MS, Pages, open_cursor, seal_cursor
from toolbus.parts.mcp.server.mcp_request import McpRequest, encode
from toolbus.parts.mcp.server.server import McpServer
from toolbus.parts.mcp.server.subscriptions import MAX_WATCHED, MAX_WATCHED_TEXT
from toolbus.protocol.input_requests import InvalidInput, check_requests
from toolbus.protocol.limits import Limits

log = logging.getLogger("toolbus.mcp")

CURSOR = "features"  # the purpose of a sealed cursor
_MODERN_ONLY = ("resultType", "ttlMs", "cacheScope")
_NOT_FOUND = (McpCode.RESOURCE_NOT_FOUND, McpCode.INVALID_PARAMS)  # of a resource, in either era
_NO_COMPLETION = {"values": [], "total": 0, "hasMore": False}

Json = dict[str, Any]


def lists(kind: str, key: str) -> Callable[[McpServer, McpRequest], Awaitable[bytes]]:
    """Returns the method that lists what the client sees of a kind.

    Args:
        key: of the result.
    """

    async def listed(server: McpServer, request: McpRequest) -> bytes:
        entries = server.features.listed(kind, request.profile, request.identity).items()
        await server.save_names()
        return _page(
            server,
            request,
            key,
            {name: {**declared, "name": name} if kind == "prompts" else declared for name, (_, declared) in entries},
        )

    return listed


async def get_prompt(server: McpServer, request: McpRequest) -> bytes:
    wire = request.text("name")
    provider, declared = _prompt(server, request, wire)
    return await _ask(server, request, [provider], {"name": declared["name"]})


async def read_resource(server: McpServer, request: McpRequest) -> bytes:
    uri = request.text("uri")
    providers = server.features.providers_of(request.profile, request.identity, uri)
    if not providers:
        raise unknown_resource(request, uri)
    return await _ask(server, request, providers, {"uri": uri})


async def complete(server: McpServer, request: McpRequest) -> bytes:
    """Completes an argument of a prompt, or a variable of a template."""
    fields = request.fields
    reference = fields.get("ref")
    if not isinstance(reference, dict):
        raise RpcError(McpCode.INVALID_PARAMS, "completion/complete needs params.ref, an object")
    kind = reference.get("type")
    if kind == "ref/prompt":
        provider, declared = _prompt(server, request, str(reference.get("name")))
        reference = {**reference, "name": declared["name"]}
    elif kind == "ref/resource":
        uri = str(reference.get("uri"))
        viewer = request.profile, request.identity
        template = server.features.listed("templates", *viewer).get(uri)
        providers = server.features.providers_of(*viewer, uri) if template is None else [template[0]]
        if not providers:
            raise unknown_resource(request, uri)
        provider = providers[0]
    else:
        raise RpcError(McpCode.INVALID_PARAMS, "ref.type must be ref/prompt or ref/resource")
    if "completions" not in provider.capabilities:
        return request.complete({"completion": _NO_COMPLETION})
    return await _ask(server, request, [provider], {"ref": reference})


async def subscribe(server: McpServer, request: McpRequest) -> bytes:
    """Notifies a legacy session of each update of a resource."""
    session, uri = request.session, request.text("uri")
    if session is not None and session.subscriptions.get(uri) is None:
        text = sum(map(len, session.subscriptions)) + len(uri)
        if len(session.subscriptions) >= MAX_WATCHED or text > MAX_WATCHED_TEXT:
            most = f"{MAX_WATCHED} subscriptions, or URIs of more than {MAX_WATCHED_TEXT} characters together"
            full = f"this would be more than {most} (limit mcp_watched): end some of them"
            raise RpcError(McpCode.INVALID_PARAMS, full)
        if not server.subscriptions.subscribe(session, uri):
            raise unknown_resource(request, uri)
        await server.sessions.save(session)
    return request.complete({})


async def unsubscribe(server: McpServer, request: McpRequest) -> bytes:
    """Ends a subscription; an unknown one is ignored."""
    session = request.session
    uri = request.text("uri")
    if session is not None and uri in session.subscriptions:
        end = session.subscriptions.pop(uri)
        if end is not None:
            end()
        await server.sessions.save(session)
    return request.complete({})


def unknown_resource(request: McpRequest, uri: str) -> RpcError:
    """Returns the error for a resource that is not visible to the client."""
    code = McpCode.INVALID_PARAMS if request.modern else McpCode.RESOURCE_NOT_FOUND
    return RpcError(code, f"Unknown resource: {quote(uri)}; resources/list has the available resources", {"uri": uri})


def _prompt(server: McpServer, request: McpRequest, wire: str) -> tuple[FeatureProvider, Declaration]:
    prompt = server.features.listed("prompts", request.profile, request.identity).get(wire)
    if prompt is None:
        raise RpcError(McpCode.INVALID_PARAMS, f"Unknown prompt: {quote(wire)}; prompts/list has the available prompts")
    return prompt


def _page(server: McpServer, request: McpRequest, key: str, entries: Mapping[str, Declaration]) -> bytes:
    """Returns a page of a list, and the cursor of the next.

    Args:
        entries: by what names them.
    """
    cursor, bound = request.fields.get("cursor"), (CURSOR, key, request.profile.name)
    after = None if cursor is None else open_cursor(server.sealer, str(cursor), *bound)
    bus_id = server.listings.bus_id
    page, last = Pages({name: encode(with_hop(entry, bus_id)) for name, entry in entries.items()}).page(after)
    result: Json = {key: Raw(b"[" + page + b"]")}
    if last is not None:
        result["nextCursor"] = seal_cursor(server.sealer, last, *bound)
    if request.modern:
        public = not request.profile.user and not request.profile.level and request.identity.scopes is None
        result |= {"ttlMs": TTL_MS, "cacheScope": "public" if public else "private"}
    return request.complete(result)


async def _ask(
    server: McpServer, request: McpRequest, providers: list[FeatureProvider], own: Mapping[str, Any]
) -> bytes:
    """Forwards a request to its providers in turn, until one knows the resource.

    Args:
        own: params that replace those of the request, with the provider's own names.
    """
    if not request.identity.may_call:
        raise RpcError(McpCode.INVALID_REQUEST, f"{request.identity.shown} may not call servers: its in_flight is 0")
    fields: Json = {**{name: value for name, value in request.fields.items() if name not in NOT_BOUND}, **own}
    report = ProgressReport(request) if request.meta.progress_token is not None else None
    profile = request.profile
    asker = Requester(request.client.accepts, request.identity, profile.user, report, profile.source)

    async def run(answers: Mapping[str, Json], state: str) -> bytes | Questions:
        params = fields | ({"inputResponses": answers} if answers else {})
        params |= {"requestState": state} if state else {}
        return _write(request, await _first(request, providers, params, asker), server.core.config.limits)

    try:
        return await run_with_input(server, request, run)
    except NotAnswered as error:
        raise RpcError(McpCode.INVALID_REQUEST, str(error)) from None


async def _first(
    request: McpRequest, providers: list[FeatureProvider], params: Mapping[str, Any], asker: Requester
) -> dict[str, Any]:
    for provider in providers:
        try:
            return await provider.request(request.method, params, asker)
        except RpcError as error:
            if request.method != "resources/read" or error.code not in _NOT_FOUND:
                raise
    raise unknown_resource(request, str(params.get("uri")))


def _write(request: McpRequest, result: dict[str, Any], limits: Limits) -> bytes | Questions:
    """Writes the answer of a provider in the form of the request's era."""
    if result.get("resultType") == "input_required":
        try:
            requests = check_requests(result["inputRequests"], limits) if result.get("inputRequests") else {}
        except InvalidInput as error:
            raise RpcError(McpCode.INTERNAL, f"the mounted server asked for input, and {error}") from None
        state = str(result.get("requestState") or "")
        if len(state.encode("utf-8", "replace")) > limits.request_state_bytes:
            raise RpcError(
                McpCode.INTERNAL,
                f"the mounted server's requestState is longer than the limit request_state_bytes = "
                f"{limits.request_state_bytes}",
            )
        return Questions(requests, state)
    fields = {name: value for name, value in result.items() if name not in _MODERN_ONLY}
    meta = fields.pop("_meta", None)
    meta = {name: value for name, value in meta.items() if name != META_SERVER} if isinstance(meta, dict) else {}
    if meta:
        fields["_meta"] = meta
    if request.modern and request.method == "resources/read":
        ttl, scope = result.get("ttlMs"), result.get("cacheScope")
        fields |= {"ttlMs": ttl if type(ttl) is int and ttl >= 0 else 0, "cacheScope": "private"}
        if scope == "public" and request.identity.scopes is None:
            fields["cacheScope"] = scope
    return request.complete(fields)
