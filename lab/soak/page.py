"""What a soak found: a live line, tables, JSON, and a page."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.soak.sample import Record, Sample
from lab.soak.verdict import STRICT_SECONDS, Finding, fifths, warm_up

SHOWN = 20  # faults
COLUMNS = ("", "first fifth", "last fifth", "highest")
# What the table of figures shows, by attribute of a sample: title, digits.
FIGURES = {
    "rss_mb": ("resident memory, MB", 1),
    "pss_mb": ("the same, shared pages shared out, MB", 1),
    "uss_mb": ("memory of its own, MB", 1),
    "files": ("open files", 0),
    "threads": ("threads", 0),
    "cpu": ("processor, of one core", 2),
    "cpu_us_per_call": ("processor for each call, visits included, µs", 0),
    "calls": ("calls/s", 0),
    "visits": ("visits/s", 0),
    "p50_ms": ("stream, p50, ms", 2),
    "p99_ms": ("stream, p99, ms", 2),
    "longest_ms": ("stream, longest, ms", 1),
    "rest_p50_ms": ("REST, p50, ms", 2),
    "callback_p50_ms": ("callback, p50, ms", 2),
}


def live_line(sample: Sample, record: Record) -> str:
    """Returns how it is, in a line."""
    left = max(0.0, record.seconds_asked - sample.at)
    return (
        f"{_clock(sample.at)} ({_clock(left)} left)  {sample.rss_mb:.1f} MB  p50 {sample.p50_ms:.2f} ms  "
        f"p99 {sample.p99_ms:.2f} ms  {sample.calls} calls/s  {sample.visits} visits/s  cpu {sample.cpu:.0%}  "
        f"files {sample.files}  threads {sample.threads}  faults {record.fault_count}"
    )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def rows(record: Record) -> list[tuple[str, ...]]:
    """Returns the figures after the warm-up: title, first fifth, last fifth, highest."""
    judged = [sample for sample in record.samples if sample.at >= warm_up(record.seconds)]
    if not judged:
        return []
    found = []
    for name, (title, digits) in FIGURES.items():
        values = [float(getattr(sample, name)) for sample in judged]
        first = statistics.median(values[: max(1, len(values) // 5)])
        last = first + fifths(list(enumerate(values)))
        found.append((title, *(f"{value:,.{digits}f}" for value in (first, last, max(values)))))
    return found


def verdicts(findings: Sequence[Finding]) -> list[tuple[str, ...]]:
    """Returns the verdict as rows."""
    return [(each.what, each.found, each.bound, "good" if each.good else "BROKEN") for each in findings]


def show(record: Record, findings: Sequence[Finding], console: Console) -> None:
    """Prints the tables."""
    console.print(_table("after the warm-up", COLUMNS, rows(record)))
    console.print(_table("how calls and visits ended", ("", "times"), [(k, str(n)) for k, n in _codes(record)]))
    console.print(_table("what has to be true", ("", "found", "allowed", ""), verdicts(findings)))
    if record.seconds < STRICT_SECONDS:
        said = f"shorter than {STRICT_SECONDS / 60:g} minutes: caches still fill, so memory is not judged strictly"
        console.print(said, markup=False, highlight=False)
    for sentence in record.faults[:SHOWN]:
        console.print(f"FAULT: {sentence}", markup=False, highlight=False)
    if record.fault_count > SHOWN:
        console.print(f"… and {record.fault_count - SHOWN} more")


def _codes(record: Record) -> list[tuple[str, int]]:
    return sorted(record.codes.items())


def _table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for line in lines:
        table.add_row(*line)
    return table


def to_json(record: Record, findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns the verdict and what it rests on, but for the samples."""
    return {
        "good": all(finding.good for finding in findings),
        "verdict": [dict(zip(("what", "found", "allowed", "verdict"), row, strict=True)) for row in verdicts(findings)],
        "before": record.before,
        "after": record.after,
        "codes": dict(_codes(record)),
        "faults": record.faults,
        "fault_count": record.fault_count,
    }


def page(record: Record, findings: Sequence[Finding], command: str, picture: str) -> str:
    """Returns the page of figures for ``lab/results/``."""
    parts = [
        "# A soak, in figures",
        f"Measured with `{command}` on {os.cpu_count()} CPUs, {platform.system()} {platform.machine()}, Python "
        f"{platform.python_version()}. Medians of the first and the last fifth after a warm-up of "
        f"{warm_up(record.seconds):.0f} s; [what it is](../../docs/about/testing.md#soak).",
        f"![Memory, latency and load over time]({picture})",
        _markdown(COLUMNS, rows(record)),
        "## What has to be true",
        _markdown(("", "found", "allowed", ""), verdicts(findings)),
        "## How calls and visits ended",
        _markdown(("", "times"), [(what, f"{count:,}") for what, count in _codes(record)]),
    ]
    return "\n\n".join(parts) + "\n"


def _markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = [columns, ["---"] * len(columns)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [*head, *lines])
