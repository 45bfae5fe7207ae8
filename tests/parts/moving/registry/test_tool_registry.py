from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.parts.moving.registry.example_tools import ANYTHING, CITY, offer, with_tools
from tests.support.waiting import within
from toolbus.sdk import Reply, ToolScope, text
from toolbus.tools import ToolDefinition, ToolRegistry

# -- what comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("晴 \n \x00", "晴 \n \x00"),
        ("", ""),
        ('{"a": 1}', '{"a": 1}'),
        (None, "null"),
        (5, "5"),
        (True, "true"),
        ({"天": [1, 2.5, None]}, '{"天":[1,2.5,null]}'),
        ((1, 2), "[1,2]"),
        (text("shown"), "shown"),
        (Reply("both", content=[text("shown")]), "both\nshown"),
        ({"is_error": True, "error": "no such city"}, "no such city"),
    ],
    ids=repr,
)
async def test_text_is_returned_unchanged_and_any_other_result_as_json_text(returned: Any, expected: str) -> None:
    registry = ToolRegistry()

    @registry.tool("gives", "d", ANYTHING)
    async def gives() -> Any:
        return returned

    text = await registry.call("gives", {})
    assert type(text) is str
    assert text == expected


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ValueError("no such city"), "ValueError: no such city"),
        (KeyError("x"), "KeyError: 'x'"),
        (Odd(), "Odd"),
        (SystemExit(3), "SystemExit: 3"),
        (StopAsyncIteration(), "StopAsyncIteration"),
        (TimeoutError(), "TimeoutError"),
        (ValueError("\ud800"), "ValueError: ?"),
    ],
    ids=["value", "key", "odd", "exit", "stop", "timeout", "half a character"],
)
async def test_an_exception_of_a_handler_is_returned_as_text_for_the_model(
    raised: BaseException, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest-xdist sends what was logged to another process, and cannot where half a character is in it.
    monkeypatch.setattr(logging.getLogger("toolbus.functions.runner"), "disabled", True)
    registry = ToolRegistry()

    @registry.tool("fails", "d", ANYTHING)
    async def fails() -> str:
        raise raised

    @registry.tool("fails_plainly", "d", ANYTHING)
    def fails_plainly() -> str:
        raise raised

    assert await registry.call("fails", {}) == expected
    assert await registry.call("fails_plainly", {}) == expected


@pytest.mark.parametrize(
    "returned", [object(), {"a": object()}, float("nan"), b"bytes"], ids=lambda each: type(each).__name__
)
async def test_a_result_that_json_cannot_hold_is_an_error_text(returned: Any) -> None:
    registry = ToolRegistry()

    @registry.tool("gives", "d", ANYTHING)
    async def gives() -> Any:
        return returned

    text = await registry.call("gives", {})
    assert "Error" in text
    assert (await registry.call_result("gives", {})).is_error


async def test_a_result_may_be_far_larger_than_a_message_of_the_wire() -> None:
    registry, large = ToolRegistry(), "x" * 10_000_000

    @registry.tool("gives", "d", ANYTHING)
    async def gives() -> str:
        return large

    assert await registry.call("gives", {}) == large


# -- what goes in ----------------------------------------------------------------------------------------------------


async def test_arguments_are_passed_as_an_object_or_as_json_text() -> None:
    registry = ToolRegistry()

    @registry.tool("echo", "d", ANYTHING)
    async def echo(**arguments: Any) -> Any:
        return arguments

    assert await registry.call("echo", {"b": [1], "a": "é"}) == '{"b":[1],"a":"é"}'
    assert await registry.call("echo", '{"a": 1}') == '{"a":1}'
    nothing: tuple[Any, ...] = (None, "", {})
    assert [await registry.call("echo", each) for each in nothing] == ["{}"] * 3
    for half in ({"half": "\ud83d"}, '{"half": "\ud83d"}'):  # of a surrogate pair: refused, but as a text
        assert "surrogate" in await registry.call("echo", half)


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "location"),
        ({"location": 5}, "location"),
        ("{", "JSON"),
        ("[]", "must be a JSON object"),
        ([], "must be a JSON object"),
        (5, "must be a JSON object"),
        ({"location": object()}, "tool 'weather' was not called"),
        ({"location": float("nan")}, "tool 'weather' was not called"),
        ({("a", "b"): 1}, "tool 'weather' was not called"),
        (lambda: deep(100_000), "tool 'weather' was not called"),
        (lambda: {"location": "x" * 2_000_000}, "bytes"),
        ({"location": "Oslo", "more": 1}, "takes no argument 'more'"),
    ],
    ids=lambda each: str(type(each).__name__),
)
async def test_arguments_that_do_not_fit_are_an_error_text_and_the_tool_does_not_run(
    arguments: Any, expected: str
) -> None:
    registry, runs = ToolRegistry(), []

    @registry.tool("weather", "d", CITY)
    async def weather(location: str) -> str:
        runs.append(location)
        return location

    # What is large is made here, not where the tests are collected.
    text = await registry.call("weather", arguments() if callable(arguments) else arguments)
    assert type(text) is str
    assert expected in text
    assert runs == []
    assert await registry.call("weather", {"location": "Oslo"}) == "Oslo"


@pytest.mark.parametrize(
    "name", ["nobody", "", "no body", "\ud800", "x" * 5000, None, 5, b"one", ("one",), "toolbus:drain"]
)
async def test_an_unknown_name_is_an_error_text_that_names_the_tools(name: Any) -> None:
    text = await with_tools("one", "two").call(name, {})
    assert text.startswith("there is no tool ")
    assert text.endswith("; there are: one, two")
    assert len(text) < 200


