from __future__ import annotations

from typing import Any

import pytest

from tests.parts.moving.registry.example_tools import ANYTHING, CITY, offer, with_tools
from toolbus.errors import InvalidTool
from toolbus.tools import TaskManager, ToolDefinition, ToolRegistry


async def get_weather(location: str) -> str:
    return f"The weather in {location} is sunny and 72°F."


async def test_the_example_of_the_document_works() -> None:
    registry = ToolRegistry()

    @registry.tool(
        name="get_weather",
        description="Get the current weather for a location.",
        parameters={
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "City and state, e.g. 'San Francisco, CA'"},
            },
            "required": ["location"],
        },
    )
    async def weather(location: str) -> str:
        return f"The weather in {location} is sunny and 72°F."

    assert await registry.call("get_weather", {"location": "Oslo"}) == "The weather in Oslo is sunny and 72°F."
    assert await weather("Rome") == "The weather in Rome is sunny and 72°F."


def test_the_decorator_returns_the_function_itself() -> None:
    registry = ToolRegistry()
    assert registry.tool("weather", "Tells it.", CITY)(get_weather) is get_weather
    assert registry.list_tools()[0].handler is get_weather


def test_the_decorator_takes_its_three_arguments_by_position_and_by_keyword() -> None:
    registry = ToolRegistry()
    registry.tool("one", "First.", CITY)(get_weather)
    registry.tool(name="two", description="Second.", parameters=CITY)(get_weather)
    registry.tool("three", parameters=CITY, description="Third.")(get_weather)
    assert [(each.name, each.description, each.parameters) for each in registry.list_tools()] == [
        ("one", "First.", CITY),
        ("two", "Second.", CITY),
        ("three", "Third.", CITY),
    ]


def test_the_decorator_takes_both_flags_and_the_options_of_llm_tool() -> None:
    registry = ToolRegistry()
    make = registry.tool("one", "d", CITY, no_background=True, allow_repeat=True, timeout=7.0, display_name="Uno")
    for _ in range(2):  # it may be put on several functions
        make(get_weather)
        (definition,) = registry.list_tools()
        assert (definition.no_background, definition.allow_repeat) == (True, True)


def test_one_function_can_be_several_tools() -> None:
    registry = ToolRegistry()
    registry.tool("one", "d", CITY)(registry.tool("two", "d", CITY)(get_weather))
    assert registry.tool_names() == {"one", "two"}


def test_an_option_that_is_unknown_or_wrong_registers_nothing() -> None:
    registry = ToolRegistry()
    for options in ({"colour": "red"}, {"timeout": 0}, {"timeout": "5"}, {"role": 5}):
        with pytest.raises((TypeError, ValueError), match=f"{next(iter(options))}"):
            registry.tool("one", "d", CITY, **options)(get_weather)
    assert not registry.has_tools


def test_a_schema_that_does_not_compile_registers_nothing_and_keeps_the_tool_before() -> None:
    registry = with_tools("one")
    with pytest.raises(InvalidTool, match="'one'"):
        registry.tool("one", "d", {"type": "object", "properties": {"a": {"type": "strin"}}})(get_weather)
    assert registry.list_tools()[0].description == "Says one."


async def test_the_same_name_is_replaced_and_keeps_its_place() -> None:
    registry = with_tools("one", "two")

    async def other() -> str:
        return "other"

    registry.tool("one", "Another.", ANYTHING)(other)
    assert [each.name for each in registry.list_tools()] == ["one", "two"]
    assert await registry.call("one", {}) == "other"
    assert len(registry) == 2


