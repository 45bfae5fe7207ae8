"""Tests how realtime sessions and their calls end, with several providers, and in any order of events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parts.models.loop.realtime_provider import (
    BlockedTool,
    Provider,
    add,
    feed,
    greet,
    live_calls,
    opened,
    run_pending,
    sets,
    with_timeout,
)
from tests.parts.models.loop.scripted_model import FunctionSource
from toolbus.bus import Bus, Config
from toolbus.functions.call_context import CallContext
from toolbus.parts.models.dialects.conversation import Json
from toolbus.parts.models.dialects.gemini_live import GeminiLive
from toolbus.parts.models.dialects.openai_realtime import GlmRealtime, OpenAIRealtime
from toolbus.parts.models.loop.loop_events import CallEnded
from toolbus.parts.models.loop.realtime_session import RealtimeSession, Sync
from toolbus.parts.models.loop.tool_source import source_of

# -- interruptions ---------------------------------------------------------------------------------------------------


async def test_an_interrupted_response_cancels_its_calls_and_no_response_is_requested() -> None:
    blocked, notifications = BlockedTool(), list[Any]()
    provider = Provider()
    async with await opened(
        FunctionSource(blocked=blocked.run, add=add), provider, on_event=notifications.append
    ) as session:
        await feed(session, provider.begin(), provider.call("c1", "blocked"))
        await with_timeout(blocked.running.wait())
        await feed(session, provider.end(status="cancelled"))
        await with_timeout(blocked.cancelled.wait())
        await provider.until(lambda: "c1" in provider.outputs)
        await run_pending()
        assert "cancelled" in provider.outputs["c1"]
        assert provider.requests == 0
        await feed(session, provider.begin("r2"), provider.call("c2", "add", "r2"), provider.end("r2"))
        await provider.until(lambda: provider.requests == 1)
    ended = [each.done.outcome for each in notifications if isinstance(each, CallEnded)]
    assert ended == ["cancelled", "ok"]
    assert provider.violations == []


async def test_a_call_that_ended_before_the_interruption_keeps_its_result() -> None:
    ended = asyncio.Event()
    provider = Provider()
    async with await opened(FunctionSource(add=add), provider, on_event=sets(ended)) as session:
        await feed(session, provider.begin(), provider.call("c1", "add", a=7))
        await with_timeout(ended.wait())
        await feed(session, provider.end(status="cancelled"))
        await provider.until(lambda: "c1" in provider.outputs)
        await run_pending()
    assert provider.outputs == {"c1": "7"}
    assert provider.requests == 0


async def test_cancel_ends_all_calls_and_answers_them() -> None:
    blocked = BlockedTool()
    provider = Provider()
    async with await opened(FunctionSource(blocked=blocked.run), provider) as session:
        await feed(session, provider.begin(), provider.call("c1", "blocked"), provider.end())
        await with_timeout(blocked.running.wait())
        session.cancel()
        await with_timeout(blocked.cancelled.wait())
        await provider.until(lambda: "c1" in provider.outputs)
        await run_pending()
    assert provider.requests == 0


async def test_close_ends_all_work_and_sends_nothing_more() -> None:
    blocked = BlockedTool()
    provider = Provider()
    session = await opened(FunctionSource(blocked=blocked.run), provider)
    await feed(session, provider.begin(), provider.call("c1", "blocked"), provider.end())
    await with_timeout(blocked.running.wait())
    await with_timeout(session.close())
    assert blocked.cancelled.is_set()
    assert await session.sync() is Sync.CLOSED
    await feed(session, provider.call("c2", "blocked"))
    assert [event["type"] for event in provider.sent] == ["session.update"]
    assert repr(session) == "<RealtimeSession openai-realtime closed>"
    await with_timeout(session.close())


async def test_a_send_that_closes_the_session_ends_it() -> None:
    provider = Provider()
    done = asyncio.Event()

    async def send(event: Json) -> None:
        if event["type"] == "session.update":
            return
        await session.close()
        done.set()
        raise ConnectionResetError("gone")

    session = RealtimeSession(OpenAIRealtime(), FunctionSource(add=add), send)
    await session.sync()
    await feed(session, provider.call("c1", "add", ""))
    await with_timeout(done.wait())
    assert session.closed


async def test_a_sync_whose_session_closes_meanwhile_returns_closed() -> None:
    async def send(event: Json) -> None:
        await session.close()
        raise ConnectionResetError("gone")

    session = RealtimeSession(OpenAIRealtime(), FunctionSource(add=add), send)
    assert await with_timeout(session.sync()) is Sync.CLOSED


# -- other providers -------------------------------------------------------------------------------------------------


async def test_gemini_gets_one_batch_and_no_answer_to_cancelled_calls() -> None:
    blocked = BlockedTool()
    provider = Provider()
    session = RealtimeSession(GeminiLive(), FunctionSource(blocked=blocked.run, add=add), provider.send)
    await session.setup()
    async with session:
        await feed(session, live_calls(("f1", "blocked"), ("f2", "add"), ("f3", "rm")))
        await with_timeout(blocked.running.wait())
        assert provider.sent == []
        await feed(session, {"tool_call_cancellation": {"ids": ["f1"]}})
        await with_timeout(blocked.cancelled.wait())
        await provider.until(lambda: len(provider.sent) == 1)
    responses = provider.sent[0]["tool_response"]["function_responses"]
    assert [each["id"] for each in responses] == ["f2", "f3"]
    assert responses[0]["response"] == {"result": 0}
    assert "no tool 'rm'" in responses[1]["response"]["error"]


async def test_two_calls_of_a_message_with_one_id_are_one() -> None:
    source, provider = FunctionSource(add=add), Provider()
    async with RealtimeSession(GeminiLive(), source, provider.send) as session:
        await session.setup()
        await feed(session, live_calls(("f1", "add"), ("f1", "add")))
        await provider.until(lambda: len(provider.sent) == 1)
    assert len(source.calls) == 1
    assert len(provider.sent[0]["tool_response"]["function_responses"]) == 1


@pytest.mark.parametrize("is_answered", [False, True])
async def test_a_call_that_comes_again_in_another_message_runs_once(is_answered: bool) -> None:
    source, provider = FunctionSource(add=add), Provider()
    async with RealtimeSession(GeminiLive(), source, provider.send) as session:
        await session.setup()
        await feed(session, live_calls(("f1", "add")))
        if is_answered:
            await provider.until(lambda: len(provider.sent) == 1)
        await feed(session, live_calls(("f1", "add")), live_calls(("f2", "add")))
        await provider.until(lambda: "f2" in str(provider.sent[-1:]))
        await run_pending()
    answers = [each["tool_response"]["function_responses"] for each in provider.sent]
    assert sorted(each["id"] for batch in answers for each in batch) == ["f1", "f2"]
    assert len(source.calls) == 2


async def test_calls_that_the_host_cancels_are_answered_to_gemini() -> None:
    blocked = BlockedTool()
    provider = Provider()
    session = RealtimeSession(GeminiLive(), FunctionSource(blocked=blocked.run), provider.send)
    await session.setup()
    async with session:
        await feed(session, live_calls(("f1", "blocked")))
        await with_timeout(blocked.running.wait())
        session.cancel()
        await provider.until(lambda: len(provider.sent) == 1)
    (response,) = provider.sent[0]["tool_response"]["function_responses"]
    assert "cancelled" in response["response"]["error"]


async def test_glm_is_answered_without_the_generated_id() -> None:
    provider = Provider()
    async with await opened(FunctionSource(add=add), provider, GlmRealtime()) as session:
        call = {**provider.call("", "add", a=3), "output_index": 0}
        del call["call_id"]
        await feed(session, provider.begin(), call, provider.end())
        await provider.until(lambda: provider.requests == 1)
    assert provider.sent[1]["item"] == {"type": "function_call_output", "output": "3"}


# -- a real bus ------------------------------------------------------------------------------------------------------


async def test_a_tool_that_is_registered_during_a_response_can_be_called() -> None:
    provider = Provider()
    async with Bus(Config(grpc=("127.0.0.1:0",), http="off", grace_seconds=0.0)) as bus:
        bus.tool(add)
        source = source_of(bus, names=("add", "greet"))
        async with RealtimeSession(OpenAIRealtime(), source, provider.send) as session:
            session.follow()
            await provider.until(lambda: provider.tools == ["add"])
            await feed(session, provider.begin("r1"))
            bus.tool(greet)
            await provider.until(lambda: provider.tools == ["add", "greet"])
            await feed(session, provider.call("c1", "greet", "r1"), provider.end("r1"))
            await provider.until(lambda: provider.requests == 1)
            assert "no tool 'greet'" in provider.outputs["c1"]  # what began without it does not know it
            await feed(session, provider.begin("r2"))
            await feed(session, provider.call("c2", "greet", "r2", name="Ada"), provider.call("c3", "add", "r2", a="x"))
            await feed(session, provider.end("r2"))
            await provider.until(lambda: provider.requests == 2)
    assert provider.outputs["c2"] == "hello Ada"
    assert "integer" in provider.outputs["c3"]
    assert provider.violations == []


async def test_calls_are_made_for_the_user_for_whom_the_source_lists() -> None:
    provider = Provider()
    async with Bus(Config(grpc=("127.0.0.1:0",), http="off", grace_seconds=0.0)) as bus:
        bus.tool(add)
        bus.permit("tools", "add", ["ann"])
        source = source_of(bus, context=CallContext(user_id="ann"))
        async with RealtimeSession(OpenAIRealtime(), source, provider.send) as session:
            await session.sync()
            assert provider.tools == ["add"]
            await feed(session, provider.begin(), provider.call("c1", "add", a=2), provider.end())
            await provider.until(lambda: provider.requests == 1)
    assert provider.outputs == {"c1": "2"}


# -- any order -------------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.sampled_from(["begin", "call", "unknown", "end", "interrupt", "finish", "hear", "heard", "turn"]), max_size=24
)


class Conversation:
    """Plays steps in any order, each where the provider may take it."""

    def __init__(self) -> None:
        self.provider = Provider()
        self.waiting: list[asyncio.Event] = []
        self.calls: list[str] = []
        self.responses = 0
        self.speaking = self.hearing = False

    async def tool(self) -> str:
        gate = asyncio.Event()
        self.waiting.append(gate)
        await gate.wait()
        return "done"

    async def step(self, session: RealtimeSession, step: str) -> None:
        current = f"r{self.responses}"
        match step:
            case "hear" if not self.hearing:
                self.hearing = True
                await feed(session, self.provider.starts_speaking())
            case "heard" if self.hearing:
                self.hearing = False
                await feed(session, self.provider.stops_speaking())
            case "begin" if not self.speaking:
                self.responses += 1
                self.speaking, self.hearing = True, False
                await feed(session, self.provider.begin(f"r{self.responses}"))
            case "call" | "unknown" if self.speaking:
                self.calls.append(f"c{len(self.calls)}")
                name = "tool" if step == "call" else "rm"
                await feed(session, self.provider.call(self.calls[-1], name, current))
            case "end" | "interrupt" if self.speaking:
                self.speaking = False
                status = "completed" if step == "end" else "cancelled"
                await feed(session, self.provider.end(current, status))
            case "finish" if self.waiting:
                self.waiting.pop(0).set()
            case _:
                await asyncio.sleep(0)

    async def play(self, steps: Iterable[str]) -> None:
        # A plain function takes answers in one step: over a network, a user may always speak in between.
        async with RealtimeSession(
            OpenAIRealtime(), FunctionSource(tool=self.tool), self.provider.take, pause_seconds=0.0
        ) as session:
            await session.sync()
            for step in steps:
                await self.step(session, step)
            for step in ["heard", "end", "finish", "turn", "turn", "turn", "begin"] * 50:  # until all has run
                await self.step(session, step)


@given(STEPS)
def test_every_call_is_answered_once_and_no_response_is_requested_during_another(steps: list[str]) -> None:
    conversation = Conversation()
    asyncio.run(conversation.play(steps))
    assert conversation.provider.violations == []
    assert sorted(conversation.provider.outputs) == sorted(conversation.calls)
