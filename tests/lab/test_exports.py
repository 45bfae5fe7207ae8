"""That the questions of lab/exports are a fair instrument: full marks for all of a schema, fewer for less of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from lab.benchmarks.export_quality import sources
from lab.exports.measure import Answer, answer
from lab.exports.model import FakeModel
from lab.exports.tools import read_calls, read_questions, read_tools
from lab.exports.words import read_words
from tests.support.wire_capture import SentTool

TOOLS = {tool.name: tool for tool in read_tools()}
QUESTIONS = read_questions()


def _answers(without: str = "") -> Iterator[Answer]:
    """Answers the questions with the tools' own schemas on the wire, less a keyword."""
    for question in QUESTIONS:
        schema = TOOLS[question["tool"]].parameters
        wire = _dropped(schema, without) if without else schema
        if wire != schema or not without:
            yield answer(question, SentTool(question["tool"], "", wire, {}), schema)


def _dropped(schema: Any, keyword: str) -> Any:
    """Returns a schema without a keyword, below its root and not as a name of a property."""
    if not isinstance(schema, dict):
        return schema
    smaller: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions", "patternProperties"):
            smaller[key] = {name: _less(inner, keyword) for name, inner in value.items()}
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            smaller[key] = [_less(inner, keyword) for inner in value]
        elif key in ("items", "additionalProperties"):
            smaller[key] = _less(value, keyword)
        else:
            smaller[key] = value
    return smaller


def _less(schema: Any, keyword: str) -> Any:
    inner = _dropped(schema, keyword)
    return {key: value for key, value in inner.items() if key != keyword} if isinstance(inner, dict) else inner


def test_there_are_100_questions_over_60_tools_whose_expected_calls_the_tools_allow() -> None:
    assert len(QUESTIONS) == 100
    assert len({question["tool"] for question in QUESTIONS}) == 60
    for question in QUESTIONS:
        validator = jsonschema_rs.validator_for(TOOLS[question["tool"]].parameters, validate_formats=True)
        validator.validate(question["arguments"])


def test_every_tool_allows_the_calls_that_stand_beside_it() -> None:
    assert len(TOOLS) == 91
    for name, calls in read_calls().items():
        for call in calls:
            jsonschema_rs.validator_for(TOOLS[name].parameters).validate(call)


def test_everything_of_a_schema_is_enough_for_every_question() -> None:
    assert [each for each in _answers() if each.why] == []


@pytest.mark.parametrize(
    "keyword",
    [
        *("type", "properties", "items", "prefixItems", "additionalProperties", "$ref", "anyOf", "oneOf"),
        *("enum", "const", "format", "pattern", "minimum", "maximum", "default", "required", "description"),
    ],
)
def test_less_of_a_schema_is_not_enough_for_every_question(keyword: str) -> None:
    assert any(each.why for each in _answers(without=keyword))


@pytest.mark.parametrize(
    ("schema", "fact", "expected"),
    [
        ({"type": "integer"}, 3, 3),
        ({}, 3, "3"),
        ({"type": "string"}, 3, "3"),
        ({"type": "boolean"}, True, True),
        ({}, True, "yes"),
        ({"enum": ["bike", "car"]}, {"shapes": ["cycling", "bike"]}, "bike"),
        ({"type": "string"}, {"shapes": ["cycling", "bike"]}, "cycling"),
        ({"type": "string", "format": "date"}, {"shapes": ["March 3", "2026-03-03"]}, "2026-03-03"),
        ({"type": "string", "description": "Day\nFormat date."}, {"shapes": ["March 3", "2026-03-03"]}, "2026-03-03"),
        ({"type": "array", "items": {"type": "integer"}}, [1, 2], [1, 2]),
        ({}, [1, 2], "1, 2"),
        ({"type": ["string", "null"]}, {"none": True}, None),
        ({"type": "string"}, {"none": True}, "none"),
        ({"type": "integer", "maximum": 9}, {"extreme": "maximum"}, 9),
        ({"type": "integer", "description": "At most 9."}, {"extreme": "maximum"}, 9),
        ({"type": "object"}, {"parts": {"how many": 3}}, {"how_many": "3"}),
        ({"type": "object", "properties": {"many": {"type": "integer"}}}, {"parts": {"how many": 3}}, {"many": 3}),
        ({"type": "object", "description": "Fields:\n- many (integer): n"}, {"parts": {"how many": 3}}, {"many": 3}),
        ({}, {"parts": {"how many": 3}}, "how many: 3"),
        ({"type": "object", "properties": {"a": {}}}, {"parts": {"a": {"implied": "x"}}}, {}),
        (
            {"type": "object", "properties": {"a": {}}, "required": ["a"]},
            {"parts": {"a": {"implied": "x"}}},
            {"a": "x"},
        ),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {}}]}, ["a"], ["a"]),
    ],
)
def test_the_model_answers_by_what_it_sees(schema: dict[str, Any], fact: Any, expected: Any) -> None:
    root = {"type": "object", "properties": {"it": schema}}
    assert FakeModel(root).arguments({"parts": {"it": fact}}) == {"it": expected}


def test_words_are_read_as_keywords() -> None:
    words = read_words(
        "Where it goes\n"
        "At least 1, at most 10, default 3.\n"
        '- name (string, required, one of "a", "b"): Who\n'
        "- when (string (format date) or null)\n"
        "- tags (array of string, required, at most 5 items)\n"
        "  - not (a field of an array's items)\n"
        '- code (string, matching the pattern ^[A-Z]{2,3}$, default "AB"): Code\n'
    )
    assert (words["minimum"], words["maximum"], words["default"]) == (1, 10, 3)
    assert words["required"] == ["name", "tags"]
    fields = words["properties"]
    assert fields["name"] == {"type": "string", "enum": ["a", "b"], "description": "Who"}
    assert fields["when"]["anyOf"] == [{"type": "string", "format": "date"}, {"type": "null"}]
    assert (fields["tags"]["type"], fields["tags"]["maxItems"]) == ("array", 5)
    assert (fields["code"]["pattern"], fields["code"]["default"]) == ("^[A-Z]{2,3}$", "AB")


def test_plain_sentences_say_nothing_about_the_form() -> None:
    assert read_words("The town, in English; ask if there are several of that name.") == {}


def test_an_unknown_commit_is_an_error_that_names_it() -> None:
    with pytest.raises(RuntimeError, match=r"'no-such-commit'.*--base"), sources("no-such-commit"):
        pass
