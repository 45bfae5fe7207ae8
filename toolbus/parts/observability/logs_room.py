"""Shows operators the output of plugins, slow calls and why a tool can be called, and changes levels of the log."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

from toolbus.bus.access.identity import principal_of
from toolbus.bus.catalog.entry import RUN_SOURCES, Trust
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.core import Core, Room
from toolbus.common.cancellation import wait_first
from toolbus.common.text import list_names, nearest, quote
from toolbus.errors import InvalidRequest
from toolbus.parts.observability.explainer import Explainer
from toolbus.protocol.tool import Result
from toolbus.sdk import ToolScope, llm_tool

# Only loggers of toolbus: at debug others may log contents. Levels belong to the process, so a bus restores those
# that it changed when it stops. Where several buses of one process change a level, the newest change is in force, and
# the end of the last change restores the level from before.

ROOT = "toolbus"
LEVELS = ("debug", "info", "warning", "error")
DEFAULT_SECONDS = 600.0
MAX_SECONDS = 86_400.0


class Timer(Protocol):
    """The part of `asyncio.TimerHandle` that is used."""

    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Timer]


@dataclass(slots=True)
class _Changes:
    """The changes of this process's buses at one logger.

    Attributes:
        before: the logger's own level before the first of them.
        levels: by bus, the newest last.
    """

    before: int
    levels: dict[LogLevels, int] = field(default_factory=dict)


_lock = threading.Lock()  # buses may run on several threads
_changes: dict[str, _Changes] = {}  # by logger; of the process, as loggers are


def _change(name: str, owner: LogLevels, level: int | None) -> int:
    """Sets the level that a bus gives a logger, None to end that; returns the logger's level before all changes."""
    logger = logging.getLogger(name)
    with _lock:
        changes = _changes.setdefault(name, _Changes(logger.level))
        changes.levels.pop(owner, None)
        if level is not None:
            changes.levels[owner] = level
        elif not changes.levels:
            del _changes[name]
        logger.setLevel([changes.before, *changes.levels.values()][-1])
        return changes.before


class LogLevels:
    """The levels that one bus has changed.

    Args:
        later: calls a function after so many seconds.
    """

    def __init__(self, later: Later) -> None:
        self._later = later
        # By logger: its level before, when that is restored, and the timer.
        self._changed: dict[str, tuple[int, float, Timer]] = {}

    def __repr__(self) -> str:
        return f"<LogLevels changed={list(self._changed)}>"

    def show(self) -> dict[str, Any]:
        """Returns the level of each logger, and the changes with the seconds until they are restored."""
        now = time.monotonic()
        return {
            "levels": {name: _name(logging.getLogger(name).getEffectiveLevel()) for name in _loggers()},
            "changed": {
                name: {"before": _name(before) if before else "", "seconds": round(max(0.0, until - now), 1)}
                for name, (before, until, _) in sorted(self._changed.items())
            },
        }

    def set(self, logger: str, level: str, seconds: float = DEFAULT_SECONDS) -> None:
        """Changes the level of a logger for a while.

        Args:
            level: one of `LEVELS`; "" restores the one before at once.

        Raises:
            InvalidRequest: the logger or level does not exist, or the time is out of range.
        """
        if logger not in (names := _loggers()):
            near = nearest(logger, names)
            hint = f"; similar: {near}" if near else ""
            raise InvalidRequest(f"{quote(logger)} is not a logger of toolbus{hint}; there are: {list_names(names)}")
        if level not in ("", *LEVELS):
            raise InvalidRequest(f"level is {quote(level)}, it must be one of {', '.join(LEVELS)}")
        if not 0.0 < seconds <= MAX_SECONDS:
            raise InvalidRequest(f"seconds is {seconds:g}, it must be more than 0 and at most {MAX_SECONDS:g}")
        changed = self._changed.pop(logger, None)
        if changed is not None:
            changed[2].cancel()
        if not level:
            if changed is not None:
                _change(logger, self, None)
            return
        timer = self._later(seconds, lambda: self.set(logger, ""))
        before = _change(logger, self, logging.getLevelNamesMapping()[level.upper()])
        self._changed[logger] = (before, time.monotonic() + seconds, timer)

    def close(self) -> None:
        """Restores every level."""
        for logger in list(self._changed):
            self.set(logger, "")


def _loggers() -> list[str]:
    known = logging.root.manager.loggerDict
    names = {name for name, logger in list(known.items()) if isinstance(logger, logging.Logger)}
    return [ROOT, *sorted(name for name in names if name.startswith(f"{ROOT}."))]


def _name(level: int) -> str:
    return logging.getLevelName(level).lower()


# A supervisor of another process is a peer `run.HOST.PID-ID` with tools for operators; those of the bus itself are
# called directly. The policy has decided who may read output before a tool of the bus runs.

