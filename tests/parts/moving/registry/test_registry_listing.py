from __future__ import annotations

import json
import time

import pytest

from tests.parts.moving.registry.example_tools import ANYTHING, CITY, offer, with_tools
from toolbus.tools import TaskManager, ToolRegistry


async def says() -> str:
    return ""


def test_an_empty_registry_is_false_and_everything_it_returns_is_empty() -> None:
    registry = ToolRegistry()
    assert not registry
    assert len(registry) == 0
    assert registry.has_tools is False
    assert registry.get_openai_tools() == []
    assert registry.get_openai_tools_by_names({"one"}) == []
    assert registry.list_tools() == []
    for names in (registry.tool_names(), registry.repeat_allowed_tools()):
        assert isinstance(names, frozenset)
        assert not names


def test_the_tools_of_a_task_manager_do_not_count() -> None:
    tasks = TaskManager()
    registry = ToolRegistry(tasks)
    assert not registry
    assert registry.get_openai_tools() == []
    registry.offer_task_tools()
    assert registry.tool_names() == {"check_task", "await_task", "list_tasks", "cancel_task"}
    tasks.close()


def test_task_tools_without_a_task_manager_are_refused() -> None:
    with pytest.raises(ValueError, match="has no task manager"):
        ToolRegistry().offer_task_tools()


def test_a_registry_with_tools_is_true_and_has_their_number() -> None:
    registry = with_tools("one", "two")
    assert registry
    assert registry.has_tools is True
    assert len(registry) == 2
    registry.clear_tools()
    assert not registry.has_tools


def test_tools_are_exported_as_openai_takes_them_in_the_order_of_the_registry() -> None:
    registry = ToolRegistry()
    registry.tool("weather", "Tells the weather. 天气", CITY)(says)
    registry.tool("a.dotted", "", ANYTHING)(says)
    first, second = registry.get_openai_tools()
    assert first == {
        "type": "function",
        "function": {"name": "weather", "description": "Tells the weather. 天气", "parameters": CITY},
    }
    assert second["function"]["name"] == "a_dotted"
    json.dumps(registry.get_openai_tools())


async def test_the_name_that_a_model_was_given_can_be_called() -> None:
    registry = with_tools("a.dotted", "b")
    name = registry.get_openai_tools()[0]["function"]["name"]
    assert name != "a.dotted"
    assert await registry.call(name, {}) == await registry.call("a.dotted", {}) == "a.dotted"


def test_some_tools_are_exported_by_name_in_the_order_of_the_registry() -> None:
    registry = with_tools("c", "a", "b.b")
    named = registry.get_openai_tools_by_names({"b.b", "a", "nobody", ""})
    assert named == registry.get_openai_tools()[1:]
    assert registry.get_openai_tools_by_names(["c", "c"]) == registry.get_openai_tools()[:1]
    assert registry.get_openai_tools_by_names(set()) == []


def test_listings_are_snapshots() -> None:
    registry = with_tools("one")
    tools, exported, names = registry.list_tools(), registry.get_openai_tools(), registry.tool_names()
    offer(registry, "two")
    assert (len(tools), len(exported), len(names)) == (1, 1, 1)
    tools.clear()
    exported.clear()
    assert len(registry.list_tools()) == len(registry.get_openai_tools()) == 2


def test_every_change_renews_the_export() -> None:
    registry = with_tools("one")
    assert len(registry.get_openai_tools()) == 1
    offer(registry, "two")
    assert len(registry.get_openai_tools()) == 2
    registry.tool("one", "Changed.", ANYTHING)(says)
    assert registry.get_openai_tools_by_names({"one"})[0]["function"]["description"] == "Changed."
    registry.unregister_tool("one")
    assert len(registry.get_openai_tools()) == 1
    assert registry.get_openai_tools_by_names({"one"}) == []


def test_an_export_is_cached_until_the_cache_is_cleared() -> None:
    registry = with_tools("one")
    (first,) = registry.get_openai_tools()
    assert registry.get_openai_tools()[0] is first
    assert registry.get_openai_tools_by_names({"one"})[0] is first
    first["function"]["description"] = "spoiled"
    registry.invalidate_cache()
    assert registry.get_openai_tools()[0]["function"]["description"] == "Says one."
    ToolRegistry().invalidate_cache()


def test_tools_that_may_be_repeated_are_named() -> None:
    registry = with_tools("one")
    offer(registry, "poll", allow_repeat=True)
    assert registry.repeat_allowed_tools() == frozenset({"poll"})
    assert [each.allow_repeat for each in registry.list_tools()] == [False, True]


def test_one_tool_by_name_costs_the_same_among_many_as_among_few() -> None:
    def seconds(registry: ToolRegistry, name: str) -> float:
        registry.get_openai_tools_by_names({name})
        runs = []
        for _ in range(5):
            begun = time.perf_counter()
            for _ in range(50):
                assert len(registry.get_openai_tools_by_names({name})) == 1
            runs.append(time.perf_counter() - begun)
        return min(runs)

    few, many = with_tools(*(f"t{n}" for n in range(10))), with_tools(*(f"t{n}" for n in range(1_000)))
    assert seconds(many, "t999") < 20 * seconds(few, "t9")  # linear would be 100 times
