"""Questions of tools and the answers to them: only what was asked for reaches a tool."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toolbus.protocol.input_requests import (
    InvalidInput,
    capabilities_for,
    check_answer,
    check_answers,
    check_requests,
    missing_needs,
    need_of,
    read_requests,
)
from toolbus.protocol.limits import Limits

NAME: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": 5}
SAMPLE = {"method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 5}}
ROOTS = {"method": "roots/list", "params": {}}


def form(required: list[str] | None = None, **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required or []}
    return {"method": "elicitation/create", "params": {"message": "?", "requestedSchema": schema}}


def url() -> dict[str, Any]:
    return {"method": "elicitation/create", "params": {"message": "?", "mode": "url", "url": "https://x.example/pay"}}


def accepted(request: dict[str, Any], **content: Any) -> dict[str, Any]:
    return check_answer(request, {"action": "accept", "content": content})


def test_each_question_says_what_its_client_must_accept() -> None:
    requests = {"a": form(a=NAME), "b": url(), "c": SAMPLE, "d": ROOTS}
    assert [need_of(each) for each in requests.values()] == ["elicitation.form", "elicitation.url", "sampling", "roots"]
    assert read_requests(json.dumps(requests)) == requests
    missing = missing_needs(requests, ("elicitation.form", "roots"))
    assert missing == ["elicitation.url", "sampling"]
    assert capabilities_for(missing) == {"elicitation": {"url": {}}, "sampling": {}}


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "not an object"),
        ({}, "at least one"),
        ({"": ROOTS}, "its key"),
        ({"a": 1}, "not an object"),
        ({"a": {"method": "tools/call"}}, "must be one of elicitation/create"),
        ({"a": {"method": ["roots/list"]}}, "must be one of"),
        ({"a": form(a={"type": ["string", "null"]})}, "forms are flat"),
        ({"a": {"method": "roots/list", "params": []}}, "params are not an object"),
        ({"a": {"method": "sampling/createMessage", "params": {"messages": []}}}, "maxTokens"),
        ({"a": {"method": "elicitation/create", "params": {}}}, "params.message"),
        ({"a": {"method": "elicitation/create", "params": {"message": "?"}}}, "requestedSchema"),
        ({"a": {"method": "elicitation/create", "params": {"message": "?", "mode": "x"}}}, "form or url"),
        ({"a": {"method": "elicitation/create", "params": {"message": "?", "mode": "url"}}}, "not a URL"),
        ({"a": form(a={"type": "object"})}, "forms are flat"),
        ({"a": form(a={"type": "array", "items": {"type": "string"}})}, "give items an enum"),
        ({"a": form(["b"], a=NAME)}, "required"),
    ],
)
def test_a_question_that_breaks_its_format_is_refused(requests: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_requests(json.dumps(requests))


def test_too_many_or_too_long_questions_are_refused_where_nobody_has_checked_that() -> None:
    long = {"a": form(a={"type": "string", "description": "x" * 65_536})}
    many = {str(each): ROOTS for each in range(9)}
    for requests, limit in ((long, "input_requests_bytes = 65536"), (many, "input_requests = 8")):
        with pytest.raises(InvalidInput, match=limit):
            check_requests(requests, Limits())
        assert check_requests(requests) == requests


CHOICE = {"type": "string", "oneOf": [{"const": "r", "title": "Red"}, {"const": "g", "title": "Green"}]}
CHOICES = {"type": "array", "minItems": 1, "maxItems": 2, "items": {"anyOf": CHOICE["oneOf"]}}
FIELDS: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (NAME, ["a", "abcde"], ["", "abcdef", 1, True, ["a"], {}]),
    ({"type": "string", "format": "email"}, ["a@b.example"], ["a", "a b@c"]),
    ({"type": "string", "format": "uri"}, ["https://a.example/x"], ["a", "a b:c"]),
    ({"type": "string", "format": "date"}, ["2026-01-31"], ["2026-02-31", "today"]),
    ({"type": "string", "format": "date-time"}, ["2026-01-31T12:00:00Z"], ["2026-01-31", "2026-01-31T25:00:00Z"]),
    ({"type": "string", "enum": ["a", "b"]}, ["a"], ["c", 1]),
    ({"type": "string", "enum": ["a", "b"], "enumNames": ["A", "B"]}, ["b"], ["A"]),
    (CHOICE, ["r"], ["Red", ""]),
    ({"type": "array", "items": {"type": "string", "enum": ["a", "b"]}}, [[], ["a", "b"]], [["c"], "a", ["a", "a"]]),
    (CHOICES, [["r"], ["r", "g"]], [[], ["Red"], [1], {"r": 1}]),
    ({"type": "integer", "minimum": 1, "maximum": 9}, [1, 9, 3.0], [0, 10, 1.5, "1", True, float("inf")]),
    ({"type": "number", "maximum": 1}, [1, 0.5, -7], [1.5, "1", False, float("nan")]),
    ({"type": "boolean"}, [True, False], [0, "true"]),
]


@pytest.mark.parametrize(("field", "valid", "invalid"), FIELDS)
def test_a_form_is_checked_field_by_field(field: dict[str, Any], valid: list[Any], invalid: list[Any]) -> None:
    request = form(["a"], a=field)
    read_requests(json.dumps({"k": request}))
    for value in valid:
        assert accepted(request, a=value) == {"action": "accept", "content": {"a": value}}
    for value in invalid:
        with pytest.raises(InvalidInput, match=r"'a' is .*must be"):
            accepted(request, a=value)


def test_what_is_not_in_the_form_never_reaches_the_tool() -> None:
    answer = accepted(form(a=NAME), a="x", b="y")
    assert answer == {"action": "accept", "content": {"a": "x"}}


def test_a_missing_field_has_its_default_only_where_it_is_required() -> None:
    field = {"type": "integer", "default": 7}
    assert accepted(form(["a"], a=field))["content"] == {"a": 7}
    assert accepted(form(a=field), a=None)["content"] == {}
    with pytest.raises(InvalidInput, match="requires it"):
        accepted(form(["a"], a=NAME))


def test_a_refused_question_has_no_content() -> None:
    for action in ("decline", "cancel"):
        assert check_answer(form(["a"], a=NAME), {"action": action, "content": {"a": 1}}) == {"action": action}
    assert check_answer(url(), {"action": "accept", "content": {"a": 1}}) == {"action": "accept"}


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (form(a=NAME), 12345),
        (form(a=NAME), None),
        (form(a=NAME), {}),
        (form(a=NAME), {"action": "yes"}),
        (form(a=NAME), {"action": "accept", "content": []}),
        (SAMPLE, {"role": "assistant", "model": "m"}),
        (SAMPLE, {"role": "system", "model": "m", "content": {"type": "text", "text": "x"}}),
        (ROOTS, {"roots": {}}),
        (ROOTS, {"roots": [{"name": "x"}]}),
    ],
)
def test_an_answer_of_another_kind_is_refused(request_: dict[str, Any], answer: Any) -> None:
    with pytest.raises(InvalidInput):
        check_answer(request_, answer)


def test_answers_to_what_was_not_asked_are_left_out() -> None:
    sampled = {"role": "assistant", "model": "m", "content": {"type": "text", "text": "x"}}
    answers = {"a": sampled, "z": 1, "b": {"roots": [{"uri": "file:///x"}]}}
    requests = {"a": SAMPLE, "b": ROOTS, "c": ROOTS}
    assert check_answers(requests, answers) == {"a": sampled, "b": {"roots": [{"uri": "file:///x"}]}}
    others: tuple[object, ...] = (None, [], "x")
    for nothing in others:
        with pytest.raises(InvalidInput, match="inputResponses"):
            check_answers(requests, nothing)
    with pytest.raises(InvalidInput, match="answer to 'a'"):
        check_answers(requests, {"a": 1})
