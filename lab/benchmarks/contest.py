"""Measures contestants: host → middle → plugin in three processes on loopback, one after the other, round by round.

Every round starts fresh processes for every contestant, so that luck in scheduling and memory is drawn anew, and the
figures handed on are medians over the rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import psutil

from lab.benchmarks.rooms import ROOMS, is_made, python_of
from lab.child import Child, ChildFailed
from lab.load.windows import Cell, Window, cells, size_title
from lab.stage import Stage, environment

LAST_ANSWER_SECONDS = 30.0  # beyond a window, until its last call is answered


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    in_flight: tuple[int, ...] = (1, 16, 64, 512)
    sizes: tuple[int, ...] = (0,)  # bytes of arguments; 0: as small as they come
    seconds: float = 3.0
    warm_up: float = 0.5
    rounds: int = 3
    before: str = ""  # another checkout, whose bus is compared; empty: none is
    base: str = ""  # a commit whose exports are compared; empty: none is

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells that each contestant goes through, in order."""
        return cells(self.in_flight, self.sizes)

    def stage(self) -> Stage:
        return Stage(environment(experiments=True))


Start = Callable[[Stage, Plan], tuple[Child | None, str]]
"""Starts a middle, and returns it with the address for the ends; without one the host is charged with the CPU time."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way from host to plugin: how its middle starts, and the commands of its two ends.

    Attributes:
        plugin: empty: `middle` starts it, too. A callable starts it, and returns when its tool is offered.
        host_room: the environment of `benchmarks.rooms` that the host runs in; empty: this one.
        rooms: those that have to be there before it starts.
        partial: it may leave cells out: what it cannot do is a result of the run, not a failure of it.
    """

    name: str
    middle: Start
    host: tuple[str, ...]
    plugin: tuple[str, ...] | Callable[[Stage, str], Child] = ()
    host_room: str = ""
    rooms: tuple[str, ...] = ()
    partial: bool = False


def run_once(
    contestant: Contestant, plan: Plan, wanted: Sequence[Cell] | None = None
) -> tuple[list[Window], dict[Cell, str]]:
    """Runs one contestant through cells, by default those of the plan, in fresh processes.

    Returns:
        What it did, and why it did not do the others. After a cell that it could not do it starts anew, and goes on
        with those that do not ask for even more.
    """
    windows: list[Window] = []
    cannot: dict[Cell, str] = {}
    left = list(plan.cells if wanted is None else wanted)
    while left:
        seen, why = _run_until_it_fails(contestant, plan, left)
        windows += seen
        left = left[len(seen) :]
        if left:
            failed = left[0]
            cannot |= {cell: why if cell == failed else f"as {failed.title}" for cell in left if failed.is_within(cell)}
            left = [cell for cell in left if not failed.is_within(cell)]
    return windows, cannot


def _run_until_it_fails(contestant: Contestant, plan: Plan, wanted: Sequence[Cell]) -> tuple[list[Window], str]:
    """Returns the windows of the first cells, and why the next one failed; empty where all succeeded."""
    windows: list[Window] = []
    with plan.stage() as stage:
        middle, address = contestant.middle(stage, plan)
        plugin = None
        if callable(contestant.plugin):
            plugin = contestant.plugin(stage, address)
        elif contestant.plugin:
            plugin = stage.module(*contestant.plugin, address)
            plugin.line()
        python = python_of(contestant.host_room) if contestant.host_room else sys.executable
        host = stage.module(
            *contestant.host,
            address,
            *("--middle-pid", str(middle.pid if middle else 0)),
            *("--plugin-pid", str(plugin.pid if plugin else 0)),
            *("--cells", ",".join(map(str, wanted))),
            *("--seconds", str(plan.seconds)),
            *("--warm-up", str(plan.warm_up)),
            python=python,
        )
        for _ in wanted:
            try:
                windows.append(Window(**json.loads(host.line(plan.seconds + plan.warm_up + LAST_ANSWER_SECONDS))))
            except ChildFailed as error:
                return windows, str(error)
    return windows, ""


