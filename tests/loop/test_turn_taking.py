"""When a realtime session sends results and asks the model to go on, while the user or the model speaks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.loop.played import Shelf
from tests.loop.provider import Held, Provider, add, feed, opened, sets, settled, within
from toolbus.dialects.openai_realtime import OpenAIRealtime
from toolbus.loop.realtime_session import RealtimeSession

ITEM, GO_ON = "conversation.item.create", "response.create"


NO_PAUSE = 0.0  # seconds: a provider begins a response at once after the user has stopped, or never
ENDLESS_PAUSE = 60.0


def kinds(provider: Provider) -> list[str]:
    """What was sent after the tools."""
    return [event["type"] for event in provider.sent[1:]]


async def with_result_while_the_user_speaks(session: RealtimeSession, provider: Provider, held: Held) -> None:
    """Has a call of a response that is over end while the user speaks."""
    await feed(session, provider.begin("r1"), provider.call("c1", "held", "r1"), provider.end("r1"), provider.hears())
    held.go.set()
    await provider.until(lambda: provider.outputs == {"c1": "held"})
    await settled()
    assert kinds(provider) == [ITEM]


async def test_results_while_the_user_speaks_are_sent_and_the_provider_begins_by_itself() -> None:
    held, provider = Held(), Provider()
    async with await opened(Shelf(held=held.run), provider, pause_seconds=ENDLESS_PAUSE) as session:
        await with_result_while_the_user_speaks(session, provider, held)
        await feed(session, provider.heard(), provider.begin("r2"), provider.end("r2"))
        await settled()
        assert kinds(provider) == [ITEM]
    assert provider.broken == []


async def test_a_provider_that_does_not_begin_when_the_user_has_stopped_is_asked_to() -> None:
    held, provider = Held(), Provider()
    async with await opened(Shelf(held=held.run), provider, pause_seconds=NO_PAUSE) as session:
        await with_result_while_the_user_speaks(session, provider, held)
        await feed(session, provider.heard(), {"type": "input_audio_buffer.committed", "item_id": "i1"})
        await provider.until(lambda: provider.asked == 1)
        await feed(session, provider.begin("r2"), provider.end("r2"))
        await settled()
    assert kinds(provider) == [ITEM, GO_ON]
    assert provider.broken == []


async def test_results_that_come_when_the_user_has_just_stopped_wait_for_what_the_provider_begins() -> None:
    held, ended, provider = Held(), asyncio.Event(), Provider()
    async with await opened(
        Shelf(held=held.run), provider, on_event=sets(ended), pause_seconds=ENDLESS_PAUSE
    ) as session:
        await feed(session, provider.begin("r1"), provider.call("c1", "held", "r1"), provider.end("r1"))
        await feed(session, provider.hears(), provider.heard())
        held.go.set()
        await within(ended.wait())
        await settled()
        assert kinds(provider) == []
        await feed(session, provider.begin("r2"), provider.end("r2"))
        await provider.until(lambda: provider.asked == 1)
    assert kinds(provider) == [ITEM, GO_ON]
    assert provider.broken == []


async def test_who_speaks_again_within_the_pause_is_not_interrupted() -> None:
    held, provider = Held(), Provider()
    async with await opened(Shelf(held=held.run), provider, pause_seconds=NO_PAUSE) as session:
        await with_result_while_the_user_speaks(session, provider, held)
        await session.feed(provider.heard())
        await session.feed(provider.hears())
        await settled()
        assert kinds(provider) == [ITEM]
        await feed(session, provider.heard())
        await provider.until(lambda: provider.asked == 1)
    assert provider.broken == []


async def test_a_session_that_is_closed_in_the_pause_sends_nothing() -> None:
    held, provider = Held(), Provider()
    session = await opened(Shelf(held=held.run), provider, pause_seconds=NO_PAUSE)
    await with_result_while_the_user_speaks(session, provider, held)
    await session.feed(provider.heard())
    await session.close()
    await settled()
    assert kinds(provider) == [ITEM]


async def test_a_request_that_is_refused_for_another_response_is_made_again_after_it() -> None:
    provider = Provider()
    async with await opened(Shelf(add=add), provider) as session:
        await feed(session, provider.begin("r1"), provider.call("c1", "add", "r1"), provider.end("r1"))
        await provider.until(lambda: provider.asked == 1)
        await feed(session, provider.begin("r2"), provider.busy())  # the provider's own, which came before ours
        await settled()
        assert provider.asked == 1
        await feed(session, provider.end("r2"))
        await provider.until(lambda: provider.asked == 2)
        await feed(session, provider.begin("r3"), provider.end("r3"))
        await settled()
    assert kinds(provider) == [ITEM, GO_ON, GO_ON]
    assert provider.broken == []


async def test_a_request_that_is_refused_for_a_response_nobody_announced_waits_for_its_end() -> None:
    provider = Provider()
    async with await opened(Shelf(add=add), provider) as session:
        await feed(session, provider.call("c1", "add", ""))
        await provider.until(lambda: provider.asked == 1)
        await feed(session, provider.busy(), {"type": "response.output_text.delta", "delta": "hm"})
        await settled()
        assert provider.asked == 1
        await feed(session, provider.end("r0"))
        await provider.until(lambda: provider.asked == 2)
    assert kinds(provider) == [ITEM, GO_ON, GO_ON]


async def test_a_request_of_others_that_is_refused_is_not_made_by_the_session() -> None:
    provider = Provider()
    async with await opened(Shelf(add=add), provider) as session:
        await feed(session, provider.begin("r1"), provider.busy(), provider.end("r1"), provider.busy())
        await settled()
    assert kinds(provider) == []


@pytest.mark.parametrize("event", ['{"type": "response.created"}', b"{}", None, 5, ["x"]])
async def test_what_is_no_event_is_refused_with_the_cure(event: Any) -> None:
    session = RealtimeSession(OpenAIRealtime(), Shelf(), Provider().send)
    with pytest.raises(TypeError, match=f"a {type(event).__name__} is not an event .* json.loads"):
        await session.feed(event)
