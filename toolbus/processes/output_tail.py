"""Stores the newest output of plugins in memory, with the state of each: bounded, with a number for each line.

`OutputTails` takes the reports of a supervisor, and returns the plugins' states and the lines after a number. It
belongs to the event loop of its supervisor. Its lines are safe to show: colours stay, all other escape sequences and
control characters are dropped (`keep_colours`).
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from toolbus.common.text import keep_colours, list_names, quote
from toolbus.errors import InvalidRequest
from toolbus.functions.workers import ChangeSignal
from toolbus.processes.supervisor import PluginReport, ReportKind

TAIL_BYTES = 1 << 20  # of each plugin, measured as Python objects
MAX_LINES = 2_000  # of one answer
ANSWER_CHARACTERS = 256 * 1024  # of one answer: at most six bytes each in JSON, below the 4 MiB of a result
MAX_ENDED = 50  # ended plugins whose output stays: drop-in tools get a new name with each change
MAX_WAIT_SECONDS = 60.0
BATCH_SECONDS = 0.05  # between the next line and the answer, so that a follower reads batches
_LINE_COST = 120  # bytes that a line takes in addition to its text

_ATTACHED = re.compile(r" attached to the bus at \S+ as ([^\s,]+),")  # what a Python plugin logs

_STATES = {
    ReportKind.STARTED: "running",
    ReportKind.OFFERED: "running",
    ReportKind.DIED: "restarting",
    ReportKind.ENDED: "ended",
    ReportKind.GIVEN_UP: "given_up",
}
RUNS = ("running", "restarting")

_Line = tuple[float, str, str, int]  # when (seconds since the epoch), stream or kind of event, text, bytes


@dataclass(slots=True)
class PluginTail:
    """The newest output of one plugin.

    Attributes:
        state: `running`, `restarting`, `ended` or `given_up`; "" before its first process.
        pid: of its process; 0 while none runs.
        since: when the state began, in seconds since the epoch.
        last_exit: how its last process ended, as text; "" before the first end.
        number: of the newest line, from 1; events count as lines.
        attached_as: the source as which it last logged that it has attached; "" for none.
    """

    name: str
    state: str = ""
    pid: int = 0
    restarts: int = 0
    since: float = field(default_factory=time.time)
    last_exit: str = ""
    number: int = 0
    attached_as: str = ""
    _lines: deque[_Line] = field(default_factory=deque)
    _bytes: int = 0

    def take(self, report: PluginReport, tail_bytes: int) -> None:
        """Stores a line or an event; drops the oldest lines beyond the limit."""
        if report.kind is not ReportKind.OUTPUT:
            self._set_state(report)
        text = report.text
        if " attached to " in text and (attached := _ATTACHED.search(text)):
            self.attached_as = attached[1]
        size = sys.getsizeof(text) + _LINE_COST
        self._lines.append((time.time(), report.stream or report.kind.value, text, size))
        self._bytes += size
        self.number += 1
        while self._bytes > tail_bytes:
            self._bytes -= self._lines.popleft()[3]

    def _set_state(self, report: PluginReport) -> None:
        started = report.kind is ReportKind.STARTED
        if not started and self.pid not in (0, report.pid):  # another process has taken over meanwhile
            return
        self.restarts += started and self.state == "restarting"
        state = _STATES[report.kind]
        if state != self.state:
            self.since = time.time()
        self.state = state
        if started:
            self.pid = report.pid
        elif state != "running":
            self.pid = 0
            self.last_exit = report.text

    def described(self) -> dict[str, Any]:
        """Returns its state as a JSON object, as the table of `toolbus logs` has it."""
        return {
            "plugin": self.name,
            "state": self.state,
            "pid": self.pid,
            "restarts": self.restarts,
            "since": round(self.since, 3),
            "last_exit": keep_colours(self.last_exit),
            "lines": len(self._lines),
            "next": self.number,
            "attached_as": self.attached_as,
        }

    def read(self, lines: int, since: int = -1) -> dict[str, Any]:
        """Returns lines, oldest first: with a number those after it, else the newest.

        Args:
            lines: the largest number of lines.
            since: the `next` of the answer before; a number above the newest counts as 0: the supervisor was restarted.
        """
        first = self.number - len(self._lines) + 1  # the number of the oldest line
        count = max(0, min(lines, MAX_LINES))
        if since > self.number:
            since = 0
        if since < 0:
            begin = max(first, self.number + 1 - count)
            chosen = _bounded(itertools.islice(reversed(self._lines), self.number + 1 - begin))[::-1]
            begin = self.number + 1 - len(chosen)
            lost = 0
        else:
            begin = max(first, since + 1)
            lost = begin - since - 1
            index = begin - first
            chosen = _bounded(itertools.islice(self._lines, index, index + count))
        return {
            "lines": [
                {"number": begin + at, "at": round(when, 3), "stream": stream, "text": keep_colours(text)}
                for at, (when, stream, text, _) in enumerate(chosen)
            ],
            "lost": lost,
            "next": begin + len(chosen) - 1 if chosen or since >= 0 else self.number,
        }


def _bounded(lines: Iterable[_Line]) -> list[_Line]:
    """Returns as many of the first lines as one answer holds, one at least."""
    chosen: list[_Line] = []
    room = ANSWER_CHARACTERS
    for line in lines:
        room -= len(line[2])
        if room < 0 and chosen:
            break
        chosen.append(line)
    return chosen


class OutputTails:
    """The newest output of the plugins of one supervisor.

    Args:
        tail_bytes: of each plugin.
    """

    def __init__(self, tail_bytes: int = TAIL_BYTES) -> None:
        self._tail_bytes = tail_bytes
        self._tails: dict[str, PluginTail] = {}  # by name, in the order in which they began
        self._changed = ChangeSignal()  # of the next line

    def __repr__(self) -> str:
        return f"<OutputTails plugins={len(self._tails)}>"

    def __call__(self, report: PluginReport) -> None:
        """Takes a report."""
        tail = self._tails.get(report.plugin)
        if tail is None:
            tail = self._tails[report.plugin] = PluginTail(report.plugin)
            self._forget()
        tail.take(report, self._tail_bytes)
        self._changed.notify()

    def _forget(self) -> None:
        """Drops the plugins that ended first, beyond the limit."""
        ended = [name for name, tail in self._tails.items() if tail.state not in ("", *RUNS)]
        for name in ended[: max(0, len(ended) - MAX_ENDED)]:
            del self._tails[name]

    def keep(self, names: Collection[str]) -> None:
        """Drops all but some plugins, in any state."""
        self._tails = {name: tail for name, tail in self._tails.items() if name in names}

    def described(self) -> list[dict[str, Any]]:
        """Returns the state of each plugin."""
        return [tail.described() for tail in self._tails.values()]

    def has(self, name: str) -> bool:
        """Tells whether a plugin has output."""
        return name in self._tails

    def find(self, name: str) -> PluginTail:
        """Returns the tail of a plugin.

        Raises:
            InvalidRequest: there is no plugin of that name.
        """
        tail = self._tails.get(name)
        if tail is None:
            raise InvalidRequest(f"there is no plugin {quote(name)} here; there are: {list_names(self._tails)}")
        return tail

    async def read(self, name: str, lines: int, since: int = -1, wait_seconds: float = 0.0) -> dict[str, Any]:
        """Returns lines of a plugin as `PluginTail.read`; waits for one if there is no line after the number.

        Raises:
            InvalidRequest: there is no plugin of that name.
        """
        tail = self.find(name)
        wait = min(wait_seconds, MAX_WAIT_SECONDS)
        if tail.number == since and await self._changed.until(lambda: tail.number != since, wait):
            await asyncio.sleep(BATCH_SECONDS)
        return tail.read(lines, since)