@dataclass(slots=True)
class Outcome:
    """The results of a contest.

    Attributes:
        rounds: the windows of every round, by contestant.
        failures: who failed and why.
        others_busy_percent: CPU of the whole machine taken by others, just before each contestant.
        cannot: what a partial contestant could not do, and why; without a cell it could do nothing.
    """

    rounds: dict[str, list[list[Window]]]
    failures: dict[str, str]
    others_busy_percent: list[float]
    cannot: dict[tuple[str, Cell | None], str] = field(default_factory=dict)

    def note(self, contestant: Contestant, cell: Cell | None, why: str) -> None:
        """Remembers that a contestant could not do something."""
        if contestant.partial:
            self.cannot[contestant.name, cell] = why
        else:
            self.failures[f"{contestant.name}, {cell.title}" if cell else contestant.name] = why

    def knows_why(self, contestant: Contestant, cell: Cell | None = None) -> bool:
        """Whether a contestant has failed at something before."""
        name = f"{contestant.name}, {cell.title}" if cell else contestant.name
        return name in self.failures or (contestant.name, cell) in self.cannot


def run(contestants: Sequence[Contestant], plan: Plan, print_line: Callable[[str], None]) -> Outcome:
    """Runs every contestant in every round; a cell in which one failed is left out from then on."""
    outcome = Outcome({contestant.name: [] for contestant in contestants}, {}, [])
    for contestant in contestants:
        _make_rooms(contestant, outcome, print_line)
    width = max((len(contestant.name) for contestant in contestants), default=0)
    for number in range(plan.rounds):
        # Each round begins with another contestant, so that none always follows the same one.
        turn = number % max(1, len(contestants))
        for contestant in (*contestants[turn:], *contestants[:turn]):
            if outcome.knows_why(contestant):
                continue
            figures = _run_round(contestant, plan, outcome)
            busy = f"(others took {outcome.others_busy_percent[-1]:.0f} % of the CPUs before)"
            print_line(f"round {number + 1}/{plan.rounds}  {contestant.name:{width}} {figures}  {busy}")
    return outcome


def _make_rooms(contestant: Contestant, outcome: Outcome, print_line: Callable[[str], None]) -> None:
    for room in contestant.rooms:
        if not is_made(room):
            print_line(f"installing {', '.join(ROOMS[room])} into an environment of its own, once …")
        try:
            python_of(room)
        except (ChildFailed, OSError) as error:
            outcome.note(contestant, None, str(error))
            print_line(f"{contestant.name} cannot take part: {error}")
            return


def _run_round(contestant: Contestant, plan: Plan, outcome: Outcome) -> str:
    """Runs one contestant once, and returns its speeds, or its failure."""
    outcome.others_busy_percent.append(psutil.cpu_percent(interval=0.3))
    wanted = [cell for cell in plan.cells if not outcome.knows_why(contestant, cell)]
    try:
        windows, cannot = run_once(contestant, plan, wanted)
    except (ChildFailed, OSError) as error:
        outcome.note(contestant, None, str(error))
        del outcome.rounds[contestant.name]
        return f"failed: {error}"
    for cell, why in cannot.items():
        outcome.note(contestant, cell, why)
    outcome.rounds[contestant.name].append(windows)
    speeds = {w.cell: f"{w.calls_per_second:,.0f}/s" for w in windows}
    lines = []
    for size in plan.sizes:
        figures = "  ".join(f"{cell.in_flight}: {speeds.get(cell, '–')}" for cell in plan.cells if cell.size == size)
        lines.append(f"{size_title(size)} {figures}" if size else figures)
    return "; ".join(lines)


def medians(rounds: Sequence[Sequence[Window]]) -> dict[Cell, Window]:
    """Returns, for each cell, the median of every figure over the rounds that have it."""
    by_cell: dict[Cell, list[Window]] = {}
    for window in (window for each in rounds for window in each):
        by_cell.setdefault(window.cell, []).append(window)
    measures = [f.name for f in fields(Window) if f.name not in ("in_flight", "size")]
    return {
        cell: replace(same[0], **{name: statistics.median(getattr(w, name) for w in same) for name in measures})
        for cell, same in by_cell.items()
    }


Rounds = Mapping[str, Sequence[Sequence[Window]]]
"""The windows of every round, by contestant."""


def ratios(rounds: Rounds, figure: tuple[str, str], over: tuple[str, str]) -> dict[Cell, float]:
    """Returns, for each cell, the median over the rounds of one contestant's figure over another's.

    Within a round, since a machine that others share is twice as fast in one minute as in the next.

    Args:
        figure, over: a contestant and one of a window's measures.
    """
    found: dict[Cell, list[float]] = {}
    for mine, others in zip(rounds.get(figure[0], ()), rounds.get(over[0], ()), strict=False):
        beside = {window.cell: getattr(window, over[1]) for window in others}
        for window in mine:
            if beside.get(window.cell) and getattr(window, figure[1]):  # 0: it was not measured
                found.setdefault(window.cell, []).append(getattr(window, figure[1]) / beside[window.cell])
    return {cell: statistics.median(each) for cell, each in found.items()}
