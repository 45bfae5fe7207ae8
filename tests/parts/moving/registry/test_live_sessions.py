"""REST-63: after a registration with sync, every live session has the tools."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.parts.moving.registry.example_tools import ANYTHING, with_tools
from tests.support.waiting import until, within
from toolbus.loop import RealtimeSession
from toolbus.parts.models.dialects.openai_realtime import OpenAIRealtime
from toolbus.sdk.shared_loop import SharedLoop
from toolbus.tools import ToolDefinition, ToolRegistry


class Session:
    """A conversation that stays open, as its owner would write one."""

    def __init__(self, registry: ToolRegistry, refuses: Exception | None = None) -> None:
        self.synced: list[frozenset[str]] = []  # what it had each time
        self.in_flight = 0
        self.open = asyncio.Event()
        self.open.set()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._registry = registry
        self._refuses = refuses

    async def sync(self) -> None:
        self.in_flight += 1
        self.loop = asyncio.get_running_loop()
        await self.open.wait()
        if self._refuses is not None:
            raise self._refuses
        self.synced.append(self._registry.tool_names())


def plain(name: str) -> ToolDefinition:
    return ToolDefinition(name, "d", ANYTHING, lambda arguments: name)


async def ours() -> str:
    return "ours"


async def test_registering_returns_at_once_and_syncs_no_session() -> None:
    registry = ToolRegistry()
    session = Session(registry)
    registry.add_session(session)
    registry.register_tool(plain("one"))
    registry.unregister_tool("one")
    assert session.in_flight == 0


@pytest.mark.parametrize("definition", [plain("one"), ToolDefinition("one", "d", ANYTHING, ours)])
async def test_registering_and_syncing_returns_when_every_session_has_the_tools(
    definition: ToolDefinition,
) -> None:
    registry = ToolRegistry()
    sessions = [Session(registry), Session(registry)]
    for session in sessions:
        registry.add_session(session)
    sessions[1].open.clear()
    registering = asyncio.create_task(registry.register_tool_and_sync(definition))
    await until(lambda: sessions[0].synced and sessions[1].in_flight, "both syncs to start")
    assert not registering.done()
    sessions[1].open.set()
    await within(registering)
    assert [session.synced for session in sessions] == [[{"one"}]] * 2
    assert await within(registry.unregister_tool_and_sync("one")) is True
    assert await within(registry.unregister_tool_and_sync("one")) is False
    assert [session.synced[1:] for session in sessions] == [[frozenset(), frozenset()]] * 2


async def test_a_session_that_refuses_is_raised_once_all_the_others_have_the_tools() -> None:
    registry = ToolRegistry()
    refusing, late = Session(registry, ValueError("too many tools")), Session(registry)
    late.open.clear()
    registry.add_session(refusing)
    registry.add_session(late)
    registering = asyncio.create_task(registry.register_tool_and_sync(plain("one")))
    await until(lambda: late.in_flight, "the other sync to start")
    late.open.set()
    with pytest.raises(ValueError, match="too many tools"):
        await within(registering)
    assert late.synced == [{"one"}]
    assert registry.tool_names() == {"one"}
    with pytest.raises(ValueError, match="too many tools"):
        await within(registry.unregister_tool_and_sync("one"))
    assert not registry


async def test_an_invalid_tool_syncs_no_session() -> None:
    registry = ToolRegistry()
    session = Session(registry)
    registry.add_session(session)
    with pytest.raises(ValueError, match="a b"):
        await registry.register_tool_and_sync(plain("a b"))
    assert session.in_flight == 0


async def test_a_removed_session_is_not_waited_for() -> None:
    registry = ToolRegistry()
    session = Session(registry)
    session.open.clear()
    registry.add_session(session)
    registry.add_session(session)
    registry.remove_session(session)
    registry.remove_session(session)
    await within(registry.register_tool_and_sync(plain("one")))
    assert session.in_flight == 0


async def test_cancelling_the_wait_cancels_the_syncs_and_keeps_the_tool() -> None:
    registry = ToolRegistry()
    session = Session(registry)
    session.open.clear()
    registry.add_session(session)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(registry.register_tool_and_sync(plain("one")), 0.02)
    assert registry.tool_names() == {"one"}


async def test_a_session_is_synced_on_its_own_event_loop_and_skipped_where_that_is_closed() -> None:
    registry, thread = ToolRegistry(), SharedLoop("session")
    thread.start()
    session = Session(registry)

    async def add() -> None:
        registry.add_session(session)

    await asyncio.wrap_future(thread.submit(add()))
    await within(registry.register_tool_and_sync(plain("one")))
    assert session.synced == [{"one"}]
    assert session.loop is thread.loop
    await asyncio.to_thread(thread.stop)
    await within(registry.register_tool_and_sync(plain("two")))
    assert len(session.synced) == 1


def test_a_session_without_an_event_loop_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        ToolRegistry().add_session(Session(ToolRegistry()))


# -- the real one ----------------------------------------------------------------------------------------------------


class Socket:
    """What a realtime session sends on; a send takes as long as the test likes."""

    def __init__(self) -> None:
        self.tools: list[list[str]] = []
        self.sending = 0
        self.open = asyncio.Event()
        self.open.set()
        self.refuses: Exception | None = None

    async def send(self, event: dict[str, Any]) -> None:
        self.sending += 1
        await self.open.wait()
        if self.refuses is not None:
            raise self.refuses
        if event["type"] == "session.update":
            self.tools.append([tool["name"] for tool in event["session"]["tools"]])


async def opened() -> tuple[ToolRegistry, Socket, RealtimeSession]:
    registry, socket = with_tools("first"), Socket()
    session = RealtimeSession(OpenAIRealtime(), registry.as_source(), socket.send)
    await session.sync()
    registry.add_session(session)
    return registry, socket, session


async def test_a_realtime_session_has_the_tools_when_registering_and_syncing_returns() -> None:
    registry, socket, session = await opened()
    async with session:
        socket.open.clear()
        registering = asyncio.create_task(registry.register_tool_and_sync(plain("second")))
        await until(lambda: socket.sending == 2, "the update to be on its way")
        assert not registering.done()
        assert socket.tools == [["first"]]
        socket.open.set()
        await within(registering)
        assert socket.tools == [["first"], ["first", "second"]]
        await within(registry.unregister_tool_and_sync("first"))
        assert socket.tools[-1] == ["second"]


async def test_an_error_of_a_realtime_session_is_raised() -> None:
    registry, socket, session = await opened()
    async with session:
        socket.refuses = ConnectionResetError("gone")
        with pytest.raises(ConnectionResetError, match="gone"):
            await within(registry.register_tool_and_sync(plain("second")))
        socket.refuses = None
        await within(registry.register_tool_and_sync(plain("third")))
        assert socket.tools[-1] == ["first", "second", "third"]


async def test_a_closed_realtime_session_delays_no_registration() -> None:
    registry, socket, session = await opened()
    await session.close()
    await within(registry.register_tool_and_sync(plain("second")))
    assert socket.tools == [["first"]]


async def test_a_realtime_session_that_follows_changes_is_synced_later() -> None:
    registry, socket, session = await opened()
    async with session:
        session.follow()
        await asyncio.to_thread(registry.register_tool, plain("second"))
        await until(lambda: socket.tools[-1] == ["first", "second"], "the update")


async def test_a_realtime_session_calls_the_tools_of_the_registry() -> None:
    _, _, session = await opened()
    sent: list[dict[str, Any]] = []
    session._send = sent.append  # the rest is what it says to the model
    async with session:
        await session.feed({"type": "response.created", "response": {"id": "r1"}})
        call = {"response_id": "r1", "call_id": "c1", "name": "first", "arguments": "{}"}
        await session.feed({"type": "response.function_call_arguments.done", **call})
        await session.feed({"type": "response.done", "response": {"id": "r1", "status": "completed", "output": []}})
        await until(lambda: sent, "the answer")
        assert sent[0]["item"]["output"] == "first"