ANSWER_SECONDS = 5.0  # for a supervisor to answer: one that hangs delays the whole table
MAX_SUPERVISORS = 200  # that one request calls
MAX_ROWS = 1_000  # of one supervisor
MAX_NUMBER = 1e11  # of its numbers: counts, process ids, and seconds since the epoch, which have to be a date
# The fields of a supervisor's answers, with the default where one is missing or of another type.
_ROW = {"plugin": "", "state": "", "pid": 0, "restarts": 0, "since": 0.0, "last_exit": "", "lines": 0, "next": 0}
_ROW |= {"attached_as": ""}
_LINE = {"number": 0, "at": 0.0, "stream": "", "text": ""}
_ANSWER = {"lost": 0, "next": 0}

Call = Callable[[str, Mapping[str, Any], float], Awaitable[Result]]
"""Calls a tool with arguments and a timeout."""
Row = dict[str, Any]


@runtime_checkable
class OwnOutput(Protocol):
    """The output of plugins that a room of this bus runs."""

    source: str

    def plugins(self) -> list[Row]:
        """Returns the state of each."""

    async def read(self, plugin: str, lines: int, since: int, wait_seconds: float) -> Row:
        """Returns lines of one; raises InvalidRequest for an unknown name."""

    def restart(self, plugin: str) -> None:
        """Restarts one; raises InvalidRequest for an unknown name."""

    def stop(self, plugin: str) -> None:
        """Stops one; raises InvalidRequest for an unknown name, or where it cannot be stopped alone."""


class PluginOutputs:
    """The output of all plugins of one bus.

    Args:
        call: calls a tool as the bus itself.
        own: returns the output of plugins that rooms of this bus run.
    """

    def __init__(self, registry: Registry, call: Call, own: Callable[[], Iterable[OwnOutput]]) -> None:
        self._registry = registry
        self._call = call
        self._own = own

    async def plugins(self, source: str = "") -> Row:
        """Returns a row for each plugin with output, and an error for each supervisor that did not answer.

        Args:
            source: one that runs plugins; "" for all.
        """
        own = [each for each in self._own() if source in ("", each.source)]
        rows = [{"source": each.source, **row} for each in own for row in each.plugins()]
        errors: dict[str, str] = {}
        sources = [each for each in self._supervisors() if source in ("", each)]
        calls = [self._call_supervisor(source, "plugins", {}) for source in sources]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for source, answer in zip(sources, answers, strict=True):
            if isinstance(answer, InvalidRequest):
                errors[source] = str(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                rows += [{**row, "source": source} for row in _rows(answer)]  # a supervisor speaks for itself only
        return {"plugins": rows, "errors": errors}

    async def read(self, source: str, plugin: str, lines: int, since: int, wait_seconds: float) -> Row:
        """Returns lines of one plugin.

        Args:
            source: where it runs; "" where its name is enough.

        Raises:
            InvalidRequest: no plugin has that name, or several do; the text lists them.
        """
        source = source or await self._place_of(plugin)
        if (own := self._own_of(source)) is not None:
            answer = await own.read(plugin, lines, since, wait_seconds)
        else:
            arguments = {"plugin": plugin, "lines": lines, "since": since, "wait_seconds": wait_seconds}
            answer = await self._call_supervisor(source, "tail", arguments, ANSWER_SECONDS + wait_seconds)
            if not isinstance(answer, dict) or not isinstance(answer.get("lines"), list):
                raise InvalidRequest(f"supervisor {source} gave no lines")
            rows = [_of_kinds(line, _LINE) for line in answer["lines"] if isinstance(line, dict)]
            answer = {"lines": rows, **_of_kinds(answer, _ANSWER)}
        return {**answer, "source": source, "plugin": plugin}

    async def act(self, act: str, source: str, plugin: str) -> str:
        """Restarts or stops a plugin; returns where it runs. Raises as `read`."""
        source = source or await self._place_of(plugin)
        if (own := self._own_of(source)) is not None:
            (own.restart if act == "restart" else own.stop)(plugin)
        else:
            await self._call_supervisor(source, act, {"plugin": plugin})
        return source

    async def _place_of(self, plugin: str) -> str:
        """Returns the source that runs the one plugin of a name; of several the one that runs.

        Whoever is trusted less may name its plugins as it likes: that hides none of those that are trusted more.
        """
        table = await self.plugins()
        rows = [row for row in table["plugins"] if row.get("plugin") == plugin]
        running = [row for row in rows if row.get("state") not in ("ended", "given_up", "disabled")]
        places = list(dict.fromkeys(str(row["source"]) for row in running or rows))
        trust = self._supervisors()
        most = max((trust.get(place, Trust.OWN) for place in places), default=Trust.OWN)
        places = [place for place in places if trust.get(place, Trust.OWN) == most]
        if len(places) == 1:
            return places[0]
        if places:
            raise InvalidRequest(
                f"plugin {quote(plugin)} runs in several places: name one as source: {list_names(places)}"
            )
        known = list_names(dict.fromkeys(str(row.get("plugin")) for row in table["plugins"]))
        unanswered = f"; no answer from {list_names(table['errors'])}" if table["errors"] else ""
        raise InvalidRequest(f"no plugin {quote(plugin)} has output here; these have: {known}{unanswered}")

    def _supervisors(self) -> dict[str, Trust]:
        """Returns the supervisors that are attached, with their trust: those that are trusted most come first."""
        trust = {
            listing.source: listing.entry.trust
            for listing in self._registry.listings(None)
            if listing.source.startswith(RUN_SOURCES) and listing.entry.bare_name == "plugins"
        }
        return dict(sorted(trust.items(), key=lambda item: -item[1])[:MAX_SUPERVISORS])

    def _own_of(self, source: str) -> OwnOutput | None:
        return next((each for each in self._own() if each.source == source), None)

    async def _call_supervisor(
        self, source: str, tool: str, arguments: Mapping[str, Any], timeout: float = ANSWER_SECONDS
    ) -> Any:
        """Calls a tool of a supervisor.

        Raises:
            InvalidRequest: it failed; the text says why.
        """
        if not source.startswith(RUN_SOURCES):
            raise InvalidRequest(f"{quote(source)} runs no plugins: `toolbus logs` lists the sources that do")
        if source not in self._registry.sources():  # a refused call would be recorded, again and again for a follower
            raise InvalidRequest(f"supervisor {source} is not attached: `toolbus logs` lists those that are")
        result = await self._call(f"{source}:{tool}", arguments, timeout)
        if result.error is not None:
            raise InvalidRequest(f"supervisor {source}: {result.error.message}")
        return result.output


def _rows(answer: Any) -> list[Row]:
    """Returns the rows of a supervisor's answer, which may hold anything."""
    rows = [row for row in answer if isinstance(row, dict)] if isinstance(answer, list) else []
    return [_of_kinds(row, _ROW) for row in rows[:MAX_ROWS]]


def _of_kinds(row: Row, kinds: Row) -> Row:
    """Returns the known fields of an object; one of another type has its default."""
    values = ((name, row.get(name, default), default) for name, default in kinds.items())
    return {name: value if _fits(value, default) else default for name, value, default in values}


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, str):
        return isinstance(value, str)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (isinstance(default, float) or isinstance(value, int)) and 0 <= value < MAX_NUMBER


