"""The classes that authors of N.E.K.O. plugins know (REST-60 to REST-64)."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from toolbus.errors import SetupError
from toolbus.functions.runner import run_handler
from toolbus.functions.tool_spec import ToolSpec
from toolbus.parts.moving.neko.plugin_base import tools_of
from toolbus.parts.moving.neko.plugin_context import describe_message
from toolbus.parts.moving.neko.plugin_i18n import PluginI18n
from toolbus.parts.moving.neko.plugin_lifecycle import start_plugin, stop_plugin
from toolbus.sdk import (
    EntryConflictError,
    Err,
    NekoPluginBase,
    Ok,
    ToolDefinition,
    ToolScope,
    lifecycle,
    llm_tool,
    neko_plugin,
    plugin,
)

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


async def run_sync(job: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(job)


@neko_plugin
class Weather(NekoPluginBase):
    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.degrees = 21  # set after registration, used when the tool runs

    @llm_tool(name="get_weather", description="Weather of a city.", parameters=CITY, timeout=10, role="Neko")
    async def weather(self, *, city: str) -> dict[str, Any]:
        return {"city": city, "degrees": self.degrees}


def test_decorated_methods_are_registered_when_the_constructor_returns() -> None:
    ctx = object()
    made = Weather(ctx)
    assert made.ctx is ctx
    assert made.list_llm_tools() == [
        {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": CITY,
            "timeout_seconds": 10.0,
            "role": "Neko",
        }
    ]


async def test_a_registered_method_runs_with_keywords_and_its_object() -> None:
    spec = tools_of(Weather(None)).get("get_weather")
    assert spec is not None
    result = await run_handler(spec, {"city": "Oslo"}, ToolScope(), run_sync)
    assert result.output == {"city": "Oslo", "degrees": 21}


def test_tools_come_and_go_at_run_time_and_the_listener_is_notified() -> None:
    made = Weather(None)
    changes: list[tuple[str, ToolSpec | None]] = []
    tools_of(made).on_change = lambda name, spec: changes.append((name, spec))
    assert made.register_llm_tool("echo", "Says it again.", CITY, lambda city: city) is True
    assert [each["name"] for each in made.list_llm_tools()] == ["get_weather", "echo"]
    assert made.list_llm_tools()[1]["timeout_seconds"] == 30.0
    assert made.unregister_llm_tool("echo") is True
    assert made.unregister_llm_tool("echo") is False
    assert [(name, spec is None) for name, spec in changes] == [("echo", False), ("echo", True)]


def test_the_documents_keywords_are_the_parameters_names() -> None:
    made = Weather(None)
    made.register_llm_tool(
        name="echo", description="d", parameters={"type": "object"}, handler=print, timeout=30.0, role=None
    )
    assert tools_of(made).get("echo") is not None


def test_a_name_twice_in_one_object_is_a_conflict() -> None:
    made = Weather(None)
    with pytest.raises(EntryConflictError, match="get_weather"):  # REST-61
        made.register_llm_tool("get_weather", "", None, print)
    Weather(None).unregister_llm_tool("get_weather")  # another object's tools are its own
    assert len(made.list_llm_tools()) == 1


def test_the_second_of_two_methods_of_one_name_is_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Twice(NekoPluginBase):
        @llm_tool(name="same")
        def one(self) -> None: ...

        @llm_tool(name="same")
        def two(self) -> None: ...

        @llm_tool
        def other(self) -> None: ...

    made = Twice(None)
    assert [each["name"] for each in made.list_llm_tools()] == ["same", "other"]
    assert "Twice.two is not offered" in caplog.text


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"name": "a b"}, ValueError),
        ({"parameters": []}, TypeError),
        ({"timeout": 301}, ValueError),
        ({"handler": "no"}, TypeError),
    ],
)
def test_registering_checks_what_the_decorator_checks(changed: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        Weather(None).register_llm_tool(
            **{"name": "a", "description": "", "parameters": None, "handler": print} | changed
        )


def test_a_constructor_that_forgets_its_base_still_has_its_tools() -> None:
    class Forgetful(Weather):
        def __init__(self) -> None:
            self.degrees = 3

    assert [each["name"] for each in Forgetful().list_llm_tools()] == ["get_weather"]


class Moments(NekoPluginBase):
    def __init__(self, log: list[str]) -> None:
        super().__init__(log)
        self.log = log

    @lifecycle(id="startup")
    async def first(self, **_: Any) -> Ok:
        self.log.append("first")
        return Ok({"status": "ready"})

    @lifecycle(id="shutdown")
    def last(self, **_: Any) -> None:
        self.log.append("last")

    @lifecycle(id="startup")
    def second(self) -> None:
        self.log.append("second")

    async def on_start(self) -> None:
        self.log.append("on_start")

    async def on_shutdown(self) -> None:
        self.log.append("on_shutdown")
        raise RuntimeError("too late to matter")


async def test_both_forms_of_lifecycle_run_in_order() -> None:
    log: list[str] = []
    made = Moments(log)
    await start_plugin(made, run_sync)
    await stop_plugin(made, run_sync)
    assert log == ["first", "second", "on_start", "on_shutdown", "last"]


async def test_a_plugin_without_lifecycle_starts_and_stops() -> None:
    made = Weather(None)
    await start_plugin(made, run_sync)
    await stop_plugin(made, run_sync)


async def test_a_failed_start_names_the_method_and_the_reason() -> None:
    class Raises(NekoPluginBase):
        @lifecycle(id="startup")
        async def connect(self) -> None:
            raise OSError("no network")

    class Refuses(NekoPluginBase):
        def on_start(self) -> Any:  # authors write it without async as well
            return Err("no key")

    for cls, words in (
        (Raises, rf"Raises.connect raised OSError: no network \({re.escape(__file__)}:\d+\)$"),
        (Refuses, "on_start returned Err: no key"),
    ):
        with pytest.raises(SetupError, match=words):
            await start_plugin(cls(None), run_sync)


def test_an_unknown_moment_is_refused() -> None:
    with pytest.raises(ValueError, match="startup, shutdown"):
        lifecycle(id="lunch")


async def test_moments_that_only_the_other_system_has_are_taken_and_never_called() -> None:
    called: list[str] = []

    class Frozen(NekoPluginBase):
        @lifecycle(id="config_change", name="On change", description="Reads it again.")
        def changed(self, **_: Any) -> None:
            called.append("config_change")

        @lifecycle(id="freeze")
        def freeze(self, **_: Any) -> None:
            called.append("freeze")

    made = Frozen(None)
    await start_plugin(made, run_sync)
    await stop_plugin(made, run_sync)
    assert called == []


def test_the_class_decorators_return_the_class_and_want_the_base() -> None:
    class Mine(NekoPluginBase): ...

    assert plugin(Mine) is Mine
    assert plugin(id="mine")(Mine) is Mine
    assert neko_plugin(Mine) is Mine
    with pytest.raises(TypeError, match="NekoPluginBase"):
        plugin(int)
    with pytest.raises(SetupError, match="rule"):
        plugin(id="a b")(Mine)


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_tool_definition_gives_its_handler_one_dict(asynchronous: bool) -> None:
    async def later(args: dict[str, Any]) -> Any:
        return args

    definition = ToolDefinition(
        name="echo",
        description="d",
        parameters=CITY,
        handler=later if asynchronous else lambda args: args,
        metadata={"source": "mine"},
    )
    spec = definition.spec()
    assert (definition.source, spec.tool.name, spec.tool.parameters) == ("mine", "echo", CITY)
    assert (await run_handler(spec, '{"city":"Oslo"}', ToolScope(), run_sync)).output == {"city": "Oslo"}


def test_a_tool_definition_without_handler_is_refused_when_it_is_offered() -> None:
    with pytest.raises(TypeError, match="handler="):
        ToolDefinition("echo").spec()
    assert ToolDefinition("echo").source == "external"


@pytest.mark.parametrize(
    ("name", "english", "chinese"),
    [(None, "Ask the user.", "问用户。"), ("Ann", "Ask Ann.", "问Ann。")],
)
def test_texts_have_the_users_name(
    name: str | None, english: str, chinese: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_NAME", raising=False)
    if name is not None:
        monkeypatch.setenv("MASTER_NAME", name)
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": "Ask {MASTER_NAME}."}}}

    class Asking(NekoPluginBase):
        @llm_tool(name="ask", description="问{MASTER_NAME}。", parameters=schema)
        def ask(self, **_: Any) -> None: ...

    (listed,) = Asking(None).list_llm_tools()
    assert listed["description"] == chinese
    assert listed["parameters"]["properties"]["a"]["description"] == english
    assert describe_message({"content": "Ask {MASTER_NAME}."})[0] == english
    texts = PluginI18n({"en": {"a": "Ask {MASTER_NAME}."}})
    assert (texts.t("a"), texts.t("a", MASTER_NAME="Bo")) == (english, "Ask Bo.")


@pytest.mark.parametrize("text", ["x" * 20_000, "猫" * 6_000, "\U0001f63a" * 5_000])
def test_a_description_that_is_too_long_is_cut_with_a_warning(text: str, caplog: pytest.LogCaptureFixture) -> None:
    made = NekoPluginBase(None)
    made.register_llm_tool("long", text, {"type": "object"}, print)
    (listed,) = made.list_llm_tools()
    assert 16_000 < len(listed["description"].encode()) <= 16 * 1024
    assert text.startswith(listed["description"].removesuffix("…"))
    assert "long: its description is cut to the limit description_bytes = 16384" in caplog.text
