"""A folder's tools on a real bus: checked arguments, results and order as a host sees them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.parts.dropin.loaded_files import load
from toolbus.bus import Bus
from toolbus.errors import Code
from toolbus.functions.tool_spec import ToolSet
from toolbus.sdk import CallContext, Plugin
from toolbus.testing import running_bus

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FILES = {
    "a.py": f"""
        def greet(args, env):
            return {{"args": args, "user": env["user"], "level": env["level"]}}

        register_tool(name="greet", execute=greet, definition={{"description": "Greets.", "parameters": {SCHEMA!r}}})
        """,
    "b.py": f"""
        TOOL_NAME = "shout"
        TOOL_PARAMETERS = {SCHEMA!r}

        async def run(**kwargs):
            return kwargs["name"].upper()
        """,
    "c.py": f"""
        async def who(name, ctx):
            return f"{{name}} asks for {{ctx.context.user_id}}"

        TOOLS = [{{"name": "who", "handler": who, "parameters": {SCHEMA!r}}}]
        """,
    "d.py": """
        from toolbus import llm_tool

        @llm_tool
        def fails(name: str):
            raise ValueError(name)
        """,
}


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    tools = ToolSet()
    for spec in load(tmp_path, FILES).specs:
        tools.add(spec)
    async with running_bus() as bus, Plugin("dropin", address=bus.grpc_addresses[0], tools=tools) as plugin:
        await plugin.ready()
        yield bus


@pytest.mark.parametrize("name", ["greet", "shout", "who", "fails"])
async def test_arguments_are_checked_before_a_tool_gets_them(bus: Bus, name: str) -> None:
    for arguments in ({"name": 5}, {}, "[]", '{"name": '):
        result = await bus.call(name, arguments)
        assert result.error is not None
        assert result.error.code is Code.INVALID_ARGUMENTS


async def test_tools_of_every_declaration_answer_over_the_wire(bus: Bus) -> None:
    context = CallContext(user_id="u1", attributes={"level": "30"})
    arguments = {"name": "Ada", "userId": "root"}
    texts = {
        name: (await bus.call(name, arguments, context=context)).text for name in ("greet", "shout", "who", "fails")
    }
    assert texts == {
        "greet": '{"args":{"name":"Ada"},"user":"u1","level":30}',
        "shout": "ADA",
        "who": "Ada asks for u1",
        "fails": '{"error":"tool exec: Ada"}',
    }


async def test_tools_are_listed_in_the_order_of_registration(bus: Bus) -> None:
    listed = [each.entry.tool.name for each in bus.list() if each.entry.source == "dropin"]
    assert listed == ["greet", "shout", "who", "fails"]
