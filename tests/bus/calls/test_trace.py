from __future__ import annotations

import random

import pytest

from tests.support.core_model import NUMBER, Core, PeerDouble, answer, call, nested, one_call, tool
from toolbus.bus.calls.call import Span, Trace
from toolbus.bus.calls.call_traces import CallTraces
from toolbus.errors import Code, Stage
from toolbus.protocol.tool import CallError
from toolbus.protocol.traceparent import TraceContext, read_traceparent
from toolbus.v1 import tool_pb2 as pb

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


def traced(core: Core, **settings: float) -> list[Span]:
    """Has a core make spans; returns those that come."""
    spans: list[Span] = []
    core.dispatcher.traces.start(lambda row: spans.append(Span.of(row)), **settings)  # type: ignore[arg-type]
    return spans


def trace_of(plugin: PeerDouble) -> Trace:
    (waiting,) = plugin.hand_over()
    assert waiting.trace is not None
    return waiting.trace


# -- what a handler reads --------------------------------------------------------------------------------------------


def test_a_sampled_call_reaches_its_handler_as_a_child_of_the_buss_own_span() -> None:
    core, host, plugin = one_call()
    spans = traced(core)
    core.call(host, "t", call_id="c9", traceparent=SAMPLED, tracestate="a=1")
    trace = trace_of(plugin)
    own = read_traceparent(trace.traceparent)
    assert own is not None
    assert (own.trace_id, own.sampled, trace.parent_id, trace.tracestate) == (TRACE, True, SPAN, "a=1")
    assert own.span_id != SPAN
    core.advance(0.5)
    core.answer(plugin)
    (span,) = spans
    assert (span.traceparent, span.parent_id, span.call_id, span.name) == (own.text, SPAN, "c9", "t")
    assert (span.source, span.caller, span.ended - span.started, span.error) == ("plugin", "host", 0.5, None)
    (record,) = core.records
    assert (record.trace_id, record.id) == (TRACE, span.id)


@pytest.mark.parametrize("makes_spans", [True, False])
def test_an_unsampled_trace_is_passed_on_as_it_came(makes_spans: bool) -> None:
    core, host, plugin = one_call()
    spans = traced(core) if makes_spans else []
    core.call(host, "t", traceparent=UNSAMPLED, tracestate="a=1")
    trace = trace_of(plugin)
    assert (trace.traceparent, trace.tracestate) == (UNSAMPLED, "a=1")
    core.answer(plugin)
    assert spans == []
    assert [record.trace_id for record in core.records] == [""]


def test_a_bus_that_records_no_spans_stands_in_no_trace() -> None:
    core, host, plugin = one_call()
    core.call(host, "t", traceparent=SAMPLED)
    assert trace_of(plugin).traceparent == SAMPLED  # with a span of its own the trace would have a hole
    core.answer(plugin)
    assert [record.trace_id for record in core.records] == [TRACE]


@pytest.mark.parametrize("broken", ["", "00-1-2-01", SAMPLED.upper(), f"{SAMPLED}-x"])
def test_a_broken_traceparent_counts_as_none_and_its_call_goes_on(broken: str) -> None:
    core, host, plugin = one_call()
    spans = traced(core)
    core.call(host, "t", traceparent=broken, tracestate="a=1")
    (waiting,) = plugin.hand_over()
    assert waiting.trace is None
    core.answer(plugin)
    assert (len(host.results), spans) == (1, [])


def test_the_traceparent_of_the_context_counts_where_the_call_has_none_of_its_own() -> None:
    core, host, plugin = one_call()
    spans = traced(core)
    core.call(host, "t", context=pb.CallContext(traceparent=SAMPLED))
    core.answer(plugin)
    core.call(host, "t", traceparent=f"00-{TRACE}-{'1' * 16}-01", context=pb.CallContext(traceparent=SAMPLED))
    core.answer(plugin)
    assert [span.parent_id for span in spans] == [SPAN, "1" * 16]


def test_a_plugin_cannot_begin_a_trace_by_a_context_it_may_not_set() -> None:
    core, _, _ = one_call()
    spans = traced(core)
    caller = core.plugin("other", tool("x"))
    core.call(caller, "t", context=pb.CallContext(traceparent=SAMPLED))
    assert spans == []


