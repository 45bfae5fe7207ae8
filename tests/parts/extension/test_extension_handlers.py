from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.parts.extension.extension_cases import SEARCH, attached, memory
from tests.support.waiting import within
from toolbus.errors import Code, SetupError, Stage
from toolbus.functions.runner import run_handler
from toolbus.functions.tool_spec import ToolDefinition
from toolbus.parts.extension.extension import with_host_fields
from toolbus.protocol.tool import Result
from toolbus.sdk import CallContext, ContextMessage, Err, Extension, Ok, ToolInvocation, ToolScope, text

MEMBER = {
    "memberId": "m1",
    "itemId": "i1",
    "packId": "p1",
    "packName": "Pack",
    "name": "Ann",
    "role": "Archivist",
    "chance": 50,
    "avatarUrl": "/a.png",
    "definition": "d",
    "personality": "p",
    "behavior": "b",
    "genderIdentity": 0,
}


MESSAGES = (ContextMessage("system", "Rules"), ContextMessage("user", "Hi", "Bo"), ContextMessage("assistant", "Boo"))


async def outcome(*handlers: Callable[[ToolInvocation], Any]) -> Result:
    """Returns what a call comes to with these handlers for all tools, without a bus."""
    extension = memory(*handlers)
    spec = extension.tools.get("search")
    assert spec is not None
    return await run_handler(spec, "{}", ToolScope("1", "search"), extension._workers.run)


# -- who answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "output"),
    [
        ("as it is", "as it is"),
        ('{"a": 1}', '{"a": 1}'),
        (None, ""),
        ({"a": [1, None, "é"]}, '{"a":[1,null,"é"]}'),
        ([1, 2], "[1,2]"),
        (5, "5"),
        (True, "true"),
        (Ok({"a": 1}), '{"a":1}'),
    ],
)
async def test_what_a_handler_returns_is_a_text(returned: Any, output: str) -> None:
    result = await outcome(lambda invocation: returned)
    assert (result.output, result.error) == (output, None)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (ValueError("no such book"), "no such book"),
        (ValueError(), "Tool invocation failed"),
        (Unspeakable(), "Tool invocation failed"),
        (StopIteration("odd"), "odd"),
        (SystemExit("bye"), "bye"),
    ],
)
@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_what_a_handler_raises_is_the_tools_error(problem: BaseException, message: str, kind: str) -> None:

    def plain(invocation: ToolInvocation) -> None:
        raise problem

    async def on_loop(invocation: ToolInvocation) -> None:
        raise problem

    result = await outcome(plain if kind == "plain" else on_loop)
    assert result.is_error
    assert result.error is not None
    assert (result.error.code, result.error.stage) == (Code.TOOL, Stage.ACCEPTED)
    if not isinstance(problem, StopIteration):  # Python makes another exception of it inside a coroutine
        assert result.error.message == message


async def test_without_a_handler_the_call_fails_with_that_reason() -> None:
    async with attached(memory()) as (_, host):
        result = await within(host.call("memory:search"))
    assert result.error is not None
    assert (result.error.code, result.error.message) == (Code.TOOL, "No TOOL_INVOCATION handler registered")


async def test_every_handler_is_called_in_order_and_the_first_value_decides() -> None:
    ran: list[str] = []

    async def silent(invocation: ToolInvocation) -> None:
        await asyncio.sleep(0)
        ran.append("silent")

    def second(invocation: ToolInvocation) -> str:
        ran.append("second")
        return ""

    async def failing(invocation: ToolInvocation) -> None:
        ran.append("failing")
        raise ValueError("too late to matter")

    assert (await outcome(silent, second, failing)).output == ""
    assert ran == ["silent", "second", "failing"]
    failed = await outcome(silent, failing, second)
    assert failed.error is not None
    assert failed.error.message == "too late to matter"


async def test_a_result_that_is_more_than_a_text_is_passed_on() -> None:
    refused = await outcome(lambda invocation: Err("closed today"))
    assert refused.error is not None
    assert refused.error.message == "closed today"
    shapes: tuple[Any, ...] = (text("hello"), [text("hello")])
    for blocks in shapes:
        shown = await outcome(functools.partial(lambda blocks, invocation: blocks, blocks))
        assert [each.text.text for each in shown.content] == ["hello"]
    wrong = await outcome(lambda invocation: {"when": math.nan})
    assert wrong.error is not None
    assert "nan" in wrong.error.message


