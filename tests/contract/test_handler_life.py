from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest

from tests.contract.handler_cases import failure
from tests.contract.offer import Offer, declared
from tests.contract.offers import Kind
from tests.contract.works import CITY, Blocking, Scope, Seen, Waiting, Work, echo, returns
from tests.support.waiting import WAIT_SECONDS, until, within
from toolbus.bus import Bus
from toolbus.errors import Code, Stage
from toolbus.protocol.tool import Result
from toolbus.sdk import CallContext, ContextMessage

pytestmark = pytest.mark.asyncio(loop_scope="module")

# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said_by", ["the call", "the tool"])
async def test_a_call_that_times_out_names_the_limit_and_its_tool_is_cancelled(
    bus: Bus, offer: Offer, said_by: str
) -> None:
    waiting = Waiting(timeout=0.15 if said_by == "the tool" else 30.0)
    await offer.offer(waiting.work)
    timeouts = []

    def call(timeout: float) -> Awaitable[Result]:
        timeouts.append(timeout if said_by == "the call" else 0.15)
        return bus.call("waits", timeout=timeout if said_by == "the call" else None)

    error = await waiting.times_out(call)
    assert (error.code, error.stage) == (Code.DEADLINE_EXCEEDED, Stage.DISPATCHED)
    assert error.limit == ("timeout_seconds", timeouts[-1])
    assert not error.retry_safe
    await waiting.was_cancelled()
    await offer.idle()


async def test_progress_holds_off_the_idle_timeout_and_silence_does_not_where_there_is_one(
    bus: Bus, offer: Offer, kind: Kind
) -> None:
    waiting = Waiting(idle_timeout=0.6)

    async def works(arguments: dict[str, Any], scope: Scope) -> Any:
        for _ in range(8):  # longer than the tool may be silent
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.1)
            scope.report()
        return await waiting.work.run(arguments, scope)

    await offer.offer(Work("works", works, idle_timeout=0.6))
    seen: list[Any] = []
    error = failure(await within(bus.call("works", on_progress=seen.append, timeout=3.0)))
    assert error.code is Code.DEADLINE_EXCEEDED
    if kind.reports_progress:
        assert len(seen) == 8
        assert (error.stage, error.limit) == (Stage.ACCEPTED, ("idle_timeout_seconds", 0.6))
    else:
        assert (error.stage, error.limit) == (Stage.DISPATCHED, ("timeout_seconds", 3.0))
    await waiting.was_cancelled()
    await offer.idle()


async def test_a_plain_function_sees_a_cancel_and_keeps_its_slot_until_it_returns(
    bus: Bus, offer: Offer, kind: Kind
) -> None:
    blocking = Blocking()
    await offer.offer(blocking.work, echo())
    call = asyncio.create_task(bus.call("blocks"))
    await blocking.has_begun()
    call.cancel()
    await asyncio.wait([call])
    await until(lambda: blocking.scope is not None and blocking.scope.cancelled.is_set(), "the cancel")
    await within(bus.call("echo"))  # whatever was answered before has arrived with it
    assert offer.pending() == int(kind.holds_slots)
    blocking.let_go()
    await offer.idle()


async def test_a_plain_function_that_handed_back_something_to_wait_for_is_cancelled_as_well(
    bus: Bus, offer: Offer
) -> None:
    waiting = Waiting()
    await offer.offer(Work("waits", lambda arguments, scope: waiting.work.run(arguments, scope)))
    error = await waiting.times_out(lambda timeout: bus.call("waits", timeout=timeout))
    assert error.code is Code.DEADLINE_EXCEEDED
    await waiting.was_cancelled()
    await offer.idle()


async def test_what_a_plain_function_hands_back_after_its_call_was_cancelled_is_cancelled_as_well(
    bus: Bus, offer: Offer
) -> None:
    waiting, begun = Waiting(), threading.Event()

    def begin(arguments: dict[str, Any], scope: Scope) -> Any:
        begun.set()
        assert scope.cancelled.wait(WAIT_SECONDS)
        return waiting.work.run(arguments, scope)

    await offer.offer(Work("begins", begin))
    call = asyncio.create_task(bus.call("begins"))
    await until(begun.is_set, "the function to begin")
    call.cancel()
    await asyncio.wait([call])
    await offer.idle()
    await until(lambda: waiting.begun == waiting.cancelled, "what was handed back to be cancelled")


# -- many at once ------------------------------------------------------------------------------------------------------


async def test_functions_that_block_delay_no_other_call(bus: Bus, offer: Offer) -> None:
    blocking = Blocking()
    plain = Work("plain", lambda arguments, scope: "plain")
    await offer.offer(blocking.work, echo(), plain)
    calls = [asyncio.create_task(bus.call("blocks")) for _ in range(24)]
    await blocking.has_begun(24)
    assert (await within(bus.call("echo"))).unwrap() == {}
    assert (await within(bus.call("plain"))).unwrap() == "plain"
    assert not any(call.done() for call in calls)
    blocking.let_go()
    assert [result.unwrap() for result in await asyncio.gather(*calls)] == ["let go"] * 24


