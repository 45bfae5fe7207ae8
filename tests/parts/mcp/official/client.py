"""Has the client for mounted servers play a scenario of the official conformance suite of MCP.

    python tests/parts/mcp/official/client.py URL

The suite starts it, with the scenario in `MCP_CONFORMANCE_SCENARIO` and what it needs to know in
`MCP_CONFORMANCE_CONTEXT`. Connection, transport and authorization are those of the bus; this file only asks for what
the scenario wants to see: it lists everything, calls every tool once, and answers questions with their defaults.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[4]))  # the suite runs it as a script

from toolbus.errors import ToolBusError
from toolbus.parts.mcp.client.connection import Incoming, McpConnection, open_connection
from toolbus.parts.mcp.client.http import HttpTransport
from toolbus.parts.mcp.client.http_link import Authorization
from toolbus.parts.mcp.messages import headers
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError

ACCEPTS = ("elicitation.form",)
MAX_ROUNDS = 5  # of questions in one call
CALL_SECONDS = 20.0
# Arguments that a scenario wants to see; other tools get what their schema needs.
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {"add_numbers": {"a": 5, "b": 3}}


class Client:
    """A client of one server.

    Args:
        context: what the suite says beside the URL.
        authorization: None where the scenario needs none.
    """

    def __init__(self, url: str, context: Mapping[str, Any], authorization: Authorization | None) -> None:
        self._context = context
        self._connection = McpConnection(
            HttpTransport("suite", url, {}, authorization),
            on_request=self._answer,
            on_notification=lambda *_: None,
            on_closed=lambda why: None,
            name="suite",
        )

    async def play(self, version: str) -> None:
        """Connects, asks for every list and calls every tool."""
        connection = self._connection
        await connection.transport.start(connection)
        try:
            await open_connection(connection, modern=version > "2026")
            tools = (await self._ask("tools/list"))["tools"]
            for name, arguments in self._calls(tools):
                try:
                    await self._call(tools, name, arguments)
                except RpcError as error:  # some servers of the suite only list tools
                    print(f"{name}: {error}", file=sys.stderr)
            for kind, method, key in (("prompts", "prompts/get", "name"), ("resources", "resources/read", "uri")):
                if connection.peer is not None and connection.peer.can(kind):
                    for each in (await self._ask(f"{kind}/list"))[kind]:
                        await self._ask(method, {key: each[key]}, each[key])
        finally:
            await connection.close()

    def _calls(self, tools: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
        """Returns which tools to call with what."""
        if "toolCalls" in self._context:
            return [(each["name"], each["arguments"]) for each in self._context["toolCalls"]]
        found = []
        for tool in tools:
            try:
                headers.marked(tool["inputSchema"])
            except ValueError:
                continue  # the bus leaves such a tool out
            found.append((tool["name"], ARGUMENTS.get(tool["name"]) or self._sample(tools, tool["inputSchema"])))
        return [(name, dict(arguments)) for name, arguments in found]

    def _sample(self, tools: list[dict[str, Any]], schema: Mapping[str, Any]) -> dict[str, Any]:
        of_type: dict[str, Any] = {"string": "x", "integer": 1, "number": 1.5, "boolean": True, "array": []}
        properties = schema.get("properties", {})
        return {
            name: tools[0]["inputSchema"] if name == "schema" else of_type.get(properties.get(name, {}).get("type"), {})
            for name in schema.get("required", ())
        }

    async def _call(self, tools: list[dict[str, Any]], name: str, arguments: Mapping[str, Any]) -> None:
        """Calls a tool, and answers what it asks in the middle of it."""
        schema: dict[str, Any] = next((each["inputSchema"] for each in tools if each["name"] == name), {})
        extra = headers.param_headers(headers.marked(schema), arguments)
        params: dict[str, Any] = {"name": name, "arguments": arguments}
        for _ in range(MAX_ROUNDS):
            result = await self._ask("tools/call", params, name, extra)
            if result.get("resultType", "complete") != "input_required":
                return
            answers = {key: _accept(each.get("params", {})) for key, each in result["inputRequests"].items()}
            params = {"name": name, "arguments": arguments, "inputResponses": answers}
            if "requestState" in result:
                params["requestState"] = result["requestState"]

    async def _ask(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        name: str = "",
        extra: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        result: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        def take(raw: Any, error: Exception | None) -> None:
            if result.done():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(json.loads(bytes(raw)))

        text = json.dumps(params or {}).encode()
        self._connection.send(method, text, take, name=name, accepts=ACCEPTS, headers=extra, on_progress=lambda _: None)
        async with asyncio.timeout(CALL_SECONDS):
            return await result

    def _answer(self, incoming: Incoming) -> None:
        if incoming.method == "elicitation/create":
            self._connection.respond(incoming, _accept(incoming.params))
        else:
            self._connection.refuse(incoming, McpCode.METHOD_NOT_FOUND, f"{incoming.method} is not offered")


def _accept(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer of a user who takes every default, and says yes."""
    content: dict[str, Any] = {}
    for name, each in params.get("requestedSchema", {}).get("properties", {}).items():
        if "default" in each:
            content[name] = each["default"]
        elif each.get("type") == "boolean":
            content[name] = True
    return {"action": "accept", "content": content}


async def play(url: str, context: Mapping[str, Any], version: str) -> None:
    """Plays a scenario."""
    found = None
    if os.environ.get("MCP_CONFORMANCE_SCENARIO", "").startswith("auth/"):
        from tests.parts.mcp.official.authorized_client import authorization  # loads the SDK

        found = await authorization(url, context)
    await Client(url, context, found).play(version)


def main() -> int:
    """Plays the scenario that the environment names."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))
    version = os.environ.get("MCP_CONFORMANCE_PROTOCOL_VERSION", "2025-11-25")
    try:
        asyncio.run(play(sys.argv[-1], context, version))
    except (ToolBusError, RpcError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
