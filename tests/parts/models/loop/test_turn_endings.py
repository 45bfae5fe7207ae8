"""Tests what a loop does about answers that are not whole: they are told, requested again, or continued."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.docs.pages import listed
from tests.parts.models.loop.scripted_model import FunctionSource, Json, ScriptedModel, call, says
from toolbus.loop import Endpoint, LoopSettings, RoundEnded, RoundRetried, TextDelta, ToolLoop
from toolbus.parts.models.dialects.anthropic import Anthropic
from toolbus.parts.models.dialects.conversation import Answers, Message, ModelCall, Turn, Usage
from toolbus.parts.models.dialects.gemini import Gemini
from toolbus.parts.models.loop.turn_reply import Reply, Stopped

MALFORMED = "function_call_filter: MALFORMED_FUNCTION_CALL"


def add(a: int = 0, b: int = 0) -> int:
    return a + b


def ends(stop: str, text: str = "", *calls: Json, tokens: int = 0) -> Json:
    """Returns an answer that ended for a reason."""
    answer = says(text, *calls)
    answer["choices"][0]["finish_reason"] = stop
    if tokens:
        answer["usage"] = {"prompt_tokens": tokens, "completion_tokens": 1}
    return answer


def refusing(answer: Json, words: str = "No.") -> Json:
    """Returns an answer in which the model refuses to answer."""
    answer["choices"][0]["message"]["refusal"] = words
    return answer


async def reply_of(
    *answers: Json, source: FunctionSource | None = None, **settings: Any
) -> tuple[Reply, ScriptedModel]:
    model = ScriptedModel(*answers)
    loop = ToolLoop(source or FunctionSource(add=add), model.endpoint, LoopSettings(**settings))
    return await loop.run("?"), model


@pytest.mark.parametrize(
    ("answer", "stopped", "reason"),
    [
        (ends("content_filter"), "refused", "content_filter"),
        (ends("content_filter", "So f"), "refused", "content_filter"),
        (ends("length", "So f"), "cut", "length"),
        (ends("length"), "cut", "length"),
        (ends("insufficient_system_resource"), "failed", "insufficient_system_resource"),
        (ends("quota_of_mars"), "failed", "quota_of_mars"),
        (ends("stop", "Hi"), "answered", ""),
        (ends("quota_of_mars", "Hi"), "answered", ""),
    ],
)
async def test_a_reply_tells_how_the_answer_ended_with_the_providers_word(
    answer: Json, stopped: str, reason: str
) -> None:
    reply, model = await reply_of(answer)
    assert (reply.stopped, reply.reason, reply.cut) == (stopped, reason, stopped == "cut")
    assert reply.text == (answer["choices"][0]["message"]["content"] or "")
    assert len(model.requests) == 1


async def test_an_answer_that_is_not_whole_is_logged_with_the_providers_word_and_without_content(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reply, model = await reply_of(refusing(ends("stop"), "I will not sing."))
    assert (reply.text, reply.stopped, reply.reason) == ("I will not sing.", "refused", "stop: I will not sing.")
    assert [record.getMessage() for record in caplog.records] == [
        f"{model.endpoint!r} gave no whole answer, it is refused: stop"
    ]


async def test_an_empty_answer_is_logged_as_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "toolbus.loop")
    _, model = await reply_of(ends("stop"), ends("stop"))
    assert [record.getMessage() for record in caplog.records if "answer" in record.getMessage()] == [
        f"the answer of {model.endpoint!r} is requested again: stop, the answer is empty",
        f"{model.endpoint!r} gave no whole answer, it is failed: stop, the answer is empty",
    ]


def test_the_documentation_has_every_end_of_a_turn() -> None:
    page = Path(__file__).parents[4] / "docs" / "start" / "tool-loop.md"
    rows = listed(page.read_text("utf-8"), "check `reply.stopped`")
    assert [row[0].strip("`") for row in rows] == list(get_args(Stopped))


async def test_a_refusal_after_tools_is_refused_and_not_an_empty_summary() -> None:
    reply, _ = await reply_of(says("", call("add")), ends("content_filter"), no_summary_text="Sorry.")
    assert (reply.text, reply.stopped, reply.reason) == ("Sorry.", "refused", "content_filter")


async def test_a_refusal_in_the_forced_answer_is_refused() -> None:
    reply, _ = await reply_of(says("", call("add")), ends("content_filter"), rounds=1)
    assert (reply.stopped, reply.rounds) == ("refused", 2)


async def test_an_answer_of_gemini_that_could_not_be_read_is_failed_with_its_reason() -> None:
    answer = {"candidates": [{"finishReason": "MALFORMED_FUNCTION_CALL", "finishMessage": "print(add())"}]}
    asked = []

    def ask(request: Json) -> Json:
        asked.append(request)
        return answer

    reply = await ToolLoop(FunctionSource(add=add), Endpoint(Gemini(), ask)).run("?")
    assert (reply.stopped, reply.reason) == ("failed", "MALFORMED_FUNCTION_CALL: print(add())")
    assert len(asked) == 2


# -- requested again -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first", [ends(MALFORMED), ends(MALFORMED, "Let me"), ends("stop"), ends("tool_calls", "", call(""))]
)
async def test_an_unreadable_answer_is_requested_once_more_and_leaves_nothing_behind(first: Json) -> None:
    reply, model = await reply_of(first, says("hi"))
    assert (reply.text, reply.stopped, reply.rounds) == ("hi", "answered", 1)
    assert model.requests[0] == model.requests[1]
    assert len(reply.items) == 2


async def test_a_second_failure_is_reported_and_not_requested_again() -> None:
    reply, model = await reply_of(ends("tool_calls", "", call("")), ends("tool_calls", "", call("")))
    assert (reply.stopped, len(model.requests)) == ("failed", 2)
    assert reply.reason == "tool_calls: the model wrote a call without the name of a tool"


@pytest.mark.parametrize(
    "answer", [ends("error"), ends("content_filter"), ends("length"), refusing(ends("tool_calls", "", call("")))]
)
async def test_an_end_that_would_come_again_is_not_requested_again(answer: Json) -> None:
    _, model = await reply_of(answer)
    assert len(model.requests) == 1


async def test_a_program_may_switch_retries_off() -> None:
    reply, model = await reply_of(ends(MALFORMED), retries=0)
    assert (reply.stopped, len(model.requests)) == ("failed", 1)


async def test_a_stream_tells_of_a_retry() -> None:
    model = ScriptedModel(ends(MALFORMED), says("hi"), streams=True)
    events = [event async for event in ToolLoop(FunctionSource(), model.endpoint).stream("?")]
    retried = [event for event in events if isinstance(event, RoundRetried)]
    assert [(event.round, event.turn.stop) for event in retried] == [(1, MALFORMED)]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "hi"
    assert sum(isinstance(event, RoundEnded) for event in events) == 1


async def test_a_text_that_a_stream_has_shown_is_not_shown_twice() -> None:
    model = ScriptedModel(ends(MALFORMED, "Let me"), says("hi"), streams=True)
    events = [event async for event in ToolLoop(FunctionSource(), model.endpoint).stream("?")]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "Let me"
    reply = events[-1].reply  # type: ignore[union-attr]
    assert (reply.text, reply.stopped, len(model.requests)) == ("Let me", "failed", 1)


# -- calls of an answer that is not whole ------------------------------------------------------------------------------


async def test_a_call_that_was_cut_is_not_made_while_whole_ones_are_and_the_model_reads_why() -> None:
    source = FunctionSource(add=add)
    cut = ends("length", "", call("add", {"a": 1}), call("add", '{"a": 5, "b'))
    reply, model = await reply_of(cut, says("done"), source=source)
    assert source.calls == [("add", '{"a": 1}')]
    assert [done.outcome for done in reply.calls] == ["ok", "invalid_arguments"]
    assert "its arguments end after 11 characters" in model.results(1)[1]
    assert (reply.text, reply.stopped, reply.cut) == ("done", "answered", False)


async def test_a_call_that_was_cut_before_its_arguments_is_not_made_without_any() -> None:
    source = FunctionSource(add=add)
    await reply_of(ends("length", "", call("add", "")), says("done"), source=source)
    assert source.calls == []


@pytest.mark.parametrize(("stop", "stopped"), [("content_filter", "refused"), ("error", "failed")])
async def test_no_call_of_an_answer_that_was_refused_or_failed_is_made_and_none_stays_unanswered(
    stop: str, stopped: str
) -> None:
    source = FunctionSource(add=add)
    model = ScriptedModel(ends(stop, "So f", call("add", {"a": 1})), says("hi"))
    loop = ToolLoop(source, model.endpoint)
    reply = await loop.run("?")
    assert (reply.text, reply.stopped, reply.reason, source.calls) == ("So f", stopped, stop, [])
    assert isinstance(reply.items[-1], Answers)
    await loop.run([*reply.items, Message("user", "again")])
    assert stop in model.results(1)[0]


async def test_a_nameless_call_beside_others_is_ignored_and_named_in_the_reason() -> None:
    source = FunctionSource(add=add)
    reply, model = await reply_of(ends("tool_calls", "", call("add"), call("")), says("done"), source=source)
    assert (reply.stopped, source.calls) == ("answered", [("add", "{}")])
    assert isinstance(reply.items[1], Turn)
    assert "without the name" in reply.items[1].reason
    assert [each["function"]["name"] for each in model.requests[1]["messages"][1]["tool_calls"]] == ["add"]


# -- pauses ------------------------------------------------------------------------------------------------------------


def paused(text: str, stop: str = "pause_turn") -> Json:
    search = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": text}}
    blocks = [{"type": "text", "text": text}, *([search] if stop == "pause_turn" else [])]
    return {"role": "assistant", "content": blocks, "stop_reason": stop, "usage": {"input_tokens": 3}}


async def pausing(*answers: Json, choice: str = "auto", **settings: Any) -> tuple[Reply, list[Json]]:
    requests: list[Json] = []

    def ask(request: Json) -> Json:
        requests.append(request)
        return answers[len(requests) - 1]

    loop = ToolLoop(FunctionSource(add=add), Endpoint(Anthropic(), ask), LoopSettings(**settings))
    return await loop.run("?", tool_choice=choice), requests


async def test_an_answer_that_paused_goes_back_and_continues() -> None:
    reply, requests = await pausing(paused("It "), paused("is "), paused("sunny.", "end_turn"))
    assert (reply.text, reply.stopped, reply.rounds) == ("It is sunny.", "answered", 3)
    last = requests[2]["messages"][-1]
    assert last["role"] == "assistant"
    assert [block["type"] for block in last["content"]] == ["text", "server_tool_use"] * 2
    assert reply.usage == Usage(9, 0)


async def test_text_before_a_call_is_not_part_of_the_answer_paused_or_not() -> None:
    reply, _ = await reply_of(ends("pause_turn", "One. "), says("Two. ", call("add")), says("Three."))
    assert reply.text == "Three."


async def test_a_blank_answer_after_tools_is_no_summary() -> None:
    reply, _ = await reply_of(says("", call("add")), says(" \n"), retries=0, no_summary_text="(nothing)")
    assert (reply.text, reply.stopped) == ("(nothing)", "no_summary")


async def test_a_choice_of_the_first_request_does_not_apply_to_its_continuation() -> None:
    _, requests = await pausing(paused("It "), paused("is", "end_turn"), choice="required")
    assert [request.get("tool_choice") for request in requests] == [{"type": "any"}, None]


async def test_an_answer_without_tools_continues_without_tools() -> None:
    reply, requests = await pausing(paused("It "), paused("is", "end_turn"), choice="none")
    assert reply.text == "It is"
    assert [request.get("tools") for request in requests] == [None, None]


@pytest.mark.parametrize("forced", [True, False])
async def test_an_answer_that_pauses_without_end_is_paused_after_the_last_round(forced: bool) -> None:
    rounds = 1 if forced else 2
    reply, requests = await pausing(
        *(paused("It "), paused("is")), rounds=rounds, forced_answer=forced, no_convergence_text="Sorry."
    )
    assert (reply.text, reply.stopped, reply.reason) == ("It is", "paused", "pause_turn")
    assert len(requests) == 2


# -- tokens ------------------------------------------------------------------------------------------------------------


async def test_a_reply_adds_up_the_tokens_of_all_requests_repeated_ones_included() -> None:
    first, last = ends("tool_calls", "", call("add"), tokens=10), ends("stop", "hi", tokens=40)
    reply, _ = await reply_of(ends(MALFORMED, tokens=10), first, last)
    assert reply.usage == Usage(60, 3)
    turns = [item.usage for item in reply.items if isinstance(item, Turn)]
    assert turns == [Usage(10, 1), Usage(40, 1)]


async def test_without_counts_the_tokens_are_unknown() -> None:
    reply, _ = await reply_of(says("hi"))
    assert reply.usage is None


# -- stored conversations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [Turn("Hi", (ModelCall("c1", "add"),), stop="stop"), ModelCall("c1", "add", "{}")])
def test_records_of_an_earlier_version_are_unpickled_with_todays_defaults(record: Any) -> None:
    current = record.__getstate__()
    assert pickle.loads(pickle.dumps(record)) == record
    older = object.__new__(type(record))
    older.__setstate__(current[:6])
    assert (older, older.__getstate__()[6:]) == (record, current[6:])
