"""Entries of N.E.K.O. plugins as tools, where they are wanted."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
import pytest

from tests.parts.moving.neko.folders import copied, loaded
from toolbus.functions.runner import run_handler
from toolbus.parts.moving.neko.entries import offer_entries, plugin_entry
from toolbus.parts.moving.neko.plugin_base import NekoPluginBase, tools_of
from toolbus.parts.moving.neko.plugin_i18n import tr
from toolbus.parts.moving.neko.sdk_errors import EntryConflictError
from toolbus.parts.moving.neko.sdk_results import Err, Ok, fail, ok
from toolbus.protocol.tool import Result
from toolbus.sdk import CallContext, Reply, ToolScope


async def run_sync(job: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(job)


class Place(pydantic.BaseModel):
    city: str
    days: int = 3


class Entries(NekoPluginBase):
    plugin_id = "entries"

    @plugin_entry(
        id="get weather",
        name="Weather",
        description=tr("weather.text", default="Weather of a city."),
        input_schema={
            "type": "object",
            "properties": {"city": {"type": "string", "description": tr("c", default="C")}},
        },
        timeout=900,
        llm_result_fields=["city"],
        kind="action",
    )
    async def weather(self, city: str = "", **_: Any) -> Ok[Any]:
        return Ok({"city": city})

    @plugin_entry(id="modelled", params=Place)
    async def modelled(self, params: Place) -> int:
        return params.days

    @plugin_entry(id="spread", params=Place)
    async def spread(self, city: str, days: int) -> list[Any]:
        return [city, days]

    @plugin_entry()
    def older(self, _ctx: dict[str, Any], text: str = "x") -> dict[str, Any]:
        """Says it again."""
        return ok(data=[text, _ctx], message="done") if text else fail("EMPTY", "say something")

    @plugin_entry(id="positional", input_schema=[])
    def positional(self) -> None: ...


async def call(plugin: NekoPluginBase, name: str, arguments: dict[str, Any]) -> Result:
    spec = tools_of(plugin).get(name)
    assert spec is not None
    return await run_handler(spec, arguments, ToolScope(context=CallContext(user_id="ann")), run_sync)


async def test_an_entry_is_a_tool_with_its_id_schema_and_timeout(caplog: pytest.LogCaptureFixture) -> None:
    plugin = Entries()
    assert offer_entries(plugin) == ["weather", "modelled", "spread", "older"]
    listed = {each["name"]: each for each in plugin.list_llm_tools()}
    weather = listed["get_weather"]
    assert (weather["description"], weather["timeout_seconds"]) == ("Weather of a city.", 300.0)
    assert weather["parameters"]["properties"] == {"city": {"type": "string", "description": "C"}}
    assert listed["modelled"]["parameters"] == Place.model_json_schema()
    assert listed["older"]["description"] == "Says it again."
    assert list(listed["older"]["parameters"]["properties"]) == ["text"]
    assert not listed["older"]["parameters"]["required"]
    assert (await call(plugin, "get_weather", {"city": "Oslo"})).output == {"city": "Oslo"}
    assert "the entry positional is not offered" in caplog.text


async def test_an_entry_gets_its_model_or_its_fields_and_the_context_if_it_names_it() -> None:
    plugin = Entries()
    offer_entries(plugin)
    assert (await call(plugin, "modelled", {"city": "Oslo"})).output == 3
    refused = await call(plugin, "modelled", {})
    assert refused.error is not None
    assert "city" in refused.error.message
    assert (await call(plugin, "spread", {"city": "Oslo", "days": 1})).output == ["Oslo", 1]
    older = await call(plugin, "older", {"text": "a"})
    assert older.output == {"success": True, "data": ["a", {"user_id": "ann"}], "message": "done", "error": None}
    failed = await call(plugin, "older", {"text": ""})
    assert failed.error is not None
    assert "say something" in failed.error.message


CALL = {"user_id": "ann", "lanlan_name": "Yui", "run_id": "r1", "conversation_id": "c9"}


class Asking(NekoPluginBase):
    plugin_id = "asking"

    @plugin_entry(id="named", input_schema={"type": "object"})
    async def named(self, _ctx: Any = None) -> Any:
        return _ctx

    @plugin_entry(id="any", input_schema={"type": "object"})
    def any(self, **kwargs: Any) -> Any:
        return kwargs

    @plugin_entry(id="modelled", params=Place)
    async def modelled(self, params: Place, **kwargs: Any) -> Any:
        return kwargs

    @plugin_entry(id="checked")
    def checked(self, **days: int) -> Any:
        return days


@pytest.mark.parametrize(
    ("entry", "expected"),
    [("named", CALL), ("any", {"_ctx": CALL}), ("modelled", {"_ctx": CALL}), ("checked", {})],
)
async def test_an_entry_gets_who_called_for_whom_and_in_which_conversation(entry: str, expected: Any) -> None:
    plugin = Asking()
    offer_entries(plugin)
    spec = tools_of(plugin).get(entry)
    assert spec is not None
    context = CallContext(user_id="ann", attributes={"channel_id": "c9"})
    scope = ToolScope("7", context=context, role="Yui", request_id="r1")
    arguments = {"city": "Oslo"} if entry == "modelled" else {}
    assert (await run_handler(spec, arguments, scope, run_sync)).output == expected


RAW = {"summary": "two", "count": 2, "raw_results": [1, 2]}
SEEN = {"summary": "two", "count": 2}


@dataclass
class Found:
    summary: str = "two"
    count: int = 2
    raw_results: tuple[int, ...] = (1, 2)


RETURNED: dict[str, tuple[Any, Any]] = {
    "dict": (RAW, SEEN),
    "Ok": (Ok(RAW), SEEN),
    "ok()": (ok(data=RAW, message="done"), {"success": True, "data": SEEN, "message": "done", "error": None}),
    "finish()": ({"message": "done", "data": RAW}, {"message": "done", "data": SEEN}),
    "envelope": ({"output": RAW, "is_error": False}, SEEN),
    "list": ([RAW, RAW], [SEEN, SEEN]),
    "dataclass": (Found(), SEEN),
    "Reply": (Reply(output=RAW), SEEN),
    "text": ("two", "two"),
    "None": (None, None),
    "without": ({"raw_results": []}, {}),
}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("returned", "seen"), RETURNED.values(), ids=RETURNED.keys())
async def test_of_an_entrys_result_models_see_the_fields_that_are_for_them(
    returned: Any, seen: Any, is_async: bool
) -> None:
    plugin: Any = Entries()
    offer_entries(plugin)

    async def later(**_: Any) -> Any:
        return returned

    handler = later if is_async else (lambda **_: returned)
    fields = ["summary", "count"]
    assert plugin.register_dynamic_entry("x", handler, input_schema={"type": "object"}, llm_result_fields=fields)
    result = await call(plugin, "x", {})
    assert (result.output, result.is_error) == (seen, False)


async def test_a_failure_of_an_entry_is_for_the_model(caplog: pytest.LogCaptureFixture) -> None:
    plugin: Any = Entries()
    offer_entries(plugin)
    for name, returned in (("err", Err("no such city")), ("env", {"is_error": True, "error": "X", "hint": "Y"})):
        assert plugin.register_dynamic_entry(
            name, lambda answer=returned, **_: answer, input_schema={"type": "object"}, llm_result_fields=["count"]
        )
        assert (await call(plugin, name, {})).is_error
    failed = await call(plugin, "env", {})
    assert failed.output == {"hint": "Y"}


def test_a_plugin_with_entries_only_says_how_to_offer_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "only.py"
    file.write_text(
        "from toolbus.sdk import NekoPluginBase\nfrom plugin.sdk.plugin import plugin_entry\n"
        "class Only(NekoPluginBase):\n    @plugin_entry(id='a')\n    def a(self): ...\n"
    )
    with loaded(file):
        assert "only: it offers no tool, only entries (a): run it with --entries" in caplog.text


async def test_entries_that_come_at_run_time_are_tools_while_they_are_enabled() -> None:
    plugin: Any = Entries()
    offer_entries(plugin)

    async def late(text: str, **_: Any) -> str:
        return text

    assert plugin.register_dynamic_entry("late one", late, name="Late", input_schema={"type": "object"}, timeout=5)
    assert (await call(plugin, "late_one", {"text": "a"})).output == "a"
    with pytest.raises(EntryConflictError):
        plugin.register_dynamic_entry("late one", late)
    assert (plugin.is_entry_enabled("late one"), plugin.disable_entry("late one")) == (True, True)
    assert (tools_of(plugin).get("late_one"), plugin.is_entry_enabled("late one")) == (None, False)
    assert plugin.enable_entry("late one")
    assert tools_of(plugin).get("late_one") is not None
    assert (plugin.unregister_dynamic_entry("late one"), plugin.unregister_dynamic_entry("late one")) == (True, False)
    assert (tools_of(plugin).get("late_one"), plugin.is_entry_enabled("late one")) == (None, None)
    assert not plugin.register_dynamic_entry("bad", late, input_schema=[])
    assert not plugin.register_dynamic_entry("modelled", late)


def test_an_entry_whose_name_is_taken_leaves_the_tool_of_that_name_alone() -> None:
    plugin: Any = Entries()
    offer_entries(plugin)

    def late() -> None: ...

    assert not plugin.register_dynamic_entry("modelled", late)
    assert not plugin.disable_entry("modelled")
    assert plugin.register_dynamic_entry("late", late)
    assert plugin.disable_entry("late")
    assert plugin.register_llm_tool("late", "Another tool.", None, late)
    assert plugin.enable_entry("late")
    assert plugin.unregister_dynamic_entry("late")
    assert {"modelled", "late"} <= {each.tool.name for each in tools_of(plugin)}


def test_a_folders_entries_are_offered_on_request_and_no_longer_called_unused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with loaded(copied("diary", tmp_path), entries=True) as plugin:
        assert plugin.tools is not None
        names = [each.tool.name for each in plugin.tools]
        assert all(each.tool.no_defaults for each in plugin.tools)
    assert names == ["write_page", "read_page", "ask_others", "pages", "pages_count"]
    assert "@plugin_entry" not in caplog.text
    assert "@message on_text; @before_entry before. Put @llm_tool above one" in caplog.text
