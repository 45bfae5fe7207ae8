from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.core_model import Core, nested, one_call, row, tool
from tests.support.examples import examples
from toolbus.bus.calls.call_records import HIDDEN, MAX_CONTENT, MAX_TEXT, CallRecord, CallRecords, RecordFilter
from toolbus.errors import Code
from toolbus.protocol.tool import Limits
from toolbus.v1 import tool_pb2 as pb


def test_records_come_newest_first_with_how_long_the_caller_waited() -> None:
    records = CallRecords()
    records.add(row("1", "a", 10.0, 10.5, 0))
    records.add(row("2", "b", 11.0, 13.0, Code.TOOL))
    assert list(records) == [
        CallRecord("2", "b", "plugin", "host", 11.0, 13.0, Code.TOOL, number=2),
        CallRecord("1", "a", "plugin", "host", 10.0, 10.5, Code.UNSPECIFIED, number=1),
    ]
    assert [record.seconds for record in records] == [2.0, 0.5]


def test_only_the_newest_records_remain_and_all_are_counted() -> None:
    records = CallRecords(limit=3)
    for number in range(10):
        records.add(row(str(number), "t", 0.0, 1.0, number % 2 * Code.CANCELLED))
    assert [record.call_id for record in records] == ["9", "8", "7"]
    assert len(records) == 3
    assert records.outcomes == {0: 5, Code.CANCELLED: 5}


def test_a_code_of_a_newer_protocol_reads_as_internal_and_hides_no_other_record() -> None:
    records = CallRecords()
    records.add(row("1", "t", 0.0, 1.0, Code.TOOL))
    records.add(row("2", "t", 0.0, 1.0, 99))
    assert [record.code for record in records] == [Code.INTERNAL, Code.TOOL]
    assert records.outcomes == {Code.TOOL: 1, Code.INTERNAL: 1}


@given(
    st.integers(1, 8),
    st.lists(st.one_of(st.integers(0, 20), st.none()), max_size=30),
    st.integers(1, 6),
    st.booleans(),
)
def test_what_a_follower_reads_and_what_it_lost_is_everything_that_happened(
    stored: int, steps: list[int | None], limit: int, filtered: bool
) -> None:
    records = CallRecords(stored)
    selection = RecordFilter(name="odd") if filtered else RecordFilter()
    position, lost, read, ended = 0, set[int](), list[int](), 0
    for step in [*steps, *(None,) * 100]:
        if step is not None:
            for _ in range(step):
                ended += 1
                records.add(row(str(ended), "odd" if ended % 2 else "even", 0.0, 1.0, 0))
            continue
        batch = records.batch(selection, position, limit)
        assert len(batch.records) <= limit
        lost.update(range(position + 1, position + batch.lost + 1))
        read += [record.number for record in batch.records]
        position = batch.position
    assert position == ended == records.ended
    assert read == [each for each in range(1, ended + 1) if each not in lost and (each % 2 or not filtered)]
    assert filtered or len(read) + len(lost) == ended


def test_a_listener_is_called_once_and_calls_cost_nothing_more_afterwards() -> None:
    records, called = CallRecords(), list[int]()
    plain = records.keep

    def first() -> None:
        called.append(1)

    for _ in range(3):  # as one that gives up and waits again does
        records.on_next(first)
    records.on_next(lambda: called.append(2))
    assert records.keep != plain
    for _ in range(3):
        records.add(row("1", "t", 0.0, 1.0, 0))
    assert (called, records.ended, len(records), records.keep) == ([1, 2], 3, 3, plain)


# -- what the dispatcher notes ---------------------------------------------------------------------------------------


def newest(core: Core) -> CallRecord:
    return next(iter(core.records))


def context(user: str = "ann", **given: str) -> pb.CallContext:
    return pb.CallContext(user_id=user, attributes=given)


