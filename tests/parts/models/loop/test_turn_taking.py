"""Tests when a realtime session sends results and requests a response, while the user or the model speaks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.parts.models.loop.realtime_provider import (
    BlockedTool,
    Provider,
    add,
    feed,
    opened,
    run_pending,
    sets,
    with_timeout,
)
from tests.parts.models.loop.scripted_model import FunctionSource
from toolbus.errors import InvalidRequest
from toolbus.parts.models.dialects.gemini_live import GeminiLive
from toolbus.parts.models.dialects.openai_realtime import (
    GlmRealtime,
    Grok,
    OpenAIRealtime,
    QwenRealtime,
    StepFunRealtime,
)
from toolbus.parts.models.loop.realtime_session import RealtimeSession, SendFailed

ITEM, GO_ON = "conversation.item.create", "response.create"


NO_PAUSE = 0.0  # seconds: a provider begins a response at once after the user has stopped, or never
ENDLESS_PAUSE = 60.0


def kinds(provider: Provider) -> list[str]:
    """What was sent after the tools."""
    return [event["type"] for event in provider.sent[1:]]


async def with_result_while_the_user_speaks(session: RealtimeSession, provider: Provider, blocked: BlockedTool) -> None:
    """Has a call of a response that is over end while the user speaks."""
    await feed(
        session,
        provider.begin("r1"),
        provider.call("c1", "blocked", "r1"),
        provider.end("r1"),
        provider.starts_speaking(),
    )
    blocked.go.set()
    await provider.until(lambda: provider.outputs == {"c1": "blocked"})
    await run_pending()
    assert kinds(provider) == [ITEM]


async def test_results_while_the_user_speaks_are_sent_and_the_provider_begins_by_itself() -> None:
    blocked, provider = BlockedTool(), Provider()
    async with await opened(FunctionSource(blocked=blocked.run), provider, pause_seconds=ENDLESS_PAUSE) as session:
        await with_result_while_the_user_speaks(session, provider, blocked)
        await feed(session, provider.stops_speaking(), provider.begin("r2"), provider.end("r2"))
        await run_pending()
        assert kinds(provider) == [ITEM]
    assert provider.violations == []


async def test_a_response_is_requested_where_the_provider_does_not_begin_one_after_the_user_stopped() -> None:
    blocked, provider = BlockedTool(), Provider()
    async with await opened(FunctionSource(blocked=blocked.run), provider, pause_seconds=NO_PAUSE) as session:
        await with_result_while_the_user_speaks(session, provider, blocked)
        await feed(session, provider.stops_speaking(), {"type": "input_audio_buffer.committed", "item_id": "i1"})
        await provider.until(lambda: provider.requests == 1)
        await feed(session, provider.begin("r2"), provider.end("r2"))
        await run_pending()
    assert kinds(provider) == [ITEM, GO_ON]
    assert provider.violations == []


async def test_results_that_come_in_the_pause_wait_for_the_response_that_the_provider_begins() -> None:
    blocked, ended, provider = BlockedTool(), asyncio.Event(), Provider()
    async with await opened(
        FunctionSource(blocked=blocked.run), provider, on_event=sets(ended), pause_seconds=ENDLESS_PAUSE
    ) as session:
        await feed(session, provider.begin("r1"), provider.call("c1", "blocked", "r1"), provider.end("r1"))
        await feed(session, provider.starts_speaking(), provider.stops_speaking())
        blocked.go.set()
        await with_timeout(ended.wait())
        await run_pending()
        assert kinds(provider) == []
        await feed(session, provider.begin("r2"), provider.end("r2"))
        await provider.until(lambda: provider.requests == 1)
    assert kinds(provider) == [ITEM, GO_ON]
    assert provider.violations == []


async def test_a_user_who_speaks_again_within_the_pause_is_not_interrupted() -> None:
    blocked, provider = BlockedTool(), Provider()
    async with await opened(FunctionSource(blocked=blocked.run), provider, pause_seconds=NO_PAUSE) as session:
        await with_result_while_the_user_speaks(session, provider, blocked)
        await session.feed(provider.stops_speaking())
        await session.feed(provider.starts_speaking())
        await run_pending()
        assert kinds(provider) == [ITEM]
        await feed(session, provider.stops_speaking())
        await provider.until(lambda: provider.requests == 1)
    assert provider.violations == []


async def test_a_session_that_is_closed_in_the_pause_sends_nothing() -> None:
    blocked, provider = BlockedTool(), Provider()
    session = await opened(FunctionSource(blocked=blocked.run), provider, pause_seconds=NO_PAUSE)
    await with_result_while_the_user_speaks(session, provider, blocked)
    await session.feed(provider.stops_speaking())
    await session.close()
    await run_pending()
    assert kinds(provider) == [ITEM]


async def test_a_request_that_is_refused_because_of_another_response_is_repeated_after_it() -> None:
    provider = Provider()
    async with await opened(FunctionSource(add=add), provider) as session:
        await feed(session, provider.begin("r1"), provider.call("c1", "add", "r1"), provider.end("r1"))
        await provider.until(lambda: provider.requests == 1)
        await feed(session, provider.begin("r2"), provider.busy())  # the provider's own, which came before ours
        await run_pending()
        assert provider.requests == 1
        await feed(session, provider.end("r2"))
        await provider.until(lambda: provider.requests == 2)
        await feed(session, provider.begin("r3"), provider.end("r3"))
        await run_pending()
    assert kinds(provider) == [ITEM, GO_ON, GO_ON]
    assert provider.violations == []


async def test_a_request_that_is_refused_because_of_an_unannounced_response_waits_for_its_end() -> None:
    provider = Provider()
    async with await opened(FunctionSource(add=add), provider) as session:
        await feed(session, provider.call("c1", "add", ""))
        await provider.until(lambda: provider.requests == 1)
        await feed(session, provider.busy(), {"type": "response.output_text.delta", "delta": "hm"})
        await run_pending()
        assert provider.requests == 1
        await feed(session, provider.end("r0"))
        await provider.until(lambda: provider.requests == 2)
    assert kinds(provider) == [ITEM, GO_ON, GO_ON]


@pytest.mark.parametrize("ends_before", [False, True], ids=["nothing ends", "the response ends before the refusal"])
async def test_a_refused_request_without_a_later_response_is_repeated_once(ends_before: bool) -> None:
    provider = Provider()
    async with await opened(FunctionSource(add=add), provider, pause_seconds=NO_PAUSE) as session:
        await feed(session, provider.begin("r1"), provider.call("c1", "add", "r1"), provider.end("r1"))
        await provider.until(lambda: provider.requests == 1)
        await feed(session, *([provider.end("r0")] if ends_before else []), provider.busy())
        await provider.until(lambda: provider.requests == 2)
        await feed(session, provider.busy())
        await run_pending()
        assert provider.requests == 2
        await feed(session, provider.begin("r2"), provider.end("r2"))
        await run_pending()
        session.request_response()
        await provider.until(lambda: provider.requests == 3)
        await feed(session, provider.busy())
        await provider.until(lambda: provider.requests == 4)


async def test_a_refused_request_of_another_party_is_not_repeated_by_the_session() -> None:
    provider = Provider()
    async with await opened(FunctionSource(add=add), provider) as session:
        await feed(session, provider.begin("r1"), provider.busy(), provider.end("r1"), provider.busy())
        await run_pending()
    assert kinds(provider) == []


@pytest.mark.parametrize("event", ['{"type": "response.created"}', b"{}", None, 5, ["x"]])
async def test_a_value_that_is_not_an_event_is_refused_with_the_fix(event: Any) -> None:
    session = RealtimeSession(OpenAIRealtime(), FunctionSource(), Provider().send)
    with pytest.raises(TypeError, match=f"a {type(event).__name__} is not an event .* json.loads"):
        await session.feed(event)


# -- responses that the program requests -----------------------------------------------------------------------------

ADD: dict[str, Any] = {"type": "response.create", "response": {"tool_choice": {"type": "function", "name": "add"}}}


async def test_a_program_requests_a_response_with_a_choice_of_tools() -> None:
    provider = Provider()
    session = await opened(FunctionSource(add=add), provider)
    session.request_response()
    await provider.until(lambda: provider.requests == 1)
    await feed(session, provider.begin("r1"), provider.end("r1"))
    for number, choice in enumerate(("add", "required", "none"), 2):
        session.request_response(choice)
        await provider.until(lambda: provider.requests == number)  # noqa: B023 (it is awaited at once)
        await feed(session, provider.begin(f"r{number}"), provider.end(f"r{number}"))
    written = [event.get("response", {}).get("tool_choice") for event in provider.sent[1:]]
    assert written == [None, ADD["response"]["tool_choice"], "required", "none"]
    assert provider.violations == []


async def test_a_requested_response_waits_for_the_one_in_progress_and_for_the_user() -> None:
    provider = Provider()
    session = await opened(FunctionSource(add=add), provider, pause_seconds=NO_PAUSE)
    await feed(session, provider.begin("r1"))
    session.request_response("add")
    await run_pending()
    assert provider.requests == 0
    await feed(session, provider.starts_speaking(), provider.end("r1"))
    await run_pending()
    assert provider.requests == 0
    await feed(session, provider.stops_speaking())
    await provider.until(lambda: provider.requests == 1)
    assert (provider.sent[-1], provider.violations) == (ADD, [])


async def test_a_choice_survives_a_response_that_began_by_itself_and_a_refusal() -> None:
    provider = Provider()
    session = await opened(FunctionSource(add=add), provider)
    await feed(session, provider.begin("r0"), provider.end("r0"))
    session.request_response("add")
    await provider.until(lambda: provider.requests == 1)
    await feed(session, provider.begin("r1"), provider.busy())  # the provider had begun one by itself
    await run_pending()
    assert provider.requests == 1
    await feed(session, provider.end("r1"))
    await provider.until(lambda: provider.requests == 2)
    assert provider.sent[-1] == ADD
    await feed(session, provider.begin("r2"), provider.end("r2"))
    await run_pending()
    assert provider.requests == 2


async def test_a_response_that_begins_by_itself_stands_for_a_requested_one_only_without_a_choice() -> None:
    for choice, requests in (("auto", 0), ("add", 1)):
        provider = Provider()
        session = await opened(FunctionSource(add=add), provider, pause_seconds=ENDLESS_PAUSE)
        await feed(session, provider.starts_speaking())
        session.request_response(choice)
        await feed(session, provider.stops_speaking(), provider.begin("r1"), provider.end("r1"))
        await run_pending()
        assert (provider.requests, provider.violations) == (requests, [])
        await session.close()


async def test_results_go_with_the_choice_that_was_requested() -> None:
    provider, blocked = Provider(), BlockedTool()
    session = await opened(FunctionSource(add=add, blocked=blocked.run), provider)
    await feed(session, provider.begin("r1"), provider.call("c1", "blocked", "r1"))
    session.request_response("add")
    blocked.go.set()
    await run_pending()
    await feed(session, provider.end("r1"))
    await provider.until(lambda: provider.requests == 1)
    assert kinds(provider) == [ITEM, GO_ON]
    assert provider.sent[-1] == ADD


async def test_without_its_chosen_tool_a_response_is_requested_without_a_choice() -> None:
    source, provider = FunctionSource(add=add), Provider()
    events: list[Any] = []
    session = await opened(source, provider, on_event=events.append)
    await feed(session, provider.begin("r1"))
    session.request_response("add")
    source.remove("add")
    await session.sync()
    await feed(session, provider.end("r1"))
    await provider.until(lambda: provider.requests == 1)
    assert provider.sent[-1] == {"type": GO_ON}
    assert any(isinstance(event, SendFailed) for event in events)


async def test_a_choice_that_the_session_or_its_provider_does_not_have_is_refused() -> None:
    provider = Provider()
    session = await opened(FunctionSource(add=add), provider)
    with pytest.raises(InvalidRequest, match=r"'ad', .* such as add$"):
        session.request_response("ad")
    for dialect in (Grok(), GlmRealtime(), QwenRealtime(), StepFunRealtime(), GeminiLive()):
        with pytest.raises(InvalidRequest, match=f"sessions of {dialect.name} have no choice: use"):
            RealtimeSession(dialect, FunctionSource(add=add), provider.send).request_response("required")
    await run_pending()
    assert provider.requests == 0
