"""However a tool is offered, it behaves the same: each test runs against every way of offering (`offers.KINDS`)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.contract.conftest import RESULT_BYTES
from tests.contract.offer import Offer, declared
from tests.contract.offers import Kind
from tests.contract.works import CITY, Blocking, Refuses, Scope, Seen, Shows, Waiting, Work, echo, raises, returns
from tests.support.waiting import WAIT_SECONDS, until, within
from toolbus.bus import Bus
from toolbus.errors import Code, Stage
from toolbus.sdk import CallContext, ContextMessage, image, link, text
from toolbus.tool import CallError, Result

VALUES: dict[str, Any] = {
    "text": "sunny",
    "empty text": "",
    "integer": 5,
    "float": 5.0,
    "small float": 1e-7,
    "zero": 0,
    "true": True,
    "false": False,
    "null": None,
    "list": [1, 2.0, "three", None, [True]],
    "empty list": [],
    "object": {"b": 1, "a": {"deep": [{"er": {}}]}},
    "empty object": {},
    "object with an envelope's words": {"error": "none", "output": 3},
    "Chinese": "晴，最高气温二十三度",
    "emoji": "⛅👩‍👩‍👧‍👦",
    "controls": 'a\x00b\u2028c"\\\n',
    "64 bits": 2**63,
    "more bits": -(2**70),
}


def failure(result: Result) -> CallError:
    assert result.is_error
    assert result.error is not None
    return result.error


# -- values in and out -------------------------------------------------------------------------------------------------


async def test_a_value_comes_back_as_it_was_returned(bus: Bus, offer: Offer, kind: Kind) -> None:
    async def gives(arguments: dict[str, Any], scope: Scope) -> Any:
        return VALUES[arguments["which"]]

    await offer.offer(Work("gives", gives))
    for which, value in VALUES.items():
        result = await within(bus.call("gives", {"which": which}))
        assert repr(result.output) == repr(value), which  # == would take 5 for 5.0, and True for 1
        assert result.is_error == (kind.soft_errors and isinstance(value, dict) and "error" in value), which
        assert not result.content


async def test_arguments_arrive_as_they_were_sent(bus: Bus, offer: Offer) -> None:
    seen = Seen()
    await offer.offer(echo(seen=seen))
    given: list[dict[str, Any]] = [{}, {"values": VALUES}, {"": 1, "键 🔑": 2}, {"integer": 2**70, "float": 1.0}]
    for arguments in given:
        assert repr((await within(bus.call("echo", arguments))).unwrap()) == repr(arguments)
    assert repr(seen.arguments) == repr(given)


async def test_a_call_without_arguments_has_an_empty_object(bus: Bus, offer: Offer) -> None:
    await offer.offer(echo())
    assert (await within(bus.call("echo", ""))).unwrap() == {}


# What is passed on where nobody checks, for arguments that are no JSON object (REST-40).
UNCHECKED: dict[str, dict[str, Any]] = {
    '{"where": ': {"_raw": '{"where": '},
    "[]": {"value": []},
    "null": {"value": None},
    '{"where": {"days": NaN}}': {"_raw": '{"where": {"days": NaN}}'},
}


UNFIT: list[tuple[Any, str]] = [  # arguments, and what their refusal names
    ({"where": {"city": 5}}, "where.city"),
    ({"where": {"days": 2.5}}, "where.days"),
    ({"where": {"days": "2.5"}}, "where.days"),
    ({"where": []}, "where"),
    ({}, "where"),
    ({"where": {}, "extra": 1}, "extra"),
    ('{"where": ', "JSON"),
    ("[]", "object"),
    ("null", "object"),
    ('{"where": {"days": NaN}}', "JSON"),
]


async def test_what_a_model_plainly_meant_arrives_where_arguments_are_checked(
    bus: Bus, offer: Offer, kind: Kind
) -> None:
    await offer.offer(echo(parameters=CITY))
    for given, meant in (
        ({"where": {"city": "Oslo", "days": "5"}}, {"where": {"city": "Oslo", "days": 5}}),
        ({"where": {"city": "Oslo", "days": 5.0}}, {"where": {"city": "Oslo", "days": 5}}),
        ({"where": '{"city": "Oslo"}'}, {"where": {"city": "Oslo"}}),
        ({"where": {"city": "Oslo", "days": None}}, {"where": {"city": "Oslo"}}),
    ):
        arrived = (await within(bus.call("echo", given))).unwrap()
        assert repr(arrived) == repr(meant if kind.checks_arguments else given)
    assert (await within(bus.call("echo", '"no object"'))).is_error == kind.checks_arguments


async def test_arguments_that_do_not_fit_are_refused_by_name_and_never_arrive_where_they_are_checked(
    bus: Bus, offer: Offer, kind: Kind
) -> None:
    seen = Seen()
    await offer.offer(echo(seen=seen, parameters=CITY))
    for arguments, told in UNFIT:
        if kind.checks_arguments:
            error = failure(await within(bus.call("echo", arguments)))
            assert (error.code, error.stage) == (Code.INVALID_ARGUMENTS, Stage.NOT_DISPATCHED), arguments
            assert told in error.message
            arrives = arguments = {"where": {"city": "Oslo", "days": 2**70}}  # which fits
        else:
            arrives = UNCHECKED[arguments] if isinstance(arguments, str) else arguments
        assert (await within(bus.call("echo", arguments))).unwrap() == arrives
        assert seen.arguments == [arrives]
        seen.arguments.clear()


USER_KEYS = ("userId", "__userId", "__user_id")


async def test_keys_that_only_a_host_may_set_are_taken_out_of_the_arguments_of_all_but_rest_tools(
    bus: Bus, offer: Offer, kind: Kind
) -> None:
    await offer.offer(echo())
    users = dict.fromkeys(USER_KEYS, "eve")
    result = await within(bus.call("echo", {"city": "Oslo", "deep": {"userId": 1}, **users}))
    assert result.unwrap() == {"city": "Oslo", "deep": {"userId": 1}, **({} if kind.strips_user_keys else users)}


@pytest.mark.parametrize("key", USER_KEYS)
async def test_such_a_key_arrives_where_the_schema_declares_it(bus: Bus, offer: Offer, kind: Kind, key: str) -> None:
    await offer.offer(echo(parameters={"type": "object", "properties": {key: {"type": "string"}}}))
    users = dict.fromkeys(USER_KEYS, "bob")
    result = await within(bus.call("echo", users))
    assert result.unwrap() == ({key: "bob"} if kind.strips_user_keys else users)


async def test_parts_beside_the_output_arrive_whole_where_they_can_be_sent(bus: Bus, offer: Offer, kind: Kind) -> None:
    parts = [text("哇 👋"), image(bytes(range(256))), link("https://example.org/a?b=c#d", "a page", mime="text/html")]

    async def shows(arguments: dict[str, Any], scope: Scope) -> Any:
        return Shows({"kept": 5.0}, parts)

    await offer.offer(Work("shows", shows))
    result = await within(bus.call("shows"))
    assert repr(result.unwrap()) == "{'kept': 5.0}"
    assert list(result.content) == (parts if kind.sends_content else [])


async def test_a_result_over_the_limit_is_replaced_by_the_limit(bus: Bus, offer: Offer) -> None:
    async def fills(arguments: dict[str, Any], scope: Scope) -> Any:
        return "x" * arguments["characters"]

    await offer.offer(Work("fills", fills))
    error = failure(await within(bus.call("fills", {"characters": RESULT_BYTES + 1})))
    assert (error.code, error.limit, error.retry_safe) == (
        Code.RESULT_TOO_LARGE,
        ("result_bytes", RESULT_BYTES),
        False,
    )
    assert len((await within(bus.call("fills", {"characters": RESULT_BYTES - 1000}))).unwrap()) == RESULT_BYTES - 1000


# -- tools that say no -------------------------------------------------------------------------------------------------


async def test_a_tool_that_raises_fails_with_its_text_and_works_afterwards(bus: Bus, offer: Offer, kind: Kind) -> None:
    await offer.offer(raises(ValueError("no such city: Тула")))
    error = failure(await within(bus.call("fails", {"fail": True})))
    assert (error.code, error.stage) == (Code.TOOL, Stage.ACCEPTED)
    assert error.message == f"{kind.raised}: Тула"
    assert error.reason == ("ValueError" if kind.names_class else error.message)
    assert not error.retry_safe
    assert (await within(bus.call("fails"))).unwrap() == "fine"


async def test_a_plain_function_that_raises_does_the_same(bus: Bus, offer: Offer, kind: Kind) -> None:
    def fails(arguments: dict[str, Any], scope: Scope) -> Any:
        raise KeyError("Oslo")

    await offer.offer(Work("fails", fails), echo())
    for _ in range(2):
        error = failure(await within(bus.call("fails")))
        assert error.code is Code.TOOL
        assert error.reason == ("KeyError" if kind.names_class else "KeyError: 'Oslo'")
        assert "Oslo" in error.message
    assert (await within(bus.call("echo"))).unwrap() == {}


async def test_a_tool_can_fail_with_its_own_text_and_still_show_content(bus: Bus, offer: Offer) -> None:
    async def refuses(arguments: dict[str, Any], scope: Scope) -> Any:
        return Refuses("city_unknown", {"nearest": ["Tula", "图拉"]})

    await offer.offer(Work("refuses", refuses))
    result = await within(bus.call("refuses"))
    error = failure(result)
    assert (error.code, error.reason, error.message) == (Code.TOOL, "city_unknown", "city_unknown")
    assert result.output == {"nearest": ["Tula", "图拉"]}


async def test_a_tool_that_returns_what_json_cannot_hold_has_failed(bus: Bus, offer: Offer) -> None:
    values = [object(), {"deep": [b"bytes"]}, float("nan"), {"deep": [float("inf")]}, "half of a pair: \ud83d"]

    async def gives(arguments: dict[str, Any], scope: Scope) -> Any:
        return values[arguments["which"]]

    await offer.offer(Work("gives", gives), echo())
    for which, value in enumerate(values):
        error = failure(await within(bus.call("gives", {"which": which})))
        assert (error.code, error.stage) == (Code.TOOL, Stage.ACCEPTED), value
        assert error.message
        assert (await within(bus.call("echo"))).unwrap() == {}


# -- progress ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_progress_arrives_in_order_and_before_the_result(bus: Bus, offer: Offer, kind: Kind, plain: bool) -> None:
    def steps(arguments: dict[str, Any], scope: Scope) -> Any:
        for step in range(1, 51):
            scope.report(step, total=50, message=f"step {step}", chunk=f"{step} ")
        return "".join(f"{step} " for step in range(1, 51))

    async def steps_async(arguments: dict[str, Any], scope: Scope) -> Any:
        return steps(arguments, scope)

    await offer.offer(Work("steps", steps if plain else steps_async))
    seen: list[Any] = []
    result = await within(bus.call("steps", on_progress=seen.append))
    assert result.unwrap().endswith(" 49 50 ")
    if not kind.reports_progress:
        assert seen == []
        return
    assert [(each.progress, each.total, each.message) for each in seen] == [
        (step, 50, f"step {step}") for step in range(1, 51)
    ]
    assert "".join(each.chunk for each in seen) == (result.unwrap() if kind.shows_chunks else "")


async def test_progress_arrives_while_the_tool_works(bus: Bus, offer: Offer, kind: Kind) -> None:
    waiting = Waiting()

    async def works(arguments: dict[str, Any], scope: Scope) -> Any:
        scope.report(0.5)
        return await waiting.work.run(arguments, scope)

    await offer.offer(Work("works", works))
    seen: list[Any] = []
    call = asyncio.create_task(bus.call("works", on_progress=seen.append))
    await waiting.has_begun()
    await until(lambda: seen or not kind.reports_progress, "the progress")
    assert not call.done()
    waiting.let_go()
    assert (await within(call)).unwrap() == "let go"


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said_by", ["the call", "the tool"])
async def test_a_call_that_times_out_names_the_limit_and_its_tool_is_cancelled(
    bus: Bus, offer: Offer, said_by: str
) -> None:
    waiting = Waiting(timeout=0.15 if said_by == "the tool" else 30.0)
    await offer.offer(waiting.work)
    error = failure(await within(bus.call("waits", timeout=0.15 if said_by == "the call" else None)))
    assert (error.code, error.stage) == (Code.DEADLINE_EXCEEDED, Stage.DISPATCHED)
    assert error.limit == ("timeout_seconds", 0.15)
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


async def test_a_cancelled_call_ends_and_its_tool_is_cancelled(bus: Bus, offer: Offer) -> None:
    waiting = Waiting()
    await offer.offer(waiting.work)
    call = asyncio.create_task(bus.call("waits"))
    await waiting.has_begun()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert next(iter(bus.records)).code is Code.CANCELLED  # the caller itself has gone
    await waiting.was_cancelled()
    await offer.idle()
    waiting.let_go()
    assert (await within(bus.call("waits"))).unwrap() == "let go"


async def test_a_plain_function_sees_a_cancel_and_keeps_its_slot_until_it_returns(
    bus: Bus, offer: Offer, kind: Kind
) -> None:
    blocking = Blocking()
    await offer.offer(blocking.work, echo())
    call = asyncio.create_task(bus.call("blocks"))
    await blocking.has_begun()
    call.cancel()
    await asyncio.wait([call])
    await until(lambda: blocking.scope is not None and blocking.scope.cancelled.is_set(), "the cancel", seconds=1.0)
    await within(bus.call("echo"))  # whatever was answered before has arrived with it
    assert offer.pending() == int(kind.holds_slots)
    blocking.let_go()
    await offer.idle()


async def test_a_plain_function_that_handed_back_something_to_wait_for_is_cancelled_as_well(
    bus: Bus, offer: Offer
) -> None:
    waiting = Waiting()
    await offer.offer(Work("waits", lambda arguments, scope: waiting.work.run(arguments, scope)))
    error = failure(await within(bus.call("waits", timeout=0.15)))
    assert error.code is Code.DEADLINE_EXCEEDED
    await waiting.was_cancelled()
    await offer.idle()


# -- many at once ------------------------------------------------------------------------------------------------------


async def test_results_of_many_calls_do_not_mix(bus: Bus, offer: Offer, kind: Kind) -> None:
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
        name = "doubles" if number % 2 else "doubles_plainly"
        return await bus.call(name, {"n": number}, on_progress=lambda each: seen.append((number, each.progress)))

    results = await asyncio.wait_for(asyncio.gather(*map(one, range(200))), WAIT_SECONDS)
    assert [result.unwrap() for result in results] == [number * 2 for number in range(200)]
    assert sorted(seen) == [(number, number) for number in range(1, 200, 2) if kind.reports_progress]


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


async def test_a_call_beyond_the_last_slot_is_refused_with_a_hint(bus: Bus, offer: Offer, kind: Kind) -> None:
    waiting = Waiting()
    await offer.offer(waiting.work, echo())
    calls = [asyncio.create_task(bus.call("waits")) for _ in range(256)]
    await waiting.has_begun(256)
    error = failure(await within(bus.call("waits")))
    assert (error.code, error.stage, error.retry_safe) == (Code.OVERLOADED, Stage.NOT_DISPATCHED, True)
    assert error.limit == ("calls_in_flight", 256.0)
    assert error.retry_after_seconds > 0
    assert (await within(bus.call("echo"))).is_error is (kind.slots_of == "session")
    waiting.let_go()
    assert {result.unwrap() for result in await asyncio.gather(*calls)} == {"let go"}
    assert (await within(bus.call("waits"))).unwrap() == "let go"


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
    wanted = declared(work)
    by_nature: dict[str, Any] = {
        "callback_url": listing.tool.callback_url,
        "metadata_json": listing.tool.metadata_json,  # the file of a drop-in tool
    }
    if not kind.reports_progress:
        by_nature["idle_timeout_seconds"] = 0.0
    written = replace(listing.tool, parameters_json=wanted.parameters_json)  # all the same but for white space
    assert written == replace(wanted, **by_nature)
    assert listing.tool.parameters == CITY
    assert listing.tool.schema_hash == declared(work).schema_hash
    assert (listing.source, listing.roles, len(listing.entry.handlers())) == (offer.source, ("default",), 1)


async def test_an_unknown_tool_is_not_found_and_those_that_there_are_get_named(bus: Bus, offer: Offer) -> None:
    await offer.offer(echo(), echo("weather.now"))
    error = failure(await within(bus.call("wether")))
    assert (error.code, error.stage) == (Code.NOT_FOUND, Stage.NOT_DISPATCHED)
    assert "'wether'" in error.message
    assert error.message.endswith("echo, weather.now")


async def test_a_tool_that_is_taken_away_while_it_works_still_answers(bus: Bus, offer: Offer) -> None:
    waiting = Waiting()
    await offer.offer(waiting.work, echo())
    call = asyncio.create_task(bus.call("waits"))
    await waiting.has_begun()
    await offer.withdraw("waits")
    error = failure(await within(bus.call("waits")))
    assert (error.code, error.message) == (Code.NOT_FOUND, "there is no tool 'waits'; there are: echo")
    assert not call.done()
    waiting.let_go()
    assert (await within(call)).unwrap() == "let go"
    assert (await within(bus.call("echo"))).unwrap() == {}


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