def test_a_record_has_the_number_of_its_call_however_it_ended_and_however_many_were_evicted() -> None:
    core, host, plugin = one_call()
    core.records = core.dispatcher.records = core.dispatcher.observer.records = CallRecords(limit=4)
    core.call(host, "t", context=context())
    core.answer(plugin)
    core.refusal(host, "nobody")
    core.call(host, "t")
    core.answer(plugin)
    core.call(host, "t")
    core.answer(plugin, is_error=True)
    core.cancel(host, core.call(host, "t"))
    assert [(record.number, record.outcome) for record in core.records] == [
        (5, "CANCELLED"),
        (4, "TOOL"),
        (3, "OK"),
        (2, "NOT_FOUND"),
    ]
    assert core.records.ended == 5


@pytest.mark.parametrize("given", [None, context()])
def test_sizes_are_those_of_arguments_and_output_without_the_context(given: pb.CallContext | None) -> None:
    core, host, plugin = one_call()
    core.call(host, "t", '{"x": "é"}', context=given)
    core.answer(plugin, '"four"')
    assert (newest(core).arguments_size, newest(core).output_size) == (10, 6)
    core.call(host, "t", '{"x": 1}', context=given)
    core.answer(plugin, '"no"', is_error=True)
    assert (newest(core).arguments_size, newest(core).output_size) == (8, 4)
    core.refusal(host, "nobody", '{"x": 12}', context=given)
    assert (newest(core).arguments_size, newest(core).output_size) == (9, 0)


def test_user_round_and_order_come_from_the_context_of_a_host_and_reach_its_nested_calls() -> None:
    core, host, plugin = one_call()
    other = core.plugin("other", tool("o"))
    core.call(host, "t", context=context(round="2", order="3"))
    plugin.hand_over()
    nested(core, plugin, "o", context=context("mallory", round="7"))
    for peer in (other, plugin):
        core.answer(peer)
        assert (newest(core).user_id, newest(core).round, newest(core).order) == ("ann", 2, 3)
    core.refusal(host, "nobody", context=context(round="4"))
    assert (newest(core).user_id, newest(core).round, newest(core).order) == ("ann", 4, 0)
    core.refusal(plugin, "nobody", context=context("mallory", round="7"))
    assert (newest(core).user_id, newest(core).round, newest(core).order) == ("", 0, 0)


@pytest.mark.parametrize("number", ["", "-1", "1.5", "x", "1 ", "٣", "²", "9" * 50])
def test_a_round_that_is_not_a_number_counts_as_not_set(number: str) -> None:
    core, host, plugin = one_call()
    core.call(host, "t", context=context("x" * 1_000, round=number, order=number))
    core.answer(plugin)
    assert (newest(core).round, newest(core).order, newest(core).user_id) == (0, 0, "x" * MAX_TEXT)


# -- contents --------------------------------------------------------------------------------------------------------


def keeping(*, limits: Limits | None = None) -> tuple[Core, Any, Any]:
    core, host, plugin = one_call(limits=limits)
    core.records = core.dispatcher.records = core.dispatcher.observer.records = CallRecords(contents=True)
    return core, host, plugin


def test_contents_are_recorded_only_if_the_bus_is_configured_to() -> None:
    core, host, plugin = one_call()
    core.call(host, "t", '{"x": 1}', context=context())
    core.answer(plugin)
    core.refusal(host, "nobody", "{}")
    assert {(record.arguments, record.output) for record in core.records} == {(None, None)}


def test_contents_are_recorded_for_every_way_in_which_a_call_ends() -> None:
    core, host, plugin = keeping()
    core.call(host, "t", '{"x":1}')
    core.answer(plugin, '"fine"')
    assert (newest(core).arguments, newest(core).output) == ('{"x":1}', '"fine"')
    core.call(host, "t", '{"x":2}')
    core.answer(plugin, '"no such city"', is_error=True)
    assert (newest(core).arguments, newest(core).output) == ('{"x":2}', '"no such city"')
    core.refusal(host, "nobody", '{"x":3}')
    assert (newest(core).arguments, newest(core).output) == ('{"x":3}', "")
    core.cancel(host, core.call(host, "t", '{"x":4}'))
    assert (newest(core).arguments, newest(core).output) == ('{"x":4}', "")


