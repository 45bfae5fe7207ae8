"""Reports an overload as a page and as a chart of one part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from lab.chart import Chart, Panel, Scale
from lab.judge import Verdict
from lab.ledger import OK, Answer
from lab.load.workload import quantile
from lab.overload.run import Recording
from lab.report import machine, verdict_table
from toolbus.errors import Code

Verdicts = Mapping[str, Sequence[Verdict]]
MIN_MS = 0.1  # the lowest point of the chart


def markdown(verdicts: Verdicts, titles: Mapping[str, str], command: str, picture: str) -> str:
    """Returns the page for ``lab/results/``."""
    parts = [
        "# Overload, measured",
        f"Written by `{command}` on {machine()}; [what it means](../README.md#overload). What has no "
        "bound is a figure, which other work of the machine makes longer.",
        *([f"![Latency before, during and after an overload]({picture})"] if picture else []),
        *(verdict_table(f"{part}: {titles[part]}", its).markdown() for part, its in verdicts.items()),
    ]
    return "\n\n".join(parts) + "\n"


def chart(seen: Recording, title: str, command: str) -> Chart | None:
    """Draws how long callers waited, second by second; None where nothing was accepted."""
    every = [answer for phase in ("before", "load", "after") for answer in seen.answers_in(phase)]
    lines = {}
    for name, code in (("accepted", OK), ("refused", Code.OVERLOADED.value)):
        of = [answer for answer in every if answer.code == code]
        for share, quantile_name in ((0.5, "p50"), (0.99, "p99")):
            if points := _by_second(of, share):
                lines[f"{name}, {quantile_name}"] = points
    if not lines:
        return None
    calm, loaded = seen.phases
    ticks = {0.0: "0", calm: f"{calm:g}: load", loaded: f"{loaded:g}: calm", calm + loaded: f"{calm + loaded:g}"}
    return Chart(
        title,
        "seconds; the load is ten times the capacity",
        (Panel("ms, since the call was due", lines),),
        ticks,
        f"Repeat with: {command}",
        frozenset(name for name in lines if name.startswith("refused")),
        x_scale=Scale.FITTING,
    )


def _by_second(of: Iterable[Answer], share: float) -> list[tuple[float, float]]:
    seconds: dict[int, list[float]] = {}
    for answer in of:
        seconds.setdefault(math.floor(answer.due), []).append(answer.seconds * 1e3)
    return [(at + 0.5, max(quantile(its, share), MIN_MS)) for at, its in sorted(seconds.items())]
