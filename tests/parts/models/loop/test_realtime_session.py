"""Tests realtime sessions: their tools, their calls, their events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.parts.models.loop.realtime_provider import (
    BlockedTool,
    ChangingSource,
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
from toolbus.errors import Code, SetupError
from toolbus.functions.call_context import CallContext
from toolbus.parts.models.dialects.conversation import Json
from toolbus.parts.models.dialects.gemini_live import GeminiLive
from toolbus.parts.models.dialects.openai_realtime import OpenAIRealtime
from toolbus.parts.models.loop.loop_events import CallEnded, CallProgress, CallStarted, ReasoningDelta, TextDelta
from toolbus.parts.models.loop.realtime_session import (
    CallRefused,
    NewSessionNeeded,
    RealtimeSession,
    ResponseDone,
    SendFailed,
    Sync,
    ToolsSent,
)

# -- tools -----------------------------------------------------------------------------------------------------------


async def test_sync_sends_the_current_tools_only_if_they_changed() -> None:
    source, provider = FunctionSource(add=add), Provider()
    session = RealtimeSession(OpenAIRealtime(), source, provider.send)
    assert await session.sync() is Sync.SENT
    assert provider.tools == ["add"]
    assert await session.sync() is Sync.UNCHANGED
    source.offer(greet)
    assert await session.sync() is Sync.SENT
    assert provider.tools == ["add", "greet"]
    source.remove("add")
    source.remove("greet")
    assert await session.sync() is Sync.SENT
    assert provider.tools == []
    assert len(provider.sent) == 3


async def test_a_session_without_tools_is_sent_nothing() -> None:
    provider = Provider()
    session = RealtimeSession(OpenAIRealtime(), FunctionSource(), provider.send)
    assert await session.sync() is Sync.UNCHANGED
    assert provider.sent == []


async def test_sync_raises_the_error_of_send_and_sends_the_same_tools_the_next_time() -> None:
    source, provider = FunctionSource(add=add), Provider()
    session = RealtimeSession(OpenAIRealtime(), source, provider.send)
    provider.next_error = ConnectionResetError("gone")
    with pytest.raises(ConnectionResetError, match="gone"):
        await session.sync()
    assert session.export.tools == ()
    assert await session.sync() is Sync.SENT
    assert provider.tools == ["add"]


async def test_syncs_at_the_same_time_send_the_tools_once() -> None:
    provider = Provider()
    session = RealtimeSession(OpenAIRealtime(), FunctionSource(add=add), provider.send)
    outcomes = await with_timeout(asyncio.gather(session.sync(), session.sync()))
    assert [*outcomes] == [Sync.SENT, Sync.UNCHANGED]
    assert len(provider.sent) == 1


async def test_send_may_be_a_plain_function() -> None:
    sent: list[Json] = []
    session = RealtimeSession(OpenAIRealtime(), FunctionSource(add=add), sent.append)
    assert await session.sync() is Sync.SENT
    assert [event["type"] for event in sent] == ["session.update"]


async def test_a_fixed_session_gets_its_tools_with_its_setup_and_needs_a_new_one_for_others() -> None:
    notifications: list[Any] = []
    source, provider = FunctionSource(add=add), Provider()
    session = RealtimeSession(GeminiLive(), source, provider.send, on_event=notifications.append)
    setup = (await session.setup())["setup"]
    assert [each["name"] for each in setup["tools"][0]["function_declarations"]] == ["add"]
    assert await session.sync() is Sync.UNCHANGED
    source.offer(greet)
    assert await session.sync() is Sync.NEW_SESSION
    assert [type(each) for each in notifications] == [NewSessionNeeded]
    assert [*notifications[0].export.kept] == ["add", "greet"]
    assert [*session.export.kept] == ["add"]
    assert provider.sent == []


async def test_a_change_outside_the_export_is_not_sent_but_later_calls_carry_the_new_hash() -> None:
    source, provider = FunctionSource(now=lambda: "noon"), Provider()
    async with RealtimeSession(GeminiLive(), source, provider.send) as session:
        await session.setup()
        source.offer(lambda: "midnight", name="now", parameters_json='{"type":"object","additionalProperties":false}')
        assert await session.sync() is Sync.UNCHANGED
        await feed(session, live_calls(("f1", "now")))
        await provider.until(lambda: len(provider.sent) == 1)
    (response,) = provider.sent[0]["tool_response"]["function_responses"]
    assert response["response"] == {"result": "midnight"}


async def test_a_call_of_gemini_that_comes_in_two_messages_runs_once() -> None:
    ran: list[int] = []
    source, provider = FunctionSource(count=lambda: ran.append(1)), Provider()
    async with RealtimeSession(GeminiLive(), source, provider.send) as session:
        await session.setup()
        await feed(session, live_calls(("f1", "count")), live_calls(("f1", "count")))
        await provider.until(lambda: len(provider.sent) == 1)
        await feed(session, live_calls(("f1", "count"), ("f2", "count")))  # after the answer, beside a new call
        await provider.until(lambda: len(provider.sent) == 2)
    assert len(ran) == 2
    answers = [each["tool_response"]["function_responses"] for each in provider.sent]
    assert [[each["id"] for each in responses] for responses in answers] == [["f1"], ["f2"]]


async def test_follow_sends_the_tools_at_once_and_after_each_change() -> None:
    source, provider = ChangingSource(add=add), Provider()
    async with RealtimeSession(OpenAIRealtime(), source, provider.send) as session:
        following = session.follow()
        await provider.until(lambda: provider.tools == ["add"])
        source.offer(greet)
        source.revisions.put_nowait(source.revision)
        await provider.until(lambda: provider.tools == ["add", "greet"])
        assert session.follow() is following
        source.revisions.put_nowait(-1)
        await with_timeout(following)
    assert len(provider.sent) == 2


async def test_a_session_keeps_its_tools_while_a_bus_that_has_restarted_waits_for_its_plugins() -> None:
    source, provider = ChangingSource(add=add, greet=greet), Provider()
    async with RealtimeSession(OpenAIRealtime(), source, provider.send) as session:
        session.follow()
        await provider.until(lambda: provider.tools == ["add", "greet"])
        source.settling = True
        for name in ("add", "greet"):
            source.remove(name)
        assert await session.sync() is Sync.UNCHANGED
        source.revisions.put_nowait(source.revision)
        source.offer(add)  # the first plugin is back
        source.revisions.put_nowait(source.revision)
        await run_pending()
        assert (provider.tools, len(provider.sent)) == (["add", "greet"], 1)
        source.settling = False  # and no change follows: the other plugin does not come back
        await provider.until(lambda: provider.tools == ["add"])
    assert len(provider.sent) == 2


async def test_follow_continues_after_an_update_that_could_not_be_sent() -> None:
    notifications: list[Any] = []
    source, provider = ChangingSource(add=add), Provider()
    provider.next_error = ConnectionResetError("gone")
    async with RealtimeSession(OpenAIRealtime(), source, provider.send, on_event=notifications.append) as session:
        session.follow()
        source.revisions.put_nowait(source.revision)
        await provider.until(lambda: provider.tools == ["add"])
    assert [type(each) for each in notifications] == [SendFailed, ToolsSent]
    assert isinstance(notifications[0].error, ConnectionResetError)


async def test_a_source_whose_changes_fail_ends_follow_with_an_event() -> None:
    class Broken(FunctionSource):
        async def changes(self) -> AsyncIterator[int]:
            yield self.revision
            raise ConnectionError("the bus is gone")

    notifications: list[Any] = []
    session = RealtimeSession(OpenAIRealtime(), Broken(), Provider().send, on_event=notifications.append)
    await with_timeout(session.follow())
    assert [type(each) for each in notifications] == [SendFailed]


# -- calls -----------------------------------------------------------------------------------------------------------


async def test_a_call_is_made_and_answered_and_a_response_is_requested() -> None:
    source, provider = FunctionSource(add=add), Provider()
    context = CallContext(user_id="u1")
    async with await opened(source, provider, context=context) as session:
        await feed(session, provider.begin(), provider.call("c1", "add", a=1, b=2), provider.end())
        await provider.until(lambda: provider.requests == 1)
    assert provider.outputs == {"c1": "3"}
    assert source.calls == [("add", '{"a": 1, "b": 2}')]
    assert source.sent[0]["context"].user_id == "u1"
    assert source.sent[0]["schema_hash"]
    assert provider.violations == []


async def test_calls_of_a_response_run_in_parallel_and_are_answered_together_in_order() -> None:
    both, ended = asyncio.Barrier(2), asyncio.Event()

    async def first() -> int:
        await both.wait()
        await ended.wait()
        return 1

    async def second() -> int:
        await both.wait()
        ended.set()
        return 2

    provider = Provider()
    async with await opened(FunctionSource(first=first, second=second), provider) as session:
        await feed(session, provider.begin(), provider.call("c1", "first"), provider.call("c2", "second"))
        await feed(session, provider.end())
        await provider.until(lambda: provider.requests == 1)
    assert [event["type"] for event in provider.sent[1:]] == [
        *["conversation.item.create"] * 2,
        "response.create",
    ]
    assert [*provider.outputs.items()] == [("c1", "1"), ("c2", "2")]


async def test_results_wait_for_the_end_of_the_response_that_requested_them() -> None:
    ended = asyncio.Event()
    provider = Provider()
    async with await opened(FunctionSource(add=add), provider, on_event=sets(ended)) as session:
        await feed(session, provider.begin(), provider.call("c1", "add"))
        await with_timeout(ended.wait())
        await run_pending()
        assert provider.outputs == {}
        await feed(session, provider.end())
        await provider.until(lambda: provider.requests == 1)
    assert provider.violations == []


async def test_feed_does_not_wait_for_calls_and_late_results_wait_for_the_response_in_progress() -> None:
    blocked, ended = BlockedTool(), asyncio.Event()
    provider = Provider()
    async with await opened(FunctionSource(blocked=blocked.run), provider, on_event=sets(ended)) as session:
        await feed(session, provider.begin("r1"), provider.call("c1", "blocked", "r1"), provider.end("r1"))
        await with_timeout(blocked.running.wait())
        await feed(session, provider.begin("r2"))
        blocked.go.set()
        await with_timeout(ended.wait())
        await run_pending()
        assert provider.requests == 0
        await feed(session, provider.end("r2"))
        await provider.until(lambda: provider.requests == 1)
    assert provider.outputs == {"c1": "blocked"}
    assert provider.violations == []


async def test_results_of_two_responses_that_are_ready_together_request_one_response() -> None:
    blocked, ended = BlockedTool(), asyncio.Event()
    provider = Provider()
    async with await opened(FunctionSource(blocked=blocked.run, add=add), provider, on_event=sets(ended)) as session:
        await feed(session, provider.begin("r1"), provider.call("c1", "blocked", "r1"), provider.end("r1"))
        await feed(session, provider.begin("r2"), provider.call("c2", "add", "r2"))
        await with_timeout(ended.wait())
        ended.clear()
        blocked.go.set()
        await with_timeout(ended.wait())
        await feed(session, provider.end("r2"))
        await provider.until(lambda: provider.requests == 1)
    assert provider.outputs == {"c1": "blocked", "c2": "0"}
    assert [event["type"] for event in provider.sent].count("response.create") == 1


async def test_results_that_come_while_a_response_is_requested_wait_for_its_end() -> None:
    blocked, ended = BlockedTool(), asyncio.Event()
    provider = Provider()
    async with await opened(FunctionSource(blocked=blocked.run, add=add), provider, on_event=sets(ended)) as session:
        await feed(session, provider.begin("r1"), provider.call("c1", "blocked", "r1"), provider.end("r1"))
        await feed(session, provider.begin("r2"), provider.call("c2", "add", "r2"), provider.end("r2"))
        await provider.until(lambda: provider.requests == 1)
        ended.clear()
        blocked.go.set()
        await with_timeout(ended.wait())
        await run_pending()
        assert provider.outputs == {"c2": "0"}
        await feed(session, provider.begin("r3"), provider.end("r3"))
        await provider.until(lambda: provider.requests == 2)
    assert provider.outputs == {"c2": "0", "c1": "blocked"}
    assert provider.violations == []


async def test_a_response_that_was_not_announced_is_answered_as_well() -> None:
    provider = Provider()
    async with await opened(FunctionSource(add=add), provider) as session:
        await feed(session, provider.call("c1", "add", "", a=2))
        await provider.until(lambda: provider.requests == 1)
    assert provider.outputs == {"c1": "2"}


async def test_answers_of_one_batch_stay_together() -> None:
    begun, go = asyncio.Event(), asyncio.Event()
    provider = Provider()

    async def send(event: Json) -> None:
        begun.set()
        await go.wait()
        await provider.send(event)

    async with RealtimeSession(OpenAIRealtime(), FunctionSource(add=add), send) as session:
        await session.setup()
        await feed(session, provider.call("c1", "add", "a"))
        await with_timeout(begun.wait())
        await feed(session, provider.call("c2", "add", "b"))
        await run_pending()
        go.set()
        await provider.until(lambda: provider.requests == 2)
    assert [event["type"] for event in provider.sent] == ["conversation.item.create", "response.create"] * 2


async def test_a_tool_that_was_not_offered_is_refused_and_never_called() -> None:
    notifications: list[Any] = []
    source, provider = FunctionSource(add=add), Provider()
    async with await opened(source, provider, on_event=notifications.append) as session:
        source.offer(greet)  # the bus has it, this model does not know it
        await feed(session, provider.begin(), provider.call("c1", "greet"), provider.end())
        await provider.until(lambda: provider.requests == 1)
    assert source.calls == []
    assert "no tool 'greet'" in provider.outputs["c1"]
    assert "add" in provider.outputs["c1"]
    (refused,) = [each for each in notifications if isinstance(each, CallRefused)]
    assert refused.done.outcome == "not_found"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [("{not json", "not JSON"), ('{"a": 1}', "ValueError"), ("", "hello")],
)
async def test_invalid_arguments_and_sources_that_raise_get_an_error_as_result(arguments: str, words: str) -> None:
    def fussy(a: int | None = None) -> str:
        if a is not None:
            raise ValueError("no")
        return "hello"

    provider = Provider()
    async with await opened(FunctionSource(fussy=fussy), provider) as session:
        await feed(session, {**provider.call("c1", "fussy", ""), "arguments": arguments}, provider.end(""))
        await provider.until(lambda: provider.requests == 1)
    assert words in provider.outputs["c1"]


async def test_a_tool_that_changed_while_the_model_spoke_is_not_run_with_old_arguments() -> None:
    source, provider = FunctionSource(add=add), Provider()
    async with await opened(source, provider) as session:
        await feed(session, provider.begin())
        source.offer(add, description="Something else.")
        assert await session.sync() is Sync.SENT
        await feed(session, provider.call("c1", "add"), provider.end())
        await provider.until(lambda: provider.requests == 1)
    assert "has changed" in provider.outputs["c1"]


# -- the window ------------------------------------------------------------------------------------------------------


async def test_the_rate_limit_refuses_the_fifth_call_within_fifteen_seconds_and_allows_later_ones() -> None:
    now = 100.0
    notifications: list[Any] = []
    source, provider = FunctionSource(add=add), Provider()
    async with await opened(source, provider, on_event=notifications.append, clock=lambda: now) as session:
        await feed(session, provider.begin("r1"), *(provider.call(f"c{n}", "add", "r1", a=n) for n in range(4)))
        now = 110.0
        await feed(session, provider.call("c4", "add", "r1"), provider.end("r1"))
        await provider.until(lambda: provider.requests == 1)
        assert len(source.calls) == 4
        assert [provider.outputs[f"c{n}"] for n in range(4)] == ["0", "1", "2", "3"]
        assert "4 tool calls in 15 seconds" in provider.outputs["c4"]
        assert "possible in 5 seconds" in provider.outputs["c4"]
        now = 115.0
        await feed(session, provider.begin("r2"), provider.call("c5", "add", "r2", a=5), provider.end("r2"))
        await provider.until(lambda: provider.requests == 2)
    assert provider.outputs["c5"] == "5"
    (refused,) = [each for each in notifications if isinstance(each, CallRefused)]
    error = refused.done.result.error
    assert error is not None
    assert (error.code, error.limit, error.retry_after_seconds) == (Code.OVERLOADED, ("window_calls", 4.0), 5.0)


async def test_the_host_sets_the_rate_limit() -> None:
    source, provider = FunctionSource(add=add), Provider()
    async with await opened(source, provider, window_calls=1, clock=lambda: 0.0) as session:
        await feed(session, provider.call("c1", "add", ""), provider.call("c2", "add", ""))
        await provider.until(lambda: len(provider.outputs) == 2)
    assert len(source.calls) == 1


@pytest.mark.parametrize("options", [{"window_calls": 0}, {"window_seconds": -1.0}, {"window_seconds": float("nan")}])
async def test_an_invalid_rate_limit_is_refused_with_its_value(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(SetupError, match=f"{name} is {value!r}"):
        RealtimeSession(OpenAIRealtime(), FunctionSource(), Provider().send, **options)


# -- watching --------------------------------------------------------------------------------------------------------


async def test_on_event_receives_every_event() -> None:
    notifications: list[Any] = []
    provider = Provider()
    async with await opened(FunctionSource(add=add), provider, on_event=notifications.append) as session:
        await feed(session, {"type": "response.text.delta", "delta": "hm"})
        await feed(session, provider.begin(), provider.call("c1", "add"), provider.end())
        await provider.until(lambda: provider.requests == 1)
    assert [type(each) for each in notifications] == [
        *(ToolsSent, TextDelta, ResponseDone, CallStarted, CallProgress, CallEnded)
    ]
    assert notifications[1].text == "hm"
    done = notifications[5].done
    assert (done.call.id, done.round, done.order, done.outcome) == ("c1", 1, 0, "ok")


async def test_reasoning_is_distinguished_from_text() -> None:
    notifications: list[Any] = []
    session = RealtimeSession(GeminiLive(), FunctionSource(), Provider().send, on_event=notifications.append)
    parts = [{"text": "hm", "thought": True}, {"text": "hello"}]
    await feed(session, {"serverContent": {"modelTurn": {"parts": parts}}})
    assert notifications == [ReasoningDelta("hm"), TextDelta("hello")]


async def test_an_on_event_that_raises_is_logged_and_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def watch(notifications: Any) -> None:
        raise RuntimeError("the screen is gone")

    provider = Provider()
    with caplog.at_level(logging.ERROR, "toolbus.loop"):
        async with await opened(FunctionSource(add=add), provider, on_event=watch) as session:
            await feed(session, provider.begin(), provider.call("c1", "add"), provider.end())
            await provider.until(lambda: provider.requests == 1)
    assert "on_event" in caplog.text
    assert "the screen is gone" in caplog.text
    assert provider.outputs == {"c1": "0"}


async def test_answers_that_could_not_be_sent_are_reported_and_later_ones_are_sent() -> None:
    failure_reported = asyncio.Event()
    notifications: list[Any] = []

    def watch(each: Any) -> None:
        notifications.append(each)
        if isinstance(each, SendFailed):
            failure_reported.set()

    provider = Provider()
    async with await opened(FunctionSource(add=add), provider, on_event=watch) as session:
        provider.next_error = ConnectionResetError("gone")
        await feed(session, provider.begin(), provider.call("c1", "add"), provider.end())
        await with_timeout(failure_reported.wait())
        assert isinstance(notifications[-1].error, ConnectionResetError)
        await feed(session, provider.call("c2", "add", "r2"))
        await provider.until(lambda: provider.requests == 1)
    assert [*provider.outputs] == ["c2"]


async def test_unknown_events_are_ignored() -> None:
    provider = Provider()
    async with await opened(FunctionSource(add=add), provider) as session:
        await feed(session, {}, {"type": "session.updated"}, {"type": "response.done"}, provider.end("unheard of"))
    assert len(provider.sent) == 1
