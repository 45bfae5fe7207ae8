from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.core_model import Core, KeeperDouble, PeerDouble, answer, call, error_of, nested, one_call, tool
from toolbus.bus.calls.call_records import RecordFilter
from toolbus.errors import Code, InvalidTool, Stage
from toolbus.parts.tripwire.tripwire import Tripwire
from toolbus.protocol.limits import Limits
from toolbus.protocol.tool import Result, Tool
from toolbus.v1 import tool_pb2 as pb

DAY = {
    "method": "elicitation/create",
    "params": {
        "mode": "form",
        "message": "Which day?",
        "requestedSchema": {"type": "object", "properties": {"day": {"type": "string"}}},
    },
}
MODEL = {"method": "sampling/createMessage", "params": {"messages": []}}
FORM: dict[str, Any] = {"accepts": ["elicitation.form"], "context": pb.CallContext()}


def ask(core: Core, plugin: PeerDouble, *questions: dict[str, Any], state: str = "") -> None:
    """Has a plugin end its oldest call with questions."""
    requests = {f"q{number}": question for number, question in enumerate(questions, 1)}
    core.answer(plugin, "", input_requests_json=json.dumps(requests), request_state=state)


def only(caller: PeerDouble, call_id: str) -> Result:
    (result,) = caller.results[call_id]
    return result


def test_a_caller_that_accepts_a_question_gets_it_and_the_result_is_neither_a_success_nor_a_failure() -> None:
    core, host, plugin = one_call()
    call_id = core.call(host, "t", **FORM)
    ask(core, plugin, DAY, state="kept")
    result = only(host, call_id)
    assert result.asks
    assert json.loads(result.input_requests_json) == {"q1": DAY}
    assert (result.request_state, result.is_error, result.error, result.output) == ("kept", False, None, None)
    (record,) = core.records.newest(RecordFilter(outcome="input_required"), 10)
    assert (record.call_id, record.outcome) == (call_id, "INPUT_REQUIRED")
    assert core.records.counts() == {"INPUT_REQUIRED": 1, "OK": 0}
    assert (core.held, plugin.pending, host.in_flight) == (0, {}, {})


def test_a_plugin_gets_what_its_caller_accepts_and_answers() -> None:
    core = Core()
    plugin, host = core.attached("plugin", tool("t")), core.attached("host")
    more = {**FORM, "input_responses_json": '{"q1":{"action":"accept"}}', "request_state": "kept"}
    call(host, "t", **more)
    (sent,) = plugin.read("calls")
    assert list(sent.accepts) == ["elicitation.form"]
    assert (sent.input_responses_json, sent.request_state) == (more["input_responses_json"], "kept")
    result = pb.ToolResult(call_id=sent.call_id, input_requests_json=json.dumps({"q2": DAY}), request_state="more")
    plugin.send(results=[result])
    (came,) = host.read("results")
    assert (json.loads(came.input_requests_json), came.request_state, came.is_error) == ({"q2": DAY}, "more", False)


def test_questions_of_a_call_that_accepts_nothing_become_an_error_that_says_what_is_asked_and_how_to_answer() -> None:
    core, host, plugin = one_call()
    for more in ({}, {"context": pb.CallContext()}, {"accepts": ["elicitation.form"]}):  # the last has no context
        call_id = core.call(host, "t", **more)
        ask(core, plugin, DAY, state="kept")
        error, result = error_of(host, call_id), only(host, call_id)
        assert (error.code, error.stage, error.retry_safe, error.reason) == (
            *(Code.TOOL, Stage.ACCEPTED, False),
            "needs_input",
        )
        assert error.message.startswith("tool 't' needs input before it can go on: 'Which day?' (day: string).")
        assert "accepts elicitation.form; Host.call takes on_input" in error.message
        assert (result.asks, result.request_state) == (False, "")
    assert core.records.counts() == {"OK": 0, "TOOL": 3}


def test_a_question_is_only_for_callers_that_accept_its_kind() -> None:
    core, host, plugin = one_call()
    call_id = core.call(host, "t", **FORM)
    ask(core, plugin, DAY, MODEL)
    error = error_of(host, call_id)
    assert "an answer of a language model" in error.message
    assert "accepts sampling;" in error.message
    call_id = core.call(host, "t", accepts=["sampling", "elicitation.form"], context=pb.CallContext())
    ask(core, plugin, DAY, MODEL)
    assert only(host, call_id).asks


