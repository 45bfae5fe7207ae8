"""Runs `tools/call`: one call on the bus, whose progress, result or failure is written in the form of MCP.

Failures have two forms. An unknown tool, a missing capability of the client or an internal error of the bus is a
JSON-RPC error. Everything else is a result with `isError`, which a model reads: invalid arguments, refusals, failures
of the tool and of the connection to it.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from dataclasses import replace
from typing import Any

import msgspec

from toolbus.bus.access.identity import Scopes
from toolbus.bus.core import Core
from toolbus.bus.local import LocalCaller, OnProgress
from toolbus.common.newest import NewestCache
from toolbus.common.text import quote
from toolbus.errors import Code, Stage
from toolbus.parts.mcp.messages import headers
from toolbus.parts.mcp.messages.content import structured_text, write_content
from toolbus.parts.mcp.messages.eras import NEWEST
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError, raw_json
from toolbus.parts.mcp.server.mcp_listing import TargetTool
from toolbus.parts.mcp.server.mcp_request import META_OF_RESULT, CallParams, McpRequest, encode
from toolbus.protocol.input_requests import capabilities_for
from toolbus.protocol.tool import DEFAULT_TIMEOUT_SECONDS, CallError, Progress, Result
from toolbus.v1 import tool_pb2 as pb

ERROR_META = "dev.toolbus/error"  # of a result: why a call failed, for programs
# The reason of a failed call that a mounted server answered with a JSON-RPC error.
RPC_REASON = re.compile(r"jsonrpc:(-?[0-9]{1,9})", re.ASCII)
_SAYS_ERROR = re.compile(r"\W{0,8}(error|failed|failure|exception|traceback)\b", re.IGNORECASE)
MAX_CALLERS = 256
RETRIED = frozenset({Code.UNAVAILABLE, Code.OVERLOADED})
FIRST_PAUSE = 0.01
MAX_PAUSE = 1.0


class Calls:
    """Makes the calls of MCP clients."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._callers: NewestCache[tuple[str, str, Scopes | None], LocalCaller] = NewestCache(MAX_CALLERS)

    def __repr__(self) -> str:
        return f"<Calls {sum(len(caller.in_flight) for caller in self._callers.values())}>"

    def caller(self, request: McpRequest) -> LocalCaller:
        """Returns the caller for a request's client."""
        profile, identity = request.profile, request.identity
        key = (profile.name, identity.name, identity.scopes)
        caller = self._callers.get(key)
        if caller is None:
            caller = self._callers[key] = LocalCaller(
                profile.source, self._core.calls.dispatcher, is_admin=profile.administers, identity=identity
            )
        return caller

    async def run(
        self, request: McpRequest, call: pb.ToolCall, on_progress: OnProgress | None, seconds: float
    ) -> Result:
        """Makes a call; repeats it while the tool is busy or offline, for at most `seconds`."""
        caller, loop = self.caller(request), asyncio.get_running_loop()
        result = await caller.call(call, on_progress)
        if not _may_retry(result.error):
            return result
        end, attempt = loop.time() + seconds, 0
        while (error := result.error) is not None and _may_retry(error) and not self._core.sessions.presence.draining:
            pause = random.uniform(0.0, min(MAX_PAUSE, FIRST_PAUSE * 2 ** min(attempt, 10)))
            pause = max(pause, error.retry_after_seconds)
            attempt += 1
            if loop.time() + pause >= end:
                break
            await asyncio.sleep(pause)
            if (left := end - loop.time()) <= 0:  # the loop was late
                break
            call.timeout_seconds = left
            result = await caller.call(call, on_progress)
            if result.error is not None and not _may_retry(result.error):
                return replace(result, error=result.error.after(error))
        return result


def call_of(request: McpRequest, target: TargetTool) -> pb.ToolCall:
    """Returns the call of a request.

    Raises:
        RpcError: headers differ from the arguments, or the client lacks a capability that the tool needs.
    """
    params, profile = request.params, request.profile
    assert isinstance(params, CallParams)  # `PARAMS` says so
    arguments = bytes(params.arguments)
    # In search mode the client does not know the arguments that it should repeat.
    if target.marked and request.headers and request.modern and profile.show != "search":
        check_param_headers(request, target, arguments)
    missing = [need for need in target.tool.needs if need not in request.client.accepts] if request.modern else []
    if missing:  # the tool is declared to ask
        raise missing_capability(missing, f"tool {quote(target.name)}")
    call = pb.ToolCall(name=target.name, arguments_json=arguments.decode(), accepts=request.client.accepts)
    if profile.role:
        call.role = profile.role
    # An SDK declares the default if its author sets none.
    if profile.timeout_seconds and target.tool.timeout_seconds in (0.0, DEFAULT_TIMEOUT_SECONDS):
        call.timeout_seconds = profile.timeout_seconds
    if profile.user:
        call.context.user_id = profile.user
    if profile.level:
        call.context.attributes["level"] = str(profile.level)
    if params.meta.traceparent:
        call.context.traceparent = params.meta.traceparent
        call.tracestate = params.meta.tracestate or ""
    return call


def seconds_of(call: pb.ToolCall, target: TargetTool) -> float:
    """Returns how long a call may take."""
    return call.timeout_seconds or target.tool.timeout_seconds or DEFAULT_TIMEOUT_SECONDS


