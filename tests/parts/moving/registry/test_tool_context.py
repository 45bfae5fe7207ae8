from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

import pytest

from tests.parts.moving.registry.example_tools import ANYTHING
from toolbus.sdk import ToolScope
from toolbus.tools import ToolDefinition, ToolRegistry

ONE: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}


class ToolContext:
    """What a program may hand to its tools: no JSON, to be written into."""

    def __init__(self) -> None:
        self.sent_files: list[str] = []


async def required(ctx: Any, a: str = "") -> str:
    return repr(ctx)


async def with_default(a: str = "", ctx: Any = "its own") -> str:
    return repr(ctx)


async def by_keyword_only(*, ctx: Any = "its own", a: str = "") -> str:
    return repr(ctx)


async def annotated(a: str = "", ctx: ToolContext | None = None) -> str:
    return repr(ctx)


async def not_annotated(ctx, a=""):  # type: ignore[no-untyped-def]
    return repr(ctx)


def plain(ctx: Any, a: str = "") -> str:
    return repr(ctx)


async def with_any_keyword(ctx: Any = "its own", **others: Any) -> str:
    return repr(ctx)


def wrapped(ctx: Any, a: str = "") -> str:
    return repr(ctx)


def _through(function: Any) -> Any:
    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    return call


HANDLERS = (
    required,
    with_default,
    by_keyword_only,
    annotated,
    not_annotated,
    plain,
    with_any_keyword,
    _through(wrapped),
)


@pytest.mark.parametrize("handler", HANDLERS, ids=lambda each: each.__name__)
async def test_a_context_reaches_a_handler_that_has_the_parameter(handler: Any) -> None:
    registry = ToolRegistry()
    registry.tool("asks", "d", ONE)(handler)
    context = ToolContext()
    assert await registry.call("asks", {"a": "x"}, "ann", context) == repr(context)
    assert await registry.call("asks", {}, ctx=context, nested=True) == repr(context)


@pytest.mark.parametrize("handler", HANDLERS, ids=lambda each: each.__name__)
async def test_without_a_context_a_handler_has_its_own_default_or_the_scope_of_the_call(handler: Any) -> None:
    registry = ToolRegistry()
    registry.tool("asks", "d", ONE)(handler)
    defaults = {
        with_default: "'its own'",
        by_keyword_only: "'its own'",
        with_any_keyword: "'its own'",
        annotated: "None",
    }
    assert (await registry.call("asks", {"a": "x"})).startswith(defaults.get(handler, "<ToolScope asks"))


@pytest.mark.parametrize("context", [None, "a context"])
@pytest.mark.parametrize("handler", HANDLERS, ids=lambda each: each.__name__)
async def test_a_model_cannot_set_the_context(handler: Any, context: str | None) -> None:
    registry = ToolRegistry()
    registry.tool("asks", "d", ONE)(handler)
    text = await registry.call("asks", {"a": "x", "ctx": "the model's"}, ctx=context)
    assert "the model's" not in text
    if handler is with_any_keyword:  # which takes what it does not know
        assert text == repr(context or "its own")
    else:
        assert "takes no argument 'ctx'" in text


@pytest.mark.parametrize("handler", HANDLERS, ids=lambda each: each.__name__)
async def test_the_context_is_never_exported_even_where_the_schema_has_it(handler: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "ctx": {}}, "required": ["ctx"]}
    registry = ToolRegistry()
    registry.tool("asks", "d", schema)(handler)
    registry.register_tool(ToolDefinition("asks_too", "d", schema, handler))
    _, listed = await registry.as_source().tools()
    exports: list[list[Any]] = [
        registry.get_openai_tools(),
        registry.get_openai_tools("ann"),
        registry.get_openai_tools_by_names({"asks", "asks_too"}),
        [each.parameters for each in registry.list_tools()],
        [each.parameters for each in listed],
    ]
    assert "ctx" not in json.dumps(exports)
    assert [len(each) for each in exports] == [2] * 5
    assert await registry.call("asks", {}, ctx="given") == "'given'"


async def test_a_handler_that_takes_any_keyword_and_has_no_such_parameter_gets_no_context() -> None:
    registry = ToolRegistry()

    async def takes_all(**arguments: Any) -> Any:
        return arguments

    async def takes_all_as_ctx(**ctx: Any) -> Any:
        return ctx

    registry.tool("all", "d", ANYTHING)(takes_all)
    registry.tool("all_as_ctx", "d", ANYTHING)(takes_all_as_ctx)
    for name in ("all", "all_as_ctx"):
        assert await registry.call(name, {"a": 1}, ctx="given") == '{"a":1}'


async def test_a_handler_of_one_dict_gets_no_context_and_its_property_ctx_is_the_models() -> None:
    registry = ToolRegistry()
    registry.register_tool(ToolDefinition("asks", "d", ANYTHING, lambda arguments: arguments))
    assert await registry.call("asks", {"ctx": 1}, ctx="given") == '{"ctx":1}'


async def test_changes_of_a_handler_to_the_context_are_there_after_the_call() -> None:
    registry, context = ToolRegistry(), ToolContext()

    @registry.tool("sends", "d", ANYTHING)
    async def sends(ctx: ToolContext) -> str:
        ctx.sent_files.append("one.png")
        return "sent"

    await registry.call("sends", {}, ctx=context)
    assert context.sent_files == ["one.png"]


async def test_contexts_of_calls_at_the_same_time_do_not_mix() -> None:
    registry = ToolRegistry()

    @registry.tool("asks", "d", ANYTHING)
    async def asks(ctx: Any = None) -> str:
        await asyncio.sleep(0)
        return str(ctx)

    @registry.tool("asks_plainly", "d", ANYTHING)
    def asks_plainly(ctx: Any = None) -> str:
        return str(ctx)

    calls = [(name, n) for n in range(50) for name in ("asks", "asks_plainly")]
    text = await asyncio.gather(*(registry.call(name, {}, ctx=n) for name, n in calls))
    assert text == [str(n) for _, n in calls]


async def test_a_nested_call_gets_its_own_context_and_not_its_callers() -> None:
    registry = ToolRegistry()

    @registry.tool("inner", "d", ANYTHING)
    async def inner(ctx: Any = None) -> str:
        return str(ctx)

    @registry.tool("outer", "d", ANYTHING)
    async def outer(ctx: Any = None) -> str:
        without = await registry.call("inner", {}, nested=True)
        other = await registry.call("inner", {}, ctx="other", nested=True)
        return f"{ctx}, {without}, {other}"

    assert await registry.call("outer", {}, ctx="given") == "given, None, other"


async def test_a_handler_may_take_the_scope_of_the_call_and_the_context_of_its_caller() -> None:
    registry = ToolRegistry()

    @registry.tool("both", "d", ANYTHING)
    async def both(scope: ToolScope, ctx: Any) -> str:
        return f"{scope.tool} {ctx is scope} {ctx}"

    assert await registry.call("both", {}, ctx="given") == "both False given"
    assert (await registry.call("both", {})).startswith("both True <ToolScope both")
