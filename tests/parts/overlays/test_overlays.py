"""Overlays: how tools are offered is the operator's word; calls reach them as their authors declared them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.contract.callers import CALLERS
from tests.parts.mcp.server.http_client import HttpClient
from tests.support.waiting import until, within
from toolbus import Bus, Host, Plugin
from toolbus.bus.serve_settings import settle
from toolbus.errors import Code, SetupError
from toolbus.parts.guards.settings import GuardRule
from toolbus.protocol.tool import Result
from toolbus.sdk import CallContext
from toolbus.testing import running_bus

pytestmark = pytest.mark.asyncio(loop_scope="module")

OVERLAYS = """
["local:read_file"]
name = "read_note"
title = "Read a note"
description = "Reads one of the user's notes."
hints = {read_only = true}
[`local:read_file`.arguments]
root = {fixed = "/srv/notes"}
path = {name = "file", description = "The note's name."}
mode = {hidden = true}

["local:danger"]
hidden = true

["local:old"]
answer = {use = "new"}

["local:gone"]
answer = "gone is retired"
description = "Retired."

["local:changed"]
original = "0000"
description = "As it was."

["local:misfit"]
arguments = {no_such = {fixed = 1}}

["local:admin"]
min_level = 50
""".replace("`", '"')


class World:
    def __init__(self, bus: Bus, file: Path) -> None:
        self.bus, self.file = bus, file
        self.got: list[Any] = []

        @bus.tool(description="Reads a file.")  # type: ignore[untyped-decorator]
        def read_file(root: str, path: str, mode: str = "text") -> str:
            self.got.append([root, path, mode])
            return f"{root}/{path}"

        def plain(name: str) -> None:
            @bus.tool(name=name, description=f"The author's {name}.")  # type: ignore[untyped-decorator]
            def tool(a: int = 1) -> str:
                self.got.append(name)
                return name

        for name in ("danger", "old", "changed", "misfit", "admin", "plain"):
            plain(name)

    def listed(self, level: int = 0) -> dict[str, Any]:
        return {listing.tool.name: listing for listing in self.bus.list(level=level)}

    async def call(self, name: str, level: int = 0, /, **arguments: Any) -> Result:
        context = CallContext(attributes={"level": str(level)})
        return await within(self.bus.call(name, arguments, context=context))


@pytest_asyncio.fixture(loop_scope="module")
async def world(tmp_path: Path) -> AsyncIterator[World]:
    file = tmp_path / "overlays.toml"
    file.write_text(OVERLAYS)
    async with running_bus(http="127.0.0.1:0", overlays=file) as bus:
        yield World(bus, file)


async def test_a_tool_is_listed_as_the_overlay_says_everywhere(world: World) -> None:
    tool = world.listed()["read_note"].tool
    assert (tool.display_name, tool.description) == ("Read a note", "Reads one of the user's notes.")
    assert tool.annotations.read_only is True
    assert tool.parameters["properties"] == {"file": {"type": "string", "description": "The note's name."}}
    assert tool.parameters["required"] == ["file"]
    assert "read_file" not in world.listed()
    by_mcp = {each["name"]: each for each in (await HttpClient(world.bus).ask("tools/list")).result["tools"]}
    assert by_mcp["read_note"]["description"] == tool.description
    async with Host(world.bus.grpc_addresses[0]) as host:
        await within(host.ready())
        (seen,) = [each for each in await host.list() if each.name == "read_note"]
        assert json.loads(seen.tool.parameters_json) == tool.parameters


@pytest.mark.parametrize("way", CALLERS)
async def test_every_way_in_reaches_the_tool_with_the_arguments_of_its_author(world: World, way: str) -> None:
    async with CALLERS[way](world.bus) as caller:
        assert (await within(caller.call("read_note", {"file": "a.txt"}))).output == "/srv/notes/a.txt"
    assert world.got == [["/srv/notes", "a.txt", "text"]]


async def test_repaired_arguments_and_defaults_reach_the_tool_under_their_authors_names(tmp_path: Path) -> None:
    file, got = tmp_path / "overlays.toml", list[Any]()
    file.write_text('["local:add"]\n["local:add".arguments]\nleft = {name = "first"}\n')
    async with running_bus(overlays=file) as bus:

        @bus.tool(description="Adds.")  # type: ignore[untyped-decorator]
        def add(left: int, right: int = 1) -> int:
            got.append([left, right])
            return left + right

        for given in ({"first": 2}, {"first": "3", "right": 4}):
            assert not (await within(bus.call("add", given))).is_error
    assert got == [[2, 1], [3, 4]]


@pytest.mark.parametrize("given", [{"root": "/"}, {"mode": "raw"}, {"path": "b"}])
async def test_nobody_gives_a_fixed_hidden_or_renamed_argument(world: World, given: dict[str, str]) -> None:
    result = await world.call("read_note", file="a", **given)
    assert result.error is not None
    assert result.error.code is Code.INVALID_ARGUMENTS
    assert world.got == []


async def test_a_missing_argument_is_named_as_the_overlay_names_it(world: World) -> None:
    result = await world.call("read_note")
    assert "file" in result.text
    assert "path" not in result.text


async def test_hidden_tools_and_those_of_a_higher_level_are_for_callers_of_that_level(world: World) -> None:
    assert not {"danger", "admin"} & world.listed().keys()
    assert (await world.call("danger")).error is not None
    assert (await world.call("admin", 50)).output == "admin"
    assert "admin" in world.listed(50)


async def test_a_retired_tool_answers_without_a_run_offered_or_not(world: World) -> None:
    assert (await world.call("old", a=2)).output == {"use": "new"}
    assert world.got == []
    assert (await world.call("gone", anything=1)).output == "gone is retired"


async def test_an_argument_that_is_renamed_to_its_own_name_can_be_given(world: World) -> None:
    world.file.write_text('["local:plain"]\narguments = {a = {name = "a", description = "A number."}}\n')
    await until(lambda: "A number." in world.listed()["plain"].tool.parameters_json, "the new overlay")
    assert (await world.call("plain", a=2)).output == "plain"


async def test_the_answer_of_a_tool_that_nobody_offers_any_more_changes_with_the_file(world: World) -> None:
    world.file.write_text('["local:gone"]\nanswer = "use plain"\ndescription = "Is no more."\n')
    await until(lambda: world.listed()["gone"].tool.description == "Is no more.", "the new description")
    assert (await world.call("gone")).output == "use plain"


async def test_a_retired_tool_is_offered_once_its_name_is_free(world: World) -> None:
    world.file.write_text('["elsewhere:plain"]\nanswer = "it is retired"\n')
    await until(lambda: "fancy" not in world.listed() and "gone" not in world.listed(), "the new overlays")
    assert (await world.call("plain")).output == "plain"
    world.bus.core.program.local.remove_tool("plain")
    await until(lambda: "plain" in world.listed(), "the retired tool")
    assert (await world.call("plain")).output == "it is retired"


async def test_a_changed_original_is_reported_and_an_overlay_that_does_not_fit_closes_the_tool(world: World) -> None:
    (warning,) = [each for each in world.listed()["changed"].entry.all_warnings if "it changed since" in each]
    assert "from 0000 to " in warning
    assert (await world.call("changed")).output == "changed"
    misfit = await world.call("misfit")
    assert "the operator's overlay of 'misfit' does not fit the tool: it names the arguments no_such" in misfit.text
    assert misfit.error is not None
    assert misfit.error.code is Code.UNAVAILABLE
    assert world.got == ["changed"]


async def test_an_explanation_shows_overlay_and_original(world: World) -> None:
    explained = (await within(world.bus.call("toolbus:explain", {"tool": "read_note"}))).unwrap()
    (why,) = [step["why"] for step in explained["steps"] if step["step"] == "overlay"]
    assert "name, title, description, hints, argument root (fixed), argument path (as file), argument mode" in why
    assert "the author declares 'read_file', 'Reads a file.', arguments root, path, mode, fingerprint " in why


async def test_a_changed_file_is_in_force_at_once_and_a_broken_one_changes_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.file.write_text('["local:plain"]\nname = "fancy"\narguments = {a = {fixed = 7}}\n')
    await until(lambda: "fancy" in world.listed(), "the new overlay")
    listed = world.listed()
    assert {"read_file", "danger", "admin", "old"} <= listed.keys()
    assert not {"read_note", "plain", "gone"} & listed.keys()
    assert listed["read_file"].tool.description == "Reads a file."
    assert (await world.call("read_file", root="/", path="a")).output == "//a"
    world.file.write_text('["local:plain"]\nnames = 1\n')
    await until(lambda: "the overlays stay as they were" in caplog.text, "the error")
    assert (await within(world.bus.call("fancy"))).output == "plain"
    world.file.write_text("")
    await until(lambda: "plain" in world.listed(), "the original")
    assert "fancy" not in world.listed()


@asynccontextmanager
async def weather_at(bus: Bus) -> AsyncIterator[None]:
    """Runs a plugin with a tool `get`."""
    plugin = Plugin("weather", address=bus.grpc_addresses[0])

    @plugin.tool(name="get")
    async def get(city: str) -> str:
        """Tells the weather."""
        return f"rain in {city}"

    await within(plugin.start())
    await within(plugin.ready())
    yield
    await within(plugin.close())


async def test_a_plugin_that_drains_and_comes_back_finds_its_renamed_tool(tmp_path: Path) -> None:
    file = tmp_path / "overlays.toml"
    file.write_text('["weather:get"]\nname = "forecast"\narguments = {city = {name = "town"}}\n')
    async with running_bus(overlays=file) as bus:
        for _ in range(2):
            async with weather_at(bus):
                assert [each.tool.name for each in bus.list()] == ["forecast"]
                assert (await within(bus.call("forecast", {"town": "Ulm"}))).output == "rain in Ulm"
            assert bus.list() == []


async def test_a_name_that_a_more_trusted_source_has_is_not_taken_by_an_overlay(tmp_path: Path) -> None:
    file = tmp_path / "overlays.toml"
    file.write_text('["weather:get"]\nname = "forecast"\narguments = {city = {name = "town"}}\n')
    async with running_bus(overlays=file, guarded=("weather",)) as bus:

        @bus.tool
        def forecast() -> str:
            return "the bus's own"

        async with weather_at(bus):
            names = {each.tool.name: each for each in bus.list()}
            assert names.keys() == {"forecast", "weather:get"}
            assert (await within(bus.call("forecast"))).output == "the bus's own"
            assert (await within(bus.call("weather:get", {"town": "Ulm"}))).output == "rain in Ulm"


async def test_a_guard_sees_and_replaces_the_arguments_of_the_author(tmp_path: Path) -> None:
    file = tmp_path / "overlays.toml"
    file.write_text('["local:greet"]\narguments = {name = {name = "who"}}\n')
    rules = (GuardRule("polite", "refuse", ("greet",), budget_ms=60_000),)
    async with running_bus(overlays=file, guards=rules) as bus:

        @bus.tool
        def greet(name: str) -> str:
            return f"hello {name}"

        @bus.tool
        def polite(arguments: dict[str, str]) -> dict[str, Any]:
            return {"verdict": "replace", "arguments": {"name": arguments["name"].title()}}

        assert (await within(bus.call("greet", {"who": "ann"}))).output == "hello Ann"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[read]", "write SOURCE:NAME"),
        ('["a:b"]\nname = ""', "it must not be empty"),
        ('["a:b"]\nname = "x"\n["a:c"]\nname = "x"', "give them two"),
        ('["a:b"]\nmin_level = -1', "min_level"),
        ('["a:b"]\nhints = {fast = true}', "unknown key"),
        ('["a:b"]\narguments = {c = {fixed = 1, name = "d"}}', "callers cannot give it"),
        ("[", "it cannot be parsed"),
    ],
)
async def test_a_file_that_is_wrong_is_refused_with_its_place(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "overlays.toml"
    file.write_text(text)
    with pytest.raises(SetupError, match=problem):
        Bus(settle({"data_dir": None, "overlays": file}, {}).config)
