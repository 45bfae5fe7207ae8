"""Answers requests: one table for each era has the function of each method.

Each is ``async def method(server, request) -> bytes``: it returns the text of the result object, usually by
`McpRequest.complete`, or raises `RpcError`. Any other exception becomes an internal error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from toolbus.bus.mcp_server import feature_methods, listen, search_mode, task_methods
from toolbus.bus.mcp_server.calls import ProgressReport, call_of, seconds_of, unknown_tool, write_result
from toolbus.bus.mcp_server.client import ClientCapabilities
from toolbus.bus.mcp_server.input import NotAnswered, Questions, missing_capability, run_with_input
from toolbus.bus.mcp_server.mcp_listing import TTL_MS
from toolbus.bus.mcp_server.mcp_request import SERVER_INFO, CallParams, McpRequest, encode
from toolbus.bus.mcp_server.server import McpServer
from toolbus.bus.mcp_server.sessions import McpSession
from toolbus.errors import INTERNAL_DETAIL, Code, LimitExceeded, Stage
from toolbus.mcp.eras import LEGACY_VERSIONS, MODERN_VERSIONS, NEWEST_LEGACY, TASKS_EXTENSION
from toolbus.mcp.input_requests import InvalidInput, read_requests
from toolbus.mcp.jsonrpc import McpCode, RpcError
from toolbus.questions import ACCEPTS, NEEDS_INPUT
from toolbus.text import dump_json, shorten
from toolbus.tool import CallError, Result

log = logging.getLogger("toolbus.mcp")

Handler = Callable[[McpServer, McpRequest], Awaitable[bytes]]

# The capabilities of the endpoint, in both eras.
CAPABILITIES: dict[str, Any] = {
    "tools": {"listChanged": True},
    "prompts": {"listChanged": True},
    "resources": {"listChanged": True, "subscribe": True},
    "completions": {},
    "logging": {},
}
EXTENSIONS: dict[str, Any] = {TASKS_EXTENSION: {}}  # of the modern era
MAX_INSTRUCTIONS = 16_384  # characters of one mounted server's instructions
INSTRUCTIONS = "Tools of a toolbus. Names begin with the source of a tool; the list changes as sources come and go."


async def initialize(server: McpServer, request: McpRequest) -> bytes:
    """Begins a session with the client's revision if the bus knows it, else with the newest one that has sessions."""
    fields = request.fields
    version = fields.get("protocolVersion")
    if not isinstance(version, str):
        raise RpcError(McpCode.INVALID_PARAMS, "initialize needs params.protocolVersion, a string")
    capabilities = fields.get("capabilities")
    client = ClientCapabilities.of(capabilities if isinstance(capabilities, dict) else {})
    version = version if version in LEGACY_VERSIONS else NEWEST_LEGACY
    server.begin_session(request, version, client)
    return request.complete(
        {
            "protocolVersion": version,
            "capabilities": CAPABILITIES,
            "serverInfo": SERVER_INFO,
            "instructions": _instructions(server, request),
        }
    )


async def discover(server: McpServer, request: McpRequest) -> bytes:
    """Describes the versions and capabilities of the endpoint."""
    instructions = _instructions(server, request)
    return request.complete(
        {
            "supportedVersions": list(MODERN_VERSIONS),
            "capabilities": {**CAPABILITIES, "extensions": EXTENSIONS},
            "serverInfo": SERVER_INFO,
            "instructions": instructions,
            "ttlMs": TTL_MS,
            "cacheScope": "public" if instructions == INSTRUCTIONS else "private",
        }
    )


def _instructions(server: McpServer, request: McpRequest) -> str:
    """Returns the bus's instructions, and those of mounted servers that share theirs, each under its name."""
    profile, identity = request.profile, request.identity

    def sources() -> set[str]:
        catalog = server.listings.catalog(profile, identity, modern=request.modern)
        return {each.source for each in catalog.listings.values()}

    texts = [
        f"Instructions of {provider.source}, for its tools:\n{shorten(provider.instructions, MAX_INSTRUCTIONS)}"
        for provider in server.features.instructing(profile, identity, sources)
    ]
    return "\n\n".join((INSTRUCTIONS, *texts))


async def ping(server: McpServer, request: McpRequest) -> bytes:
    """Answers a ping."""
    return b"{}"


async def set_level(server: McpServer, request: McpRequest) -> bytes:
    """Sets the lowest level of log messages for a session."""
    if request.session is not None:
        request.session.set_level(request.text("level"))
    return b"{}"


async def list_tools(server: McpServer, request: McpRequest) -> bytes:
    """Lists the tools that are visible to the client."""
    cursor = request.fields.get("cursor") if b"cursor" in request.raw else None
    if cursor is not None and not isinstance(cursor, str):
        raise RpcError(McpCode.INVALID_PARAMS, "cursor must be the nextCursor of a page, a string")
    if request.profile.show == "search":
        return search_mode.list_page(request)
    await server.returning.wait_for_lists(request.profile, request.identity, modern=request.modern)
    page = server.listings.page(request.profile, request.identity, modern=request.modern, cursor=cursor)
    await server.save_names()
    return page


