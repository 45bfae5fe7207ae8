"""However a tool is called, the caller sees the same: every way of calling against every way of offering."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from tests.contract.callers import Caller
from tests.contract.conftest import RESULT_BYTES
from tests.contract.handler_cases import failure
from tests.contract.offer import Offer
from tests.contract.offers import Kind
from tests.contract.works import CITY, Refuses, Scope, Seen, Shows, Waiting, Work, echo, raises, returns
from tests.support.waiting import WAIT_SECONDS, until, within
from toolbus.bus import Bus
from toolbus.errors import Code, Stage
from toolbus.functions.reply import image, link, text
from toolbus.protocol.tool import Progress, Result
from toolbus.sdk import CallContext, ContextMessage

pytestmark = pytest.mark.asyncio(loop_scope="module")

VALUES: dict[str, Any] = {
    "numbers": [5, 5.0, 2**63, -(2**70), 1e-7, 0],
    "words": ["", "晴，二十三度", "⛅👩‍👩‍👧‍👦", 'a\x00b\u2028c"\\\n'],
    "others": [None, True, False, [], {}, {"": {"deep": [{}]}}],
}


async def test_arguments_and_results_are_handed_on_exactly(offer: Offer, caller: Caller) -> None:
    seen = Seen()
    await offer.offer(echo(seen=seen))
    given: list[Any] = [VALUES, {}, None]
    for arguments in given:
        result = await within(caller.call("echo", arguments))
        assert repr(result.unwrap()) == repr(arguments or {})
        assert not result.content
    assert repr(seen.arguments) == repr([VALUES, {}, {}])


async def test_a_null_result_is_none(offer: Offer, caller: Caller) -> None:
    await offer.offer(returns(None))
    result = await within(caller.call("gives"))
    assert (result.output_json, result.unwrap(), result.is_error) == ("null", None, False)


async def test_parts_beside_the_output_arrive_whole(offer: Offer, kind: Kind, caller: Caller) -> None:
    parts = (text("哇 👋"), image(bytes(range(256))), link("https://example.org/a?b=c#d", "a page", mime="text/html"))

    async def shows(arguments: dict[str, Any], scope: Scope) -> Any:
        return Shows(["kept", 5.0], parts)

    await offer.offer(Work("shows", shows))
    result = await within(caller.call("shows"))
    assert (repr(result.unwrap()), result.content) == ("['kept', 5.0]", parts if kind.sends_content else ())


# What is passed on unchecked, for arguments that are not a JSON object (REST-40).
UNCHECKED: dict[str, Any] = {'{"where": {"city": 5}, ': {"_raw": '{"where": {"city": 5}, '}, "[]": {"value": []}}

BROKEN: list[Any] = [{"where": {"city": 5}}, '{"where": {"city": 5}, ', "[]", {"where": {"city": "\ud83d"}}]


async def test_arguments_that_do_not_fit_never_arrive_where_they_are_checked(
    offer: Offer, kind: Kind, caller: Caller
) -> None:
    seen = Seen()
    await offer.offer(echo(seen=seen, parameters=CITY))
    for arguments in BROKEN:
        result = await within(caller.call("echo", arguments))
        if not kind.checks_arguments:
            assert seen.arguments == [UNCHECKED[arguments] if isinstance(arguments, str) else arguments]
            seen.arguments.clear()
            continue
        error = failure(result)
        assert (error.code, error.stage, error.retry_safe) == (Code.INVALID_ARGUMENTS, Stage.NOT_DISPATCHED, False)
        assert "where.city" in error.message or "JSON" in error.message, arguments
        assert not seen.arguments


async def test_a_tool_that_fails_is_distinguished_from_a_bus_that_cannot_call_it(
    offer: Offer, kind: Kind, caller: Caller
) -> None:
    async def refuses(arguments: dict[str, Any], scope: Scope) -> Any:
        return Refuses("city_unknown", {"nearest": "图拉"})

    await offer.offer(raises(ValueError("no such city: Тула")), Work("refuses", refuses))
    raised = failure(await within(caller.call("fails", {"fail": True})))
    assert (raised.code, raised.stage) == (Code.TOOL, Stage.ACCEPTED)
    assert raised.reason == ("ValueError" if kind.names_class else raised.message)
    assert raised.message.endswith("no such city: Тула")
    refused = await within(caller.call("refuses"))
    assert failure(refused).reason == "city_unknown"
    assert refused.output == {"nearest": "图拉"}
    missing = failure(await within(caller.call("refusse")))
    assert (missing.code, missing.stage) == (Code.NOT_FOUND, Stage.NOT_DISPATCHED)
    assert missing.message.endswith("fails, refuses")


async def test_a_result_over_the_limit_is_replaced_by_the_limit(offer: Offer, caller: Caller) -> None:
    await offer.offer(returns("x" * (RESULT_BYTES + 1)))
    error = failure(await within(caller.call("gives")))
    assert (error.code, error.limit, error.retry_safe) == (
        Code.RESULT_TOO_LARGE,
        ("result_bytes", RESULT_BYTES),
        False,
    )
    await offer.offer(returns("x" * (RESULT_BYTES - 1000)))
    assert len((await within(caller.call("gives"))).unwrap()) == RESULT_BYTES - 1000


async def test_progress_arrives_in_order_while_the_tool_works(offer: Offer, kind: Kind, caller: Caller) -> None:
    waiting = Waiting()

    async def steps(arguments: dict[str, Any], scope: Scope) -> Any:
        for step in range(1, 6):
            scope.report(step, total=5, message=f"step {step}", chunk=f"{step} ")
        return await waiting.work.run(arguments, scope)

    await offer.offer(Work("steps", steps))
    seen: list[Progress] = []
    call = asyncio.create_task(caller.call("steps", on_progress=seen.append))
    steps_seen = range(1, 6) if kind.reports_progress else ()
    await waiting.has_begun()
    await until(lambda: len(seen) == len(steps_seen), "the progress")
    chunks = [f"{step} " if kind.shows_chunks else "" for step in steps_seen]
    assert seen == [Progress(step, 5, f"step {step}", chunk) for step, chunk in zip(steps_seen, chunks, strict=True)]
    assert not call.done()
    waiting.let_go()
    assert (await within(call)).unwrap() == "let go"


async def test_a_call_that_times_out_names_the_limit_and_its_tool_is_cancelled(offer: Offer, caller: Caller) -> None:
    waiting = Waiting()
    await offer.offer(waiting.work)
    timeouts = []

    def call(timeout: float) -> Awaitable[Result]:
        timeouts.append(timeout)
        return caller.call("waits", timeout=timeout)

    error = await waiting.times_out(call, 0.25)
    assert (error.code, error.stage) == (Code.DEADLINE_EXCEEDED, Stage.DISPATCHED)
    assert error.limit is not None
    assert error.limit[0] == "timeout_seconds"
    assert 0.0 < error.limit[1] <= timeouts[-1]  # a host's clock runs from its call
    await waiting.was_cancelled()
    await offer.idle()


async def test_a_cancelled_call_ends_and_its_tool_is_cancelled(bus: Bus, offer: Offer, caller: Caller) -> None:
    waiting, ended = Waiting(), bus.records.ended
    await offer.offer(waiting.work)
    call = asyncio.create_task(caller.call("waits"))
    await waiting.has_begun()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, WAIT_SECONDS)
    await waiting.was_cancelled()
    newest = next(iter(bus.records))
    assert (newest.name, newest.code, newest.number) == ("waits", Code.CANCELLED, ended + 1)
    await offer.idle()
    waiting.let_go()
    assert (await within(caller.call("waits"))).unwrap() == "let go"


async def test_results_of_many_calls_do_not_mix(offer: Offer, kind: Kind, caller: Caller) -> None:
    async def doubles(arguments: dict[str, Any], scope: Scope) -> Any:
        scope.report(arguments["n"])
        if arguments["n"] % 3 == 0:
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.01)
        return arguments["n"] * 2

    def doubles_plainly(arguments: dict[str, Any], scope: Scope) -> Any:
        return arguments["n"] * 2

    await offer.offer(Work("doubles", doubles), Work("doubles_plainly", doubles_plainly))
    seen: list[tuple[int, float]] = []

    async def one(number: int) -> Result:
        def see(progress: Progress) -> None:
            seen.append((number, progress.progress))

        return await caller.call("doubles" if number % 2 else "doubles_plainly", {"n": number}, on_progress=see)

    results = await asyncio.wait_for(asyncio.gather(*map(one, range(caller.many))), 2 * WAIT_SECONDS)
    assert [result.unwrap() for result in results] == [number * 2 for number in range(caller.many)]
    assert sorted(seen) == [(number, number) for number in range(1, caller.many, 2) if kind.reports_progress]


async def test_a_call_beyond_the_last_slot_is_refused_with_a_hint(
    bus: Bus, offer: Offer, kind: Kind, caller: Caller
) -> None:
    waiting = Waiting()
    await offer.offer(waiting.work, echo())
    calls = [asyncio.create_task(bus.call("waits")) for _ in range(256)]
    await waiting.has_begun(256)
    timeout = 0.2  # a Host tries again for as long as it has time
    while (error := failure(await within(caller.call("waits", timeout=timeout)))).code is Code.UNAVAILABLE:
        timeout *= 2  # a busy machine had no time to connect
    assert (error.code, error.stage, error.retry_safe) == (Code.OVERLOADED, Stage.NOT_DISPATCHED, True)
    assert error.limit == ("calls_in_flight", 256.0)
    assert error.retry_after_seconds > 0
    assert (await within(bus.call("echo"))).is_error is (kind.slots_of == "session")
    waiting.let_go()
    assert {result.unwrap() for result in await asyncio.gather(*calls)} == {"let go"}
    assert (await within(caller.call("waits"))).unwrap() == "let go"


async def test_the_circumstances_arrive_and_are_gone_with_the_next_call_or_never_arrive(
    offer: Offer, kind: Kind, caller: Caller
) -> None:
    seen = Seen()
    await offer.offer(echo(seen=seen))
    context = CallContext(
        user_id="小明",
        attributes={"channel": "voice"},
        member={"id": 2**70, "name": "Ada"},
        messages=(ContextMessage("user", "wie wird's? 🌦", "Bob"),),
        traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    )
    said_by_model = {"userId": "eve", "n": 1}
    for given in (context, None):
        result = await within(caller.call("echo", said_by_model, context=given))
        assert result.unwrap() == ({"n": 1} if kind.strips_user_keys else said_by_model)
    shown = context if kind.shows_context else CallContext()
    assert [scope.context for scope in seen.scopes] == [shown, CallContext()]


async def test_a_call_with_an_older_schema_hash_fails_with_what_changed(bus: Bus, offer: Offer, caller: Caller) -> None:
    await offer.offer(echo(parameters=CITY))
    known = bus.list()[0].tool.schema_hash
    await offer.offer(echo(parameters={**CITY, "required": []}))
    error = failure(await within(caller.call("echo", {"where": {}}, schema_hash=known)))
    assert (error.code, error.stage) == (Code.CATALOG_STALE, Stage.NOT_DISPATCHED)
    assert "no required argument 'where' any more" in error.message
    newer = bus.list()[0].tool.schema_hash
    assert (await within(caller.call("echo", schema_hash=newer))).unwrap() == {}


async def test_a_role_that_is_not_configured_is_not_found(offer: Offer, caller: Caller) -> None:
    await offer.offer(echo())
    assert (await within(caller.call("echo", role="default"))).unwrap() == {}
    error = failure(await within(caller.call("echo", role="nobody")))
    assert (error.code, error.stage) == (Code.NOT_FOUND, Stage.NOT_DISPATCHED)
    assert "nobody" in error.message


async def test_a_tool_that_is_taken_away_while_it_works_still_answers(offer: Offer, caller: Caller) -> None:
    waiting = Waiting()
    await offer.offer(waiting.work, echo())
    call = asyncio.create_task(caller.call("waits"))
    await waiting.has_begun()
    await offer.withdraw("waits")
    error = failure(await within(caller.call("waits")))
    assert error.code is Code.NOT_FOUND
    assert error.message.endswith("there is no tool 'waits'; there are: echo")
    assert not call.done()
    waiting.let_go()
    assert (await within(call)).unwrap() == "let go"
    assert (await within(caller.call("echo"))).unwrap() == {}
