from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.parts.extension.extension_cases import SEARCH, attached, memory
from tests.sdk.played_bus import SECONDS, PlayedStream, played_bus
from tests.support.waiting import HANG_SECONDS, WAIT_SECONDS, Stopwatch, until, within
from toolbus.bus import Bus
from toolbus.errors import Code, RequestError, Stage
from toolbus.sdk import Extension, Host, Plugin
from toolbus.testing import running_bus
from toolbus.v1 import tool_bus_service_pb2 as wire

ENDLESS = {"type": "object", "$ref": "#"}  # a schema that the bus refuses


def offered(bus: Bus) -> list[str]:
    return [each.tool.name for each in bus.list()]


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
    logged = [(each.levelno, each.getMessage()) for each in caplog.records if each.name == "toolbus.sdk.plugin_client"]
    assert logged == [
        (logging.WARNING, "the permission 'tools' was revoked"),
        (logging.INFO, "the permission 'tools' was granted"),
    ]


async def test_a_right_that_came_while_there_was_no_stream_is_known_after_the_next_attach() -> None:
    async def deny(stream: PlayedStream) -> None:
        await stream.read_until("attach")
        why = "lacks the permission 'tools'"
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
    assert refused == [(("search", "more"), "lacks the permission 'tools'")]


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
            async with asyncio.timeout(WAIT_SECONDS):
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
        "import sys, toolbus.parts.extension.extension\n"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] in "
        "('orjson', 'jsonschema_rs', 'starlette', 'httpx', 'uvicorn')))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert json.loads(ran.stdout.replace("'", '"')) == []
