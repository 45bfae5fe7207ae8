from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parts.council.fake_tool_source import Model
from tests.support.examples import examples
from tests.support.waiting import WAIT_SECONDS
from toolbus.errors import ToolBusError
from toolbus.parts.council.settings import Member, SidecarSettings
from toolbus.parts.council.sidecar import Completion, LanguageModel, Question
from toolbus.parts.council.tool_runner import coerce_arguments, missing_required, plan_arguments, read_arguments
from toolbus.protocol.tool import Tool

MEMBER = Member("1", "Ada", role="archivist")
SEARCH = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}, "deep": {"type": "boolean"}},
    "required": ["query"],
}
TWO = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
FAILED = 'Failed to plan arguments for tool "Search"'


def tool_of(schema: Mapping[str, Any]) -> Tool:
    return Tool("search", "Finds things.", json.dumps(schema), display_name="Search")


async def plan(
    schema: Mapping[str, Any],
    model: LanguageModel,
    *,
    timeout_seconds: float = 30.0,
    sidecar: SidecarSettings | None = None,
) -> dict[str, Any]:
    return await plan_arguments(
        tool_of(schema),
        MEMBER,
        "user: where do owls live?",
        model,
        timeout_seconds=timeout_seconds,
        sidecar=sidecar or SidecarSettings(),
    )


async def test_planning_forces_one_call_with_the_schema_of_the_tool() -> None:
    model = Model(Completion(arguments={"query": "owls"}))
    assert await plan(SEARCH, model, sidecar=SidecarSettings(model="small")) == {"query": "owls"}
    (question,) = model.questions
    assert question.function is not None
    assert (question.function["name"], question.function["parameters"]) == ("call_tool", SEARCH)
    assert (question.temperature, question.top_p, question.max_tokens, question.model) == (0.2, 0.9, 300, "small")
    system, user = question.messages
    assert "Ada" in system["content"]
    assert "archivist" in system["content"]
    assert "Finds things." in system["content"]
    assert user == {"role": "user", "content": "user: where do owls live?"}


@pytest.mark.parametrize(
    ("sidecar", "seconds", "temperature", "tokens"),
    [
        (SidecarSettings(temperature=0.1), 30.0, 0.1, 300),
        (SidecarSettings(temperature=1.5), 1.0, 0.2, 128),
        (SidecarSettings(max_tokens=64), 30.0, 0.2, 64),
        (SidecarSettings(max_tokens=4096), 300.0, 0.2, 3000),
    ],
)
async def test_temperature_and_length_stay_below_what_the_sidecar_and_the_time_allow(
    sidecar: SidecarSettings, seconds: float, temperature: float, tokens: int
) -> None:
    model = Model(Completion(arguments={"query": "owls"}))
    await plan(SEARCH, model, sidecar=sidecar, timeout_seconds=seconds)
    assert (model.questions[0].temperature, model.questions[0].max_tokens) == (temperature, tokens)


@pytest.mark.parametrize("schema", [{}, {"type": "object"}, {"type": "object", "properties": {}}, {"properties": []}])
async def test_a_tool_without_parameters_asks_no_model(schema: dict[str, Any]) -> None:
    model = Model()
    assert await plan(schema, model) == {}
    assert model.questions == []


@pytest.mark.parametrize(
    ("answer", "arguments"),
    [
        (Completion(arguments='{"query": "owls"}'), {"query": "owls"}),
        (Completion(arguments='```json\n{"query": "owls"}\n```'), {"query": "owls"}),
        (
            Completion(arguments={"query": "owls", "limit": "5", "deep": "Yes"}),
            {"query": "owls", "limit": 5, "deep": True},
        ),
        (Completion("{'no': json}", arguments='{"query": "owls"'), {"query": "{'no': json}"}),
        ('{"query": "owls"}', {"query": "owls"}),
        ('Sure!\n```json\n{"query": "owls"}\n```\nDone.', {"query": "owls"}),
        ('I choose {"query": "owls", "limit": 2} now.', {"query": "owls", "limit": 2}),
        ("- **query**: `owls`\n- limit = 3,\nWhy: I like them", {"query": "owls", "limit": 3}),
        ('"query": "owls",\n"deep": off', {"query": "owls", "deep": False}),
        ("owls of the north", {"query": "owls of the north"}),
        ("<think>{}: hm, owls?</think> owls", {"query": "owls"}),
        ("so it is owls</think>\nowls", {"query": "owls"}),
        (Completion("owls", arguments={}), {"query": "owls"}),
        (Completion("owls", arguments={"query": {1, 2}}), {"query": "owls"}),
        (Completion("owls", arguments='{"query": NaN}'), {"query": "owls"}),
        (Completion("owls", arguments='{"limit": 1e999}'), {"query": "owls"}),
        ('{"query": "\\ud83d"}', {"query": "\ufffd"}),
    ],
)
async def test_arguments_are_found_wherever_a_model_puts_them(answer: Any, arguments: dict[str, Any]) -> None:
    model = Model(answer)
    assert await plan(SEARCH, model) == arguments
    assert len(model.questions) == 1


