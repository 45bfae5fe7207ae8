from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from types import FrameType

import pytest

from tests.support.core_model import NUMBER, Core, error_of, nested, offered, one_call, outputs, tool
from toolbus.bus.calls import refusals
from toolbus.bus.streams.peer import Peer
from toolbus.errors import Code, Stage
from toolbus.protocol.tool import Limits, Tool
from toolbus.v1 import tool_pb2 as pb

# -- one result, and what it says ------------------------------------------------------------------------------------


def test_a_call_reaches_the_plugin_under_its_bare_name_and_its_result_the_caller_under_its_own_id() -> None:
    core = Core()
    host, plugin = core.peer("host"), core.plugin("far", tool("t"), qualified=True)
    call_id = core.call(host, "far:t", '{"a": 1.0, "b": 18446744073709551616}')
    (call,) = plugin.hand_over()
    assert (call.entry.bare_name, call.arguments_json) == ("t", '{"a": 1.0, "b": 18446744073709551616}')
    assert call.id != call_id
    core.answer(plugin, '{"x": 1e2}')
    assert outputs(host) == ['{"x": 1e2}']
    assert (core.held, host.in_flight, plugin.pending, core.records.outcomes) == (0, {}, {}, {0: 1})


def test_a_call_to_an_unknown_tool_names_the_known_ones() -> None:
    core, host, _ = one_call(tool("weather"), tool("time"))
    error = core.refusal(host, "wether")
    assert (error.code, error.stage, error.retry_safe) == (Code.NOT_FOUND, Stage.NOT_DISPATCHED, False)
    assert error.message == "there is no tool 'wether'; there are: weather, time"
    error = core.refusal(host, "weather", role="nobody")
    assert (error.code, error.message) == (Code.NOT_FOUND, "unknown role: nobody (configured: default)")


def test_a_request_for_a_model_that_no_host_lends_says_how_to_lend_one() -> None:
    core, host, _ = one_call(tool("weather"))
    error = core.refusal(host, "host:generate")
    assert (error.code, error.message) == (
        Code.NOT_FOUND,
        "no host lends a model now: start one that does, with `await host.lend(…)`",
    )


def test_just_after_a_start_a_call_to_an_unknown_tool_may_be_retried() -> None:
    core, host, _ = one_call()
    core.dispatcher.admission.settled_at = core.now + 5.0
    error = core.refusal(host, "later")
    assert (error.code, error.stage, error.retry_safe) == (Code.UNAVAILABLE, Stage.NOT_DISPATCHED, True)
    assert error.retry_after_seconds > 0
    core.advance(5.0)
    assert core.refusal(host, "later").code is Code.NOT_FOUND


def test_a_call_to_an_offline_tool_ends_at_once_and_may_be_retried() -> None:
    core, host, plugin = one_call()
    core.lose(plugin, "its stream ended")
    error = core.refusal(host, "t")
    assert (error.code, error.stage, error.retry_safe) == (Code.UNAVAILABLE, Stage.NOT_DISPATCHED, True)
    assert "its stream ended" in error.message


def test_a_suspect_plugin_gets_no_new_calls() -> None:
    core, host, plugin = one_call()
    plugin.takes_calls = False
    error = core.refusal(host, "t")
    assert (error.code, error.retry_safe) == (Code.UNAVAILABLE, True)
    assert error.retry_after_seconds > 0
    assert plugin.pending == {}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("{", "JSON"),
        ("[1]", "must be a JSON object"),
        ('{"a": "x"}', "arguments.a"),
        ("{}", "required"),
        ("", "required"),
        ('{"a": NaN}', "JSON"),
    ],
)
def test_arguments_that_break_the_schema_are_refused_with_path_and_rule(arguments: str, says: str) -> None:
    core, host, plugin = one_call(NUMBER)
    error = core.refusal(host, "n", arguments)
    assert (error.code, error.stage, error.retry_safe) == (Code.INVALID_ARGUMENTS, Stage.NOT_DISPATCHED, False)
    assert says in error.message
    assert plugin.pending == {}


def test_arguments_of_a_tool_without_validation_pass_as_they_are() -> None:
    core, host, plugin = one_call(Tool("n", parameters_json=NUMBER.parameters_json, validate=False))
    core.call(host, "n", '{"a": "x"}')
    core.call(host, "n", "not json")
    core.call(host, "n", "")
    assert [call.arguments_json for call in plugin.hand_over()] == ['{"a": "x"}', "not json", ""]


