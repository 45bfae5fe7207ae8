"""Loading folders of tool files into a registry."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.parts.dropin.loaded_files import REGISTERED, write
from tests.parts.moving.registry.example_tools import offer
from toolbus.tools import ToolRegistry, load_tools, reload_tools

SINGLE = """
TOOL_NAME = "get_weather"
TOOL_DESCRIPTION = "Tells the weather."
TOOL_PARAMETERS = {
    "type": "object",
    "properties": {"location": {"type": "string"}},
    "required": ["location"],
}
TOOL_NO_BACKGROUND = True
TOOL_ALLOW_REPEAT = True

async def run(location, ctx=None):
    return f"sunny in {location} for {ctx.user_id}"
"""
LIST = """
async def add(a, b):
    return str(a + b)

async def fails():
    raise RuntimeError("no luck")

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [
    {"name": "add", "description": "Adds.", "parameters": NUMBERS, "handler": add},
    {"name": "fails", "description": "Fails.", "parameters": {"type": "object"}, "handler": fails},
]
"""


def _one(name: str, answer: str = "") -> str:
    return dedent(f'''
        TOOL_NAME = "{name}"
        TOOL_DESCRIPTION = "d"
        TOOL_PARAMETERS = {{"type": "object", "properties": {{}}}}
        async def run():
            return "{answer or name}"
    ''')


class Ctx:
    user_id = "ann"


async def test_files_of_every_shape_are_loaded_with_their_flags(tmp_path: Path) -> None:
    write(tmp_path, {"weather.py": SINGLE, "numbers.py": LIST, "greet.py": REGISTERED})
    registry = ToolRegistry()
    loaded = load_tools(tmp_path, registry)
    assert loaded.problems == ()
    assert registry.tool_names() == {"get_weather", "add", "fails", "greet"}
    assert registry.repeat_allowed_tools() == {"get_weather"}
    assert [each.name for each in registry.list_tools() if each.no_background] == ["get_weather"]
    assert await registry.call("get_weather", {"location": "Oslo"}, "bob", Ctx()) == "sunny in Oslo for ann"
    assert await registry.call("get_weather", {"location": "Oslo"}, "bob") == "sunny in Oslo for bob"
    assert await registry.call("add", {"a": 1, "b": 2}) == "3"
    assert json.loads(await registry.call("greet", {"name": "Ann"})) == {"hello": "Ann"}
    assert "no luck" in await registry.call("fails", {})
    assert "ctx" not in json.dumps(registry.get_openai_tools())


def test_one_bad_file_is_one_warning_and_the_others_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {"a.py": _one("a"), "broken.py": "def run(:", "wrong.py": 'TOOL_NAME = "b"', "z.py": _one("z")})
    registry = ToolRegistry()
    with caplog.at_level(logging.WARNING):
        loaded = load_tools(str(tmp_path), registry)
    assert registry.tool_names() == {"a", "z"}
    assert [problem.file for problem in loaded.problems] == ["broken.py", "wrong.py"]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        *("failed to load broken.py", "failed to load wrong.py")
    ]


def test_a_manifest_says_which_files_are_loaded_and_can_be_required(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": _one("a"), "b.py": _one("b")})
    registry = ToolRegistry()
    assert [problem.file for problem in load_tools(tmp_path, registry, require_manifest=True).problems] == [
        "_manifest.json"
    ]
    assert not registry
    write(tmp_path, {"_manifest.json": '{"allow": ["b.py"]}'})
    load_tools(tmp_path, registry)
    assert registry.tool_names() == {"b"}


async def test_loading_again_swaps_the_tools_of_the_folder_and_no_others(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": _one("a"), "b.py": _one("b"), "c.py": _one("c")})
    registry = ToolRegistry()
    offer(registry, "own")
    load_tools(tmp_path, registry)
    before = registry.get_openai_tools()
    write(tmp_path, {"a.py": _one("a", "newer"), "c.py": "def run(:", "d.py": _one("d")})
    (tmp_path / "b.py").unlink()
    reload_tools(tmp_path, registry)
    assert registry.tool_names() == {"own", "a", "c", "d"}  # c.py failed and keeps what it had
    assert await registry.call("a", {}) == "newer"
    assert await registry.call("c", {}) == "c"
    assert registry.get_openai_tools() != before
    write(tmp_path, {"a.py": _one("a").replace('"object"', '"objekt"')})  # which the registry refuses
    assert reload_tools(tmp_path, registry).problems[-1].file == "a.py"
    assert await registry.call("a", {}) == "newer"
    (tmp_path / "c.py").unlink()
    reload_tools(tmp_path, registry)
    assert registry.tool_names() == {"own", "a", "d"}


def test_a_broken_manifest_changes_nothing_and_one_that_names_fewer_files_withdraws_the_others(
    tmp_path: Path,
) -> None:
    write(tmp_path, {"a.py": _one("a"), "b.py": _one("b")})
    registry = ToolRegistry()
    load_tools(tmp_path, registry)
    write(tmp_path, {"_manifest.json": "{"})
    assert reload_tools(tmp_path, registry).problems
    assert registry.tool_names() == {"a", "b"}
    write(tmp_path, {"_manifest.json": '{"allow": ["a.py"]}', "b.py": "def run(:"})
    reload_tools(tmp_path, registry)
    assert registry.tool_names() == {"a"}


async def test_a_call_in_flight_ends_on_the_code_that_it_began_on(tmp_path: Path) -> None:
    waiting = "import asyncio\n" + _one("waits", "old").replace("return", "await asyncio.sleep(0.05)\n    return")
    write(tmp_path, {"a.py": waiting})
    registry = ToolRegistry()
    load_tools(tmp_path, registry)
    call = asyncio.create_task(registry.call("waits", {}))
    await asyncio.sleep(0)
    write(tmp_path, {"a.py": waiting.replace('"old"', '"new"')})
    reload_tools(tmp_path, registry)
    assert await registry.call("waits", {}) == "new"
    assert await call == "old"


@pytest.mark.parametrize("key", ["def", "definition"])
async def test_a_program_can_register_what_a_file_would(key: str) -> None:
    def greet(args: dict[str, Any], env: Any) -> Any:
        return f"{args['name']} {env['user_id']}"

    async def weather(location: str, ctx: Any) -> str:
        return f"{location} {ctx}"

    registry = ToolRegistry()
    city = {"type": "object", "properties": {"location": {"type": "string"}}}
    named = {"type": "object", "properties": {"name": {"type": "string"}}}
    registry.register_tool({"name": "greet", "execute": greet, key: {"description": "d", "parameters": named}})
    registry.register_tool({"name": "weather", "description": "d", "parameters": city, "handler": weather})
    assert await registry.call("greet", {"name": "Ann"}, "u1") == "Ann u1"
    assert await registry.call("weather", {"location": "Oslo"}, ctx="given") == "Oslo given"


def test_the_tools_of_a_folder_are_cleared_like_all_others(tmp_path: Path) -> None:
    registry = ToolRegistry(source="mine")
    load_tools(write(tmp_path, {"a.py": _one("a")}), registry)
    assert registry.clear_tools("mine") == 1
