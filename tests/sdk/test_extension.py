from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.played_bus import SECONDS, PlayedStream, played_bus
from tests.support.waiting import Stopwatch, until, within
from toolbus.bus import Bus
from toolbus.errors import Code, RequestError, SetupError, Stage
from toolbus.functions.runner import run_handler
from toolbus.functions.tool_definition import ToolDefinition
from toolbus.sdk import CallContext, ContextMessage, Err, Extension, Host, Ok, Plugin, ToolInvocation, ToolScope, text
from toolbus.sdk.hooks import Hooks
from toolbus.sdk.invocation import with_host_fields
from toolbus.testing import running_bus
from toolbus.tool import Result
from toolbus.v1 import tool_bus_service_pb2 as wire

SEARCH = {
    "name": "search",
    "display_name": "Search memory",
    "description": "Searches.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    "council_eligible": True,
    "inline_available": True,
}
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


@asynccontextmanager
async def attached(*extensions: Extension, **settings: Any) -> AsyncIterator[tuple[Bus, Host]]:
    """Runs a bus with these extensions, and a host."""
    async with running_bus(**settings) as bus, Host(bus.grpc_addresses[0]) as host:
        for extension in extensions:
            object.__setattr__(extension._settings, "address", bus.grpc_addresses[0])
            await extension.start()
            await within(extension.ready())
        try:
            yield bus, host
        finally:
            for extension in extensions:
                await extension.close()


ENDLESS = {"type": "object", "$ref": "#"}  # a schema that the bus refuses


def memory(*handlers: Callable[[ToolInvocation], Any], **fields: Any) -> Extension:
    extension = Extension("memory")
    extension.register_tool(SEARCH, **fields)
    for handler in handlers:
        extension.on_invocation(handler)
    return extension


def offered(bus: Bus) -> list[str]:
    return [each.tool.name for each in bus.list()]


async def outcome(*handlers: Callable[[ToolInvocation], Any]) -> Result:
    """Returns what a call comes to with these handlers for all tools, without a bus."""
    extension = memory(*handlers)
    spec = extension.tools.get("search")
    assert spec is not None
    return await run_handler(spec, "{}", ToolScope("1", "search"), extension._workers.run)


# -- registering ------------------------------------------------------------------------------------------------------


async def test_a_record_is_listed_under_the_source_with_every_field_and_unknown_ones_are_tolerated() -> None:
    async with attached(memory(extension_id="spoofed", colour="red")) as (_, host):
        (listed,) = [each for each in await host.list() if each.source == "memory"]
    assert listed.name == "memory:search"
    tool = listed.tool
    assert (tool.display_name, tool.description, tool.parameters) == tuple(
        SEARCH[key] for key in ("display_name", "description", "parameters")
    )
    assert (tool.council_eligible, tool.inline_available) == (True, True)


def test_a_missing_field_of_a_record_has_its_default_and_keywords_win() -> None:
    extension = Extension("memory")
    extension.register_tool({"name": "a", "description": None, "display_name": "A"}, display_name="B", timeout=60)
    (spec,) = extension.tools
    assert (spec.tool.description, spec.tool.display_name, spec.tool.timeout_seconds) == ("", "B", 60.0)
    assert spec.tool.parameters == {"type": "object", "properties": {}}
    assert (spec.tool.council_eligible, spec.tool.inline_available) == (False, False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "memory:search"}, "'memory:search' holds a colon: register the bare name"),
        ({}, "name is None, it must be a text"),
        ({"name": 7}, "name is 7"),
        ({"name": "a b"}, r"'a b' breaks the rule .*: pass another"),
        ({"name": "a", "council_eligible": "yes"}, "council_eligible is 'yes', it must be True or False"),
        ({"name": "a", "parameters": "{}"}, "parameters must be a dict"),
        ({"name": "a", "description": 5}, "description must be a str"),
        ({"name": "a", "timeout": 301}, "timeout is 301 s"),
    ],
)
def test_a_record_that_breaks_a_rule_is_refused_with_the_value_the_rule_and_the_fix(
    fields: dict[str, Any], words: str
) -> None:
    extension = memory()
    with pytest.raises((ValueError, TypeError), match=words):
        extension.register_tool(fields)
    assert [spec.tool.name for spec in extension.tools] == ["search"]