async def test_an_empty_registry_says_that_there_are_no_tools() -> None:
    assert await ToolRegistry().call("one", {}) == "there is no tool 'one'; there are: none"


async def test_none_means_no_user() -> None:
    registry = with_tools("one")
    registry.set_permissions({"one": ["ann"]})
    assert await registry.call("one", {}, None) == await registry.call("one", {}, "") == "one"


@pytest.mark.parametrize("user_id", [5, b"ann", "\ud800"])
async def test_a_user_that_is_not_text_is_an_error_text(user_id: Any) -> None:
    assert (await with_tools("one").call("one", {}, user_id)).startswith("tool 'one' was not called")


async def test_a_call_takes_its_arguments_by_position_and_by_keyword() -> None:
    registry = with_tools("one")
    assert await registry.call("one", {}, "ann", None, nested=True) == "one"
    assert await registry.call(name="one", arguments={}, user_id="ann", ctx=None, nested=False) == "one"


# -- handlers --------------------------------------------------------------------------------------------------------


async def test_every_kind_of_callable_can_be_a_handler() -> None:
    registry = ToolRegistry()
    both = {"ctx": "given", "n": 2}

    async def waits(n: int, ctx: str) -> str:
        await asyncio.sleep(0)
        return f"{ctx} {n}"

    def plain(n: int, ctx: str) -> str:
        return f"{ctx} {n}"

    def generator(n: int, ctx: str) -> Iterator[str]:
        yield from (f"{ctx} ", str(n))

    async def async_generator(n: int, ctx: str) -> AsyncIterator[str]:
        yield f"{ctx} "
        yield str(n)

    class Object:
        async def __call__(self, n: int, ctx: str) -> str:
            return f"{ctx} {n}"

        def method(self, n: int, ctx: str) -> str:
            return f"{ctx} {n}"

    handlers: tuple[Any, ...] = (
        waits,
        plain,
        generator,
        async_generator,
        Object(),
        Object().method,
        lambda n, ctx: waits(n, ctx),
    )
    for number, handler in enumerate(handlers):
        registry.tool(f"t{number}", "d", ANYTHING)(handler)
        assert await registry.call(f"t{number}", {"n": both["n"]}, ctx=both["ctx"]) == "given 2", handler


async def test_a_handler_runs_on_the_event_loop_of_its_caller() -> None:
    registry, lock, seen = ToolRegistry(), asyncio.Lock(), []

    @registry.tool("locks", "d", ANYTHING)
    async def locks() -> str:
        seen.append(asyncio.get_running_loop())
        async with lock:
            return "mine"

    await lock.acquire()
    call = asyncio.create_task(registry.call("locks", {}))
    while not seen:
        await asyncio.sleep(0)
    lock.release()
    assert await within(call) == "mine"
    assert seen == [asyncio.get_running_loop()]


async def test_a_plain_function_runs_on_a_thread_and_blocks_no_other_call() -> None:
    registry, go = ToolRegistry(), threading.Event()
    offer(registry, "one")

    @registry.tool("blocks", "d", ANYTHING)
    def blocks() -> str:
        assert go.wait(10)
        return threading.current_thread().name

    call = asyncio.create_task(registry.call("blocks", {}))
    assert await within(registry.call("one", {})) == "one"
    go.set()
    assert (await within(call)).startswith("toolbus-tools-")


async def test_context_variables_of_the_caller_reach_handlers_of_both_kinds() -> None:
    registry, variable = ToolRegistry(), contextvars.ContextVar("variable", default="unset")

    @registry.tool("waits", "d", ANYTHING)
    async def waits() -> str:
        return variable.get()

    @registry.tool("plain", "d", ANYTHING)
    def plain() -> str:
        return variable.get()

    async def call(name: str, value: str) -> str:
        variable.set(value)
        return await registry.call(name, {})

    text = await asyncio.gather(*(call(name, f"{name} {n}") for n in range(20) for name in ("waits", "plain")))
    assert text == [f"{name} {n}" for n in range(20) for name in ("waits", "plain")]
    assert await registry.call("waits", {}) == "unset"


async def test_a_handler_that_asks_for_its_scope_gets_it() -> None:
    registry, seen = ToolRegistry(), []

    @registry.tool("a", "d", ANYTHING)
    async def named(scope: ToolScope) -> str:
        seen.append(scope.context.user_id)
        return scope.tool

    @registry.tool("b", "d", ANYTHING)
    async def named_ctx(ctx: ToolScope) -> str:
        return ctx.tool

    assert await registry.call("a", {}, "ann") == "a"
    assert await registry.call("b", {}, ctx="a context") == "b"
    assert seen == ["ann"]


@pytest.mark.parametrize("as_dict", [False, True])
async def test_a_handler_gets_the_arguments_that_were_sent_and_no_defaults(as_dict: bool) -> None:
    schema = {"type": "object", "properties": {"side": {}, "azimuth": {"type": "number", "default": 0.0}}}
    tools = ToolRegistry()

    def by_keywords(**arguments: Any) -> Any:
        return arguments

    handler = (lambda arguments: arguments) if as_dict else by_keywords
    tools.register_tool(ToolDefinition("look", "Looks.", schema, handler))
    assert json.loads(await tools.call("look", {"side": "left"})) == {"side": "left"}
