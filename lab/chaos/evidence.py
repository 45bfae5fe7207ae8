"""What everybody wrote down, put together: each call with what was asked, what ran, and what was told."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.chaos.cast import BUS, ChaosTool, Part
from lab.chaos.scene import Trouble
from lab.chaos.schedule import Act
from lab.chaos.watcher import AWAY, Move
from lab.chaos.work import CALLS, RUNS


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
    asked: Moment
    told: list[Moment] = field(default_factory=list)
    began: list[Moment] = field(default_factory=list)
    ended: list[Moment] = field(default_factory=list)

    def __str__(self) -> str:
        return f"call {self.token} of {self.tool.name}"

    @property
    def host(self) -> str:
        return self.asked.part

    @property
    def timeout(self) -> float:
        return float(self.asked.line["timeout"])

    @property
    def leaves(self) -> bool:
        """Whether its caller took it back early."""
        return bool(self.asked.line["leave"])

    @property
    def deadline(self) -> float:
        return self.asked.at + self.timeout

    def says(self, key: str) -> Any:
        """Returns a part of its first result; None where it has none."""
        return self.told[0].line[key] if self.told else None


@dataclass(slots=True)
class Evidence:
    """Everything that there is to judge.

    Attributes:
        strays: results that nobody waited for, as sentences.
        unknown: runs of calls that nobody made, by token.
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
        """Reads the ledgers."""
        for line in lines(folder / CALLS):
            self.take_call_line(line, tools)
        for line in lines(folder / RUNS):
            self.take_run_line(line)

    def take_call_line(self, line: Mapping[str, Any], tools: Mapping[str, ChaosTool]) -> None:
        """Takes a line of a host."""
        moment = Moment(line["at"], line["pid"], line["host"], line)
        if "asked" in line:
            self.calls[line["asked"]] = Call(line["asked"], tools[line["tool"]], moment)
        elif "told" in line:
            self.calls[line["told"]].told.append(moment)
        else:
            kind = "a second result" if line["again"] else "a result that it never asked for"
            self.strays.append(f"{moment.part} got {kind} on one stream, call_id {line['stray']}")

    def take_run_line(self, line: Mapping[str, Any]) -> None:
        """Takes a line of a plugin."""
        begins = "began" in line
        token = line["began" if begins else "ended"]
        call = self.calls.get(token)
        if call is None:
            self.unknown.append(token)
            return
        (call.began if begins else call.ended).append(Moment(line["at"], line["pid"], line["part"], line))

    # -- what was going on ---------------------------------------------------------------------------------------

    def is_orphan(self, call: Call, at: float) -> bool:
        """Whether nobody was left at a moment to hear of a call: the process that asked had been killed."""
        return not call.told and self._killed.get(call.asked.pid, math.inf) < at

    def between(self, call: Call, *plugins: str) -> set[str]:
        """Returns all parts that a call depends on: its host, the bus, plugins (else all of its tool), their lines."""
        names = {call.host, BUS, *(plugins or call.tool.parts)}
        return names | {self.parts[name].line for name in names if self.parts[name].line}

    def disturbed(self, names: Iterable[str], begin: float, end: float, *, but: Act | None = None) -> bool:
        """Whether anything was done to one of these parts in a time.

        Args:
            but: what does not count.
        """
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
        return next((m.state for m in reversed(self.moves) if m.tool == tool and m.at < at), AWAY)


def lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a ledger; none where nobody wrote."""
    if file.exists():
        with open(file, encoding="utf-8") as ledger:
            yield from map(json.loads, ledger)
