"""Reports a run as tables and as JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.console import Console

from lab.chaos.checks import deaths, hangs, lateness
from lab.chaos.run import Run
from lab.report import Table

SHOWN = 10  # findings of one check


def show(run: Run, console: Console) -> None:
    bus = [(str(each.pid), f"{each.memory_mb:.1f}", str(each.files)) for each in run.samples]
    for table in (
        Table("what happened", ("", "times"), [(what, str(n)) for what, n in sorted(run.events.items())]),
        Table("how calls ended", ("code, stage", "calls"), [(what, str(n)) for what, n in endings(run).most_common()]),
        Table("how soon, s", ("", "times", "median", "longest"), [tuple(map(str, row)) for row in figures(run)]),
        Table("the bus in each calm", ("pid", "MB", "files"), bus),
        Table(
            "what must be true",
            ("", "judged", "broken"),
            [(verdict.rule, str(verdict.judged), str(len(verdict.broken))) for verdict in run.verdicts],
        ),
    ):
        table.show(console)
    for verdict in run.verdicts:
        for finding in verdict.broken[:SHOWN]:
            console.print(f"BROKEN: {verdict.rule}: {finding}", markup=False, highlight=False)
        if len(verdict.broken) > SHOWN:
            console.print(f"… and {len(verdict.broken) - SHOWN} more")


def endings(run: Run) -> Counter[str]:
    return Counter(
        f"{call.result('code')} {call.result('stage')}".strip() if call.results else "no result: the host was killed"
        for call in run.evidence.calls.values()
    )


def figures(run: Run) -> list[tuple[str, int, str, str]]:
    """Returns how soon deaths, hangs and the end of trouble were noticed, and how late results were."""
    times: dict[str, list[float]] = {}
    for what, seconds in deaths(run.evidence):
        times.setdefault("death, by callers" if what.startswith("call") else "death, in the catalog", []).append(
            seconds
        )
    for what, seconds in hangs(run.evidence):
        times.setdefault(f"hang, {what.rpartition(' ')[2]}", []).append(seconds)
    times["the catalog is right, after trouble"] = run.settled
    times["results after their deadlines"] = list(lateness(run.evidence))
    return [
        (what, len(seconds), f"{statistics.median(seconds):.3f}", f"{max(seconds):.3f}")
        for what, seconds in sorted(times.items())
        if seconds
    ]


def to_json(run: Run, **more: Any) -> dict[str, Any]:
    """Returns everything that the tables show, and every finding."""
    return {
        **more,
        "events": dict(run.events),
        "endings": dict(endings(run)),
        "noticed": [
            dict(zip(("what", "times", "median_seconds", "longest_seconds"), row, strict=True)) for row in figures(run)
        ],
        "bus": list(map(asdict, run.samples)),
        "checks": list(map(asdict, run.verdicts)),
    }
