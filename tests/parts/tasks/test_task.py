"""A task as a record, and the texts about it for models."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.parts.tasks.samples import finished, running
from toolbus.common.text import dump_json
from toolbus.errors import Code
from toolbus.parts.tasks.task import (
    MAX_ERROR,
    Status,
    envelope,
    error_text,
    new_id,
    owner_of,
    result_of,
    shown_owner,
    text_of,
)
from toolbus.protocol.tool import CallError, Progress, Result


def test_the_envelope_names_the_task_the_tool_and_what_to_do() -> None:
    answer = json.loads(dump_json(envelope(running())))
    assert list(answer) == ["status", "task_id", "tool", "message"]
    assert (answer["status"], answer["task_id"], answer["tool"]) == ("running", "task_1", "report")
    assert "Do not call report again" in answer["message"]
    assert "await_task with task_id='task_1'" in answer["message"]
    assert "check_task" in answer["message"]
    assert "If you have no such tool, tell the user that it takes longer." in answer["message"]


def test_no_user_owns_what_a_program_does_whatever_they_call_themselves() -> None:
    owners = [owner_of("", "http"), *(owner_of(user, "x") for user in ("ann", "source:http", "user:source:http"))]
    assert owners[:2] == ["source:http", "ann"]
    assert len(set(owners)) == 4


@pytest.mark.parametrize(
    ("user", "account", "shown"),
    [
        ("ann", "x", {"user": "ann"}),
        ("source:http", "x", {"user": "source:http"}),
        ("user:source:http", "x", {"user": "user:source:http"}),
        ("", "host:7", {"source": "host:7"}),
        ("", "identity bot", {"identity": "bot"}),
    ],
)
def test_an_operator_is_shown_whose_a_task_is(user: str, account: str, shown: dict[str, str]) -> None:
    assert shown_owner(owner_of(user, account)) == shown


def test_only_a_program_without_a_name_is_told_how_its_task_is_found_again() -> None:
    notes = ["note" in envelope(replace(running(), owner=owner_of("", each))) for each in ("host:123", "bot", "host:a")]
    assert notes == [True, False, False]
    assert "note" not in envelope(replace(running(), owner=owner_of("host:123", "x")))


def test_ids_are_alike_in_form_and_never_the_same() -> None:
    ids = {new_id() for _ in range(100)}
    assert len(ids) == 100
    assert {len(each) for each in ids} == {21}


@pytest.mark.parametrize(
    ("output_json", "text"),
    [
        ('"ä text"', "ä text"),
        ('{"a":1}', '{"a":1}'),
        ("null", "null"),
        ('"broken', '"broken'),
        ("", "null"),
        ("5", "5"),
    ],
)
def test_a_text_is_shown_as_it_is_and_all_else_as_json(output_json: str, text: str) -> None:
    assert finished(output_json=output_json).text == text


def test_the_error_stands_before_the_output() -> None:
    error = CallError(Code.TOOL, "no such page")
    task = running().with_result(Result(output_json='{"page":7}', is_error=True, error=error), 5.0)
    assert (task.status, task.error) == (Status.FAILED, "no such page")
    assert task.text == 'no such page\n{"page":7}'


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (Result(output_json='"it broke"', is_error=True), "it broke"),
        (Result(is_error=True, error=CallError(Code.CANCELLED, "")), "CANCELLED"),
        (Result(error=CallError(Code.UNAVAILABLE, "gone")), "gone"),
    ],
)
def test_a_failure_of_any_form_has_one_sentence(result: Result, error: str) -> None:
    task = running().with_result(result, 5.0)
    assert (task.status, task.error, task.text) == (Status.FAILED, error, error)


def test_what_is_described_counts_seconds_and_shows_the_last_progress() -> None:
    assert finished(ended=3.26).described(99.0)["seconds"] == 3.3
    description = running().described(7.0)
    assert description == {"task_id": "task_1", "tool": "report", "status": "running", "seconds": 7.0}
    shown = replace(running(), progress=Progress(3.0, 10.0, "page 3")).described(7.0)
    assert shown["progress"] == {"done": 3.0, "total": 10.0, "message": "page 3"}


def test_a_repr_shows_neither_result_nor_owner() -> None:
    assert repr(finished(output_json='"secret"')) == "<Task task_1 report completed>"


def test_any_value_becomes_a_result_and_what_json_cannot_hold_is_named() -> None:
    assert result_of("a\ud800").output == "a\\ud800"
    assert result_of({"b": [1, None]}).output_json == '{"b":[1,null]}'
    passed = Result(output_json="1")
    assert result_of(passed) is passed
    with pytest.raises(TypeError, match="output is of type object, which JSON cannot hold"):
        result_of(object())
    assert text_of(result_of("x")) == "x"


def test_the_text_of_an_exception_is_its_class_and_message() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert error_text(ValueError("no")) == "ValueError: no"
    assert error_text(Mute()) == "Mute"
    assert error_text(KeyError()) == "KeyError"


def test_the_error_of_a_task_is_short_and_can_be_written() -> None:
    assert running().with_error("\ud800", 1.0).error == "?"
    assert len(running().with_error("x" * 9999, 1.0).error) == MAX_ERROR