async def call_tool(server: McpServer, request: McpRequest) -> bytes:
    """Calls a tool."""
    params = request.params
    assert isinstance(params, CallParams)  # `PARAMS` says so
    if bytes(params.arguments)[:1] != b"{":
        raise RpcError(McpCode.INVALID_PARAMS, "params.arguments must be an object")
    if request.profile.show == "search":
        answered = await search_mode.answer_search(server, request, params)
        if isinstance(answered, bytes):
            return answered
        request.params = params = answered
    target = await server.returning.find(request.profile, request.identity, params.name)
    if target is None:
        raise unknown_tool(params.name)
    tool = target.tool
    if tool.always_background and not tool.no_background and request.modern:
        task_methods.check_tasks(request)
    listens = params.meta.progress_token is not None or request.log_level is not None
    report = ProgressReport(request) if listens else None

    async def run(answers: Mapping[str, Any], state: str) -> bytes | Questions:
        call = call_of(request, target)
        if answers or state:
            call.input_responses_json, call.request_state = dump_json(answers), state
        if request.has_tasks:
            call.background_after_seconds = server.settings.task_after_seconds
        result = await server.calls.run(request, call, report, seconds_of(call, target))
        if request.modern and result.error is not None and result.error.reason == NEEDS_INPUT:
            asked_for = result.error.message.rpartition("(accepts ")[2]
            raise missing_capability([word for word in ACCEPTS if word in asked_for])
        if result.input_requests_json or result.request_state:
            requests = result.input_requests_json
            return Questions(read_requests(requests) if requests not in ("", "{}") else {}, result.request_state)
        task = task_methods.task_of(server, request, result) if request.has_tasks else None
        if task is None:
            return write_result(result, request)
        return await task_methods.write_created(server, request, task)

    try:
        return await run_with_input(server, request, run)
    except (NotAnswered, InvalidInput) as error:
        text = f"tool {params.name} needs input before it can go on: {error}"
        return write_result(Result(is_error=True, error=CallError(Code.TOOL, text, Stage.ACCEPTED)), request)


_FEATURES: Mapping[str, Handler] = {
    "prompts/list": feature_methods.list_prompts,
    "prompts/get": feature_methods.get_prompt,
    "resources/list": feature_methods.list_resources,
    "resources/templates/list": feature_methods.list_templates,
    "resources/read": feature_methods.read_resource,
    "completion/complete": feature_methods.complete,
}
# The methods of the era of sessions, and of the stateless one.
LEGACY: Mapping[str, Handler] = {
    "initialize": initialize,
    "ping": ping,
    "logging/setLevel": set_level,
    "tools/list": list_tools,
    "tools/call": call_tool,
    "resources/subscribe": feature_methods.subscribe,
    "resources/unsubscribe": feature_methods.unsubscribe,
    **_FEATURES,
}
MODERN: Mapping[str, Handler] = {
    "server/discover": discover,
    "tools/list": list_tools,
    "tools/call": call_tool,
    "subscriptions/listen": listen.listen,
    "tasks/get": task_methods.get_task,
    "tasks/update": task_methods.update_task,
    "tasks/cancel": task_methods.cancel_task,
    **_FEATURES,
}


async def answer(server: McpServer, request: McpRequest) -> tuple[int, bytes]:
    """Answers a request: returns the HTTP status and the message."""
    try:
        handler = (MODERN if request.modern else LEGACY).get(request.method)
        if handler is None:
            raise RpcError(McpCode.METHOD_NOT_FOUND, f"there is no method {request.method!r:.80}")
        session = request.session
        if session is None:
            result = await handler(server, request)
        else:
            result = await _in_session(server, session, request, handler)
    except RpcError as error:
        return server.refuse(request, error)
    except LimitExceeded as error:
        return server.refuse(request, RpcError(McpCode.INTERNAL, str(error)))
    except Exception:
        log.exception("internal error in MCP method %.80r", request.method)
        return server.refuse(request, RpcError(McpCode.INTERNAL, INTERNAL_DETAIL))
    return 200, b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (encode(request.id), result)


async def _in_session(server: McpServer, session: McpSession, request: McpRequest, handler: Handler) -> bytes:
    """Answers a request of a session, which its client can cancel by its id."""
    task = asyncio.current_task()
    assert task is not None  # it runs in one
    tasks = session.running.setdefault(request.id, set())
    tasks.add(task)
    try:
        return await handler(server, request)
    finally:
        tasks.discard(task)
        if not tasks and session.running.get(request.id) is tasks:
            del session.running[request.id]
