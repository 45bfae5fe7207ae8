"""Changes levels of the log at run time, for a while: each is restored by a timer.

Only loggers of toolbus: at debug others may log contents. Levels belong to the process, so a bus restores those that it
changed when it stops. Where several buses of one process change a level, the newest change is in force, and the end of
the last change restores the level from before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from toolbus.errors import InvalidRequest
from toolbus.text import list_names, nearest, quote

ROOT = "toolbus"
LEVELS = ("debug", "info", "warning", "error")
DEFAULT_SECONDS = 600.0
MAX_SECONDS = 86_400.0


class Timer(Protocol):
    """The part of `asyncio.TimerHandle` that is used."""

    def cancel(self) -> None:
        """Cancels the call."""


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
    """Returns the names of toolbus' loggers."""
    known = logging.root.manager.loggerDict
    names = {name for name, logger in list(known.items()) if isinstance(logger, logging.Logger)}
    return [ROOT, *sorted(name for name in names if name.startswith(f"{ROOT}."))]


def _name(level: int) -> str:
    return logging.getLevelName(level).lower()
