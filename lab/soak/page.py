"""Reports a soak: a live line, tables, JSON, a page and its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from lab.chart import Chart, Panel, Scale, round_marks
from lab.commands import printer
from lab.judge import Verdict, beginning, fifths, thinned
from lab.report import Table, machine, verdict_table
from lab.soak.sample import Record, Sample
from lab.soak.verdict import STRICT_SECONDS, warm_up

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
    left = max(0.0, record.seconds_planned - sample.at)
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
    figures = []
    for name, (title, digits) in FIGURES.items():
        values = [float(getattr(sample, name)) for sample in judged]
        first = beginning([*enumerate(values)])
        last = first + fifths([*enumerate(values)])
        figures.append((title, *(f"{value:,.{digits}f}" for value in (first, last, max(values)))))
    return figures


def codes(record: Record) -> list[tuple[str, str]]:
    """Returns how calls and visits ended, as rows."""
    return [(what, f"{count:,}") for what, count in sorted(record.codes.items())]


def tables(record: Record, verdicts: Sequence[Verdict]) -> list[Table]:
    return [
        Table("after the warm-up", COLUMNS, rows(record)),
        verdict_table("what must be true", verdicts),
        Table("how calls and visits ended", ("", "times"), codes(record)),
    ]


def show(record: Record, verdicts: Sequence[Verdict], console: Console) -> None:
    for table in tables(record, verdicts):
        table.show(console)
    print_line = printer(console)
    if record.seconds < STRICT_SECONDS:
        print_line(f"shorter than {STRICT_SECONDS / 60:g} minutes: caches still fill, so growth is not judged strictly")
    for sentence in record.faults[:SHOWN]:
        print_line(f"FAULT: {sentence}")
    if record.fault_count > SHOWN:
        print_line(f"… and {record.fault_count - SHOWN} more")


def to_json(record: Record, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Returns the verdicts and their evidence, without the samples."""
    return {
        "good": all(verdict.good for verdict in verdicts),
        "verdict": [
            {"what": each.what, "found": each.measured, "allowed": each.bound, "verdict": each.word}
            for each in verdicts
        ],
        "before": record.before,
        "after": record.after,
        "codes": dict(sorted(record.codes.items())),
        "faults": record.faults,
        "fault_count": record.fault_count,
    }


def page(record: Record, verdicts: Sequence[Verdict], command: str, picture: str) -> str:
    """Returns the page of figures for ``lab/results/``."""
    figures, *others = tables(record, verdicts)
    parts = [
        "# A soak, in figures",
        f"Measured with `{command}` on {machine()}. Medians of the first and the last fifth after a warm-up of "
        f"{warm_up(record.seconds):.0f} s; [what it is](../README.md#soak).",
        f"![Memory, latency and load over time]({picture})",
        figures.markdown(level=0),
        *(table.markdown() for table in others),
    ]
    return "\n\n".join(parts) + "\n"


# -- the picture -----------------------------------------------------------------------------------------------------

MAX_POINTS = 240  # of a line: more are medians of neighbours
# Panels: title, scale, and by the name of a line the attribute of a sample that it shows.
PANELS: tuple[tuple[str, Scale, Mapping[str, str]], ...] = (
    ("memory of the bus, MB", Scale.FITTING, {"resident": "rss_mb", "shared out": "pss_mb", "its own": "uss_mb"}),
    (
        "latency of calls, ms",
        Scale.LOGARITHMIC,  # what may be a hundred times as much the next second
        {"stream p99": "p99_ms", "stream p50": "p50_ms", "REST p50": "rest_p50_ms", "callback p50": "callback_p50_ms"},
    ),
    ("load, each second", Scale.FROM_ZERO, {"calls": "calls", "visits × 10": "visits_times_10", "open files": "files"}),
)


def chart(samples: Sequence[Sample], command: str) -> Chart:
    longest = max((sample.at for sample in samples), default=0.0) or 1.0
    unit, axis = (60.0, "minutes") if longest >= 120 else (1.0, "seconds")
    ticks = {mark * unit: f"{mark:g}" for mark in round_marks(0.0, longest / unit)}
    panels = []
    for title, scale, lines in PANELS:
        points = {
            line: thinned([(each.at, value) for each in samples if (value := getattr(each, name))], MAX_POINTS)
            for line, name in lines.items()
        }
        panels.append(Panel(title, points, scale))
    note = f"Medians of neighbouring seconds; grey: warm-up. Repeat with: {command}"
    heading = "A bus under steady load"
    return Chart(heading, axis, panels, ticks, note, x_scale=Scale.FITTING, shaded_to=warm_up(longest))
