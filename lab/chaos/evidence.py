"""Puts the ledgers together: each call with its order, its runs and its results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.chaos.cast import BUS, ChaosTool, Part
from lab.chaos.scene import Trouble
from lab.chaos.schedule import Act
from lab.chaos.watcher import AWAY, Move
from lab.ledger import CALLS, RUNS, LedgerReader

RECOVERY = 10.0  # seconds after a disturbance in which it is the cause of failures and of tools that go away


@dataclass(frozen=True, slots=True)
class Moment:
    """One line of a ledger about a call.

    Attributes:
        pid: the process that wrote it.
        part: its name in the cast.
    """

    at: float
    pid: int
    part: str
    line: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Call:
    """One call, as all sides saw it."""

    token: str
    tool: ChaosTool
    order: Moment
    results: list[Moment] = field(default_factory=list)
    began: list[Moment] = field(default_factory=list)
    ended: list[Moment] = field(default_factory=list)

    def __str__(self) -> str:
        return f"call {self.token} of {self.tool.name}"

    @property
    def host(self) -> str:
        return self.order.part

    @property
    def timeout(self) -> float:
        return float(self.order.line["timeout"])

    @property
    def leaves(self) -> bool:
        """Whether its caller took it back early."""
        return bool(self.order.line["leave"])

    @property
    def deadline(self) -> float:
        return self.order.at + self.timeout

    def result(self, key: str) -> Any:
        """Returns a part of its first result; None where it has none."""
        return self.results[0].line[key] if self.results else None


@dataclass(slots=True)
class Evidence:
    """Everything that is judged.

    Attributes:
        strays: results for which no call was pending, as sentences.
        unknown: runs of calls that no host made, by token.
        moves: what a watcher saw of the catalog, oldest first.
    """

    parts: Mapping[str, Part]
    troubles: Sequence[Trouble]
    moves: Sequence[Move] = ()
    calls: dict[str, Call] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    _by_part: dict[str, list[Trouble]] = field(default_factory=dict)
    _killed: dict[int, float] = field(default_factory=dict)  # processes, and when

    def __post_init__(self) -> None:
        for trouble in self.troubles:
            self._killed.update(dict.fromkeys(trouble.pids, trouble.began))
            self._by_part.setdefault(trouble.part, []).append(trouble)

    def read(self, folder: Path, tools: Mapping[str, ChaosTool]) -> None:
        for line in LedgerReader(folder / CALLS).new_lines():
            self.take_call_line(line, tools)
        for line in LedgerReader(folder / RUNS).new_lines():
            self.take_run_line(line)

    def take_call_line(self, line: Mapping[str, Any], tools: Mapping[str, ChaosTool]) -> None:
        moment = Moment(line["at"], line["pid"], line["host"], line)
        if "called" in line:
            self.calls[line["called"]] = Call(line["called"], tools[line["tool"]], moment)
        elif "answered" in line:
            self.calls[line["answered"]].results.append(moment)
        else:
            kind = "a second result" if line["again"] else "a result of an unknown call"
            self.strays.append(f"{moment.part} got {kind} on one stream, call_id {line['stray']}")

    def take_run_line(self, line: Mapping[str, Any]) -> None:
        begins = "began" in line
        token = line["began" if begins else "ended"]
        call = self.calls.get(token)
        if call is None:
            self.unknown.append(token)
            return
        (call.began if begins else call.ended).append(Moment(line["at"], line["pid"], line["part"], line))

    # -- what was going on ---------------------------------------------------------------------------------------

    def is_orphan(self, call: Call, at: float) -> bool:
        """Whether the process that called had been killed by a moment, so that its call gets no result."""
        return not call.results and self._killed.get(call.order.pid, math.inf) < at

    def between(self, call: Call, *plugins: str) -> set[str]:
        """Returns all parts that a call depends on: its host, the bus, plugins (else all of its tool), their lines."""
        names = {call.host, BUS, *(plugins or call.tool.parts)}
        return names | {self.parts[name].line for name in names if self.parts[name].line}

    def disturbed(self, names: Iterable[str], begin: float, end: float, *, but: Act | None = None) -> bool:
        """Whether anything was done to one of these parts in a time, but for one act."""
        return any(self._troubles(names, begin, end, but))

    def seconds_disturbed(self, names: Iterable[str], begin: float, end: float) -> float:
        """Returns for how long something was done to these parts in a time."""
        return sum(
            min(trouble.ended, end) - max(trouble.began, begin) for trouble in self._troubles(names, begin, end, None)
        )

    def _troubles(self, names: Iterable[str], begin: float, end: float, but: Act | None) -> Iterator[Trouble]:
        for name in names:
            for trouble in self._by_part.get(name, ()):
                if trouble.began <= end and trouble.ended >= begin and trouble.act is not but:
                    yield trouble

    def first_move(self, tool: str, states: Iterable[str], begin: float) -> Move | None:
        """Returns when a tool was next seen in one of some states; None where it never was."""
        wanted = set(states)
        return next((m for m in self.moves if m.tool == tool and m.at >= begin and m.state in wanted), None)

    def state(self, tool: str, at: float) -> str:
        """Returns the state in which a tool was seen last, before a moment."""
        last = self._last_move(tool, at)
        return last.state if last else AWAY

    def _last_move(self, tool: str, at: float) -> Move | None:
        return next((m for m in reversed(self.moves) if m.tool == tool and m.at < at), None)

    def is_recovering(self, call: Call) -> bool:
        """Whether a tool that went away in a disturbance had not been seen live again when a call was made."""
        last = self._last_move(call.tool.name, call.order.at)
        if last is None or last.state == "live":
            return False
        return self.disturbed(self.between(call), last.at - RECOVERY, last.at)
