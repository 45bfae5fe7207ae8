"""Changes levels of the log at run time, for a while: each goes back by itself.

Only loggers of toolbus: at debug others may log what passes through them. Levels belong to the process, so a bus puts
back what it changed when it stops.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from toolbus.errors import InvalidRequest
from toolbus.text import list_names, nearest, quote

ROOT = "toolbus"
LEVELS = ("debug", "info", "warning", "error")
DEFAULT_SECONDS = 600.0
MAX_SECONDS = 86_400.0


class Timer(Protocol):
    """What `loop.call_later` returns."""

    def cancel(self) -> None:
        """Does not call any more."""


Later = Callable[[float, Callable[[], None]], Timer]


class LogLevels:
    """The changed levels of one process.

    Args:
        later: calls a function after so many seconds.
    """

    def __init__(self, later: Later) -> None:
        self._later = later
        self._changed: dict[str, tuple[int, float, Timer]] = {}  # by logger: its own level, when it goes back, by what

    def __repr__(self) -> str:
        return f"<LogLevels changed={list(self._changed)}>"

    def show(self) -> dict[str, Any]:
        """Returns the level of each logger, and what was changed with the seconds until it goes back."""
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
            level: one of `LEVELS`; "" puts back the one before at once.

        Raises:
            InvalidRequest: there is no such logger or level, or the time is out of range.
        """
        if logger not in (names := _loggers()):
            near = nearest(logger, names)
            hint = f"; similar: {near}" if near else ""
            raise InvalidRequest(f"{quote(logger)} is not a logger of toolbus{hint}; there are: {list_names(names)}")
        if level not in ("", *LEVELS):
            raise InvalidRequest(f"level is {quote(level)}, it must be one of {', '.join(LEVELS)}")
        if not 0.0 < seconds <= MAX_SECONDS:
            raise InvalidRequest(f"seconds is {seconds:g}, it must be more than 0 and at most {MAX_SECONDS:g}")
        before = self._forget(logger)
        if not level:
            logging.getLogger(logger).setLevel(before)
            return
        timer = self._later(seconds, lambda: self.set(logger, ""))
        self._changed[logger] = (before, time.monotonic() + seconds, timer)
        logging.getLogger(logger).setLevel(level.upper())

    def close(self) -> None:
        """Puts back every level."""
        for logger in list(self._changed):
            self.set(logger, "")

    def _forget(self, logger: str) -> int:
        """Returns a logger's level before it was changed, and forgets that it was."""
        changed = self._changed.pop(logger, None)
        if changed is None:
            return logging.getLogger(logger).level
        changed[2].cancel()
        return changed[0]


def _loggers() -> list[str]:
    """Returns the loggers of toolbus that there are."""
    known = logging.root.manager.loggerDict
    names = {name for name, logger in list(known.items()) if isinstance(logger, logging.Logger)}
    return [ROOT, *sorted(name for name in names if name.startswith(f"{ROOT}."))]


def _name(level: int) -> str:
    return logging.getLevelName(level).lower()
