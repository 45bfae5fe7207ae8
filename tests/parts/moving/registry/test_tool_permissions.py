from __future__ import annotations

from typing import Any

import pytest

from tests.parts.moving.registry.example_tools import ANYTHING, BlockedTool, with_tools
from toolbus.errors import InvalidRequest
from toolbus.sdk import ToolScope
from toolbus.tools import ToolRegistry

RULES = {"everyones": ["*"], "anns": ["ann", "bob"], "mixed": ["ann", "*"], "nobodys": []}
TOOLS = ("open", *RULES)


def ruled(**options: Any) -> ToolRegistry:
    registry = ToolRegistry(**options)
    for each in with_tools(*TOOLS).list_tools():
        registry.register_tool(each)
    registry.set_permissions(RULES)
    return registry


@pytest.mark.parametrize(
    ("tool", "user", "allowed"),
    [
        ("open", "ann", True),  # rule 1: it is not named
        ("open", "", True),
        ("unknown", "ann", True),
        ("everyones", "carl", True),  # rule 2: everyone
        ("everyones", "", True),
        ("mixed", "carl", True),
        ("anns", "ann", True),  # rule 3: the user is named
        ("anns", "bob", True),
        ("anns", "carl", False),  # rule 4: else not
        ("anns", "Ann", False),
        ("anns", "", False),
        ("anns", "*", False),
        ("nobodys", "ann", False),
        ("nobodys", "", False),
    ],
)
async def test_four_rules_decide_who_is_allowed_and_calls_follow_them(tool: str, user: str, allowed: bool) -> None:
    registry = ruled()
    assert registry.is_allowed(tool, user) is allowed
    if user and tool != "unknown":
        text = await registry.call(tool, {}, user)
        assert (text == tool) is allowed
        names = {each["function"]["name"] for each in registry.get_openai_tools(user)}
        assert (tool in names) is allowed
        listed = (await registry.as_source(user).tools())[1]
        assert {each.name for each in listed} == names


async def test_a_call_that_is_denied_is_an_error_text_and_runs_nothing() -> None:
    registry, held = ToolRegistry(), BlockedTool()
    registry.tool("secret", "d", ANYTHING)(held)
    registry.set_permissions({"secret": ["ann"]})
    text = await registry.call("secret", {}, "eve")
    assert text.startswith("user 'eve' may not call 'secret'")
    assert held.begun == 0


async def test_a_call_without_a_user_passes_every_rule() -> None:
    registry = ruled()
    for tool in TOOLS:
        assert await registry.call(tool, {}) == await registry.call(tool, {}, "") == tool


async def test_where_a_user_is_required_a_call_without_one_passes_open_tools_only() -> None:
    registry = ruled(require_user=True)
    passed = {tool for tool in TOOLS if await registry.call(tool, {}) == tool}
    assert passed == {"open", "everyones", "mixed"}
    assert "a call that names no user" in await registry.call("anns", {})
    assert await registry.call("anns", {}, "ann") == "anns"


@pytest.mark.parametrize("require_user", [False, True])
def test_permissions_remove_no_tool(require_user: bool) -> None:
    registry = ruled(require_user=require_user)
    assert len(registry) == len(registry.get_openai_tools()) == len(registry.list_tools()) == len(TOOLS)
    assert registry.tool_names() == set(TOOLS)
    registry.set_permissions(dict.fromkeys(TOOLS, ()))
    assert registry.has_tools


async def test_a_source_without_a_user_lists_what_it_can_call() -> None:
    for require_user, expected in ((False, set(TOOLS)), (True, {"open", "everyones", "mixed"})):
        source = ruled(require_user=require_user).as_source()
        assert {each.name for each in (await source.tools())[1]} == expected