async def test_both_kinds_of_definition_can_be_registered() -> None:
    registry = ToolRegistry()
    registry.register_tool(ToolDefinition("weather", "Tells it.", CITY, get_weather, True, True))
    seen: list[dict[str, Any]] = []

    def takes_dict(arguments: dict[str, Any]) -> Any:
        seen.append(arguments)
        return {"got": arguments}

    async def takes_dict_too(arguments: dict[str, Any]) -> Any:
        return arguments["location"]

    registry.register_tool(ToolDefinition("plain", "d", CITY, takes_dict, metadata={"source": "pack"}))
    registry.register_tool(ToolDefinition("async", "d", CITY, takes_dict_too))
    assert await registry.call("weather", {"location": "Oslo"}) == "The weather in Oslo is sunny and 72°F."
    assert await registry.call("plain", {"location": "Oslo"}, ctx=object()) == '{"got":{"location":"Oslo"}}'
    assert await registry.call("async", {"location": "Rome"}) == "Rome"
    assert seen == [{"location": "Oslo"}]
    assert registry.repeat_allowed_tools() == {"weather"}


def test_a_value_that_is_not_a_definition_is_refused_with_the_fix() -> None:
    registry = ToolRegistry()
    for wrong in ("weather", None, {"name": "weather"}, get_weather):
        with pytest.raises(TypeError, match="is not a tool: give a ToolDefinition"):
            registry.register_tool(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="has no handler"):
        registry.register_tool(ToolDefinition("plain"))
    assert len(registry) == 0


async def test_a_listed_definition_can_be_called_whatever_its_arguments_are_named() -> None:
    registry = ToolRegistry()
    registry.register_tool(ToolDefinition("greet", "d", ANYTHING, lambda arguments: sorted(arguments)))
    (definition,) = registry.list_tools()
    assert definition.handler is not None
    assert await definition.handler(name="Bob", self=1) == '["name","self"]'


async def test_a_tool_is_withdrawn_once() -> None:
    registry = with_tools("one", "two")
    assert registry.unregister_tool("one") is True
    assert registry.unregister_tool("one") is False
    assert registry.unregister_tool("never") is False
    assert registry.tool_names() == {"two"}
    assert await registry.call("one", {}) == "there is no tool 'one'; there are: two"


def test_tools_are_cleared_by_source_or_all() -> None:
    registry = with_tools("mine")
    for name, source in (("a", "pack"), ("b", "pack"), ("c", None)):
        metadata = {"source": source} if source else {}
        registry.register_tool(ToolDefinition(name, "d", ANYTHING, dict, metadata=metadata))
    assert registry.clear_tools("nobody") == 0
    assert registry.clear_tools("pack") == 2
    assert registry.tool_names() == {"mine", "c"}
    assert registry.clear_tools("external") == 1
    assert registry.clear_tools() == 1
    assert registry.clear_tools() == 0
    assert not registry


def test_a_tool_that_changed_its_source_is_cleared_with_the_new_one() -> None:
    registry = ToolRegistry()
    for source in ("a", "b"):
        registry.register_tool(ToolDefinition("x", "d", ANYTHING, dict, metadata={"source": source}))
    assert registry.clear_tools("a") == 0
    assert registry.clear_tools("b") == 1


def test_a_task_manager_is_optional_and_is_shown() -> None:
    tasks = TaskManager()
    assert ToolRegistry().task_manager is None
    assert ToolRegistry(None).task_manager is None
    assert ToolRegistry(tasks).task_manager is tasks
    assert ToolRegistry(task_manager=tasks).task_manager is tasks
    tasks.close()


def test_a_registry_shows_how_many_tools_it_has() -> None:
    registry = with_tools("one")
    offer(registry, "two")
    assert repr(registry) == "<ToolRegistry tools=2>"


@pytest.mark.parametrize("source", ["toolbus", "", "a b", "ä", "s" * 129])
def test_an_invalid_source_and_the_source_of_the_bus_are_refused(source: str) -> None:
    with pytest.raises(ValueError, match="name another"):
        ToolRegistry(source=source)
    if source:  # without one it is called external
        with pytest.raises(ValueError, match="name another"):
            ToolRegistry().register_tool(ToolDefinition("x", "d", ANYTHING, dict, metadata={"source": source}))


def test_a_registry_names_the_source_of_its_tools() -> None:
    registry = ToolRegistry(source="mine")
    offer(registry, "one")
    assert registry.clear_tools("local") == 0
    assert registry.clear_tools("mine") == 1
