"""However a tool is offered, it behaves the same: each test runs against every way of offering (`offers.KINDS`)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.handler_cases import failure
from tests.contract.offer import Offer
from tests.contract.offers import Kind
from tests.contract.works import CITY, Refuses, Scope, Seen, Work, echo, raises
from tests.support.waiting import within
from toolbus.bus import Bus
from toolbus.errors import Code, Stage

pytestmark = pytest.mark.asyncio(loop_scope="module")

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


# What is passed on unchecked, for arguments that are not a JSON object (REST-40).
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
    for arguments, reason in UNFIT:
        if kind.checks_arguments:
            error = failure(await within(bus.call("echo", arguments)))
            assert (error.code, error.stage) == (Code.INVALID_ARGUMENTS, Stage.NOT_DISPATCHED), arguments
            assert reason in error.message
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
