"""Makes the tables of a bus's state: tools, sources, calls, errors.

The frame of text and the screen draw the same tables. Cells are as the bus sent them: what draws them cleans them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from toolbus.parts.console.top import units
from toolbus.parts.console.top.bus_state import BARS, BusState, FailureKey, FailureState, Row, ToolState, is_failure


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        word: what `--sort` calls it.
        cell: the text of a line.
        rank: what a line is sorted by; lines where it is None stand last.
        width: characters on the screen; 0: what the others leave.
        number: whether it stands at the right, and the highest first.
        tone: of a cell that should be seen: `ok`, `warning`, `bad`, `accent`; "" for all others.
    """

    title: str
    word: str
    cell: Callable[[Any], str]
    rank: Callable[[Any], Any]
    width: int
    number: bool = False
    tone: Callable[[Any], str] = lambda line: ""


@dataclass(frozen=True, slots=True)
class View:
    """One table.

    Attributes:
        lines: makes the lines of a state at a moment, in their natural order.
        texts: what a filter looks at.
        sort: the column by which it is sorted at first; "" for the natural order.
        empty: what stands there instead of a table without lines.
        least: words of the columns that a narrow screen leaves out, the first one first.
        narrowest: characters of the column that takes what the others leave: for less, another column goes.
        widest: characters of the column that takes what the others leave; 0: all of it.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    lines: Callable[[BusState, float], list[Any]]
    texts: Callable[[Any], Iterable[str]]
    sort: str
    empty: str
    least: tuple[str, ...] = ()
    narrowest: int = 20
    widest: int = 0

    def column(self, word: str) -> Column | None:
        """Returns the column that a word of `--sort` names; None where this table has none."""
        return next((column for column in self.columns if column.word == word), None)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which lines of a table are shown, and in which order.

    Attributes:
        sort: the word of a column; "" for the natural order of the table.
        reverse: whether the order is turned round.
        filter: words that a line must have, in any case of letters.
        source: only lines of this source; "" for all.
    """

    sort: str = ""
    reverse: bool = False
    filter: str = ""
    source: str = ""


def select(view: View, state: BusState, now: float, selection: Selection) -> list[Any]:
    """Returns the lines of a table that are selected, in their order."""
    lines = view.lines(state, now)
    if selection.source:
        lines = [line for line in lines if line.source == selection.source]
    if words := selection.filter.casefold().split():
        lines = [line for line in lines if _has(words, view.texts(line))]
    column = view.column(selection.sort or view.sort)
    if column is None:
        return lines[::-1] if selection.reverse else lines
    ranked = [(rank, line) for line in lines if (rank := column.rank(line)) is not None]
    ranked.sort(key=lambda pair: pair[0], reverse=column.number != selection.reverse)
    return [line for _, line in ranked] + [line for line in lines if column.rank(line) is None]


def _has(words: Sequence[str], texts: Iterable[str]) -> bool:
    text = "\n".join(texts).casefold()
    return all(word in text for word in words)


