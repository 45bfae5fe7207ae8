"""Finds the output of plugins: in this process's supervisors, and in those that are attached.

A supervisor of another process is a peer `run.HOST.PID-ID` with tools for operators; those of the bus itself are called
directly. The policy has decided who may read output before a tool of the bus runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

from toolbus.bus.catalog.handler import RUN_SOURCES
from toolbus.bus.catalog.registry import Registry
from toolbus.errors import InvalidRequest
from toolbus.text import list_names, quote
from toolbus.tool import Result

ANSWER_SECONDS = 5.0  # for a supervisor to answer: one that hangs delays the whole table
MAX_SUPERVISORS = 200  # that one request calls
MAX_ROWS = 1_000  # of one supervisor
MAX_NUMBER = 1e11  # of its numbers: counts, process ids, and seconds since the epoch, which have to be a date
# The fields of a supervisor's answers, with the default where one is missing or of another type.
_ROW = {"plugin": "", "state": "", "pid": 0, "restarts": 0, "since": 0.0, "last_exit": "", "lines": 0, "next": 0}
_LINE = {"number": 0, "at": 0.0, "stream": "", "text": ""}
_ANSWER = {"lost": 0, "next": 0}

Call = Callable[[str, Mapping[str, Any], float], Awaitable[Result]]
"""Calls a tool with arguments and a timeout."""
Row = dict[str, Any]


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
        answers = await asyncio.gather(
            *(self._call_supervisor(source, "plugins", {}) for source in sources), return_exceptions=True
        )
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
        own = self._own_of(source)
        if own is not None:
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
        own = self._own_of(source)
        if own is not None:
            (own.restart if act == "restart" else own.stop)(plugin)
        else:
            await self._call_supervisor(source, act, {"plugin": plugin})
        return source

    async def _place_of(self, plugin: str) -> str:
        """Returns the source that runs the one plugin of a name; of several the one that runs."""
        table = await self.plugins()
        rows = [row for row in table["plugins"] if row.get("plugin") == plugin]
        running = [row for row in rows if row.get("state") not in ("ended", "given_up", "disabled")]
        places = list(dict.fromkeys(str(row["source"]) for row in running or rows))
        if len(places) == 1:
            return places[0]
        if places:
            raise InvalidRequest(
                f"plugin {quote(plugin)} runs in several places: name one as source: {list_names(places)}"
            )
        known = list_names(dict.fromkeys(str(row.get("plugin")) for row in table["plugins"]))
        unanswered = f"; no answer from {list_names(table['errors'])}" if table["errors"] else ""
        raise InvalidRequest(f"no plugin {quote(plugin)} has output here; these have: {known}{unanswered}")

    def _supervisors(self) -> list[str]:
        """Returns the supervisors that are attached."""
        sources = (
            listing.source
            for listing in self._registry.listings(None)
            if listing.source.startswith(RUN_SOURCES) and listing.entry.bare_name == "plugins"
        )
        return list(dict.fromkeys(sources))[:MAX_SUPERVISORS]

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
