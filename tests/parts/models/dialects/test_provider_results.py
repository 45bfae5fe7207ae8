"""Tests results as text and as objects: nothing is lost, and nothing remains that JSON or UTF-8 cannot carry."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolbus.errors import Code
from toolbus.parts.models.dialects.provider_results import answer_text, arguments_object, object_of
from toolbus.protocol.tool import CallError, Result
from toolbus.v1 import tool_pb2 as pb

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
TEXTS = st.text(st.characters(exclude_categories=())) | st.text(
    '"\\{}[]:,0123456789eE.-+NaInfty \\u d8\ud800\ud83d\ude00'
)
IMAGE = pb.ContentBlock(image=pb.ImageContent(data=bytes(1234), mime_type="image/png"))
LINK = pb.ContentBlock(resource_link=pb.ResourceLink(uri="https://example.com/a", name="A", mime_type="text/html"))


def _failed(message: str, output_json: str = "null") -> Result:
    return Result(output_json=output_json, is_error=True, error=CallError(Code.TOOL, message))


@pytest.mark.parametrize(
    ("output_json", "text"),
    [
        ('"it rains"', "it rains"),
        ('"\\u5317\\u4eac"', "北京"),
        ('{"a": "\\u5317\\u4eac",  "b": [1, 2.50]}', '{"a":"北京","b":[1,2.50]}'),
        ('{"a": NaN, "b": [Infinity, -Infinity], "c": "NaN"}', '{"a":null,"b":[null,null],"c":"NaN"}'),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ("9" * 5000, "9" * 5000),
        ("1e999", "1e999"),
        ('{"a b": "c  d\\n", "e": "\\"q\\""}', '{"a b":"c  d\\n","e":"\\"q\\""}'),
        ('["\\ud83d\\ude00"]', '["😀"]'),
        ('["\\ud83d"]', '["\ufffd"]'),
        ('"\ud83d\ude00 \ud83d"', "😀 \ufffd"),
        ("Traceback: no JSON at all", "Traceback: no JSON at all"),
        ("{'a': 1}", "{'a': 1}"),
        ("NaN", "null"),
        ("", "null"),
        ("null", "null"),
        ("true", "true"),
        ('""', ""),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_an_output_becomes_plain_text(output_json: str, text: str) -> None:
    assert Result(output_json=output_json).text == text


def test_a_failure_has_its_message_before_the_output() -> None:
    assert _failed("no such city").text == "no such city"
    assert _failed("no such city", '{"tried":3}').text == 'no such city\n{"tried":3}'
    assert _failed("no such city", '"no such city"').text == "no such city"
    assert Result(error=CallError(Code.UNAVAILABLE, "")).text == "UNAVAILABLE"
    assert _failed("", '"sorry"').text == "the tool reported a failure\nsorry"
    assert Result(output_json='"sorry"', is_error=True).text == "the tool reported a failure\nsorry"


def test_binary_content_becomes_a_short_line() -> None:
    text = pb.ContentBlock(text=pb.TextContent(text="a caption"))
    sound = pb.ContentBlock(audio=pb.AudioContent(data=b"12"))
    result = Result(content=(text, IMAGE, sound, LINK, pb.ContentBlock()))
    assert result.text.splitlines() == [
        *("a caption", "[image/png, 1234 bytes]", "[audio, 2 bytes]", "[text/html, A, https://example.com/a]"),
        "[content of a kind that this version does not know]",
    ]
    assert Result(output_json='"done"', content=(IMAGE,)).text == "done\n[image/png, 1234 bytes]"


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (Result(output_json='{"a": "\\u5317", "b": NaN}'), {"a": "北", "b": None}),
        (Result(output_json='"text"'), {"result": "text"}),
        (Result(output_json="[1]"), {"result": [1]}),
        (Result(output_json="null"), {"result": None}),
        (Result(output_json="no JSON"), {"result": "no JSON"}),
        (Result(output_json="9" * 5000), {"result": "9" * 5000}),
        (Result(output_json="1e999"), {"result": "1e999"}),
        (Result(output_json="[" * 300 + "]" * 300), {"result": "[" * 300 + "]" * 300}),
        (_failed("no"), {"error": "no"}),
        (_failed("no", '{"error": "no", "code": 4}'), {"error": "no", "result": {"error": "no", "code": 4}}),
        (_failed("no", '"no"'), {"error": "no"}),
        (Result(output_json='{"error": "no"}', is_error=True), {"error": "no"}),
        (_failed("", '{"error": "no"}'), {"error": "no"}),
        (Result(output_json='{"a": 1}', is_error=True), {"error": "the tool reported a failure", "result": {"a": 1}}),
        (Result(output_json='{"a": 1}', content=(IMAGE,)), {"a": 1, "content": "[image/png, 1234 bytes]"}),
        (
            Result(output_json='{"content": 1}', content=(IMAGE,)),
            {"result": {"content": 1}, "content": "[image/png, 1234 bytes]"},
        ),
    ],
)
def test_an_object_passes_and_any_other_value_is_wrapped(result: Result, expected: dict[str, Any]) -> None:
    assert object_of(result) == expected


@pytest.mark.parametrize(
    ("arguments_json", "expected"),
    [
        ('{"n": 12345678901234567890123}', {"n": 12345678901234567890123}),
        ('{"a": NaN, "b": "\\ud800"}', {"a": None, "b": "\ufffd"}),
        *((text, {}) for text in ("", "{", "[1]", '"{}"', "null", '{"a": 1} and more', "[" * 100_000)),
    ],
)
def test_arguments_are_an_object_or_empty(arguments_json: str, expected: dict[str, Any]) -> None:
    assert arguments_object(arguments_json) == expected


@given(value=JSON)
def test_json_is_preserved_and_nan_becomes_null(value: Any) -> None:
    for output_json in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        text = Result(output_json=output_json).text
        text.encode()
        if isinstance(value, str):
            assert text == value
        else:
            assert json.loads(text) == _without_nan(value)
        assert object_of(Result(output_json=output_json)) == (
            _without_nan(value) if isinstance(value, dict) else {"result": _without_nan(value)}
        )


@given(text=TEXTS)
def test_any_output_of_a_plugin_can_be_sent_to_a_model(text: str) -> None:
    for result in (Result(output_json=text), Result(output_json=json.dumps(text)), _failed(text, text)):
        result.text.encode()
        json.dumps(object_of(result), ensure_ascii=False, allow_nan=False).encode()
    json.dumps(arguments_object(text), ensure_ascii=False, allow_nan=False).encode()


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def test_a_resource_is_its_text_or_its_description() -> None:
    text = pb.ContentBlock(resource=pb.EmbeddedResource(uri="file:///a", text="what is in it"))
    data = pb.ContentBlock(resource=pb.EmbeddedResource(uri="file:///b", mime_type="image/png", data=b"123"))
    assert Result(content=(text, data)).text == "what is in it\n[image/png, file:///b, 3 bytes]"


def test_a_question_without_an_answer_is_a_failure_with_the_question() -> None:
    asks = Result(input_requests_json='{"q":{"method":"elicitation/create","params":{"message":"Which day?"}}}')
    said = "the tool needs input before it can go on: 'Which day?'. No answer was given"
    assert asks.text == said
    assert answer_text(asks) == f"Error: {said}"
    assert object_of(asks) == {"error": said}
