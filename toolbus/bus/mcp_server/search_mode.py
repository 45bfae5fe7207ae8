"""Offers three tools with which a model finds and calls all others, for profiles with hundreds of tools.

The three are always the same, because a list must not differ between connections. Two of them call, so that users can
always allow the one for read-only tools.
"""

from __future__ import annotations

import asyncio
import json

import msgspec

from toolbus.bus.mcp_server.mcp_listing import declare, page_of
from toolbus.bus.mcp_server.mcp_request import CallParams, McpRequest, encode
from toolbus.bus.mcp_server.server import McpServer
from toolbus.mcp import jsonrpc
from toolbus.mcp.jsonrpc import McpCode, RpcError
from toolbus.search import MAX_RESULTS
from toolbus.search_tool import SEARCH_TOOLS
from toolbus.tool import Annotations, Tool

CALL_TOOL = "call_tool"
CALL_READ_ONLY = "call_read_only_tool"
RESULTS = 5  # of a search without `top_k`
_CALLED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": f"The name of a tool, as {SEARCH_TOOLS} returned it"},
        "arguments": {"type": "object", "description": "Its arguments, by its parameters"},
    },
    "required": ["name"],
}
_QUERY = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "description": "What the tool should do, e.g. `send email`"},
        "top_k": {"type": "integer", "minimum": 1, "maximum": MAX_RESULTS, "default": RESULTS},
    },
    "required": ["query"],
}
TOOLS = (
    Tool(
        name=SEARCH_TOOLS,
        description=(
            "Find tools by what they do. There are many more tools than these three. Returns names, descriptions and "
            f"parameters; call one with {CALL_READ_ONLY} where it is read_only, else with {CALL_TOOL}. If no result "
            "fits, try other words once, then say that there is no such tool."
        ),
        parameters_json=json.dumps(_QUERY),
        annotations=Annotations(read_only=True, idempotent=True, open_world=False),
    ),
    Tool(
        name=CALL_TOOL,
        description=f"Call a tool that {SEARCH_TOOLS} found. It may change things.",
        parameters_json=json.dumps(_CALLED),
        annotations=Annotations(read_only=False),
    ),
    Tool(
        name=CALL_READ_ONLY,
        description=f"Call a tool that {SEARCH_TOOLS} found and that is read_only. Other tools are refused.",
        parameters_json=json.dumps(_CALLED),
        annotations=Annotations(read_only=True),
    ),
)


class _Search(msgspec.Struct):
    query: str
    top_k: int = RESULTS


def list_page(request: McpRequest) -> bytes:
    """Returns the result of `tools/list`."""
    texts = (encode(declare(tool.name, tool, modern=request.modern)) for tool in TOOLS)
    return page_of(b",".join(texts), modern=request.modern, private=False)


async def answer_search(server: McpServer, request: McpRequest, params: CallParams) -> CallParams | bytes:
    """Returns the result of a search, or the call that `call_tool` and `call_read_only_tool` stand for.

    Raises:
        RpcError: the tool is not one of the three.
    """
    match params.name:
        case "search_tools":
            return await _search(server, request, bytes(params.arguments))
        case "call_tool" | "call_read_only_tool":
            return _called(server, request, params)
    raise RpcError(McpCode.INVALID_PARAMS, f"Unknown tool: {params.name!r:.80}; find tools with {SEARCH_TOOLS}")


async def _search(server: McpServer, request: McpRequest, arguments: bytes) -> bytes:
    try:
        search = msgspec.json.decode(arguments, type=_Search)
    except (msgspec.DecodeError, RecursionError) as error:
        return _failed(request, f"the arguments of {SEARCH_TOOLS}: {error}")
    if not 1 <= search.top_k <= MAX_RESULTS:
        return _failed(request, f"top_k is {search.top_k}, it must be from 1 to {MAX_RESULTS}")
    catalog = server.listings.catalog(request.profile, request.identity, modern=request.modern)
    await server.save_names()

    def find() -> dict[str, object]:
        index = server.core.indexes.index_of(
            ("mcp", catalog.digest), [listing.tool.renamed(wire) for wire, listing in catalog.listings.items()]
        )
        return index.search(search.query, top_k=search.top_k, include_parameters=True)

    try:
        answer = await asyncio.to_thread(find)  # a new catalog takes some time to index
    except ValueError as error:
        return _failed(request, str(error))
    results = answer["results"]
    assert isinstance(results, list)  # `ToolIndex.search` says so
    tools = [
        {**each, "read_only": catalog.listings[each["name"]].tool.annotations.read_only is True} for each in results
    ]
    output = {"tools": tools}
    text = encode(output).decode()
    return request.complete(
        {"content": [{"type": "text", "text": text}], "structuredContent": output, "isError": False}
    )


def _called(server: McpServer, request: McpRequest, params: CallParams) -> CallParams | bytes:
    try:
        inner = jsonrpc.read(params.arguments, CallParams, "the arguments")
    except RpcError as error:
        return _failed(request, error.message)
    target = server.listings.find(request.profile, request.identity, inner.name)
    if target is None:
        return _failed(request, f"there is no tool {inner.name!r:.80}: find one with {SEARCH_TOOLS}")
    if params.name == CALL_READ_ONLY and target.tool.annotations.read_only is not True:
        return _failed(request, f"tool {inner.name!r:.80} is not read_only: use {CALL_TOOL}")
    if bytes(inner.arguments)[:1] != b"{":
        return _failed(request, "arguments must be an object")
    return msgspec.structs.replace(params, name=inner.name, arguments=inner.arguments)


def _failed(request: McpRequest, text: str) -> bytes:
    return request.complete({"content": [{"type": "text", "text": text}], "isError": True})