async def test_plain_text_is_not_an_argument_where_two_are_required() -> None:
    model = Model("Paris, three days", "Paris again")
    with pytest.raises(ToolBusError) as caught:
        await plan(TWO, model)
    assert str(caught.value) == FAILED
    assert len(model.questions) == 2


async def test_missing_arguments_are_requested_once_more_and_merged() -> None:
    model = Model(Completion(arguments={"city": "Paris", "days": ""}), "days: 3\ncity:  ")
    assert await plan(TWO, model) == {"city": "Paris", "days": 3}
    first, repair = model.questions
    assert (repair.temperature, repair.max_tokens) == (0.0, 192)
    assert repair.function == first.function
    assert repair.messages[:2] == first.messages
    assert [each["role"] for each in repair.messages[2:]] == ["assistant", "user"]
    assert "This lacks days." in repair.messages[3]["content"]


async def test_planning_fails_where_the_repair_adds_nothing() -> None:
    model = Model("{}", "{}", "never asked")
    with pytest.raises(ToolBusError, match=FAILED):
        await plan(TWO, model)
    assert len(model.questions) == 2


@pytest.mark.parametrize(
    "fault", [RuntimeError("no"), ToolBusError("no"), asyncio.CancelledError(), RecursionError(), None, 7, ["x"]]
)
async def test_whatever_a_model_does_wrong_is_one_error_with_its_cause(fault: Any) -> None:
    with pytest.raises(ToolBusError) as caught:
        await plan(TWO, Model(fault))
    assert str(caught.value) == FAILED
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("seconds", [0.02, 0.0])
async def test_both_questions_together_end_at_the_timeout(seconds: float) -> None:
    async def silent(question: Question) -> str:
        if question.temperature > 0:
            return "{}"
        await asyncio.Event().wait()
        return ""

    with pytest.raises(ToolBusError, match=FAILED):
        await asyncio.wait_for(plan(TWO, silent, timeout_seconds=seconds), WAIT_SECONDS)


async def test_a_model_that_suppresses_the_timeout_gets_no_repair_question() -> None:
    questions = []

    async def swallowing(question: Question) -> str:
        questions.append(question)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        return "{}"

    with pytest.raises(ToolBusError, match=FAILED):
        await asyncio.wait_for(plan(TWO, swallowing, timeout_seconds=0.02), WAIT_SECONDS)
    assert len(questions) == 1


async def test_cancelling_reaches_the_model_and_is_no_failure() -> None:
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def silent(question: Question) -> str:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return ""

    planning = asyncio.create_task(plan(TWO, silent))
    await asyncio.wait_for(asked.wait(), WAIT_SECONDS)
    planning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await planning
    assert cancelled.is_set()


async def test_an_error_names_a_tool_without_a_display_name_by_its_name() -> None:
    tool = Tool("search", parameters_json=json.dumps(TWO))
    with pytest.raises(ToolBusError, match='for tool "search"'):
        await plan_arguments(tool, MEMBER, "", Model("", ""), timeout_seconds=1, sidecar=SidecarSettings())


