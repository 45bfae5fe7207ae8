"""Tests the events of a streamed turn, and what closing the stream cancels."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from tests.parts.models.loop.scripted_model import ApiError, FunctionSource, ScriptedModel, call, says
from tests.support.waiting import WAIT_SECONDS
from toolbus.loop import ToolLoop
from toolbus.parts.models.loop.loop_events import (
    CallEnded,
    CallProgress,
    CallStarted,
    Finished,
    LoopEvent,
    RoundEnded,
    RoundStarted,
    TextDelta,
    ToolsRefused,
)


def add(a: int = 0) -> int:
    return a


async def watched(loop: ToolLoop, messages: str = "?") -> list[LoopEvent]:
    async with asyncio.timeout(WAIT_SECONDS):
        return [event async for event in loop.stream(messages)]


async def test_a_stream_yields_all_events_in_order_and_the_reply_last() -> None:
    model = ScriptedModel(says("so", call("add", {"a": 1})), says("one"), streams=True)
    events = await watched(ToolLoop(FunctionSource(add=add), model.endpoint))
    assert [type(event) for event in events] == [
        *(RoundStarted, TextDelta, TextDelta, RoundEnded, CallStarted, CallProgress, CallEnded),
        *(RoundStarted, TextDelta, TextDelta, TextDelta, RoundEnded, Finished),
    ]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "soone"
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.reply.text == "one"
    assert model.closed == 2


async def test_a_whole_answer_yields_the_same_events_as_a_streamed_one() -> None:
    events = await watched(ToolLoop(FunctionSource(), ScriptedModel(says("hi")).endpoint))
    assert [type(event) for event in events] == [RoundStarted, TextDelta, RoundEnded, Finished]


async def test_a_reply_that_is_not_the_models_is_streamed_too() -> None:
    source = FunctionSource()
    source.offer(lambda: "done", name="act", direct_reply=True)
    events = await watched(ToolLoop(source, ScriptedModel(says("", call("act"))).endpoint))
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["done"]


async def test_a_refusal_of_tools_is_an_event_and_the_answer_follows() -> None:
    model = ScriptedModel(ApiError(400, "this model does not support tools"), says("hi"), streams=True)
    events = await watched(ToolLoop(FunctionSource(add=add), model.endpoint))
    assert [type(event) for event in events][:2] == [RoundStarted, ToolsRefused]


async def test_a_forced_round_is_marked_in_its_event() -> None:
    model = ScriptedModel(*(says("", call("add", {"a": n})) for n in range(3)), says("end"))
    events = await watched(ToolLoop(FunctionSource(add=add), model.endpoint))
    rounds = [event for event in events if isinstance(event, RoundStarted)]
    assert [event.forced for event in rounds] == [False, False, False, True]


async def test_closing_a_stream_cancels_the_calls_in_flight_before_it_returns() -> None:
    ended = []

    async def stuck() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    model = ScriptedModel(says("", call("stuck"), call("stuck", '{"n": 1}')), streams=True)
    source = FunctionSource()
    source.offer(lambda **arguments: stuck(), name="stuck")
    async with asyncio.timeout(WAIT_SECONDS), aclosing(ToolLoop(source, model.endpoint).stream("?")) as events:
        async for event in events:
            if isinstance(event, CallStarted) and event.order == 1:
                break
    assert ended == [True, True]


async def test_closing_a_stream_closes_the_models_stream() -> None:
    model = ScriptedModel(says("a long answer"), streams=True)
    async with (
        asyncio.timeout(WAIT_SECONDS),
        aclosing(ToolLoop(FunctionSource(), model.endpoint).stream("?")) as events,
    ):
        async for event in events:
            if isinstance(event, TextDelta):
                break
    assert model.closed == 1


async def test_an_error_of_the_client_is_raised_by_the_stream() -> None:
    model = ScriptedModel(ApiError(500, "oops"))
    with pytest.raises(ApiError, match="oops"):
        await watched(ToolLoop(FunctionSource(add=add), model.endpoint))


async def test_a_turn_that_fails_after_its_stream_was_closed_logs_no_warning() -> None:
    def late(request: object) -> object:
        return ApiError(500, "too late")

    async with aclosing(ToolLoop(FunctionSource(), ScriptedModel(late).endpoint).stream("?")) as events:
        async for event in events:
            assert isinstance(event, RoundStarted)
            break


async def test_calls_of_a_run_without_stream_do_not_request_progress() -> None:
    source = FunctionSource(add=add)
    progress_requested = []
    inner = source.call

    async def noted(*arguments: object, **options: object) -> object:
        progress_requested.append(options["on_progress"] is not None)
        return await inner(*arguments, **options)  # type: ignore[arg-type]

    source.call = noted  # type: ignore[method-assign,assignment]
    model = ScriptedModel(says("", call("add")), says("0"), says("", call("add")), says("0"))
    loop = ToolLoop(source, model.endpoint)
    await loop.run("?")
    await watched(loop)
    assert progress_requested == [False, True]


async def test_conversations_run_in_parallel_on_one_loop() -> None:
    def answer(request: dict[str, Any]) -> object:
        last = request["messages"][-1]
        return says("done") if last["role"] == "tool" else says("", call("add", {"a": int(last["content"])}))

    model = ScriptedModel(*[answer] * 8)
    loop = ToolLoop(FunctionSource(add=add), model.endpoint)
    replies = await asyncio.gather(*(loop.run(str(n)) for n in range(4)))
    assert [[done.result.output for done in reply.calls] for reply in replies] == [[0], [1], [2], [3]]
