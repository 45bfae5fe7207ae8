"""What a run found: as a table, as JSON, as a page, and as a picture of one part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from lab.benchmarks.plot import Chart
from lab.overload.judge import Verdict, answers
from lab.overload.load import OK, Answer, quantile
from lab.overload.stage import Seen
from toolbus.errors import Code

Verdicts = Mapping[str, Sequence[Verdict]]
LEAST_MS = 0.1  # the lowest point of the picture
_PHASES = ("before", "load", "after")


def table(verdicts: Verdicts, titles: Mapping[str, str]) -> Table:
    """Returns the table of a run."""
    shown = Table(title="what has to be true under overload", title_justify="left")
    for column, justify in (
        ("part", "left"),
        ("what", "left"),
        ("bound", "right"),
        ("measured", "right"),
        ("", "left"),
    ):
        shown.add_column(column, justify=justify)  # type: ignore[arg-type]  # one of rich's words
    for part, its in verdicts.items():
        for place, verdict in enumerate(its):
            word = verdict.word if verdict.kept else f"[bold red]{verdict.word}[/]"
            shown.add_row("" if place else part, verdict.what, verdict.bound, verdict.measured, word)
        shown.add_section()
    return shown


def to_json(verdicts: Verdicts, failures: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """Returns everything that the table shows."""
    parts = {part: [asdict(verdict) for verdict in its] for part, its in verdicts.items()}
    return {**more, "parts": parts, "failures": dict(failures)}


def markdown(verdicts: Verdicts, titles: Mapping[str, str], command: str, picture: str) -> str:
    """Returns the page with the figures."""
    lines = [
        "# Overload, measured",
        "",
        f"Written by `{command}`; what it means stands in [overload.md](../../docs/about/testing.md#overload).",
        "Bounds of time are stretched by what the machine was late by itself, as measured in the same run.",
        "",
    ]
    if picture:
        lines += [f"![Latency before, during and after an overload]({picture})", ""]
    for part, its in verdicts.items():
        lines += [f"## {part}: {titles[part]}", "", "| what | bound | measured | |", "| --- | ---: | ---: | --- |"]
        lines += [f"| {v.what} | {v.bound} | {v.measured} | {v.word if v.kept else f'**{v.word}**'} |" for v in its]
        lines.append("")
    return "\n".join(lines)


def chart(seen: Seen, title: str, command: str) -> Chart | None:
    """Draws how long callers waited, second by second; None where nothing was accepted."""
    everything = [answer for phase in _PHASES for answer in answers(seen, phase)]
    lines = {}
    for name, code in (("accepted", OK), ("refused", Code.OVERLOADED.value)):
        of = [answer for answer in everything if answer.code == code]
        for share, word in ((0.5, "p50"), (0.99, "p99")):
            if points := _by_second(of, share):
                lines[f"{name}, {word}"] = points
    if not lines:
        return None
    calm, loaded = seen.phases
    ticks = {0.0: "0", calm: f"{calm:g}: load", loaded: f"{loaded:g}: calm", calm + loaded: f"{calm + loaded:g}"}
    return Chart(
        title,
        "seconds; the load is ten times the capacity",
        "ms, since the call was due",
        lines,
        ticks,
        f"Repeat with: {command}",
        frozenset(name for name in lines if name.startswith("refused")),
        linear_x=True,
    )


def _by_second(of: Iterable[Answer], share: float) -> list[tuple[float, float]]:
    seconds: dict[int, list[float]] = {}
    for answer in of:
        seconds.setdefault(math.floor(answer.due), []).append(answer.seconds * 1e3)
    return [(at + 0.5, max(quantile(its, share), LEAST_MS)) for at, its in sorted(seconds.items())]