def test_the_message_to_a_stream_has_the_trace() -> None:
    core = Core()
    traced(core)
    plugin, host = core.attached("plugin", tool("t")), core.attached("host")
    call(host, "t", traceparent=SAMPLED, tracestate="a=1")
    call(host, "t", "2", traceparent=UNSAMPLED)
    call(host, "t", "3")
    sampled, unsampled, none = plugin.read("calls")
    read = read_traceparent(sampled.traceparent)
    assert read is not None
    assert (read.trace_id, read.sampled, sampled.tracestate) == (TRACE, True, "a=1")
    assert read.span_id != SPAN
    assert (unsampled.traceparent, none.traceparent, none.tracestate) == (UNSAMPLED, "", "")
    answer(plugin, sampled.call_id)


# -- nested calls ----------------------------------------------------------------------------------------------------


def test_a_nested_call_is_a_child_of_the_span_that_the_plugin_names_or_else_of_the_buss() -> None:
    core, host, plugin = one_call()
    inner = core.plugin("inner", tool("i"))
    spans = traced(core)
    core.call(host, "t", traceparent=SAMPLED, tracestate="a=1")
    outer = trace_of(plugin)
    own = TraceContext.of(TRACE, "2" * 16, sampled=True).text
    for call_id, text in (("named", own), ("silent", ""), ("broken", "00-zz")):
        nested(core, plugin, "i", call_id, traceparent=text)
        core.answer(inner)
    assert [span.parent_id for span in spans] == ["2" * 16, outer.traceparent[36:52], outer.traceparent[36:52]]
    assert [span.tracestate for span in spans] == ["", "a=1", "a=1"]
    assert {span.trace_id for span in spans} == {TRACE}


def test_a_nested_call_of_an_unsampled_one_is_not_sampled() -> None:
    core, host, plugin = one_call()
    inner = core.plugin("inner", tool("i"))
    spans = traced(core, ratio=1.0)
    core.call(host, "t", traceparent=UNSAMPLED)
    plugin.hand_over()
    nested(core, plugin, "i")
    assert trace_of(inner).traceparent == UNSAMPLED
    core.answer(inner)
    assert spans == []


def test_a_span_that_waits_holds_none_of_the_texts_of_an_error() -> None:
    core, host, plugin = one_call()
    spans = traced(core)
    core.call(host, "t", traceparent=SAMPLED)
    failed = pb.CallError(code=pb.ERROR_CODE_TOOL, message="x" * 100_000, reason="y", limit=pb.Limit(name="z"))
    core.answer(plugin, is_error=True, error=failed)
    core.refusal(host, "no-such-tool", traceparent=SAMPLED)
    assert [span.error for span in spans] == [
        CallError(Code.TOOL, "", Stage.ACCEPTED),
        CallError(Code.NOT_FOUND, "", Stage.NOT_DISPATCHED, retry_safe=False),
    ]


# -- which calls are sampled -----------------------------------------------------------------------------------------


def test_of_calls_without_a_trace_the_ratio_begins_one() -> None:
    core, host, plugin = one_call()
    spans = traced(core, ratio=0.1, most=100_000)
    state = random.getstate()
    random.seed(7)
    try:
        for _ in range(100):
            calls = [pb.ToolCall(call_id=f"c{n}", name="t") for n in range(100)]
            core.dispatcher.calls(host, calls, core.now)
            plugin.hand_over()
            results = [pb.ToolResult(call_id=id, output_json="1") for id in list(plugin.pending)]
            core.dispatcher.results(plugin, results, core.now)
    finally:
        random.setstate(state)
    assert 850 < len(spans) < 1150  # 1,000 are expected, with a deviation of 30
    assert {span.parent_id for span in spans} == {""}
    assert len({span.trace_id for span in spans}) == len(spans)
    assert len({span.call_id for span in spans}) == 100  # wherever they stand in a message


def test_the_smallest_ratio_that_there_is_draws_no_call_and_fails_none() -> None:
    core, host, plugin = one_call()
    spans = traced(core, ratio=5e-324)
    core.call(host, "t")
    core.answer(plugin)
    assert (len(host.results), spans) == (1, [])


@pytest.mark.parametrize("refused", [1, 50])
def test_refused_calls_take_no_draw_from_the_calls_after_them(refused: int) -> None:
    core, host, plugin = one_call()
    spans = traced(core, ratio=1.0)
    core.call(host, "t")
    core.answer(plugin)
    unknown = [pb.ToolCall(call_id=f"u{n}", name="no-such-tool") for n in range(refused)]
    core.dispatcher.calls(host, unknown, core.now)
    del spans[:]
    for _ in range(5):
        core.call(host, "t")
        core.answer(plugin)
    assert len(spans) == 5


