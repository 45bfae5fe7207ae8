"""Counts the questions for which what is on the wire is enough to form the expected call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema_rs

from lab.exports.model import FakeModel
from tests.support.wire_capture import Sent, SentTool
from tests.support.wire_forms import plain_schema
from toolbus.tool import Tool


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one question; `why` is empty where the call is the expected one."""

    question: str
    tool: str
    arguments: Any
    why: str


def answers(sent: Sent, tools: Sequence[Tool], questions: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """Asks the fake model every question, and checks its calls against the tools' own schemas."""
    schemas = {tool.name: tool.parameters for tool in tools}
    return [answer(each, sent.tool(each["tool"]), schemas[each["tool"]]) for each in questions]


def answer(question: Mapping[str, Any], written: SentTool | None, schema: Any) -> Answer:
    """Asks the fake model one question.

    Args:
        written: the tool on the wire, None where it was left out.
        schema: the tool's own.
    """
    asked, tool = question["question"], question["tool"]
    if written is None:
        return Answer(asked, tool, None, "the tool was left out")
    arguments = FakeModel(plain_schema(written)).arguments(question["facts"])
    if written.declaration.get("function", written.declaration).get("strict") is True:
        arguments = _without_nulls(arguments, question["arguments"])
    return Answer(asked, tool, arguments, _fault(arguments, question, schema))


def _fault(arguments: Any, question: Mapping[str, Any], schema: Any) -> str:
    for error in jsonschema_rs.validator_for(schema, validate_formats=True).iter_errors(arguments):
        return f"invalid: {error.message}"
    return "" if arguments == question["arguments"] else "another call than the expected one"


def _without_nulls(value: Any, expected: Any) -> Any:
    """Returns arguments of a strict schema without the nulls that stand for arguments that were left out."""
    if isinstance(value, dict) and isinstance(expected, dict):
        return {
            key: _without_nulls(each, expected.get(key))
            for key, each in value.items()
            if each is not None or key in expected
        }
    if isinstance(value, list) and isinstance(expected, list) and len(value) == len(expected):
        return [_without_nulls(each, one) for each, one in zip(value, expected, strict=True)]
    return value