def missing_capability(needs: list[str], what: str = "this") -> RpcError:
    """Returns the error for a modern client that does not accept a tool's questions."""
    return RpcError(
        McpCode.MISSING_CAPABILITY,
        f"{what} needs capabilities that the client lacks: {', '.join(needs)}; declare them in clientCapabilities",
        {"requiredCapabilities": capabilities_for(needs)},
    )


def check_param_headers(request: McpRequest, target: TargetTool, arguments: bytes) -> None:
    """Checks the headers that repeat arguments.

    Raises:
        RpcError: one is missing, or differs from the argument.
    """
    values = msgspec.json.decode(arguments)
    for name, path in target.marked.items():
        header = f"{headers.PARAM_PREFIX}{name}"
        given = request.headers.get(header.lower())
        expected = headers.scalar_text(headers.value_at(values, path))
        shown = headers.read_value(given) if given is not None else None
        if shown != expected:
            raise RpcError(
                McpCode.HEADER_MISMATCH,
                f"the header {header} is {quote(given) if given is not None else 'missing'}, and the argument "
                f"{'.'.join(path)} is {quote(expected) if expected is not None else 'not given'}: they must agree",
            )


class ProgressReport:
    """Reports the progress of a call to its client.

    Numbers must rise strictly, or clients drop the stream; others are left out. A text without a number is a log
    message.
    """

    def __init__(self, request: McpRequest) -> None:
        self._request = request
        self._token = request.meta.progress_token
        self._highest = -math.inf

    def __call__(self, progress: Progress) -> None:
        number, total, message = progress.progress, progress.total, progress.message
        rises = number > self._highest and math.isfinite(number)
        if self._token is not None and (number or total) and rises:
            self._highest = number
            params: dict[str, Any] = {"progressToken": self._token, "progress": number}
            if total and math.isfinite(total):
                params["total"] = total
            if message:
                params["message"] = message
            self._request.notify("notifications/progress", params)
        elif message:
            self._request.log("info", message)


def write_result(result: Result, request: McpRequest) -> bytes:
    """Returns a result as the text of a `CallToolResult`.

    Raises:
        RpcError: the failure is a JSON-RPC error.
    """
    error = result.error
    if error is not None:
        raise_rpc_error(error, result, request)
    modern = request.modern
    structured = structured_text(result.output_json, modern=modern)
    raw = raw_json(structured) if structured else None
    text = (replace(result, content=()) if result.content else result).text  # content is written as blocks
    failed = result.is_error or error is not None
    content = write_content(result, text, request.version or NEWEST)
    if failed:
        _mark_failure(content)
    parts = [b'{"content":', encode(content)]
    if raw is not None and error is None:
        parts += [b',"structuredContent":', bytes(raw)]
    parts.append(b',"isError":true' if failed else b',"isError":false')
    if modern:
        parts.append(b',"resultType":"complete"')
    if error is not None and error.code != Code.TOOL:
        meta = {ERROR_META: describe(error)}
        parts += [b',"_meta":', META_OF_RESULT[:-1] + b"," + encode(meta)[1:] if modern else encode(meta)]
    elif modern:
        parts += [b',"_meta":', META_OF_RESULT]
    parts.append(b"}")
    return b"".join(parts)


def _mark_failure(content: list[dict[str, Any]]) -> None:
    """Lets the first text of a failure begin with a word for it: some clients pass on texts without `isError`."""
    first = next((each for each in content if each["type"] == "text"), None)
    if first is None:
        content.insert(0, {"type": "text", "text": "Error"})
    elif not _SAYS_ERROR.match(first["text"]):
        first["text"] = f"Error: {first['text']}"


def raise_rpc_error(error: CallError, result: Result, request: McpRequest) -> None:
    """Raises a failure that is a JSON-RPC error; returns for one that is a result.

    Raises:
        RpcError: the tool is unknown, the bus has an internal error, or a mounted server answered with such an error.
    """
    if error.code == Code.NOT_FOUND and error.stage == Stage.NOT_DISPATCHED:
        raise unknown_tool(getattr(request.params, "name", ""))
    if error.code == Code.INTERNAL:
        raise RpcError(McpCode.INTERNAL, error.message)
    reason = RPC_REASON.fullmatch(error.reason) if error.code == Code.TOOL else None
    if reason is not None:
        data = None if result.output_json in ("", "null") else raw_json(result.output_json)
        raise RpcError(int(reason[1]), error.message, data)


def unknown_tool(name: str) -> RpcError:
    """Returns the error for a tool that is not visible to the client."""
    return RpcError(McpCode.INVALID_PARAMS, f"Unknown tool: {quote(name)}; tools/list has the available tools")


def describe(error: CallError) -> dict[str, Any]:
    """Returns the error of a failed call, for programs."""
    described: dict[str, Any] = {"code": error.code.name, "stage": error.stage.name, "retry_safe": error.retry_safe}
    if error.limit is not None:
        described["limit"] = {"name": error.limit[0], "value": error.limit[1]}
    if error.retry_after_seconds:
        described["retry_after"] = error.retry_after_seconds
    return described


def _may_retry(error: CallError | None) -> bool:
    return error is not None and error.retry_safe and error.code in RETRIED
