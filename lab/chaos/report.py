"""Reports a run as tables and as JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from rich.console import Console

from lab.chaos.checks import deaths, hangs, lateness
from lab.chaos.run import Outcome, Sample
from lab.report import Table

SHOWN = 10  # findings of one check


def show(outcome: Outcome, console: Console) -> None:
    """Prints the tables."""
    for table in (
        Table("what happened", ("", "times"), [(what, str(n)) for what, n in sorted(outcome.events.items())]),
        Table(
            "how calls ended", ("code, stage", "calls"), [(what, str(n)) for what, n in endings(outcome).most_common()]
        ),
        Table("how soon, s", ("", "times", "median", "longest"), [tuple(map(str, row)) for row in figures(outcome)]),
        Table("the bus in each calm", ("pid", "MB", "files"), [_sample(each) for each in outcome.samples]),
        Table(
            "what must be true",
            ("", "judged", "broken"),
            [(verdict.rule, str(verdict.judged), str(len(verdict.broken))) for verdict in outcome.verdicts],
        ),
    ):
        table.show(console)
    for verdict in outcome.verdicts:
        for finding in verdict.broken[:SHOWN]:
            console.print(f"BROKEN: {verdict.rule}: {finding}", markup=False, highlight=False)
        if len(verdict.broken) > SHOWN:
            console.print(f"… and {len(verdict.broken) - SHOWN} more")


def _sample(sample: Sample) -> tuple[str, str, str]:
    return str(sample.pid), f"{sample.memory_mb:.1f}", str(sample.files)


def endings(outcome: Outcome) -> Counter[str]:
    """Counts how calls ended."""
    return Counter(
        f"{call.result('code')} {call.result('stage')}".strip() if call.results else "no result: the host was killed"
        for call in outcome.evidence.calls.values()
    )


def figures(outcome: Outcome) -> list[tuple[str, int, str, str]]:
    """Returns how soon deaths, hangs and the end of trouble were noticed, and how late results were."""
    times: dict[str, list[float]] = {}
    for what, seconds in deaths(outcome.evidence):
        times.setdefault("death, by callers" if what.startswith("call") else "death, in the catalog", []).append(
            seconds
        )
    for what, seconds in hangs(outcome.evidence):
        times.setdefault(f"hang, {what.rpartition(' ')[2]}", []).append(seconds)
    times["the catalog is right, after trouble"] = outcome.settled
    times["results after their deadlines"] = list(lateness(outcome.evidence))
    return [
        (what, len(seconds), f"{statistics.median(seconds):.3f}", f"{max(seconds):.3f}")
        for what, seconds in sorted(times.items())
        if seconds
    ]


def to_json(outcome: Outcome, **more: Any) -> dict[str, Any]:
    """Returns everything that the tables show, and every finding."""
    return {
        **more,
        "events": dict(outcome.events),
        "told": dict(endings(outcome)),
        "noticed": [
            dict(zip(("what", "times", "median_seconds", "longest_seconds"), row, strict=True))
            for row in figures(outcome)
        ],
        "bus": [{"pid": each.pid, "memory_mb": each.memory_mb, "files": each.files} for each in outcome.samples],
        "checks": [
            {"rule": verdict.rule, "judged": verdict.judged, "broken": verdict.broken} for verdict in outcome.verdicts
        ],
    }
