"""Names spans and their attributes: OpenTelemetry's conventions for tools, RPC and MCP, and those of toolbus.

Those for tools are still in development (https://opentelemetry.io/docs/specs/semconv/gen-ai/): a change of theirs is a
change of this file. No name stands for arguments, outputs or users, which spans never hold.
"""

from __future__ import annotations

from toolbus.errors import Stage
from toolbus.protocol.tool import CallError

SCOPE = "toolbus"  # of instrumentation
INVOKE = "toolbus.v1.ToolBusService/Invoke"  # the method that carries calls
EVENT_SENT, EVENT_FIRST_SIGN = "sent", "first_sign"
SERVICE_NAME, SERVICE_VERSION, SERVICE_INSTANCE = "service.name", "service.version", "service.instance.id"
ERROR_TYPE = "error.type"
CALLER, SESSION = "toolbus.caller", "toolbus.protocol.session"
_TOOL = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.type": "function"}
_CALL_ID = "gen_ai.tool.call.id"
_SOURCE, _ID, _STAGE, _RETRY_SAFE = "toolbus.source", "toolbus.id", "toolbus.stage", "toolbus.retry_safe"

Attributes = dict[str, str | bool]


def execute_name(tool: str) -> str:
    """Returns the name of the span of a program that calls or runs a tool."""
    return f"execute_tool {tool}"


def dispatch_name(tool: str, *, mcp: bool) -> str:
    """Returns the name of the bus's span."""
    return f"tools/call {tool}" if mcp else f"dispatch {tool}"


def call_attributes(tool: str, call_id: str, *, id: str = "", source: str = "", mcp: bool = False) -> Attributes:
    """Returns the attributes of every span of a call.

    Args:
        call_id: that the caller chose; "" if it is not known.
        id: the bus's own; "" if it is not known.
        source: whose tool it is; "" if it is not known.
        mcp: whether the call goes to an MCP server.
    """
    rpc = {"mcp.method.name": "tools/call"} if mcp else {"rpc.system.name": "grpc", "rpc.method": INVOKE}
    known = {_CALL_ID: call_id, _ID: id, _SOURCE: source}
    return {**_TOOL, "gen_ai.tool.name": tool, **rpc, **{name: value for name, value in known.items() if value}}


def call_id_attributes(call_id: str) -> Attributes:
    """Returns the attribute for the id that a program chose for its call; none before it has."""
    return {_CALL_ID: call_id} if call_id else {}


def failure_attributes(error: CallError) -> Attributes:
    """Returns the attributes for a failure: not its message, which may repeat arguments."""
    attributes: Attributes = {ERROR_TYPE: error.code.name, _RETRY_SAFE: error.retry_safe}
    if error.stage is not Stage.UNSPECIFIED:
        attributes[_STAGE] = error.stage.name.lower()
    return attributes
