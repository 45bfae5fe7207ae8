"""Prints, as JSON, how well the exports of the toolbus that it imports do: `python -m lab.exports.measure quality`.

`times` prints what an export of 1,000 tools costs. `benchmarks.export_quality` runs both, also with the exports of
another commit.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema_rs

from lab.benchmarks import catalog
from lab.exports.model import FakeModel
from lab.exports.tools import read_questions, read_tools
from tests.support.provider_rules import refusals
from tests.support.wire_accounting import account
from tests.support.wire_capture import Sent, SentTool, capturing
from tests.support.wire_forms import plain_schema
from toolbus.dialects import DIALECTS, find_dialect
from toolbus.protocol.tool import Tool

TOOLS = 1_000
_FIRST, _AGAIN = 3, 10  # samples in one process

Figures = dict[str, dict[str, float]]


def quality() -> Figures:
    """Returns, by dialect, the questions answered, and what became of the keywords of all tools."""
    tools = read_tools()
    with capturing() as capture:
        return {name: _quality(name, capture.sent(name, tools)) for name in DIALECTS}


def _quality(name: str, sent: Sent) -> dict[str, float]:
    tools = read_tools()
    found = answers(sent, tools, read_questions())
    accounts = []
    for tool in tools:
        written = sent.tool(tool.name)
        if written is not None:
            losses = [loss for loss in sent.export.losses if loss.tool == tool.name]
            accounts.append(account(tool.parameters, written, losses, tool.description))
    refused = {line.partition(":")[0] for line in refusals(name, sent)}
    return {
        "answered": sum(not each.why for each in found),
        "lost": sum(each.lost for each in accounts),
        "in words": sum(len(each.in_words) for each in accounts),
        "reported": sum(len(each.reported) for each in accounts),
        "unreported": sum(len(each.unreported) for each in accounts),
        "refused": len(refused),
        "left out": len(sent.export.left_out),
    }


def times() -> Figures:
    """Returns, by dialect, the processor time of an export in ms: the first of an instance, and a repeated one."""
    tools = catalog.tools(TOOLS)
    figures: Figures = {}
    for name in DIALECTS:
        first, again = [], []
        for _ in range(_FIRST):
            dialect = find_dialect(name)
            first.append(_timed(lambda: dialect.export(tools)))  # noqa: B023 -- runs at once
            again += [_timed(lambda: dialect.export(tools)) for _ in range(_AGAIN)]  # noqa: B023
        figures[name] = {"first": statistics.median(first), "again": statistics.median(again)}
    return figures


def _timed(do: Callable[[], Any]) -> float:
    gc.collect()
    began_at = time.process_time()
    do()
    return (time.process_time() - began_at) * 1e3


# -- questions -------------------------------------------------------------------------------------------------------


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


if __name__ == "__main__":
    print(json.dumps({"quality": quality, "times": times}[sys.argv[1]]()))