@pytest.mark.parametrize("kind", ["a plugin", "a nested call"])
def test_only_hosts_can_be_asked(kind: str) -> None:
    core, host, plugin = one_call(tool("t"), tool("inner"))
    more = {**FORM, "input_responses_json": "{}", "request_state": "s"}
    if kind == "a plugin":
        caller = core.peer("other", trusted=False)
        call_id = core.call(caller, "t", **more)
    else:
        core.call(host, "t", **more)
        caller, call_id = plugin, nested(core, plugin, "inner", accepts=["elicitation.form"], context=pb.CallContext())
    *_, received = plugin.hand_over()
    assert received.exchange is None
    core.dispatcher.results(
        plugin, [pb.ToolResult(call_id=received.id, input_requests_json=json.dumps({"q": DAY}))], core.now
    )
    assert error_of(caller, call_id).reason == "needs_input"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "must be a JSON object"),
        ("{", "not JSON"),
        ('{"q":{"params":{}}}', "the text method"),
        ('{"q":{"method":"roots/list","params":[]}}', "the object params"),
        ('{"":{"method":"roots/list"}}', "1 to 128 characters"),
    ],
)
def test_questions_that_break_a_rule_are_an_error_of_the_tool(text: str, says: str) -> None:
    core, host, plugin = one_call()
    call_id = core.call(host, "t", **FORM)
    core.answer(plugin, "", input_requests_json=text)
    error = error_of(host, call_id)
    assert (error.code, error.reason) == (Code.TOOL, "invalid_questions")
    assert says in error.message


@pytest.mark.parametrize("limit", ["input_requests", "input_requests_bytes", "request_state_bytes"])
def test_questions_have_limits_that_their_error_names(limit: str) -> None:
    limits = Limits(**{limit: 2})
    core, host, plugin = one_call(limits=limits)
    call_id = core.call(host, "t", **FORM)
    ask(core, plugin, DAY, DAY, DAY, state="kept")
    error = error_of(host, call_id)
    assert (error.code, error.limit) == (Code.RESULT_TOO_LARGE, (limit, 2))
    assert f"{limit} = 2" in error.message


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"input_responses_json": "[]"}, "must be a JSON object"),
        ({"input_responses_json": '{"a":"' + "x" * 60 + '"}'}, "more than 60"),
        ({"request_state": "x" * 11}, "request_state_bytes = 10"),
    ],
)
def test_answers_are_checked_before_a_plugin_sees_them(more: dict[str, str], says: str) -> None:
    core, host, plugin = one_call(limits=Limits(arguments_bytes=60, request_state_bytes=10))
    error = core.refusal(host, "t", **FORM, **more)
    assert (error.code, error.stage) == (Code.INVALID_ARGUMENTS, Stage.NOT_DISPATCHED)
    assert says in error.message
    assert plugin.pending == {}


def test_answers_count_as_held_until_the_call_ends() -> None:
    core, host, plugin = one_call()
    core.call(host, "t", "{}", **FORM, input_responses_json="{" + " " * 998 + "}", request_state="x" * 1_000)
    assert core.held == 2_002
    core.answer(plugin)
    assert core.held == 0


def test_a_failure_has_no_questions() -> None:
    core, host, plugin = one_call()
    call_id = core.call(host, "t", **FORM)
    core.answer(plugin, "", is_error=True, input_requests_json=json.dumps({"q": DAY}), request_state="s")
    assert error_of(host, call_id).code is Code.TOOL
    assert not only(host, call_id).asks


@pytest.mark.parametrize("content", [[], [pb.ContentBlock(text=pb.TextContent(text="x"))]])
def test_a_result_with_an_output_has_no_questions(content: list[pb.ContentBlock]) -> None:
    core, host, plugin = one_call()
    for output in ("null", '"done"'):
        call_id = core.call(host, "t", **FORM)
        core.answer(plugin, output, input_requests_json=json.dumps({"q": DAY}), request_state="s", content=content)
        result = only(host, call_id)
        assert (result.asks, result.output) == (output == "null", None if output == "null" else "done")
        assert result.request_state == ("s" if result.asks else "")


def test_the_questions_of_an_untrusted_tool_may_not_ask_for_a_secret() -> None:
    core = Core(untrusted=("plugin",))
    core.dispatcher.seams.tripwire = Tripwire()
    host, plugin = core.peer("host"), core.plugin("plugin", tool("t"))
    call_id = core.call(host, "t", **FORM)
    schema = {"type": "object", "properties": {"password": {"type": "string"}}}
    ask(core, plugin, {"method": "elicitation/create", "params": {"message": "?", "requestedSchema": schema}})
    assert error_of(host, call_id).code is Code.SECRET_BLOCKED


# -- what a tool needs -----------------------------------------------------------------------------------------------


def test_a_call_of_a_tool_that_needs_more_than_its_caller_accepts_never_reaches_the_plugin() -> None:
    core, host, plugin = one_call(tool("t", needs=("sampling", "elicitation.form")))
    for more in ({}, FORM):
        error = core.refusal(host, "t", **more)
        assert (error.code, error.stage, error.reason) == (
            *(Code.INVALID_ARGUMENTS, Stage.NOT_DISPATCHED),
            "needs_input",
        )
        assert "does not accept sampling" in error.message
    assert plugin.pending == {}
    core.call(host, "t", accepts=["elicitation.form", "sampling"], context=pb.CallContext())
    assert len(plugin.pending) == 1


