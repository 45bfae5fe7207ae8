"""What a run says at its end: ratios first, then figures, then facts, each with the command that repeats it.

The same rows become a table on the terminal, a page in ``docs/`` and a file of JSON.
"""

from __future__ import annotations

import os
import platform
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.contest import Outcome, Plan, medians, ratios
from benchmarks.fact import Fact
from benchmarks.suite import Suite
from benchmarks.window import Window


@dataclass(frozen=True, slots=True)
class Section:
    """One table."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a run has found."""

    suite: Suite
    plan: Plan
    outcome: Outcome
    facts: Sequence[Fact]
    failures: Mapping[str, str]
    command: str
    repeats: int

    @property
    def figures(self) -> dict[str, dict[int, Window]]:
        """The medians of every contestant, by calls in flight."""
        return {name: medians(rounds) for name, rounds in self.outcome.rounds.items() if rounds}

    def sections(self) -> list[Section]:
        """Returns the tables that have rows."""
        return [section for section in (self._ratios(), self._windows(), self._facts()) if section.rows]

    def _ratios(self) -> Section:
        # Both, because the two ends share the CPUs with the middle and so hide part of what it costs.
        measures = {"calls/s": "calls_per_second", f"CPU of {self.suite.charged} a call": "middle_cpu_us"}
        figures = self.figures
        rows = [
            (f"{name} / {to}, {label}", *(f"{ratio:.2f}" for ratio in ratios(figures, name, to, measure).values()))
            for label, measure in measures.items()
            for name, to in self.suite.ratios
            if name in figures and to in figures
        ]
        return Section("Ratios", ("ratio", *(f"{n} in flight" for n in self.plan.in_flight)), rows)

    def _windows(self) -> Section:
        rows = [
            (
                name,
                str(n),
                f"{w.calls_per_second:,.0f}",
                f"{w.p50_us:,.0f}",
                f"{w.p99_us:,.0f}",
                f"{w.middle_cpu_us:.1f}",
                f"{self._begin()} --only {name} --in-flight {n}{self._lengths()}{self._switches()}",
            )
            for name, windows in self.figures.items()
            for n, w in windows.items()
        ]
        columns = ("contestant", "in flight", "calls/s", "p50 µs", "p99 µs", "CPU µs/call", "repeat with")
        return Section(f"Medians, {self.plan.rounds} × {self.plan.seconds:g} s", columns, rows)

    def _facts(self) -> Section:
        rows = [
            (
                fact.sentence,
                f"{fact.median:,.1f} {fact.unit}",
                f"{fact.worst:,.1f} {fact.unit}",
                *(("", "") if fact.aim is None else (f"{fact.aim:g} {fact.unit}", "met" if fact.met else "missed")),
                f"{self._begin()} --only {fact.name} --repeats {self.repeats}{self._switches()}",
            )
            for fact in self.facts
        ]
        return Section("Facts", ("what", "median", "worst", "aim", "", "repeat with"), rows)

    def _begin(self) -> str:
        return shlex.join(self.suite.command)

    def _switches(self) -> str:
        # A bus of another command is not the one that is installed: no row of it may look as if it were.
        other = f" --bus-command {shlex.quote(self.plan.bus_command)}" if self.plan.bus_command else ""
        return other + ("" if self.plan.experiments else " --no-experiments")

    def _lengths(self) -> str:
        plain = Plan()
        return "".join(
            f" --{name.replace('_', '-')} {getattr(self.plan, name):g}"
            for name in ("seconds", "warm_up", "rounds")
            if getattr(self.plan, name) != getattr(plain, name)
        )

    def machine(self) -> str:
        """Returns one sentence about where the figures come from."""
        versions = ", ".join(f"{name} {found}" for name in self.suite.packages if (found := _version(name)))
        switch = "with" if self.plan.experiments else "without"
        busy = self.outcome.others_busy_percent
        others = f" Others took {statistics.median(busy):.0f} % of the CPUs in between (median)." if busy else ""
        bus = f" The bus was started by `{self.plan.bus_command}`." if self.plan.bus_command else ""
        return (
            f"{os.cpu_count()} CPUs, {platform.system()} {platform.machine()}, Python {platform.python_version()}, "
            f"{versions}; every gRPC process {switch} the GRPC_EXPERIMENTS switch.{others}{bus}"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the run with every sample."""
        return {
            "command": self.command,
            "machine": self.machine(),
            "others_busy_percent": self.outcome.others_busy_percent,
            "plan": asdict(self.plan),
            "ratios": {
                f"{name}/{to}": ratios(self.figures, name, to)
                for name, to in self.suite.ratios
                if name in self.figures and to in self.figures
            },
            "rounds": {name: [[asdict(w) for w in one] for one in many] for name, many in self.outcome.rounds.items()},
            "medians": {name: [asdict(w) for w in windows.values()] for name, windows in self.figures.items()},
            "facts": [{**asdict(fact), "median": fact.median, "met": fact.met} for fact in self.facts],
            "failures": dict(self.failures),
        }

    def show(self, console: Console) -> None:
        """Prints the tables."""
        for section in self.sections():
            table = Table(title=section.title, title_justify="left")
            for column in section.columns:
                left = column in ("contestant", "what", "repeat with", "ratio", "")
                table.add_column(column, justify="left" if left else "right", overflow="fold")
            for row in section.rows:
                table.add_row(*row)
            console.print(table)
        console.print(self.machine(), highlight=False)
        for name, why in self.failures.items():
            console.print(f"{name} could not be measured: {why}", style="red", highlight=False, markup=False)

    def to_markdown(self) -> str:
        """Returns the page for ``docs/``."""
        parts = [
            f"# {self.suite.title}",
            self.suite.intro,
            f"Measured with `{self.command}` on {self.machine()}",
        ]
        for section in self.sections():
            heads = "| " + " | ".join(section.columns) + " |"
            rule = "| " + " | ".join("---" for _ in section.columns) + " |"
            body = ["| " + " | ".join(_code(cell) for cell in row) + " |" for row in section.rows]
            parts += [f"## {section.title}", "\n".join((heads, rule, *body))]
        return "\n\n".join(parts) + "\n"


def _code(cell: str) -> str:
    return f"`{cell}`" if cell.startswith("python -m") else cell


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
