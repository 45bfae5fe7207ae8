"""What a run says at its end: ratios first, then figures, then facts, each with the command that repeats it.

The same rows become a table on the terminal, a page in ``docs/`` and a file of JSON.
"""

from __future__ import annotations

import math
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
    repeat: str = ""  # what repeats all of it, where not each row says it


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
        return [
            section for section in (self._ratios(), self._windows(), *self._tables(), self._facts()) if section.rows
        ]

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
        lengths = self._lengths("seconds", "warm_up", "rounds")
        rows = [
            (
                name,
                str(n),
                f"{w.calls_per_second:,.0f}",
                f"{w.p50_us:,.0f}",
                f"{w.p99_us:,.0f}",
                f"{w.middle_cpu_us:.1f}",
                f"{self._begin()} --only {name} --in-flight {n}{lengths}{self._switches()}",
            )
            for name, windows in self.figures.items()
            for n, w in windows.items()
        ]
        columns = ("contestant", "in flight", "calls/s", "p50 µs", "p99 µs", "CPU µs/call", "repeat with")
        return Section(f"Medians, {self.plan.rounds} × {self.plan.seconds:g} s", columns, rows)

    def _tables(self) -> list[Section]:
        return [self._table(table) for table in dict.fromkeys(fact.table for fact in self.facts if fact.table)]

    def _table(self, table: str) -> Section:
        facts = [fact for fact in self.facts if fact.table == table]
        heads = {(fact.sentence, fact.unit): ", ".join(filter(None, (fact.sentence, fact.unit))) for fact in facts}
        cells = {(fact.line, fact.sentence, fact.unit): _cell(fact) for fact in facts}
        rows = [
            (line, *(cells.get((line, *head), "") for head in heads))
            for line in dict.fromkeys(each.line for each in facts)
        ]
        lengths = self._lengths("rounds")
        repeat = f"{self._begin()} --only {facts[0].name} --repeats {self.repeats}{lengths}{self._switches()}"
        return Section(table, ("what", *heads.values()), rows, repeat)

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
            if not fact.table
        ]
        return Section("Facts", ("what", "median", "worst", "aim", "", "repeat with"), rows)

    def _begin(self) -> str:
        return shlex.join(self.suite.command)

    def _switches(self) -> str:
        # A bus of another command is not the one that is installed: no row of it may look as if it were.
        other = f" --bus-command {shlex.quote(self.plan.bus_command)}" if self.plan.bus_command else ""
        return other + ("" if self.plan.experiments else " --no-experiments")

    def _lengths(self, *names: str) -> str:
        """Returns the options that say how long and how often, where they are not the usual ones."""
        plain = Plan()
        return "".join(
            f" --{name.replace('_', '-')} {getattr(self.plan, name):g}"
            for name in names
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
            if section.repeat:
                console.print(f"median (best to worst); repeat with {section.repeat}", highlight=False, soft_wrap=True)
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
            if section.repeat:
                parts.append(f"Median (best to worst); repeat with `{section.repeat}`.")
        return "\n\n".join(parts) + "\n"


def _cell(fact: Fact) -> str:
    """Returns what a table says about a fact: about three digits of its median, and how far its samples lie apart."""
    if fact.median == round(fact.median):
        places = 0
    else:
        places = max(0, 2 - math.floor(math.log10(abs(fact.median))))
    median, best, worst = (f"{figure:,.{places}f}" for figure in (fact.median, fact.best, fact.worst))
    return median if fact.best == fact.worst else f"{median} ({best} to {worst})"


def _code(cell: str) -> str:
    return f"`{cell}`" if cell.startswith("python -m") else cell


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
