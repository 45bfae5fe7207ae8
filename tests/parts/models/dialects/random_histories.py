"""Generates conversations as hosts store them, with everything that a provider would refuse, for property tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.parts.models.dialects.sample_tools import SAMPLES
from toolbus.parts.models.dialects.conversation import Answered, Answers, HistoryItem, Message, ModelCall, Turn
from toolbus.protocol.tool import Result

NAMES = [*(tool.name for tool in SAMPLES), "no such tool", "", "功能"]
IDS = ["call_0", "call_1", "functions.f:0", "", "工具", "x" * 60]
TEXTS = ["hello", "", " \n", "你好"]
ARGUMENTS = ["{}", "", '{"city":"Paris"}', "[1]", '{"cut', "NaN"]
OUTPUTS = ['"sun"', '""', "null", '{"a":1}', "[1]", "no JSON"]

CallNames = list[tuple[str, str]]  # ids and names of calls

calls = st.lists(st.tuples(st.sampled_from(IDS), st.sampled_from(NAMES)), max_size=3)
messages = st.builds(Message, st.sampled_from(("system", "user", "assistant")), st.sampled_from(TEXTS))
results = st.builds(Result, output_json=st.sampled_from(OUTPUTS), is_error=st.booleans())


@st.composite
def foreign_turns(draw: st.DrawFn) -> Turn:
    """Returns a turn of a dialect that keeps names and ids as they are."""
    call_names: CallNames = draw(calls)
    model_calls = tuple(
        ModelCall(call_id, name, draw(st.sampled_from(ARGUMENTS)), True, name) for call_id, name in call_names
    )
    return Turn(draw(st.sampled_from(TEXTS)), model_calls, dialect="another", raw=({"role": "assistant"},))


@st.composite
def histories(draw: st.DrawFn, own: Callable[[str, CallNames], tuple[Turn, Any]]) -> list[HistoryItem]:
    """Returns a conversation: turns answered, in part, late, twice or not at all, and answers without a turn.

    Args:
        own: returns a turn of the dialect with a text and calls, and the provider's own form of it.
    """
    items: list[HistoryItem] = []
    model_calls: list[ModelCall] = []
    for kind in draw(st.lists(st.sampled_from(("message", "foreign", "own", "form", "answers")), max_size=8)):
        if kind == "message":
            items.append(draw(messages))
        elif kind == "answers":
            chosen = draw(st.lists(st.sampled_from(model_calls), max_size=4)) if model_calls else []
            items.append(Answers(tuple(Answered(call, draw(results)) for call in chosen)))
        elif kind == "foreign":
            items.append(turn := draw(foreign_turns()))
            model_calls += turn.calls
        else:
            turn, form = own(draw(st.sampled_from(TEXTS)), draw(calls))
            items.append(turn if kind == "own" else form)
            model_calls += turn.calls
    return items
