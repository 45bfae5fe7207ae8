"""Tests what is read of providers' answers: text, calls, how they ended, their tokens, and what goes back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.parts.models.dialects.answer_cases import CASES, Case
from tests.support.providers import anthropic, genai_types
from toolbus.dialects import Dialect, find_dialect
from toolbus.parts.models.dialects.conversation import Ending, Message, Turn, Usage
from toolbus.parts.models.dialects.endings import (
    ANTHROPIC_ENDINGS,
    GEMINI_ENDINGS,
    OLLAMA_ENDINGS,
    OPENAI_CHAT_ENDINGS,
    RESPONSES_ENDINGS,
    Endings,
)
from toolbus.protocol.tool import Tool

PAGE = Path(__file__).parents[4] / "docs" / "start" / "dialects.md"
TOOLS = [Tool("get_weather", "Tells."), Tool("now", "Tells."), Tool("get_get_x", "Does.")]
TABLES: Mapping[str, Endings] = {
    "openai": OPENAI_CHAT_ENDINGS,
    "openai-responses": RESPONSES_ENDINGS,
    "anthropic": ANTHROPIC_ENDINGS,
    "gemini": GEMINI_ENDINGS,
    "ollama": OLLAMA_ENDINGS,
}


def read(case: Case) -> tuple[Dialect, Any, Turn]:
    dialect = find_dialect(case.dialect)
    assert isinstance(dialect, Dialect)
    export = dialect.export(TOOLS)
    if not case.streamed:
        answer = case.events[0]
        return dialect, export, dialect.parse(answer.get("response", answer), export.names)
    stream = dialect.stream(export.names)
    for event in case.events:
        stream.feed(event)
    assert stream.complete
    return dialect, export, stream.finish()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dialect}: {case.name}")
def test_an_answer_is_read_as_it_is_meant_and_tells_how_it_ended(case: Case) -> None:
    dialect, export, turn = read(case)
    assert (turn.ending, turn.stop, turn.text) == (case.ending, case.stop, case.text)
    calls = [(call.name, call.arguments_json + ("" if call.whole else "…")) for call in turn.calls]
    assert calls == list(case.calls)
    assert case.reason in turn.reason
    assert (turn.retry, turn.usage) == (case.retry, case.usage)
    assert turn.cut is (case.ending == "cut")
    history = dialect.history([Message("user", "?"), turn, Message("user", "And?")], export.names)
    assert history  # what came can always go back
    if case.back is not None:
        assert {key: history[1].get(key) for key in case.back} == case.back


def _kind(endings: Endings, word: str) -> str | None:
    return endings.get(word.lower())


def test_every_word_that_an_official_client_declares_is_in_the_table() -> None:
    assert set(get_args(anthropic.types.StopReason)) <= ANTHROPIC_ENDINGS.keys()
    unspecified = {"FINISH_REASON_UNSPECIFIED"}
    declared = {each.value for each in genai_types.FinishReason} - unspecified
    assert {word for word in declared if _kind(GEMINI_ENDINGS, word) is None} == set()


@pytest.mark.parametrize("dialect", TABLES)
def test_the_documentation_lists_every_word_of_a_dialect(dialect: str) -> None:
    text = PAGE.read_text("utf-8")
    heads = [head.strip("` ") for head in re.findall(r"^\| dialect \|(.*`cut`.*)\|$", text, re.MULTILINE)[0].split("|")]
    row = next(line for line in text.splitlines() if line.startswith(f"| `{dialect}`") and line.count("|") == 6)
    cells = [set(re.findall(r"`([a-z_]+)`", cell.split(";")[0])) for cell in row.split("|")[2:6]]
    documented = {(word, head) for head, words in zip(heads, cells, strict=True) for word in words}
    assert documented == {(word, ending) for word, ending in TABLES[dialect].items() if ending != "complete"}
    assert set(heads) == set(get_args(Ending)) - {"complete"}


def test_tokens_add_up_and_counts_that_no_provider_reports_stay_unknown() -> None:
    assert Usage(1, 2) + Usage(3, 4, 5) == Usage(4, 6, 5)
    assert (Usage(1, 2) + Usage(1, 2)).cached_tokens is None