@pytest.mark.parametrize("call_id", ["", "x" * 129, "taken"])
def test_a_call_id_that_is_empty_too_long_or_in_flight_is_refused(call_id: str) -> None:
    core, host, _ = one_call()
    core.call(host, "t", call_id="taken")
    core.dispatcher.calls(host, [pb.ToolCall(call_id=call_id, name="t")], core.now)
    error = error_of(host, call_id)
    assert (error.code, "call_id" in error.message) == (Code.INVALID_ARGUMENTS, True)
    assert list(host.in_flight) == ["taken"]


@pytest.mark.parametrize("full", ["caller", "tool"])
def test_many_refused_calls_each_get_an_error_whose_text_is_built_once(full: str) -> None:
    core = Core()
    core.plugin("small", NUMBER, max_in_flight=4 if full == "tool" else 4096)
    crowd = Peer(Limits(), core.now)
    crowd.source = "host"
    crowd.open(4 if full == "caller" else 4096, 0)

    built: list[str] = []

    def note(running: FrameType, event: str, _: object) -> None:
        if event == "call" and running.f_code is refusals.overloaded.__code__:
            built.append("an error text")

    before = sys.getprofile()
    for turn in range(30):
        frame = [pb.ToolCall(call_id=f"{turn}-{each}", name="n", arguments_json='{"a":1}') for each in range(128)]
        sys.setprofile(note)
        try:
            core.dispatcher.calls(crowd, frame, core.now)
        finally:
            sys.setprofile(before)
    results = [result for frame in iter(crowd.outbox.take, None) for result in frame.results]
    assert len({result.call_id for result in results} - crowd.in_flight.keys()) == len(results) == 30 * 128 - 4
    limit = pb.Limit(name="calls_in_flight", value=4)
    assert all(result.error.code == Code.OVERLOADED.value and result.error.limit == limit for result in results)
    assert 0 < len(built) <= 30, "each frame builds the text once"


def test_the_checks_stand_in_one_order() -> None:
    limits = Limits(calls_in_flight=1)
    core = Core(limits=limits)
    host = core.peer("host", max_in_flight=0)
    host.principal = replace(host.principal, is_admin=False)
    plugin = core.plugin("plugin", NUMBER, max_in_flight=0)
    core.registry.register(core.peer("toolbus", shares=False), offered(NUMBER), qualified=True)
    codes = [core.refusal(host, "toolbus:n", "{", call_id="1", schema_hash="old").code]
    codes.append(core.refusal(host, "n", "{", call_id="2", schema_hash="old").code)
    codes.append(core.refusal(host, "n", "{", call_id="3").code)
    codes.append(core.refusal(host, "n", '{"a":1}', call_id="4").code)
    core.dispatcher.draining = True
    codes.append(core.refusal(host, "nobody", call_id="5").code)
    assert plugin.pending == {}
    assert codes == [
        Code.PERMISSION_DENIED,
        Code.CATALOG_STALE,
        Code.INVALID_ARGUMENTS,
        Code.OVERLOADED,
        Code.UNAVAILABLE,
    ]


def test_a_tools_own_error_reaches_the_caller_as_data() -> None:
    core, host, plugin = one_call()
    core.call(host, "t", call_id="1")
    core.answer(plugin, '"no such city"', is_error=True)
    core.call(host, "t", call_id="2")
    core.answer(plugin, "null", is_error=True)
    core.call(host, "t", call_id="3")
    core.answer(plugin, "null", error=pb.CallError(message="boom", reason="ValueError"))
    core.call(host, "t", call_id="4")
    core.answer(plugin, '""', is_error=True)
    first, second, third, fourth = (error_of(host, call_id) for call_id in "1234")
    assert first.code is second.code is third.code is Code.TOOL
    assert (first.stage, first.retry_safe) == (Stage.ACCEPTED, False)
    assert "no such city" in host.results["1"][0].text
    assert second.message == fourth.message == "tool 't' failed and gave no reason"
    assert (third.message, third.reason) == ("boom", "ValueError")


