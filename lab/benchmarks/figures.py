"""Draws the charts of a benchmark's page; each names the command that repeats it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lab.benchmarks.facts import Fact
from lab.benchmarks.report import Report
from lab.chart import Chart, Panel, Points
from lab.load.windows import Cell, Window, size_title


def charts(report: Report) -> dict[str, Chart]:
    """Returns the charts of a report by the name of their file, without its ending."""
    begin = report.suite.file.removesuffix(".md")
    drawn = _throughput(report) | _latency(report) | _growth(report)
    return {f"{begin}-{name}": chart for name, chart in drawn.items()}


def _throughput(report: Report) -> dict[str, Chart]:
    """Calls a second by calls in flight, one chart for each size."""
    levels, found = report.plan.in_flight, {}
    for size in report.plan.sizes:
        lines = _lines(report, (Cell(level, size) for level in levels), "in_flight", "calls_per_second")
        if len(levels) > 1 and lines:
            about = f", {size_title(size)} of arguments" if size else ""
            ticks = {float(level): f"{level:,}" for level in levels}
            title = f"Throughput{about}"
            found[f"throughput-{size}" if size else "throughput"] = _chart(
                report, title, "calls in flight", "calls/s", lines, ticks
            )
    return found


def _latency(report: Report) -> dict[str, Chart]:
    """The median latency by size, one chart for the fewest calls in flight."""
    sizes, level = report.plan.sizes, min(report.plan.in_flight, default=1)
    lines = _lines(report, (Cell(level, size) for size in sizes if size), "size", "p50_us")
    if len(sizes) < 2 or not lines:
        return {}
    ticks = {float(size): size_title(size) for size in sizes if size}
    title = f"Median latency, {level} in flight"
    return {"latency": _chart(report, title, "arguments", "µs", lines, ticks)}


def _lines(report: Report, cells: Iterable[Cell], across: str, up: str) -> dict[str, Points]:
    wanted = tuple(cells)

    def points(windows: Mapping[Cell, Window]) -> Points:
        return [(getattr(w, across), getattr(w, up)) for cell in wanted if (w := windows.get(cell))]

    drawn = {name: points(windows) for name, windows in report.figures.items()}
    return {name: drawn[name] for name in sorted(drawn, key=lambda name: name != "toolbus") if drawn[name]}


def _growth(report: Report) -> dict[str, Chart]:
    """What one operation costs over what it costs among the fewest, by how much there is."""
    found = {}
    for name in ("catalog", "served", "sessions"):
        facts = [fact for fact in report.facts if fact.name == name and fact.table and fact.unit == "µs"]
        lines = _relative(facts)
        if lines:
            amounts = sorted({x for points in lines.values() for x, _ in points})
            ticks = {amount: f"{amount:,.0f}" for amount in amounts}
            over = f"times the cost among {ticks[amounts[0]]}"
            found[name] = _chart(report, facts[0].table, "how many", over, lines, ticks)
    return found


def _relative(facts: Sequence[Fact]) -> dict[str, Points]:
    by_sentence: dict[str, list[tuple[float, float]]] = {}
    for fact in facts:
        amount = fact.line.split()[0].replace(",", "")
        if amount.isdigit():
            by_sentence.setdefault(fact.sentence, []).append((float(amount), fact.median))
    return {
        sentence: [(x, y / points[0][1]) for x, y in points]
        for sentence, points in by_sentence.items()
        if len(points) > 1 and points[0][1]
    }


def _chart(
    report: Report, title: str, x_title: str, y_title: str, lines: dict[str, Points], ticks: dict[float, str]
) -> Chart:
    own = {"in_process", "rest", "callback", "dropin", "toolbus"}
    others = frozenset(name for name in report.figures if name not in own)
    return Chart(title, x_title, (Panel(y_title, lines),), ticks, f"Repeat with: {report.command}", others)