MAX_WAIT_SECONDS = 60.0
DEFAULT_LINES = 100
RECENT_SECONDS = 3600.0  # of slow calls that are shown


class LogsRoom(Room):
    """The logs of one bus, and the records of its calls over HTTP."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._outputs = PluginOutputs(core.catalog.registry, self._call, partial(core.rooms.providers, OwnOutput))
        self._levels = LogLevels(_later)
        self._explainer = Explainer(core)
        self._texts: Timer | None = None  # ends the recording of errors' texts; None where an operator began none
        self._draining = asyncio.Event()  # set once the bus shuts down

    def tools(self) -> Iterable[Callable[..., Any]]:
        output = (self.plugin_logs, self.plugin_restart, self.plugin_stop)
        return [*output, self.record_errors, self.log_level, self.slow_calls, self._explainer.explain]

    def routes(self) -> Iterable[str]:
        """Names the endpoint of records."""
        return ["toolbus.parts.observability.record_routes:router"]

    async def start(self) -> None:
        """Begins to note slow calls."""
        self.core.calls.dispatcher.slow_calls.watch(self.core.config.slow_seconds, _later)

    async def drain(self) -> None:
        """Ends requests that wait for output, which would hold the shutdown up."""
        self._draining.set()

    async def stop(self) -> None:
        """Restores the levels that were changed."""
        self._levels.close()
        self._end_texts()

    async def _call(self, name: str, arguments: Mapping[str, Any], timeout: float) -> Result:
        return await self.core.program.local.call(name, arguments, timeout=timeout)

    @llm_tool(
        description="Shows which plugins have output, wherever they run; with a plugin its newest lines, or those "
        "after a number.",
        read_only=True,
        allow_repeat=True,
        timeout=MAX_WAIT_SECONDS + 30.0,
    )
    async def plugin_logs(
        self, plugin: str = "", source: str = "", lines: int = DEFAULT_LINES, since: int = -1, wait_seconds: float = 0.0
    ) -> dict[str, Any]:
        """Shows output.

        Args:
            plugin: its name; "" for a table of all.
            source: where it runs, as in the table; "" where the name is enough.
            lines: at most so many, 2,000 at the most.
            since: the `next` of the answer before; -1: the newest lines.
            wait_seconds: how long to wait for a line after that number, at most 60.

        The table is `plugins` (source, plugin, state, pid, restarts, since, last_exit, lines, next) and `errors` of
        supervisors that did not answer. The lines are `lines` (number, at, stream, text), oldest first; `lost`, how
        many after `since` are not stored any more; `next`, the `since` of the next request.
        """
        if not plugin:
            return await self._outputs.plugins(source)
        wait = max(0.0, min(wait_seconds, MAX_WAIT_SECONDS))
        reading = asyncio.ensure_future(self._outputs.read(source, plugin, lines, since, wait))
        await wait_first(reading, *([self._draining.wait()] if wait else ()))
        if not reading.cancelled():
            return reading.result()
        return {"source": source, "plugin": plugin, "lines": [], "lost": 0, "next": since}

    @llm_tool(description="Shuts a plugin that a supervisor runs down gracefully, and starts it anew.")
    async def plugin_restart(self, scope: ToolScope, plugin: str, source: str = "") -> dict[str, Any]:
        """Restarts a plugin; `source` as for plugin_logs."""
        return {**await self._act("plugin.restart", scope, plugin, source), "restarted": True}

    @llm_tool(description="Shuts a plugin that a supervisor runs down gracefully; it stays so until it is restarted.")
    async def plugin_stop(self, scope: ToolScope, plugin: str, source: str = "") -> dict[str, Any]:
        """Stops a plugin; `source` as for plugin_logs."""
        return {**await self._act("plugin.stop", scope, plugin, source), "stopped": True}

    async def _act(
        self, act: Literal["plugin.restart", "plugin.stop"], scope: ToolScope, plugin: str, source: str
    ) -> dict[str, Any]:
        with self.core.audit.operation(act, principal_of(scope), target=plugin, why=source):
            where = await self._outputs.act(act.removeprefix("plugin."), source, plugin)
        return {"plugin": plugin, "source": where}

    @llm_tool(
        description="Changes the level of a logger of the bus for a while; without arguments shows the levels in force."
    )
    async def log_level(
        self, scope: ToolScope, logger: str = "", level: str = "", seconds: float = DEFAULT_SECONDS
    ) -> dict[str, Any]:
        """Changes a level.

        Args:
            logger: `toolbus`, or one below it such as `toolbus.calls`; "" only shows.
            level: debug, info, warning or error; "" restores the level before.
            seconds: how long, 86,400 at the most; then the level before comes back.

        The answer is `levels`, the effective one of each logger, and `changed`: those that go back, with `before` (""
        where the logger had none of its own) and `seconds` until then.
        """
        if logger:
            what = f"{level or 'back'} for {seconds:g} s"
            with self.core.audit.operation("log.level", principal_of(scope), target=logger, why=what):
                self._levels.set(logger, level, seconds)
        return self._levels.show()

    @llm_tool(
        description="Records the texts of errors for a while, which may repeat arguments, where the configuration "
        "does not record them anyway."
    )
    async def record_errors(self, scope: ToolScope, seconds: float = DEFAULT_SECONDS) -> dict[str, Any]:
        """Begins to record, or sets another end.

        Args:
            seconds: how long, 86,400 at the most; 0 ends it.

        The answer is `recorded`, whether they are recorded now, and `seconds` until that ends (0: it stays so).
        """
        if not 0.0 <= seconds <= MAX_SECONDS:
            raise InvalidRequest(f"seconds is {seconds:g}, it must be from 0 to {MAX_SECONDS:g}")
        records = self.core.calls.records
        with self.core.audit.operation("calls.record", principal_of(scope), target="errors", why=f"for {seconds:g} s"):
            self._end_texts()
            lasts = seconds if not records.texts else 0.0
            if lasts:
                records.texts, self._texts = True, _later(lasts, self._end_texts)
        return {"recorded": records.texts, "seconds": lasts}

    def _end_texts(self) -> None:
        if self._texts is not None:
            self._texts.cancel()
            self._texts, self.core.calls.records.texts = None, False

    @llm_tool(
        description="Shows the slowest calls of the last hour, slowest first: those above slow_seconds.",
        read_only=True,
        allow_repeat=True,
    )
    async def slow_calls(self, limit: int = 50) -> dict[str, Any]:
        """Shows slow calls, without contents.

        Args:
            limit: at most this many.

        The answer is `slow_seconds` (0: none is noted), `count` since the start of the bus, and `calls`: call_id, id,
        tool, source, identity, caller, seconds, ended (seconds since the epoch), outcome, and trace_id if there is one.
        """
        slow = self.core.calls.dispatcher.slow_calls
        calls = slow.slowest(limit, time.monotonic() - RECENT_SECONDS)
        return {
            "slow_seconds": self.core.config.slow_seconds,
            "count": slow.count,
            "calls": [each.described(self.core.calls.records.began) for each in calls],
        }


def _later(seconds: float, function: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, function)