def test_a_drawn_call_that_brings_a_trace_keeps_its_own() -> None:
    core, host, plugin = one_call()
    spans = traced(core, ratio=1.0)
    for text in (SAMPLED, UNSAMPLED, ""):
        core.call(host, "t", traceparent=text)
        core.answer(plugin)
    assert [span.parent_id for span in spans] == [SPAN, ""]


def test_a_drawn_call_that_its_caller_makes_again_stays_in_its_trace() -> None:
    core, host, plugin = one_call()
    spans = traced(core, ratio=1.0)
    message = pb.ToolCall(call_id="c1", name="t", schema_hash="another")
    core.dispatcher.calls(host, [message], core.now)
    message.schema_hash = ""
    core.dispatcher.calls(host, [message], core.now)
    core.answer(plugin)
    refused, answered = spans
    assert refused.error is not None
    assert (answered.error, answered.trace_id, answered.parent_id) == (None, refused.trace_id, refused.span_id)


def test_beyond_the_most_of_a_second_calls_are_not_sampled_and_their_handlers_told_so() -> None:
    core, host, plugin = one_call()
    spans = traced(core, most=100)
    for _ in range(60):  # 3,000 calls in a second
        calls = [pb.ToolCall(call_id=f"c{n}", name="t", traceparent=SAMPLED) for n in range(50)]
        core.dispatcher.calls(host, calls, core.now)
        *_, last = plugin.hand_over()
        results = [pb.ToolResult(call_id=id, output_json="1") for id in list(plugin.pending)]
        core.dispatcher.results(plugin, results, core.now)
        core.now += 1 / 60.1
    assert (len(spans), core.dispatcher.traces.refused) == (100, 2_900)
    assert last.trace is not None
    trace_context = read_traceparent(last.trace.traceparent)
    assert trace_context is not None
    assert (trace_context.trace_id, trace_context.sampled) == (TRACE, False)
    assert trace_context.span_id != SPAN  # the flag changes together with the span, as the standard asks
    core.now += 1.0
    core.call(host, "t", traceparent=SAMPLED)
    core.answer(plugin)
    assert len(spans) == 101


def test_a_bus_that_stopped_making_spans_draws_none() -> None:
    core, host, plugin = one_call()
    spans = traced(core, ratio=1.0)
    core.dispatcher.traces.stop()
    core.call(host, "t")
    assert [waiting.trace for waiting in plugin.hand_over()] == [None]
    assert spans == []


# -- what a span says ------------------------------------------------------------------------------------------------


def test_the_span_of_a_refused_call_has_its_code() -> None:
    core, host, _ = one_call(NUMBER)
    spans = traced(core)
    core.call(host, "n", '{"a": "x"}', traceparent=SAMPLED)
    core.call(host, "gone" * 100, traceparent=SAMPLED)
    first, second = spans
    assert first.error is not None
    assert second.error is not None
    assert (first.error.code, first.name, first.source, first.parent_id) == (Code.INVALID_ARGUMENTS, "n", "", SPAN)
    assert (second.error.code, len(second.name)) == (Code.NOT_FOUND, 128)
    assert {record.trace_id for record in core.records} == {TRACE}


def test_the_span_of_a_call_that_timed_out_ends_with_its_caller() -> None:
    core, host, plugin = one_call()
    spans = traced(core)
    core.call(host, "t", timeout_seconds=2.0, traceparent=SAMPLED)
    (waiting,) = plugin.hand_over()
    core.progress(plugin, waiting.id)
    core.advance(1.0)
    core.progress(plugin, waiting.id)
    core.advance(5.0)
    (span,) = spans
    assert span.error is not None
    assert span.error.code is Code.DEADLINE_EXCEEDED
    assert (span.first_sign, round(span.ended - span.started, 1)) == (span.started, 2.0)


def test_a_call_counts_as_sent_when_the_writer_takes_its_message() -> None:
    core = Core()
    spans = traced(core)
    plugin, host = core.attached("plugin", tool("t")), core.attached("host")
    call(host, "t", traceparent=SAMPLED)
    plugin.peer.note_sent(core.now)  # of what went before
    core.advance(0.25)
    (waiting,) = plugin.read("calls")
    plugin.peer.note_sent(core.now)
    answer(plugin, waiting.call_id)
    (span,) = spans
    assert (span.sent - span.started, span.session) == (0.25, plugin.peer.session_id)
    assert plugin.peer.traced == []


def test_traces_describe_themselves() -> None:
    traces = CallTraces()
    assert repr(traces) == "<CallTraces ratio=0 refused=0 off>"
    traces.start(lambda row: None, ratio=0.5)
    assert repr(traces) == "<CallTraces ratio=0.5 refused=0>"