def test_a_result_larger_than_the_limit_is_replaced_and_names_it() -> None:
    core, host, plugin = one_call(limits=Limits(result_bytes=1_000))
    small = core.peer("small", max_item_bytes=500)
    for caller, size, limit in ((host, 1_001, ("result_bytes", 1_000)), (small, 501, ("max_message_bytes", 500))):
        call_id = core.call(caller, "t")
        core.answer(plugin, json.dumps("x" * size))
        error = error_of(caller, call_id)
        assert (error.code, error.stage, error.limit) == (Code.RESULT_TOO_LARGE, Stage.ACCEPTED, limit)
        assert not error.retry_safe
    call_id = core.call(host, "t")
    core.answer(plugin, json.dumps("x" * 900))
    assert not host.results[call_id][0].is_error


def test_a_result_of_exactly_the_limit_passes_and_one_byte_more_does_not() -> None:
    core, host, plugin = one_call(limits=Limits(result_bytes=1_000))
    for size, passes in ((1_000, True), (1_001, False)):
        call_id = core.call(host, "t")
        core.answer(plugin, json.dumps("x" * (size - 2)))
        assert host.results[call_id][0].is_error is not passes
    assert error_of(host, call_id).message == "tool 't' returned 1001 bytes, more than 1000: ask for less"


def test_content_counts_towards_the_limit_of_a_result_and_is_passed_on_below_it() -> None:
    core, host, plugin = one_call(limits=Limits(result_bytes=1_000))
    for size in (100, 2_000):
        core.call(host, "t", call_id=str(size))
        core.answer(plugin, "null", content=[pb.ContentBlock(text=pb.TextContent(text="x" * size))])
    assert host.results["100"][0].content[0].text.text == "x" * 100
    assert error_of(host, "2000").code is Code.RESULT_TOO_LARGE


def test_progress_that_the_caller_cannot_receive_never_reaches_it() -> None:
    core, _, plugin = one_call()
    small = core.peer("small", max_item_bytes=500)
    core.call(small, "t")
    core.progress(plugin, next(iter(plugin.pending)), output_chunk="x" * 501)
    assert all(sign.ByteSize() <= 500 for sign in small.signs)


def test_a_code_of_a_newer_protocol_is_kept_and_recorded_as_internal() -> None:
    core, host, plugin = one_call()
    core.call(host, "t")
    result = pb.ToolResult.FromString(
        pb.ToolResult(call_id=next(iter(plugin.pending))).SerializeToString() + b'"\x02\x08c'
    )
    assert result.error.code == 99
    core.dispatcher.results(plugin, [result], core.now)
    assert [record.code for record in core.records] == [Code.INTERNAL]


# -- schema_hash -----------------------------------------------------------------------------------------------------

OLD = Tool("t", "same", '{"type":"object","properties":{"a":{"type":"string"},"b":{}},"required":["a"]}')
NEW = Tool("t", "same", '{"type":"object","properties":{"a":{"type":"number"},"c":{}},"required":["a","c"]}')


def test_a_call_that_carries_an_older_hash_goes_to_a_session_that_declared_it() -> None:
    core = Core()
    host, older, newer = core.peer("host"), core.plugin("p", OLD), core.plugin("p", NEW)
    core.call(host, "t", '{"a": "x"}', schema_hash=OLD.schema_hash)
    core.call(host, "t", '{"a": 1, "c": 1}', schema_hash=NEW.schema_hash)
    core.call(host, "t", '{"a": 1, "c": 1}')
    assert (len(older.pending), len(newer.pending)) == (1, 2)


def test_a_hash_that_no_session_declares_any_more_is_stale_and_the_change_is_explained() -> None:
    core = Core()
    host, plugin = core.peer("host"), core.plugin("p", OLD)
    core.registry.register(plugin, offered(NEW), declare=True)
    error = core.refusal(host, "t", schema_hash=OLD.schema_hash)
    assert (error.code, error.stage, error.retry_safe) == (Code.CATALOG_STALE, Stage.NOT_DISPATCHED, False)
    assert error.message == (
        "tool 't' has changed since it was listed: new required argument 'c', no argument 'b' any more, other rules "
        "for 'a'. List the tools again and call it as it is now."
    )
    error = core.refusal(host, "t", schema_hash="unheard of")
    assert error.message.startswith("tool 't' has changed since it was listed. List")
    assert plugin.pending == {}