# -- pure ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("integer", " 42 ", 42),
        ("integer", "-3.0", -3),
        ("integer", "3.5", "3.5"),
        ("integer", "many", "many"),
        ("number", "3.5", 3.5),
        ("number", "3", 3),
        ("number", "nan", "nan"),
        ("number", "1e999", "1e999"),
        ("integer", "9" * 5000, "9" * 5000),
        ("boolean", "TRUE", True),
        ("boolean", "yes", True),
        ("boolean", "on", True),
        ("boolean", "False", False),
        ("boolean", "no", False),
        ("boolean", "off", False),
        ("boolean", "1", "1"),
        ("string", "5", "5"),
        ("array", "[1]", "[1]"),
        (["integer", "null"], "5", 5),
        (["integer", "string"], "5", "5"),
        (["number", "boolean"], "no", False),
        (7, "5", "5"),
        ("integer", 5.5, 5.5),
        ("boolean", None, None),
    ],
)
def test_texts_become_the_types_that_the_top_of_the_schema_declares(kind: Any, text: Any, value: Any) -> None:
    found = coerce_arguments({"x": text}, {"properties": {"x": {"type": kind}}})["x"]
    assert (found, type(found)) == (value, type(value))


def test_only_the_top_level_is_turned_and_a_closed_schema_keeps_strangers_out() -> None:
    schema = {"properties": {"a": {"type": "object", "properties": {"n": {"type": "integer"}}}, "b": True}}
    assert coerce_arguments({"a": {"n": "5"}, "b": "5", "c": "5"}, schema) == {"a": {"n": "5"}, "b": "5", "c": "5"}
    assert coerce_arguments({"a": {}, "c": "5"}, schema | {"additionalProperties": False}) == {"a": {}}


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ({}, ("a", "b")),
        ({"a": "", "b": " \n"}, ("a", "b")),
        ({"a": None, "b": None}, ("a",)),
        ({"a": 0, "b": False}, ()),
        ({"a": [], "b": {}}, ()),
    ],
)
def test_required_arguments_are_missing_where_they_are_blank(
    arguments: dict[str, Any], missing: tuple[str, ...]
) -> None:
    schema = {
        "properties": {"a": {"type": "string"}, "b": {"type": ["string", "null"]}},
        "required": ["a", "b", 7, "a"],
    }
    assert missing_required(arguments, schema) == missing


def test_a_broken_list_of_required_names_requires_nothing() -> None:
    assert missing_required({}, {"required": "query"}) == ()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from(["a", "b", "query"])
_TYPES = st.sampled_from(["string", "integer", "number", "boolean", "array", "object", "null", 7, None])
_SCHEMAS = st.fixed_dictionaries(
    {},
    optional={
        "properties": st.dictionaries(_NAMES, st.fixed_dictionaries({"type": _TYPES | st.lists(_TYPES)}) | _JSON)
        | _JSON,
        "required": st.lists(_NAMES | _JSON, max_size=3) | _JSON,
        "additionalProperties": _JSON,
    },
)
_WORDS = st.text(max_size=30) | st.sampled_from(
    ["{", "}", "```", "```json\n{}```", "a: 1\nb: yes", '{"a": "5"}', "<think>"]
)
_TEXTS = st.lists(_WORDS, max_size=4).map("".join)
_ARGUMENTS = st.none() | _TEXTS | st.dictionaries(_NAMES | st.text(max_size=3), _JSON, max_size=3)
_ANSWERS = _TEXTS | st.builds(Completion, _TEXTS, _ARGUMENTS) | _JSON


@settings(max_examples=examples(15))
@given(_SCHEMAS, _ANSWERS, _ANSWERS)
def test_no_answer_to_any_schema_ends_in_anything_but_arguments_or_that_one_error(
    schema: dict[str, Any], first: Any, second: Any
) -> None:
    tool = Tool("search", parameters_json=json.dumps(schema).replace("NaN", "0").replace("Infinity", "0"))
    model = Model(first, second)
    try:
        found = asyncio.run(plan_arguments(tool, MEMBER, "", model, timeout_seconds=30, sidecar=SidecarSettings()))
    except ToolBusError as problem:
        failed: str | None = str(problem)
    else:
        failed = None
    if failed is not None:
        assert failed == 'Failed to plan arguments for tool "search"'
        return
    assert isinstance(found, dict)
    assert not missing_required(found, tool.parameters) or not found
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()


@settings(max_examples=examples(15))
@given(
    st.dictionaries(
        st.text(max_size=5), _JSON.filter(lambda value: "nan" not in repr(value) and "inf" not in repr(value))
    )
)
def test_arguments_that_a_model_wrote_as_json_are_read_as_they_are(arguments: dict[str, Any]) -> None:
    text = json.dumps(arguments)
    assert read_arguments(Completion(arguments=text), {}) == arguments
    assert read_arguments(Completion(f"So: {text} !"), {}) == arguments
