"""Reports a benchmark: ratios first, then figures, then facts, each with the command that repeats it.

The same rows become tables on the terminal, a page in ``lab/results/`` and a file of JSON.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from lab.benchmarks.contest import Outcome, Plan, medians, ratios
from lab.benchmarks.facts import Fact
from lab.benchmarks.rooms import version_of as room_version
from lab.benchmarks.suite import Suite
from lab.commands import repeat_command
from lab.load.windows import Cell, Window, size_title
from lab.report import Table, machine, version_of


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
    def figures(self) -> dict[str, dict[Cell, Window]]:
        found = {name: medians(rounds) for name, rounds in self.outcome.rounds.items()}
        return {name: windows for name, windows in found.items() if windows}

    def sections(self) -> list[Table]:
        """Returns the tables that have rows, ratios first."""
        alone = [fact for fact in self.facts if not fact.table]
        every = [
            self._facts("Ratios", [fact for fact in alone if fact.unit == "×"]),
            *map(self._ratios, self.plan.sizes),
            self._windows(),
            *map(self._table, dict.fromkeys(fact.table for fact in self.facts if fact.table)),
            self._facts("Facts", [fact for fact in alone if fact.unit != "×"]),
            self._cannot(),
        ]
        return [section for section in every if section.rows]

    def _ratios(self, size: int) -> Table:
        # CPU too, because the two ends share the CPUs with the middle and so hide part of what it costs.
        measures = {
            "calls/s": "calls_per_second",
            "p50": "p50_us",
            **{f"CPU of {process} a call": measure for process, measure in self.suite.processes.items()},
        }
        columns = [cell for cell in self.plan.cells if cell.size == size]
        rows = []
        for label, measure in measures.items():
            for name, to in self.suite.ratios:
                found = ratios(self.outcome.rounds, (name, measure), (to, measure))
                if any(cell in found for cell in columns):
                    figures = (_ratio(found[cell]) if cell in found else "–" for cell in columns)
                    rows.append((f"{name} / {to}, {label}", *figures))
        # Of the rounds, not of the medians below: see `contest.ratios`.
        title = f"Ratios with {size_title(size)} of arguments" if size else "Ratios"
        return Table(title, ("ratio", *(f"{cell.in_flight} in flight" for cell in columns)), rows)

    def _windows(self) -> Table:
        processes = self.suite.processes
        sized = self.plan.sizes != (0,)
        rows = [
            (
                name,
                *((size_title(cell.size),) if sized else ()),
                str(cell.in_flight),
                f"{w.calls_per_second:,.0f}" if w.calls_per_second >= 100 else f"{w.calls_per_second:.1f}",
                f"{w.p50_us:,.0f}",
                f"{w.p99_us:,.0f}",
                *(f"{cpu:,.1f}" if (cpu := getattr(w, measure)) else "–" for measure in processes.values()),
                self._repeat(
                    *("seconds", "warm_up", "rounds"),
                    only=name,
                    in_flight=cell.in_flight,
                    sizes=str(cell.size) if sized else "",
                ),
            )
            for name, windows in self.figures.items()
            for cell, w in windows.items()
        ]
        sizes = ("arguments",) if sized else ()
        charged = ("CPU µs/call",) if len(processes) == 1 else tuple(f"CPU of {name} µs/call" for name in processes)
        columns = ("contestant", *sizes, "in flight", "calls/s", "p50 µs", "p99 µs", *charged, "repeat with")
        return Table(f"Medians, {self.plan.rounds} × {self.plan.seconds:g} s", columns, rows)

    def _cannot(self) -> Table:
        rows = [
            (name, cell.title if cell else "anything", why.splitlines()[-1] if why else "")
            for (name, cell), why in self.outcome.cannot.items()
        ]
        return Table("What could not be measured", ("contestant", "what", "why"), rows)

    def _table(self, table: str) -> Table:
        facts = [fact for fact in self.facts if fact.table == table]
        heads = {(fact.sentence, fact.unit): ", ".join(filter(None, (fact.sentence, fact.unit))) for fact in facts}
        cells = {(fact.line, fact.sentence, fact.unit): _cell(fact) for fact in facts}
        rows = [
            (line, *(cells.get((line, *head), "") for head in heads))
            for line in dict.fromkeys(each.line for each in facts)
        ]
        repeat = self._repeat("rounds", only=facts[0].name, repeats=self.repeats)
        return Table(table, ("what", *heads.values()), rows, repeat)

    def _facts(self, title: str, facts: Sequence[Fact]) -> Table:
        rows = [
            (
                fact.sentence,
                f"{fact.median:,.{_places(fact.median)}f} {fact.unit}",
                f"{fact.worst:,.{_places(fact.worst)}f} {fact.unit}",
                "" if fact.aim is None else f"{fact.aim:g} {fact.unit}",
                self._repeat(only=fact.name, repeats=self.repeats),
            )
            for fact in facts
        ]
        return Table(title, ("what", "median", "worst", "aim", "repeat with"), rows)

    def _repeat(self, *lengths: str, **options: object) -> str:
        """Returns the command that repeats a part of the run.

        Args:
            lengths: those of the plan that matter; they are named where they are not the usual ones.
        """
        plan, usual = self.plan, Plan()
        options |= {name: getattr(plan, name) for name in lengths if getattr(plan, name) != getattr(usual, name)}
        options["base"] = plan.base
        named = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
        return repeat_command("benchmarks", named, *self.suite.command[3:])

    def machine(self) -> str:
        """Returns one sentence about where the figures come from."""
        here = [(name, version_of(name)) for name in self.suite.packages]
        elsewhere = [(package, room_version(room, package)) for room, package in self.suite.extra]
        versions = ", ".join(f"{name} {found}" for name, found in (*here, *elsewhere) if found)
        busy = self.outcome.others_busy_percent
        others = f" Others took {statistics.median(busy):.0f} % of the CPUs in between (median)." if busy else ""
        return f"{machine()}, {versions}; every gRPC process with the GRPC_EXPERIMENTS switch.{others}"

    def to_json(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "machine": self.machine(),
            "others_busy_percent": self.outcome.others_busy_percent,
            "plan": asdict(self.plan),
            "rounds": {name: [[asdict(w) for w in one] for one in many] for name, many in self.outcome.rounds.items()},
            "facts": [*map(asdict, self.facts)],
            "cannot": {f"{name} {cell or ''}".strip(): why for (name, cell), why in self.outcome.cannot.items()},
            "failures": dict(self.failures),
        }

    def show(self, console: Console) -> None:
        for section in self.sections():
            section.show(console)
            if section.repeat:
                console.print(f"median (best to worst); repeat with {section.repeat}", highlight=False, soft_wrap=True)
        console.print(self.machine(), highlight=False)
        for name, why in self.failures.items():
            console.print(f"{name} could not be measured: {why}", style="red", highlight=False, markup=False)

    def to_markdown(self) -> str:
        """Returns the page for ``lab/results/``."""
        ratio_rule = " Ratios are medians of those within each round." if self.suite.ratios else ""
        parts = [
            f"# {self.suite.title}",
            self.suite.intro,
            f"Measured with `{self.command}` on {self.machine()}{ratio_rule}",
        ]
        for section in self.sections():
            parts.append(section.markdown())
            if section.repeat:
                parts.append(f"Median (best to worst); repeat with `{section.repeat}`.")
        return "\n\n".join(parts) + "\n"


def _cell(fact: Fact) -> str:
    """Returns a fact as a cell of a table: about three digits of its median, and how far its samples lie apart."""
    places = 0 if fact.median == round(fact.median) else max(0, 2 - math.floor(math.log10(abs(fact.median))))
    median, best, worst = (f"{figure:,.{places}f}" for figure in (fact.median, fact.best, fact.worst))
    return median if fact.best == fact.worst else f"{median} ({best} to {worst})"


def _ratio(found: float) -> str:
    return f"{found:,.2f}" if found < 10 else f"{found:,.0f}"


def _places(figure: float) -> int:
    return 2 if abs(figure) < 10 else 1
