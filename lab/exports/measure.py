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
from collections.abc import Callable
from typing import Any

from lab.benchmarks import catalog
from lab.exports.score import answers
from lab.exports.tools import read_questions, read_tools
from tests.support.provider_rules import refusals
from tests.support.wire_accounting import account
from tests.support.wire_capture import Sent, capturing
from toolbus.dialects import DIALECTS, find_dialect

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


if __name__ == "__main__":
    print(json.dumps({"quality": quality, "times": times}[sys.argv[1]]()))