async def test_the_same_name_again_replaces_and_unregistering_reaches_own_tools_only() -> None:
    other = Extension("other")
    other.register_tool(SEARCH)
    mine = memory(lambda invocation: "mine")
    async with attached(other, mine) as (bus, host):
        mine.register_tool(SEARCH, description="Anew.")
        await within(mine.ready())
        descriptions = {each.tool.name: each.tool.description for each in bus.list()}
        assert descriptions == {"other:search": "Searches.", "memory:search": "Anew."}
        assert (await within(host.call("memory:search"))).output == "mine"
        assert mine.unregister_tool("other:search") is False
        assert mine.unregister_tool("unknown") is False
        assert mine.unregister_tool("search") is True
        await within(mine.ready())
        assert offered(bus) == ["other:search"]


async def test_a_bare_name_finds_the_first_that_was_registered() -> None:
    first, second = Extension("a"), Extension("b")
    for extension, word in ((first, "first"), (second, "second")):
        extension.register_tool(SEARCH)
        extension.on_invocation(lambda _, word=word: word)
    async with attached(first, second) as (_, host):
        assert (await within(host.call("search"))).output == "first"
        assert (await within(host.call("b:search"))).output == "second"


async def test_a_refused_tool_is_data_one_warning_and_one_event_and_the_others_are_offered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    extension = memory()
    heard: asyncio.Queue[Any] = asyncio.Queue()

    @extension.on_refused
    async def refused(names: tuple[str, ...], why: str) -> None:
        heard.put_nowait((names, why))

    async with attached(extension) as (bus, _):
        extension.register_tool(name="bad", parameters=ENDLESS)
        names, why = await within(heard.get())
        assert (names, "without end" in why) == (("bad",), True)
        extension.register_tool(name="later")
        await within(extension.ready())
        assert offered(bus) == ["memory:search", "memory:later"]
        assert [(each.name, each.error, each.role) for each in extension.refused] == [("bad", why, None)]
        extension.unregister_tool("bad")
        await within(extension.ready())
        assert (extension.refused, extension.waiting) == ((), ())
    (line,) = [record.message for record in caplog.records if "does not offer" in record.message]
    assert line == f"the bus does not offer bad of source memory: {why}"


