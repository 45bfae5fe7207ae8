"""Makes the tables of a bus's state: tools, sources, calls, errors.

The frame of text and the screen draw the same tables. Cells are texts as the bus sent them: who draws them cleans them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolbus.cli.top import units
from toolbus.cli.top.bus_state import BusState, FailureKey, FailureState, Row, ToolState, is_failure
from toolbus.cli.top.table import Column, View
from toolbus.cli.top.trail import BARS


@dataclass(frozen=True, slots=True)
class ToolLine:
    """A tool, how often it is called now, and how many of the running calls it has."""

    tool: ToolState
    rate: float | None
    in_flight: int
    now: float

    @property
    def source(self) -> str:
        """Whose line it is."""
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
        """Whose line it is."""
        return self.name

    @property
    def key(self) -> tuple[str, ...]:
        """What stays the same of this line from digest to digest."""
        return (self.name,)

    def first(self, field: str) -> Any:
        """Returns a field of the source, or of the first session that has it; None where nobody says."""
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
        """Whose line it is."""
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
    def tone(self) -> str:
        """How the outcome is drawn."""
        return "accent" if self.running else "bad" if is_failure(self.call) else "ok"


@dataclass(frozen=True, slots=True)
class FailureLine:
    """Calls of a tool that failed in the same way."""

    failure: FailureState

    @property
    def source(self) -> str:
        """Whose line it is."""
        return str(self.newest["source"])

    @property
    def key(self) -> FailureKey:
        """What stays the same of this line from digest to digest."""
        newest = self.newest
        return str(newest["source"]), str(newest["name"]), str(newest["outcome"])

    @property
    def newest(self) -> Row:
        """The record of the newest one."""
        return self.failure.newest

    def said(self, field: str) -> Any:
        """Returns a field of what was said about the newest failure; None where nothing was."""
        return (self.newest.get("failure") or {}).get(field)


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
        Column("NAME", "name", lambda line: line.tool.name, lambda line: line.tool.name, 0),
        Column("SOURCE", "source", lambda line: line.tool.source, lambda line: line.tool.source, 16),
        Column("CALLS/S", "rate", lambda line: units.rate(line.rate), _rate_rank, 8, True),
        Column("CALLS", "calls", lambda line: units.count(line.tool.calls), lambda line: line.tool.calls, 10, True),
        Column(
            *("ERRORS", "errors"),
            lambda line: units.count(line.tool.failed),
            lambda line: line.tool.failed,
            *(8, True),
            lambda line: "bad" if line.tool.failed else "",
        ),
        Column("P50", "p50", lambda line: units.duration(line.tool.p50), lambda line: line.tool.p50, 8, True),
        Column("P95", "p95", lambda line: units.duration(line.tool.p95), lambda line: line.tool.p95, 8, True),
        Column("IN FLIGHT", "in-flight", lambda line: str(line.in_flight), lambda line: line.in_flight, 9, True),
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


def _number(line: SourceLine, field: str) -> int | None:
    value = line.entry.get(field)
    if isinstance(value, int):
        return value
    return len(line.sessions) if field == "sessions" else line.total(field)


def _counted(title: str, field: str, width: int, tone: str = "") -> Column:
    return Column(
        *(title, field.replace("_", "-")),
        lambda line: units.count(_number(line, field)),
        lambda line: _number(line, field),
        *(width, True),
        lambda line: tone if _number(line, field) else "",
    )


def _said(title: str, field: str, width: int) -> Column:
    return Column(
        *(title, field.replace("_", "-")),
        lambda line: str(line.first(field) or "-"),
        lambda line: str(line.first(field) or ""),
        width,
    )


_STATES = {"attached": "ok", "suspect": "warning", "draining": "warning", "offline": "bad"}
SOURCES = View(
    "sources",
    "Sources",
    (
        Column("SOURCE", "name", lambda line: line.name, lambda line: line.name, 0),
        Column(
            *("STATE", "state"),
            lambda line: str(line.first("state") or "-"),
            lambda line: str(line.first("state") or ""),
            9,
            tone=lambda line: _STATES.get(str(line.first("state")), ""),
        ),
        _said("KIND", "kind", 9),
        _counted("TOOLS", "tools", 7),
        _counted("SESSIONS", "sessions", 8),
        Column("IN FLIGHT", "in-flight", _window, lambda line: line.total("in_flight"), 11, True),
        _counted("PENDING", "pending", 8),
        _counted("STUCK", "stuck", 6, "bad"),
        _counted("REFUSED", "refused", 8, "warning"),
        _said("IDENTITY", "identity", 14),
        _said("VERSION", "version", 12),
    ),
    _source_lines,
    lambda line: (line.name, str(line.first("state") or ""), str(line.first("kind") or "")),
    "",
    "no sources",
    ("version", "identity", "refused", "stuck", "kind", "pending", "sessions"),
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
    return Column(
        *(title, field.removesuffix("_id")),
        lambda line: str(line.call.get(field) or "-"),
        lambda line: str(line.call.get(field) or ""),
        width,
    )


def _stage(line: CallLine) -> str:
    return str(line.call.get("stage") or (line.call.get("failure") or {}).get("stage") or "-").lower()


_SEARCHED = ("name", "source", "caller", "user_id", "call_id", "trace_id")
CALLS = View(
    "calls",
    "Calls",
    (
        Column(
            "OUTCOME", "outcome", lambda line: line.outcome, lambda line: line.outcome, 17, tone=lambda line: line.tone
        ),
        Column("DURATION", "duration", lambda line: units.duration(line.seconds), lambda line: line.seconds, 11, True),
        Column("STAGE", "stage", _stage, _stage, 14),
        _of_call("NAME", "name", 0),
        _of_call("SOURCE", "source", 18),
        _of_call("CALLER", "caller", 16),
        _of_call("USER", "user_id", 12),
        Column(
            *("STARTED", "started"),
            lambda line: units.clock(line.call.get("started")),
            lambda line: line.call.get("started"),
            *(9, True),
        ),
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


def _of_newest(title: str, field: str, width: int) -> Column:
    return Column(
        title, field, lambda line: str(line.newest.get(field, "")), lambda line: str(line.newest.get(field, "")), width
    )


def _retry_safe(line: FailureLine) -> str:
    safe = line.said("retry_safe")
    return units.UNKNOWN if safe is None else "yes" if safe else "no"


ERRORS = View(
    "errors",
    "Errors",
    (
        Column(
            *("LAST", "last"),
            lambda line: units.clock(line.newest.get("ended")),
            lambda line: line.newest.get("ended"),
            *(9, True),
        ),
        Column(
            *("ERRORS", "errors"),
            lambda line: units.count(line.failure.count),
            lambda line: line.failure.count,
            *(7, True),
        ),
        Column(
            "OUTCOME",
            "outcome",
            lambda line: line.key[2].lower(),
            lambda line: line.key[2],
            17,
            tone=lambda line: "bad",
        ),
        _of_newest("NAME", "name", 20),
        _of_newest("SOURCE", "source", 14),
        Column(
            *("STAGE", "stage"),
            lambda line: str(line.said("stage") or units.UNKNOWN).lower(),
            lambda line: str(line.said("stage") or ""),
            14,
        ),
        Column("RETRY SAFE", "retry-safe", _retry_safe, _retry_safe, 10),
        Column(
            *("MESSAGE", "message"),
            lambda line: str(line.said("message") or "-"),
            lambda line: str(line.said("message") or ""),
            0,
        ),
    ),
    _failure_lines,
    lambda line: (*line.key, str(line.said("message") or "")),
    "",
    "no errors since this program began to read",
    ("retry-safe", "stage", "source", "last"),
    narrowest=36,
)

VIEWS = (TOOLS, SOURCES, CALLS, ERRORS)