async def test_rules_replace_those_before_and_take_effect_at_once() -> None:
    registry = with_tools("one", "two")
    registry.set_permissions({"one": ["ann"]})
    assert await registry.call("one", {}, "ann") == "one"
    assert await registry.call("two", {}, "ann") == "two"
    registry.set_permissions({"two": ["bob"]})
    assert registry.is_allowed("one", "eve")
    assert not registry.is_allowed("two", "ann")
    assert await registry.call("one", {}, "eve") == "one"
    assert await registry.call("two", {}, "ann") != "two"
    registry.set_permissions({})
    assert await registry.call("two", {}, "ann") == "two"


async def test_a_rule_may_come_before_its_tool_and_stays_when_the_tool_is_replaced() -> None:
    registry = ToolRegistry()
    registry.set_permissions({"one": ["ann"]})
    for _ in range(2):
        registry.register_tool(with_tools("one").list_tools()[0])
        assert await registry.call("one", {}, "eve") != "one"
        assert await registry.call("one", {}, "ann") == "one"


async def test_a_rule_holds_for_the_name_that_models_know_too() -> None:
    registry = with_tools("a.dotted")
    registry.set_permissions({"a.dotted": ["ann"]})
    (tool,) = registry.get_openai_tools()
    assert "may not call" in await registry.call(tool["function"]["name"], {}, "eve")


@pytest.mark.parametrize(
    ("permissions", "match"),
    [
        ({"one": "ann"}, "permissions.tools.one is 'ann'"),
        ({"one": None}, "permissions.tools.one is None"),
        ({"one": [5]}, "permissions.tools.one names 5"),
        ({5: ["ann"]}, "a rule for 5"),
        ({"one": ["x" * 300]}, "at most 256 characters"),
    ],
)
async def test_invalid_rules_are_refused_by_name_and_change_nothing(permissions: Any, match: str) -> None:
    registry = ruled()
    with pytest.raises(InvalidRequest, match=match):
        registry.set_permissions(permissions)
    assert not registry.is_allowed("anns", "eve")
    registry.set_permissions({})
    assert registry.is_allowed("anns", "eve")


def test_users_may_be_any_collection_and_are_copied() -> None:
    registry, users = with_tools("one"), ["ann"]
    registry.set_permissions({"one": users, "two": {"ann"}, "three": (each for each in ["ann"])})
    users.append("eve")
    assert all(registry.is_allowed(name, "ann") for name in ("one", "two", "three"))
    assert not any(registry.is_allowed(name, "eve") for name in ("one", "two", "three"))


async def test_a_tool_that_calls_another_calls_it_for_its_own_user() -> None:
    registry = ToolRegistry()

    @registry.tool("secret", "s", {"type": "object", "properties": {}})
    async def secret() -> str:
        return "passed"

    @registry.tool("open", "o", {"type": "object", "properties": {}})
    async def opened() -> str:
        return await registry.call("secret", {}, nested=True)

    registry.set_permissions({"secret": ["ann"]})
    assert await registry.call("open", {}, "ann") == "passed"
    assert "may not call 'secret'" in await registry.call("open", {}, "eve")
    assert await registry.call("open", {}) == "passed"  # no user passes, as in Stargazer


@pytest.mark.parametrize(("options", "answer"), [({}, "denied"), ({"inherit_user": False}, "done for ")])
async def test_calls_that_a_tool_makes_itself_are_made_for_its_user_unless_the_registry_says_otherwise(
    options: dict[str, Any], answer: str
) -> None:
    registry = ToolRegistry(**options)

    @registry.tool("inner", "d", ANYTHING)
    async def inner(scope: ToolScope) -> str:
        return f"done for {scope.user_id}"

    @registry.tool("outer", "d", ANYTHING)
    async def outer() -> str:
        return await registry.call("inner", {}, nested=True)

    registry.set_permissions({"inner": ["bob"]})
    text = await registry.call("outer", {}, "ann")
    assert text == answer or (answer == "denied" and "user 'ann' may not call 'inner'" in text)
    assert await registry.call("outer", {}, "bob") == ("done for bob" if answer == "denied" else answer)