# -- context -----------------------------------------------------------------------------------------------------------


async def test_what_the_host_says_of_the_circumstances_arrives_and_is_gone_with_the_next_call_or_never_arrives(
    bus: Bus, offer: Offer, kind: Kind
) -> None:
    seen = Seen()
    await offer.offer(echo(seen=seen))
    context = CallContext(
        user_id="小明",
        attributes={"channel": "voice", "ключ": ""},
        member={"id": 2**70, "name": "Ada", "tags": ["a"]},
        messages=(ContextMessage("user", "wie wird's? 🌦", "Bob"), ContextMessage("assistant", "")),
        traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    )
    given = (context, CallContext(), CallContext(user_id="only"))
    for each in given:
        await within(bus.call("echo", {"userId": "eve"}, context=each if each != CallContext() else None))
    shown = given if kind.shows_context else [CallContext()] * 3
    assert [scope.context for scope in seen.scopes] == list(shown)
    host_only = {"userId": "eve"} if not kind.strips_user_keys else {}
    assert seen.arguments == [host_only] * 3  # what the host says comes in no other way either


# -- tools that come, change and go ------------------------------------------------------------------------------------


async def test_a_listing_is_the_same_for_every_kind_of_handler(bus: Bus, offer: Offer, kind: Kind) -> None:
    work = echo("weather.now", description="Tells the weather. 天气", parameters=CITY, timeout=7.5, idle_timeout=2.5)
    await offer.offer(work)
    (listing,) = bus.list()
    expected = declared(work)
    by_nature: dict[str, Any] = {
        "callback_url": listing.tool.callback_url,
        "metadata_json": listing.tool.metadata_json,  # the file of a drop-in tool
        "no_defaults": not kind.fills_defaults,
        "hints_trusted": kind.hints_believed,
    }
    if not kind.reports_progress:
        by_nature["idle_timeout_seconds"] = 0.0
    written = replace(listing.tool, parameters_json=expected.parameters_json)  # all the same but for white space
    assert written == replace(expected, **by_nature)
    assert listing.tool.parameters == CITY
    assert listing.tool.schema_hash == declared(work).schema_hash
    assert (listing.source, listing.roles, len(listing.entry.handlers())) == (offer.source, ("default",), 1)


async def test_an_unknown_tool_is_not_found_and_those_that_there_are_get_named(bus: Bus, offer: Offer) -> None:
    await offer.offer(echo(), echo("weather.now"))
    error = failure(await within(bus.call("wether")))
    assert (error.code, error.stage) == (Code.NOT_FOUND, Stage.NOT_DISPATCHED)
    assert "'wether'" in error.message
    assert error.message.endswith("echo, weather.now")


async def test_a_call_with_an_older_schema_hash_fails_with_what_changed(bus: Bus, offer: Offer) -> None:
    await offer.offer(echo(parameters=CITY), returns("other"))
    known = bus.list()[0].tool.schema_hash
    assert (await within(bus.call("echo", {"where": {}}, schema_hash=known))).unwrap() == {"where": {}}
    properties = {**CITY["properties"], "unit": {"type": "string"}}
    await offer.offer(echo(parameters={**CITY, "properties": properties}))
    error = failure(await within(bus.call("echo", {"where": {}}, schema_hash=known)))
    assert (error.code, error.stage) == (Code.CATALOG_STALE, Stage.NOT_DISPATCHED)
    assert "new argument 'unit'" in error.message
    listed = bus.list()
    assert [each.tool.name for each in listed] == ["echo", "gives"]  # it has kept its place
    result = await within(bus.call("echo", {"where": {}, "unit": "C"}, schema_hash=listed[0].tool.schema_hash))
    assert result.unwrap() == {"where": {}, "unit": "C"}


async def test_a_schema_that_is_written_differently_is_the_same_declaration(bus: Bus, offer: Offer) -> None:
    await offer.offer(echo(parameters=CITY))
    known = bus.list()[0].tool.schema_hash
    await offer.offer(echo(parameters=dict(reversed(CITY.items()))))
    assert (await within(bus.call("echo", {"where": {}}, schema_hash=known))).unwrap() == {"where": {}}


async def test_a_tool_that_left_in_good_order_is_gone_at_once(bus: Bus, offer: Offer) -> None:
    await offer.offer(echo())
    await offer.withdraw("echo")
    assert failure(await within(bus.call("echo"))).message == "there is no tool 'echo'; there are: none"
    assert bus.list() == []