@dataclass(frozen=True, slots=True)
class ToolLine:
    """A tool, how often it is called now, and how many of the running calls it has."""

    tool: ToolState
    rate: float | None
    in_flight: int
    now: float

    @property
    def source(self) -> str:
        return self.tool.source

    @property
    def key(self) -> tuple[str, ...]:
        """What stays the same of this line from digest to digest."""
        return self.tool.key


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A source with its sessions; a program that only calls has no entry of its own among the sources.

    Attributes:
        entry: empty where there is none.
    """

    name: str
    entry: Row
    sessions: tuple[Row, ...]

    @property
    def source(self) -> str:
        return self.name

    @property
    def key(self) -> tuple[str, ...]:
        """What stays the same of this line from digest to digest."""
        return (self.name,)

    def first(self, field: str) -> Any:
        """Returns a field of the source, or of the first session that has it; None where none of them says."""
        return next((each[field] for each in (self.entry, *self.sessions) if each.get(field)), None)

    def total(self, field: str) -> int | None:
        """Returns the sum of a field of the sessions; None where none has it."""
        values = [each[field] for each in self.sessions if each.get(field) is not None]
        return sum(values) if values else None


@dataclass(frozen=True, slots=True)
class CallLine:
    """A call that runs, or that has ended.

    Attributes:
        seconds: how long it took, or has run.
    """

    call: Row
    running: bool
    seconds: float | None

    @property
    def source(self) -> str:
        return str(self.call.get("source", ""))

    @property
    def key(self) -> tuple[str, ...]:
        """What stays the same of this line from digest to digest, also when the call ends."""
        return (str(self.call.get("id") or self.call.get("number", "")),)

    @property
    def outcome(self) -> str:
        """`running`, or as `toolbus calls` writes it."""
        return "running" if self.running else str(self.call.get("outcome", "")).lower()

    @property
    def stage(self) -> str:
        """How far it has got, or had got when it failed; "" where the bus does not say."""
        return str(self.call.get("stage") or (self.call.get("failure") or {}).get("stage") or "").lower()

    @property
    def tone(self) -> str:
        """How the outcome is drawn."""
        return "accent" if self.running else "bad" if is_failure(self.call) else "ok"


@dataclass(frozen=True, slots=True)
class FailureLine:
    """Calls of a tool that failed in the same way."""

    failure: FailureState

    @property
    def source(self) -> str:
        return str(self.newest["source"])

    @property
    def key(self) -> FailureKey:
        """What stays the same of this line from digest to digest."""
        newest = self.newest
        return str(newest["source"]), str(newest["name"]), str(newest["outcome"])

    @property
    def newest(self) -> Row:
        return self.failure.newest

    @property
    def stage(self) -> str:
        """How far the newest one had got; "" where the bus does not say."""
        return str(self.failed_with("stage") or "").lower()

    def failed_with(self, field: str) -> Any:
        """Returns a field of the newest failure; None where the bus told nothing about it."""
        return (self.newest.get("failure") or {}).get(field)


_Tone = Callable[[Any], str]


def _plain(line: Any) -> str:
    return ""


def _text(
    title: str, word: str, read: Callable[[Any], Any], width: int, tone: _Tone = _plain, *, without: str = "-"
) -> Column:
    """Returns a column of texts; `without` stands where there is none."""
    return Column(
        title, word, lambda line: str(read(line) or without), lambda line: str(read(line) or ""), width, tone=tone
    )


def _number(
    title: str, word: str, read: Callable[[Any], Any], width: int, write: Callable[[Any], str], tone: _Tone = _plain
) -> Column:
    """Returns a column of numbers, the highest first."""
    return Column(title, word, lambda line: write(read(line)), read, width, True, tone)


# -- tools --------------------------------------------------------------------------------------------------------


def _tool_lines(state: BusState, now: float) -> list[Any]:
    running = state.running_of()
    return [ToolLine(tool, tool.trail.rate(now), running.get(key, 0), now) for key, tool in state.tools.items()]


def _rate_rank(line: ToolLine) -> tuple[float, int] | None:
    """Returns what orders tools by their rate, and those that are called equally often by their calls."""
    return None if line.rate is None else (line.rate, line.tool.calls or 0)


TOOLS = View(
    "tools",
    "Tools",
    (
        _text("NAME", "name", lambda line: line.tool.name, 0),
        _text("SOURCE", "source", lambda line: line.source, 16),
        Column("CALLS/S", "rate", lambda line: units.rate(line.rate), _rate_rank, 8, True),
        _number("CALLS", "calls", lambda line: line.tool.calls, 10, units.count),
        _number(
            *("ERRORS", "errors", lambda line: line.tool.failed, 8),
            *(units.count, lambda line: "bad" if line.tool.failed else ""),
        ),
        _number("P50", "p50", lambda line: line.tool.p50, 8, units.duration),
        _number("P95", "p95", lambda line: line.tool.p95, 8, units.duration),
        _number("IN FLIGHT", "in-flight", lambda line: line.in_flight, 9, str),
        Column(
            *("LAST MINUTE", "last"),
            lambda line: units.sparkline(line.tool.trail.course(line.now), BARS),
            lambda line: line.tool.last_ended,
            *(BARS, True),
            lambda line: "accent" if line.rate else "muted",
        ),
    ),
    _tool_lines,
    lambda line: line.tool.key,
    "rate",
    "no tool was called since the bus began, or it does not count calls (metrics = false)",
    ("last", "p50", "source", "calls", "in-flight"),
    widest=56,
)


# -- sources ------------------------------------------------------------------------------------------------------


def _source_lines(state: BusState, now: float) -> list[Any]:
    sessions: dict[str, list[Row]] = {}
    for session in state.sessions.values():
        sessions.setdefault(str(session.get("source", "")), []).append(session)
    names = sorted(state.sources.keys() | sessions.keys())
    return [SourceLine(name, state.sources.get(name, {}), tuple(sessions.get(name, ()))) for name in names]


def _window(line: SourceLine) -> str:
    used, limit = line.total("in_flight"), line.total("max_in_flight")
    if used is None:
        return units.UNKNOWN
    return f"{used}/{limit}" if limit else str(used)


def _count(line: SourceLine, field: str) -> int | None:
    value = line.entry.get(field)
    if isinstance(value, int):
        return value
    return len(line.sessions) if field == "sessions" else line.total(field)


def _counted(field: str, width: int, tone: str = "") -> Column:
    return _number(
        *(field.upper(), field, lambda line: _count(line, field), width),
        *(units.count, lambda line: tone if _count(line, field) else ""),
    )


def _of_source(field: str, width: int, tone: _Tone = _plain) -> Column:
    return _text(field.upper(), field, lambda line: line.first(field), width, tone)


_STATES = {"attached": "ok", "suspect": "warning", "draining": "warning", "offline": "bad"}
SOURCES = View(
    "sources",
    "Sources",
    (
        _text("SOURCE", "name", lambda line: line.name, 0),
        _of_source("state", 9, lambda line: _STATES.get(str(line.first("state")), "")),
        _of_source("kind", 9),
        _counted("tools", 7),
        _counted("sessions", 8),
        Column("IN FLIGHT", "in-flight", _window, lambda line: line.total("in_flight"), 11, True),
        _counted("pending", 8),
        _counted("stuck", 6, "bad"),
        _counted("refused", 8, "warning"),
        _of_source("identity", 14),
    ),
    _source_lines,
    lambda line: (line.name, str(line.first("state") or ""), str(line.first("kind") or "")),
    "",
    "no sources",
    ("identity", "refused", "stuck", "kind", "pending", "sessions"),
    widest=56,
)


# -- calls --------------------------------------------------------------------------------------------------------


def call_lines(state: BusState, now: float) -> list[Any]:
    """Returns the calls that run, the oldest first, and then those that ended, the newest first."""
    running = [CallLine(call, True, _since(call, now)) for call in state.running]
    ended = [CallLine(call, False, call.get("seconds")) for call in reversed(state.calls.values())]
    return running + ended


def _since(call: Row, now: float) -> float | None:
    started = call.get("started")
    return None if started is None else max(0.0, now - float(started))


def _of_call(title: str, field: str, width: int) -> Column:
    return _text(title, field.removesuffix("_id"), lambda line: line.call.get(field), width)


_SEARCHED = ("name", "source", "caller", "user_id", "call_id", "trace_id")
CALLS = View(
    "calls",
    "Calls",
    (
        _text("OUTCOME", "outcome", lambda line: line.outcome, 17, lambda line: line.tone),
        _number("DURATION", "duration", lambda line: line.seconds, 11, units.duration),
        _text("STAGE", "stage", lambda line: line.stage, 14),
        _of_call("NAME", "name", 0),
        _of_call("SOURCE", "source", 18),
        _of_call("CALLER", "caller", 16),
        _of_call("USER", "user_id", 12),
        _number("STARTED", "started", lambda line: line.call.get("started"), 9, units.clock),
        _of_call("CALL", "call_id", 14),
    ),
    call_lines,
    lambda line: (line.outcome, *(str(line.call.get(field, "")) for field in _SEARCHED)),
    "",
    "no calls yet",
    ("call", "user", "started", "caller", "stage", "source"),
    widest=56,
)


# -- errors -------------------------------------------------------------------------------------------------------


def _failure_lines(state: BusState, now: float) -> list[Any]:
    return [FailureLine(failure) for failure in reversed(state.failures.values())]


def _retry_safe(line: FailureLine) -> str:
    safe = line.failed_with("retry_safe")
    return units.UNKNOWN if safe is None else "yes" if safe else "no"


ERRORS = View(
    "errors",
    "Errors",
    (
        _number("LAST", "last", lambda line: line.newest.get("ended"), 9, units.clock),
        _number("ERRORS", "errors", lambda line: line.failure.count, 7, units.count),
        _text("OUTCOME", "outcome", lambda line: line.key[2].lower(), 17, lambda line: "bad"),
        _text("NAME", "name", lambda line: line.newest.get("name"), 20),
        _text("SOURCE", "source", lambda line: line.newest.get("source"), 14),
        _text("STAGE", "stage", lambda line: line.stage, 14, without=units.UNKNOWN),
        _text("RETRY SAFE", "retry-safe", _retry_safe, 10),
        _text("MESSAGE", "message", lambda line: line.failed_with("message"), 0),
    ),
    _failure_lines,
    lambda line: (*line.key, str(line.failed_with("message") or "")),
    "",
    "no errors since this program began to read",
    ("retry-safe", "stage", "source", "last"),
    narrowest=36,
)

VIEWS = (TOOLS, SOURCES, CALLS, ERRORS)