async def test_a_function_of_its_own_wins_for_its_tool() -> None:
    extension = memory(lambda invocation: f"all: {invocation['toolName']}")

    @extension.tool
    async def add(a: int, b: int) -> int:
        return a + b

    extension.register_tool(name="times", parameters={"type": "object"}, handler=lambda a, b: a * b)
    async with attached(extension) as (_, host):
        assert (await within(host.call("memory:add", {"a": 1, "b": 2}))).output == 3
        assert (await within(host.call("memory:times", {"a": 2, "b": 3}))).output == 6
        assert (await within(host.call("memory:search"))).output == "all: search"


async def test_a_function_takes_over_a_registered_tool_and_keeps_it_when_it_is_registered_anew() -> None:
    extension = memory(lambda invocation: "all")
    extension.add_tool(lambda query="": f"own {query}", name="search")
    extension.register_tool(SEARCH, description="Anew.")
    extension.add_tool(ToolDefinition("dict", handler=lambda given: given))
    extension.register_tool(name="dict", description="Anew.")
    with pytest.raises(SetupError, match="already has a tool 'search'"):
        extension.add_tool(lambda: None, name="search")
    async with attached(extension) as (bus, host):
        assert (await within(host.call("memory:search", {"query": "x"}))).output == "own x"
        assert (await within(host.call("memory:dict", {"a": 1}))).output == {"a": 1}
        assert {each.tool.description for each in bus.list()} == {"Anew."}


async def test_handlers_are_also_given_by_the_name_of_the_event_and_can_be_taken_away() -> None:
    extension = memory()
    off = extension.on("TOOL_INVOCATION", lambda payload: "here")
    async with attached(extension) as (_, host):
        assert (await within(host.call("memory:search"))).output == "here"
        off()
        off()
        assert (await within(host.call("memory:search"))).is_error


def test_an_unknown_event_and_a_handler_that_is_not_a_function_are_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"no event 'PERMISSION_DENIED'.*use on_permission_denied"):
        memory().on("PERMISSION_DENIED", lambda payload: None)
    with pytest.raises(TypeError, match="on_invocation is put on a function, not on 'x'"):
        memory().on_invocation("x")  # type: ignore[type-var]
    with pytest.raises(TypeError, match="on_refused is put on a function"):
        memory().on_refused(None)  # type: ignore[type-var]


# -- the arguments of handlers ----------------------------------------------------------------------------------------


async def invocation_of(arguments: Any = None, context: CallContext | None = None, **fields: Any) -> ToolInvocation:
    """Returns what a handler got of a call over the wire."""
    seen: list[ToolInvocation] = []
    async with attached(memory(seen.append, **fields)) as (_, host):
        await within(host.call("memory:search", arguments, context=context, timeout=20))
    return seen[0]


async def test_a_handler_gets_everything_by_the_names_that_extensions_know() -> None:
    seen = await invocation_of({"query": "door"}, CallContext(member=MEMBER, messages=MESSAGES))
    assert list(seen) == ["toolName", "args", "requestId", "councilMember", "contextMessages"]
    assert (seen["toolName"], seen.tool_name, seen["args"]["query"]) == ("search", "search", "door")
    assert dict(seen["councilMember"]) == MEMBER
    assert seen["contextMessages"] == [
        {"role": "system", "content": "Rules"},
        {"role": "user", "content": "Hi", "name": "Bo"},
        {"role": "assistant", "content": "Boo"},
    ]
    with pytest.raises(AttributeError):
        seen.tool_name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        seen["councilMember"]["name"] = "Eve"
    with pytest.raises(KeyError):
        seen["userId"]


async def test_the_request_id_is_the_callers() -> None:
    seen: list[ToolInvocation] = []
    async with attached(memory(seen.append)) as (_, host):
        await within(host.call("memory:search"))
        await within(host.call("memory:search"))
    ids = [each["requestId"] for each in seen]
    assert len(set(ids)) == 2
    assert all(ids)
    assert ids == [each.scope.request_id for each in seen]


async def test_outside_a_council_there_is_neither_member_nor_conversation() -> None:
    seen = await invocation_of({"query": "door", "context": "the model's", "councilMember": {"name": "Eve"}})
    assert (seen["councilMember"], seen["contextMessages"]) == (None, None)
    assert "context" not in seen["args"]


async def test_arguments_cannot_replace_the_fields_of_the_host() -> None:
    posed = {"context": "the model's", "__deadlineMs": 1, "councilMember": {"name": "Eve"}, "contextMessages": []}
    seen = await invocation_of(posed, CallContext(member=MEMBER, messages=MESSAGES))
    assert seen["args"]["context"] == "Rules\n\nuser: Hi\n\nassistant: Boo"
    assert seen["args"]["__deadlineMs"] > 1
    assert seen["councilMember"]["name"] == "Ann"
    assert len(seen["contextMessages"]) == 3