# -- what a model may not say ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        '{"userId": "x", "a": 1}',
        '{"__userId": "x", "a": 1}',
        '{"a": 1, "__user_id": {"deep": "x"}}',
        r'{"\u0075s\u0065rId": "x", "a": 1}',
        r'{"__us\u0065r_id": "x", "a": 1}',
    ],
)
@pytest.mark.parametrize("validate", [True, False])
def test_keys_that_only_a_host_may_set_are_stripped_however_they_are_spelled(sent: str, validate: bool) -> None:
    core, host, plugin = one_call(tool("t", validate=validate))
    core.call(host, "t", sent)
    (call,) = plugin.hand_over()
    assert json.loads(call.arguments_json) == {"a": 1}


def test_arguments_too_deep_to_search_for_such_keys_are_refused() -> None:
    core, host, _ = one_call(tool("t", validate=False))
    sent = '{"userId": "x", "a": ' + "[" * 200 + "]" * 200 + "}"
    assert core.refusal(host, "t", sent).code is Code.INVALID_ARGUMENTS


def test_a_key_that_the_schema_declares_or_that_is_not_at_the_top_stays_and_nothing_is_re_encoded() -> None:
    declares = Tool("d", parameters_json='{"type":"object","properties":{"userId":{}}}')
    core, host, plugin = one_call(declares, tool("t"))
    core.call(host, "d", '{"userId" : 1e2}', call_id="1")
    core.call(host, "t", '{"user" :{"userId":  1e2}}', call_id="2")
    assert [call.arguments_json for call in plugin.hand_over()] == ['{"userId" : 1e2}', '{"user" :{"userId":  1e2}}']


def test_context_is_taken_from_hosts_and_never_from_plugins() -> None:
    core, host, plugin = one_call()
    other = core.plugin("other", tool("o"))
    context = pb.CallContext(user_id="ann")
    core.call(host, "t", context=context)
    context.user_id = "changed afterwards"
    core.call(plugin, "o", call_id="own", context=pb.CallContext(user_id="mallory"))
    nested(core, plugin, "o", "nested", context=pb.CallContext(user_id="mallory"))
    (root,) = plugin.hand_over()
    assert root.context is not None
    assert root.context.user_id == "ann"
    own, child = other.hand_over()
    assert own.context is None
    assert child.context is not None
    assert child.context.user_id == "ann"


def test_a_context_counts_towards_what_a_plugin_receives_and_what_the_bus_holds() -> None:
    core = Core(limits=Limits(held_bytes=3_000))
    host = core.peer("host")
    core.plugin("small", tool("s"), max_item_bytes=1_000)
    core.plugin("large", tool("l"))
    context = pb.CallContext(user_id="x" * 2_000)
    error = core.refusal(host, "s", context=context)
    assert (error.code, error.limit) == (Code.INVALID_ARGUMENTS, ("max_message_bytes", 1_000))
    core.call(host, "l", context=context)
    assert core.refusal(host, "l", context=context).code is Code.OVERLOADED


def test_a_nested_call_whose_inherited_context_its_plugin_cannot_receive_is_refused() -> None:
    core, host, plugin = one_call()
    core.plugin("small", tool("s"), max_item_bytes=1_000)
    core.call(host, "t", context=pb.CallContext(user_id="x" * 2_000))
    error = core.refusal(plugin, "s", parent_call_id=next(iter(plugin.pending)))
    assert (error.code, error.limit) == (Code.INVALID_ARGUMENTS, ("max_message_bytes", 1_000))


@pytest.mark.parametrize(
    ("hint", "bounded"), [(2.5, 2.5), (math.inf, 86_400.0), (1e300, 86_400.0), (math.nan, 0.0), (-1.0, 0.0)]
)
def test_a_tools_hint_when_to_retry_is_bounded(hint: float, bounded: float) -> None:
    core, host, plugin = one_call()
    call_id = core.call(host, "t")
    core.answer(plugin, "null", error=pb.CallError(message="busy", retry_after_seconds=hint))
    assert error_of(host, call_id).retry_after_seconds == bounded


def test_a_key_of_the_user_is_stripped_and_a_wide_integer_beside_it_stays_exact() -> None:
    wide = 123456789012345678901234567890
    core, host, plugin = one_call(tool("t", parameters_json='{"type":"object","properties":{"n":{}}}'))
    core.call(host, "t", f'{{"userId":"ann","n":{wide}}}')
    (sent,) = plugin.hand_over()
    assert json.loads(sent.arguments_json) == {"n": wide}