@pytest.mark.parametrize("needs", [("",), ("x" * 65,), ("a",) * 17])
def test_what_a_tool_needs_has_limits(needs: tuple[str, ...]) -> None:
    with pytest.raises(InvalidTool, match="needs has"):
        Tool("t", needs=needs)


# -- tools that are always tasks -------------------------------------------------------------------------------------


def test_a_call_that_is_always_a_task_becomes_one_at_once_where_its_caller_takes_tasks() -> None:
    core, host, plugin = one_call(tool("t", always_background=True))
    keeper = KeeperDouble(core)
    call_id = core.call(host, "t", background_after_seconds=100.0)
    assert only(host, call_id).output == {"task_id": "task1"}
    core.answer(plugin, "7")
    assert keeper.peer.results["task1"] == [Result("task1", "7")]
    waiting = core.call(host, "t")
    assert waiting in host.in_flight
    core.answer(plugin, "8")
    assert only(host, waiting).output == 8
    assert core.dispatcher.in_flight.soft_deadlines == {}


def test_a_tool_that_never_becomes_a_task_does_not_for_being_always_one() -> None:
    core, host, _ = one_call(tool("t", always_background=True, no_background=True))
    KeeperDouble(core)
    assert core.call(host, "t", background_after_seconds=1.0) in host.in_flight


def test_without_room_for_another_task_the_caller_waits() -> None:
    core, host, plugin = one_call(tool("t", always_background=True))
    KeeperDouble(core, room=0)
    call_id = core.call(host, "t", background_after_seconds=1.0)
    assert call_id in host.in_flight
    core.answer(plugin, "7")
    assert only(host, call_id).output == 7


# -- outputs ---------------------------------------------------------------------------------------------------------

DEGREES = '{"type":"object","properties":{"degrees":{"type":"number"}},"required":["degrees"]}'


def test_a_result_that_breaks_the_schema_that_its_author_asked_to_check_is_withheld_and_says_why() -> None:
    core, host, plugin = one_call(tool("t", output_schema_json=DEGREES, validate_output=True))
    for output, says in (
        ('{"degrees":"warm"}', "output.degrees: "),
        ("{}", "output: "),
        ("", "output: "),
        ("{", "output: are not JSON"),
    ):
        call_id = core.call(host, "t")
        core.answer(plugin, output)
        error = error_of(host, call_id)
        assert (error.code, error.stage, error.reason) == (Code.TOOL, Stage.ACCEPTED, "output_schema")
        assert says in error.message
        assert "warm" not in only(host, call_id).output_json
    call_id = core.call(host, "t")
    core.answer(plugin, '{"degrees": 1e1}')
    assert only(host, call_id) == Result(call_id, '{"degrees": 1e1}')
    assert core.records.counts() == {"OK": 1, "TOOL": 4}


def test_a_failure_is_not_checked_against_the_schema_of_outputs() -> None:
    core, host, plugin = one_call(tool("t", output_schema_json=DEGREES, validate_output=True))
    call_id = core.call(host, "t")
    core.answer(plugin, '"no"', is_error=True)
    assert error_of(host, call_id).reason == ""


def test_a_schema_of_outputs_is_only_a_promise_where_its_author_asks_for_nothing_more() -> None:
    core, host, plugin = one_call(tool("t", output_schema_json=DEGREES))
    call_id = core.call(host, "t")
    core.answer(plugin, "1")
    assert only(host, call_id).output == 1


def test_another_schema_of_outputs_counts_although_the_declaration_has_the_same_hash() -> None:
    core = Core()
    plugin, host = core.attached("plugin", tool("t")), core.attached("host")
    checked = tool("t", output_schema_json=DEGREES, validate_output=True)
    plugin.attach("plugin", checked)
    plugin.read("calls")
    call(host, "t")
    (sent,) = plugin.read("calls")
    answer(plugin, sent.call_id, "1")
    (came,) = host.read("results")
    assert came.error.reason == "output_schema"


def test_an_output_schema_may_be_of_anything_and_one_that_breaks_a_rule_refuses_the_tool() -> None:
    core, host, plugin = one_call(tool("t", output_schema_json='{"type":"str"}', validate_output=True))
    (listing,) = core.registry.listings()
    assert listing.tool.output_schema_json == '{"type":"string"}'
    assert listing.entry.all_warnings[0].startswith("output schema at #/type")
    call_id = core.call(host, "t")
    core.answer(plugin, '"text"')
    assert only(host, call_id).output == "text"
    with pytest.raises(InvalidTool, match="tool 'bad': output schema at #"):
        core.plugin("p", tool("bad", output_schema_json='{"type":"nonsense"}'))
    with pytest.raises(InvalidTool, match="output_schema_json is a JSON array"):
        Tool("t", output_schema_json="[]")
    with pytest.raises(InvalidTool, match=r"output_schema_json has \d+ bytes, more than the limit schema_bytes"):
        Tool.from_wire(pb.Tool(name="t", output_schema_json='{"a":"' + "x" * 300_000 + '"}'), Limits())