async def test_a_bad_tool_harms_nothing_but_itself_across_a_restart_of_the_bus(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"unix:{tmp_path}/bus.sock"
    extension = Extension("memory", address=address)
    extension.register_tool(name="good")
    async with running_bus(grpc=(address,)) as bus, extension:
        await within(extension.ready())
        extension.register_tool({"name": "bad", "parameters": {"type": "object", "$ref": "#"}})
        for name in ("later", "last"):
            extension.register_tool(name=name)
        await within(extension.ready())
        assert offered(bus) == ["memory:good", "memory:later", "memory:last"]
        await bus.stop()
        async with running_bus(grpc=(address,)) as again:
            await until(lambda: len(offered(again)) == 3, "the good tools on the new bus")
            assert offered(again) == ["memory:good", "memory:later", "memory:last"]
            assert [each.name for each in extension.refused] == ["bad"]
            await extension.close()
    assert sum("does not offer bad" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("plain", [True, False])
async def test_a_plugin_that_is_refused_as_a_whole_gets_the_reason_before_it_ends(plain: bool) -> None:
    heard: list[Any] = []
    async with running_bus(unix=True) as bus:
        extension = Extension("memory", address=bus.grpc_addresses[0], all_or_none=True)
        extension.register_tool(SEARCH)
        extension.register_tool(name="bad", parameters=ENDLESS)

        async def later(names: tuple[str, ...], why: str) -> None:
            await asyncio.sleep(0)
            heard.append((names, why))

        extension.on_refused((lambda *told: heard.append(told)) if plain else later)
        async with extension:
            with pytest.raises(RequestError, match="without end"):
                await within(extension.ended())
    ((names, why),) = heard
    assert (names, "without end" in why) == (("bad",), True)


async def test_all_or_none_refuses_a_later_set_as_a_whole_and_ready_raises_until_it_is_good() -> None:
    async with running_bus() as bus:
        extension = Extension("memory", address=bus.grpc_addresses[0], all_or_none=True)
        extension.register_tool(SEARCH)
        async with extension:
            await within(extension.ready())
            extension.register_tool(name="bad", parameters=ENDLESS)
            with pytest.raises(RequestError, match="without end"):
                await within(extension.ready())
            assert offered(bus) == ["memory:search"]
            extension.unregister_tool("bad")
            await within(extension.ready())


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


# -- what handlers are told -------------------------------------------------------------------------------------------


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
        told = {"query": "door", "context": "the model's", "userId": "eve"}
        assert (await within(host.call("memory:recall", told))).output == ["door", "none"]
        assert (await within(host.call("memory:recall", told, context=context))).output == ["door", "user: Hi"]
        assert (await within(host.call("memory:anything", told, context=context))).output == {
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


# -- rights -----------------------------------------------------------------------------------------------------------


def noted(extension: Plugin, heard: asyncio.Queue[Any]) -> None:
    """Has a queue of this loop get what an extension hears about its rights."""

    @extension.on_permission_denied
    async def denied(permission: str, operation: str) -> None:
        heard.put_nowait(("denied", permission, operation))

    @extension.on_permission_changed
    async def changed(permission: str, granted: bool, all_granted: tuple[str, ...]) -> None:
        heard.put_nowait(("changed", permission, granted, all_granted))


async def test_without_the_right_the_stream_stays_and_tools_come_when_it_is_granted() -> None:
    extension = memory(lambda invocation: "here")
    heard: asyncio.Queue[Any] = asyncio.Queue()
    noted(extension, heard)
    async with running_bus(silenced=("memory",)) as bus, Host(bus.grpc_addresses[0]) as host:
        object.__setattr__(extension._settings, "address", bus.grpc_addresses[0])
        async with extension:
            assert await within(heard.get()) == ("denied", "tools", "registerTool")
            assert not extension.permissions.has("tools")
            assert bus.list() == []
            await within(extension.ready())
            assert ["lacks the permission 'tools'" in each.error for each in extension.refused] == [True]
            bus.grant("memory")
            assert await within(heard.get()) == ("changed", "tools", True, ("tools",))
            await within(extension.ready())
            assert extension.permissions.has("tools")
            assert extension.refused == ()
            assert (await within(host.call("memory:search"))).output == "here"


async def test_revoking_withdraws_tools_while_connected_and_registering_is_denied_until_it_is_granted() -> None:
    extension = memory(lambda invocation: "here")
    heard: asyncio.Queue[Any] = asyncio.Queue()
    noted(extension, heard)
    async with attached(extension, grace_seconds=0.001) as (bus, host):
        assert extension.permissions.granted == {"tools"}
        bus.revoke("memory")
        assert await within(heard.get()) == ("changed", "tools", False, ())
        assert not extension.permissions.has("tools")
        refused = await within(host.call("memory:search"))
        assert refused.error is not None
        assert refused.error.code is Code.PERMISSION_DENIED
        extension.register_tool(name="more")
        assert await within(heard.get()) == ("denied", "tools", "registerTool")
        bus.grant("memory")
        assert await within(heard.get()) == ("changed", "tools", True, ("tools",))
        await within(extension.ready())
        assert offered(bus) == ["memory:search", "memory:more"]


async def test_a_hook_that_raises_is_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    heard: asyncio.Queue[Any] = asyncio.Queue()
    threads: list[threading.Thread] = []

    async def deny(stream: PlayedStream) -> None:
        await stream.accept()
        denied = wire.PermissionDenied(permission="files", operation="read")
        await stream.write(events=[wire.Event(permission_denied=denied)])
        await stream.read()

    async with played_bus(deny) as bus:
        plugin = Plugin("p", address=bus.address)

        @plugin.on_permission_denied
        def plain(permission: str, operation: str) -> None:
            threads.append(threading.current_thread())
            raise SystemExit(f"{permission} {operation}")

        noted(plugin, heard)
        async with plugin:
            assert await within(heard.get()) == ("denied", "files", "read")
            assert plugin.permissions.granted == {"tools"}
    assert threads[0] is not threading.main_thread()
    assert any("on_permission_denied" in record.message for record in caplog.records if record.levelno == logging.ERROR)


async def test_a_right_that_is_revoked_is_a_warning_and_one_that_is_granted_is_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    extension = memory()
    heard: asyncio.Queue[Any] = asyncio.Queue()
    noted(extension, heard)
    async with attached(extension) as (bus, _):
        bus.revoke("memory")
        await within(heard.get())
        bus.grant("memory")
        await within(heard.get())
    told = [(each.levelno, each.getMessage()) for each in caplog.records if each.name == "toolbus.sdk.delegate"]
    assert told == [
        (logging.WARNING, "the right 'tools' was revoked"),
        (logging.INFO, "the right 'tools' was granted"),
    ]


async def test_a_right_that_came_while_there_was_no_stream_is_known_after_the_next_attach() -> None:
    async def deny(stream: PlayedStream) -> None:
        await stream.read_until("attach")
        why = "lacks the right 'tools'"
        refused = [wire.RefusedTool(name=name, error=why) for name in ("search", "more")]
        await stream.write(attached=wire.Attached(session_id="s", refused=refused, refused_total=2))
        denied = wire.PermissionDenied(permission="tools", operation="attach")
        await stream.write(events=[wire.Event(permission_denied=denied)])
        await asked.wait()

    async def allow(stream: PlayedStream) -> None:
        await stream.accept()
        await stream.read()

    asked = asyncio.Event()
    heard: asyncio.Queue[Any] = asyncio.Queue()
    refused: list[Any] = []
    async with played_bus(deny, allow) as bus:
        extension = Extension("memory", address=bus.address)
        extension.register_tool(SEARCH)
        noted(extension, heard)
        extension.on_refused(lambda *told: refused.append(told))
        async with extension:
            assert await within(heard.get()) == ("denied", "tools", "registerTool")
            asked.set()
            async with asyncio.timeout(SECONDS):
                while not extension.permissions.has("tools"):
                    await asyncio.sleep(0.005)
    assert refused == [(("search", "more"), "lacks the right 'tools'")]


async def test_changes_of_the_catalog_reach_their_hooks() -> None:
    heard: asyncio.Queue[Any] = asyncio.Queue()
    extension = memory()
    async with attached(extension) as (bus, _):

        @extension.on_tools_changed
        async def changed(change: Any) -> None:
            heard.put_nowait({each.name for each in (*change.added, *change.changed)})

        assert await within(heard.get()) == {"memory:search"}
        bus.tool(name="new")(lambda: 1)
        assert await within(heard.get()) == {"new"}


# -- ends -------------------------------------------------------------------------------------------------------------

KILLED = """
import os, sys
from toolbus.sdk import Extension
extension = Extension("memory", address=sys.argv[1])
extension.register_tool(name="search")
extension.on_invocation(lambda invocation: os._exit(9))
extension.run()
"""


async def test_killing_an_extension_ends_its_call_at_once_and_takes_its_tools_off_the_list() -> None:
    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, bus.grpc_addresses[0])
        try:
            async with asyncio.timeout(30):
                while not bus.list():
                    await asyncio.sleep(0.01)
            stopwatch = Stopwatch()
            result = await within(host.call("memory:search"))
            assert stopwatch.seconds() < 1
            assert result.error is not None
            assert result.error.code is Code.UNAVAILABLE
            assert result.error.stage is not Stage.NOT_DISPATCHED
            assert bus.list() == []
        finally:
            assert await within(process.wait()) == 9


def test_it_is_as_light_as_the_rest_of_the_sdk() -> None:
    script = (
        "import sys, toolbus.sdk.extension\n"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] in "
        "('orjson', 'jsonschema_rs', 'starlette', 'httpx', 'uvicorn')))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert json.loads(ran.stdout.replace("'", '"')) == []


async def test_a_hook_gets_events_in_order_and_delays_no_other_hook() -> None:
    async def run(work: Any) -> Any:
        return await asyncio.to_thread(work)

    hooks = Hooks(run)
    heard: list[int] = []
    slow: list[int] = []
    first = asyncio.Event()

    async def waits(number: int) -> None:
        await first.wait()
        slow.append(number)

    def plain(number: int) -> None:
        time.sleep(0.02 if number == 0 else 0.0)
        heard.append(number)

    hooks.add("change", waits)
    hooks.add("change", plain)
    hooks.open(asyncio.get_running_loop())
    for number in range(5):
        hooks.fire("change", number)
    await until(lambda: len(heard) == 5)
    assert (heard, slow) == ([0, 1, 2, 3, 4], [])
    first.set()
    await until(lambda: len(slow) == 5)
    assert slow == [0, 1, 2, 3, 4]