async def test_a_member_has_exactly_twelve_fields_whatever_the_host_sent() -> None:
    seen = await invocation_of(context=CallContext(member={"name": "Ann", "role": None, "secret": 1}))
    assert dict(seen["councilMember"]) == {
        **dict.fromkeys(MEMBER, ""),
        "name": "Ann",
        "chance": 100,
        "avatarUrl": None,
        "genderIdentity": 3,
    }


async def test_a_declared_context_is_the_models_where_the_host_sent_none() -> None:
    declared = {"type": "object", "properties": {"context": {"type": "string"}}}
    seen = await invocation_of({"context": "the model's"}, parameters=declared)
    assert seen["args"]["context"] == "the model's"
    seen = await invocation_of({"context": "the model's"}, CallContext(messages=MESSAGES[1:2]), parameters=declared)
    assert seen["args"]["context"] == "user: Hi"


async def test_the_deadline_is_the_moment_at_which_the_caller_stops_waiting() -> None:
    before = time.time()
    seen = await invocation_of()
    after = time.time()
    due = seen["args"]["__deadlineMs"]
    assert isinstance(due, int)
    assert (before + 20) * 1000 - 50 <= due <= (after + 20) * 1000 + 50


async def test_a_late_result_is_dropped_and_the_handler_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def slow(invocation: ToolInvocation) -> str:
        if invocation["args"].get("query") == "quick":
            return "quick"
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            return "late"
        return ""

    async with attached(memory(slow)) as (_, host):
        result = await within(host.call("memory:search", timeout=0.05))
        assert result.error is not None
        assert result.error.code is Code.DEADLINE_EXCEEDED
        await within(cancelled.wait())
        assert (await within(host.call("memory:search", {"query": "quick"}))).output == "quick"


def test_the_user_is_never_in_the_arguments_but_beside_them() -> None:
    scope = ToolScope("1", "search", context=CallContext(user_id="bo"))
    nested = {"userId": "eve"}
    written = {"userId": "eve", "__userId": "eve", "__user_id": "eve", "user_id": "eve", "about": nested}
    assert with_host_fields(written, scope) == {"user_id": "eve", "about": nested}
    assert ToolInvocation.of(written, scope).scope.context.user_id == "bo"


def test_a_call_without_a_deadline_has_none() -> None:
    assert with_host_fields({"__deadlineMs": 5, "context": "x"}, ToolScope()) == {}


async def test_a_function_of_its_own_gets_the_hosts_fields_where_it_asks_for_them() -> None:
    extension = Extension("memory")

    @extension.tool(host_args=True)
    async def recall(query: str, context: str = "none") -> list[str]:
        return [query, context]

    @extension.tool(host_args=True)
    def anything(**given: Any) -> dict[str, Any]:
        return {**given, "__deadlineMs": given["__deadlineMs"] > time.time() * 1000}

    @extension.tool
    async def plain(query: str) -> str:
        return query

    extension.register_tool(name="handled", handler=lambda context: context, host_args=True)
    async with attached(extension) as (bus, host):
        shown = {each.tool.name: each.tool.parameters for each in bus.list()}
        assert shown["memory:recall"]["properties"].keys() == {"query"}
        assert shown["memory:recall"]["required"] == ["query"]
        context = CallContext(messages=MESSAGES[1:2])
        arguments = {"query": "door", "context": "the model's", "userId": "eve"}
        assert (await within(host.call("memory:recall", arguments))).output == ["door", "none"]
        assert (await within(host.call("memory:recall", arguments, context=context))).output == ["door", "user: Hi"]
        assert (await within(host.call("memory:anything", arguments, context=context))).output == {
            "query": "door",
            "context": "user: Hi",
            "__deadlineMs": True,
        }
        assert (await within(host.call("memory:plain", {"query": "door"}, context=context))).output == "door"
        assert (await within(host.call("memory:handled", context=context))).output == "user: Hi"


async def test_a_handler_for_all_tools_can_call_others_for_the_same_member() -> None:
    seen: list[ToolInvocation] = []

    async def handler(invocation: ToolInvocation) -> Any:
        seen.append(invocation)
        if invocation.tool_name == "search":
            return await invocation.scope.call("memory:look")
        return "found"

    extension = memory(handler)
    extension.register_tool(name="look")
    async with attached(extension) as (_, host):
        result = await within(host.call("memory:search", context=CallContext(member=MEMBER)))
    assert result.output == "found"
    assert [each["councilMember"]["name"] for each in seen] == ["Ann", "Ann"]