def test_large_broken_and_deep_contents_are_shortened() -> None:
    core, host, plugin = keeping()
    for arguments in ("{" * 5_000, json.dumps({"x": "y" * 50_000}), '{"x":' * 2_000, '{"x": "\\ud800"}'):
        core.call(host, "t", arguments)
        if host.in_flight:
            core.answer(plugin, json.dumps("z" * 100_000))
        record = newest(core)
        assert record.arguments is not None
        assert record.output is not None
        assert len(record.arguments) <= MAX_CONTENT
        assert len(record.output) <= MAX_CONTENT
        (record.arguments + record.output).encode()
        assert record.arguments_size == len(arguments)


@settings(max_examples=examples(10))
@given(
    name=st.sampled_from(["password", "clientSecret", "x-api-key", "API_KEY", "sessionId", "token"]),
    secret=st.from_regex(r"Zq[-A-Za-z0-9!$%+/=]{8,20}qZ", fullmatch=True),
    depth=st.integers(0, 60),
    ends=st.sampled_from(["well", "badly", "refused", "broken"]),
)
def test_no_record_ever_holds_a_secret(name: str, secret: str, depth: int, ends: str) -> None:
    core, host, plugin = keeping()
    keyed: Any = {name: secret, "said": f"{name}={secret}, then more"}
    for level in range(depth):
        keyed = {"x": keyed} if level % 2 else [keyed]
    text = json.dumps({"x": keyed})
    core.call(host, "nobody" if ends == "refused" else "t", text[:-1] if ends == "broken" else text)
    if host.in_flight:
        core.answer(plugin, text, is_error=ends == "badly")
    record = newest(core)
    assert secret not in f"{record.arguments} {record.output}"
    if depth < 10 and ends != "broken":
        assert HIDDEN in (record.arguments or "")


# -- nested and failed calls -------------------------------------------------------------------------------------------


def test_a_record_names_the_call_of_the_bus_and_the_one_that_made_it() -> None:
    core, host, plugin = one_call(tool("outer"))
    other = core.plugin("other", tool("inner"))
    core.call(host, "outer")
    (outer,) = plugin.hand_over()
    nested(core, plugin, "inner")
    (inner,) = other.hand_over()
    core.answer(other, "1")
    core.answer(plugin, "2")
    assert [(record.name, record.id, record.parent) for record in core.records] == [
        ("outer", outer.id, ""),
        ("inner", inner.id, outer.id),
    ]


def test_a_failed_call_says_how_far_it_got_and_which_limit_it_met() -> None:
    core, host, _ = one_call(tool("t", timeout_seconds=2.0))
    core.call(host, "t")
    core.advance(3.0)
    record = next(iter(core.records))
    assert record.described(0.0)["failure"] == {
        "message": "no result from tool 't' within 2 s (waited 2.0 s; limit timeout_seconds)",
        "stage": "not_dispatched",
        "retry_safe": True,
        "limit": {"name": "timeout_seconds", "value": 2.0},
    }


def test_a_message_that_could_repeat_contents_is_recorded_only_where_texts_of_errors_are() -> None:
    for texts in (False, True):
        core, host, plugin = one_call()
        core.records.texts = texts
        core.call(host, "t")
        plugin.hand_over()
        core.answer(plugin, is_error=True, error=pb.CallError(message="the city of 4711"))
        failure = next(iter(core.records)).failure
        assert failure is not None
        assert failure.message == ("the city of 4711" if texts else "")


def test_a_refused_call_is_recorded_with_its_reason() -> None:
    core, host, _ = one_call()
    core.refusal(host, "nothing")
    record = next(iter(core.records))
    assert (record.id, record.parent) == ("", "")
    assert record.described(0.0)["failure"]["message"] == "there is no tool 'nothing'; there are: t"


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_limit_that_a_plugin_makes_up_is_shortened_and_can_be_written_as_json(value: float) -> None:
    core, host, plugin = one_call()
    core.call(host, "t")
    made_up = pb.Limit(name="x" * 100_000, value=value)
    core.answer(plugin, is_error=True, error=pb.CallError(code=pb.ERROR_CODE_TOOL, limit=made_up))
    (record,) = core.records
    shown = json.loads(json.dumps(record.described(0.0), allow_nan=False))["failure"]["limit"]
    assert shown["value"] == 0.0
    assert 0 < len(shown["name"]) <= MAX_TEXT + len("[99,872 characters left out]")
