"""Offers the tools that the official conformance suite of MCP calls: a plugin over gRPC, as any author writes one.

    python -m tests.parts.mcp.official.fixture_plugin [ADDRESS]

Names, texts and schemas are the suite's. What it expects stands in the descriptions of its scenarios.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Callable
from typing import Any

from tests.parts.mcp.official import fixture_questions
from toolbus.errors import Code
from toolbus.protocol.tool import CallError, Result
from toolbus.sdk import Err, Plugin, Reply, ToolScope, audio, image, text
from toolbus.v1 import tool_pb2 as pb

SOURCE = "mcp-fixture"
IMAGE = base64.b64decode(  # one red pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
)
AUDIO = base64.b64decode("UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAAB9AAACABAAZGF0YQIAAAA=")
POLL_SECONDS = 11.0  # longer than the bus leaves the stream of one request open
STEP_SECONDS = 0.05  # between two steps of a tool that shows how far it is
SCHEMA_2020_12: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


def embedded(uri: str, mime_type: str, content: str) -> pb.ContentBlock:
    """Returns a part that holds a resource with its text."""
    return pb.ContentBlock(resource=pb.EmbeddedResource(uri=uri, mime_type=mime_type, text=content))


def offer_content(plugin: Plugin) -> None:
    """Offers tools that return at once."""

    @plugin.tool
    def test_simple_text() -> str:
        """Tests simple text content response"""
        return "This is a simple text response for testing."

    @plugin.tool
    def test_image_content() -> Reply:
        """Tests image content response"""
        return Reply(content=[image(IMAGE)])

    @plugin.tool
    def test_audio_content() -> Reply:
        """Tests audio content response"""
        return Reply(content=[audio(AUDIO)])

    @plugin.tool
    def test_embedded_resource() -> Reply:
        """Tests embedded resource content response"""
        block = embedded("test://embedded-resource", "text/plain", "This is an embedded resource content.")
        return Reply(content=[block])

    @plugin.tool
    def test_multiple_content_types() -> Reply:
        """Tests response with multiple content types (text, image, resource)"""
        block = embedded("test://mixed-content-resource", "application/json", '{"test":"data","value":123}')
        return Reply(content=[text("Multiple content types test:"), image(IMAGE), block])

    @plugin.tool
    def test_error_handling() -> Err:
        """Tests error response handling"""
        return Err("This tool intentionally returns an error for testing")

    @plugin.tool(
        parameters={
            "type": "object",
            "properties": {"region": {"type": "string", "x-mcp-header": "Region"}},
            "required": ["region"],
        }
    )
    def test_x_mcp_header(region: str) -> str:
        """Tests an argument that is also sent as a header"""
        return f"region: {region}"

    @plugin.tool(parameters=SCHEMA_2020_12)
    def json_schema_2020_12_tool(**arguments: Any) -> dict[str, Any]:
        """Tool with JSON Schema 2020-12 features"""
        return arguments

    @plugin.tool
    def greet(name: str) -> str:
        """Greets a person"""
        return f"Hello, {name}!"


def offer_steps(plugin: Plugin) -> None:
    """Offers tools that take a moment and say so."""

    @plugin.tool
    async def test_tool_with_logging(scope: ToolScope) -> str:
        """Tests tool that emits log messages during execution"""
        for message in ("Tool execution started", "Tool processing data", "Tool execution completed"):
            scope.progress(message=message)
            await asyncio.sleep(STEP_SECONDS)
        return "Tool with logging executed successfully"

    @plugin.tool
    async def test_logging_tool(scope: ToolScope) -> str:
        """Tests that log messages go only to those who want them"""
        scope.progress(message="a message for the log")
        return "Logged"

    @plugin.tool
    async def test_tool_with_progress(scope: ToolScope) -> str:
        """Tests tool that reports progress notifications"""
        for done in (0, 50, 100):
            scope.progress(done, total=100, message=f"Completed step {done} of 100")
            await asyncio.sleep(STEP_SECONDS)
        return "Tool with progress executed successfully"

    @plugin.tool
    async def test_reconnection(scope: ToolScope) -> str:
        """Tests that a client fetches the rest of a stream that was closed during a call"""
        scope.progress(message="Before disconnect")
        await asyncio.sleep(POLL_SECONDS)
        scope.progress(message="After reconnect")
        return "Reconnection test completed"


def offer_changes(plugin: Plugin) -> None:
    """Offers a tool that changes the list of tools."""

    def appearing() -> str:
        """Is there after every second call of test_trigger_tool_change"""
        return "I am here."

    @plugin.tool
    def test_trigger_tool_change() -> str:
        """Adds a tool, or removes it again"""
        # Each call changes the list for good: a tool that came and went at once would be no change to be told.
        if not plugin.remove_tool("test_appearing_tool"):
            plugin.add_tool(appearing, name="test_appearing_tool")
        return "Tool list changed"


def offer_tasks(plugin: Plugin) -> None:
    """Offers tools that outlast the time after which a call becomes a task."""

    @plugin.tool
    async def slow_compute(seconds: float = 0.0, label: str = "") -> str:
        """Computes for a while"""
        await asyncio.sleep(seconds)
        return f"Computed {label or 'nothing'} for {seconds:g} s"

    @plugin.tool(always_background=True)
    async def failing_job() -> Err:
        """Fails after a second"""
        await asyncio.sleep(1.0)
        return Err("This job always fails")

    @plugin.tool(always_background=True)
    async def protocol_error_job() -> Result:
        """Ends with an error of the protocol after a second"""
        await asyncio.sleep(1.0)
        error = CallError(Code.TOOL, "This job breaks the protocol", reason="jsonrpc:-32603")
        return Result(is_error=True, error=error)


OFFERS: tuple[Callable[[Plugin], None], ...] = (
    offer_content,
    offer_steps,
    offer_changes,
    offer_tasks,
    fixture_questions.offer_questions,
    fixture_questions.offer_rounds,
    fixture_questions.offer_asking_tasks,
)


def fixture_plugin(address: str | None = None) -> Plugin:
    """Returns the plugin with all its tools, not started."""
    plugin = Plugin(SOURCE, address=address)
    for offer in OFFERS:
        offer(plugin)
    return plugin


if __name__ == "__main__":
    fixture_plugin(sys.argv[1] if len(sys.argv) > 1 else None).run(lambda: print("ready", flush=True))
