"""What a run found, as tables and as JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.chaos.checks import deaths, hangs
from lab.chaos.run import Outcome

SHOWN = 10  # findings of one check


def show(outcome: Outcome, console: Console) -> None:
    """Prints the tables."""
    console.print(_table("what happened", ("", "times"), sorted(outcome.events.items())))
    console.print(_table("what callers were told", ("code, stage", "calls"), told(outcome).most_common()))
    console.print(_table("how soon it was noticed, s", ("", "times", "median", "longest"), figures(outcome)))
    bus = [(str(each.pid), f"{each.memory_mb:.1f}", each.files) for each in outcome.samples]
    console.print(_table("the bus in each calm", ("pid", "MB", "files"), bus))
    rows = [(verdict.rule, verdict.judged, len(verdict.broken)) for verdict in outcome.verdicts]
    console.print(_table("what has to be true", ("", "judged", "broken"), rows))
    for verdict in outcome.verdicts:
        for finding in verdict.broken[:SHOWN]:
            console.print(f"BROKEN: {verdict.rule}: {finding}", markup=False, highlight=False)
        if len(verdict.broken) > SHOWN:
            console.print(f"… and {len(verdict.broken) - SHOWN} more")


def told(outcome: Outcome) -> Counter[str]:
    """Counts how calls ended."""
    return Counter(
        f"{call.says('code')} {call.says('stage')}".strip() if call.told else "nothing: the host was killed"
        for call in outcome.evidence.calls.values()
    )


def figures(outcome: Outcome) -> list[tuple[str, int, str, str]]:
    """Returns how soon deaths and hangs were noticed."""
    noticed: dict[str, list[float]] = {}
    for what, seconds in deaths(outcome.evidence):
        noticed.setdefault("death, by callers" if what.startswith("call") else "death, in the catalog", []).append(
            seconds
        )
    for what, seconds, _ in hangs(outcome.evidence):
        noticed.setdefault(f"hang, {what.rpartition(' ')[2]}", []).append(seconds)
    return [
        (what, len(seconds), f"{statistics.median(seconds):.3f}", f"{max(seconds):.3f}")
        for what, seconds in sorted(noticed.items())
    ]


def to_json(outcome: Outcome, **more: Any) -> dict[str, Any]:
    """Returns everything that the tables show, and every finding."""
    return {
        **more,
        "events": dict(outcome.events),
        "told": dict(told(outcome)),
        "noticed": [
            dict(zip(("what", "times", "median_seconds", "longest_seconds"), row, strict=True))
            for row in figures(outcome)
        ],
        "bus": [{"pid": each.pid, "memory_mb": each.memory_mb, "files": each.files} for each in outcome.samples],
        "checks": [
            {"rule": verdict.rule, "judged": verdict.judged, "broken": verdict.broken} for verdict in outcome.verdicts
        ],
    }


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(str, row))
    return table
