"""Writes the log of ``toolbus serve`` to standard error, as text or as JSON lines.

What peers sent may be part of a record, so every text is cleaned: it can neither look like another line of the log nor
change the terminal that shows it. Fields of a record follow its text as ``key=value``, in quotes where the value holds
blanks, quotes or ``=``: a value cannot look like a field either.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from toolbus.text import clean_line, clean_lines, escape_unsafe

if TYPE_CHECKING:
    from toolbus.bus.serve_settings import ServeSettings

_BARE = re.compile(r'[^\s"=\\]+')  # a value that needs no quotes
_RECORD_FIELDS = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})


class _Lines(logging.Formatter):
    """Formats ``12:00:00 info toolbus: text key=value``; with the date if the log does not go to a terminal.

    A record is one line. A traceback follows it, indented.
    """

    def __init__(self, date: bool) -> None:
        super().__init__()
        self._date = "%Y-%m-%dT%H:%M:%S%z" if date else "%H:%M:%S"

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime(self._date, time.localtime(record.created))
        fields = "".join(f" {key}={_shown(value)}" for key, value in _extra_fields(record).items())
        text = f"{when} {record.levelname.lower()} {record.name}: {clean_line(f'{record.getMessage()}{fields}')}"
        stack = self.formatStack(record.stack_info) if record.stack_info else ""
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return "\n  ".join((text, *(clean_lines(part) for part in (trace, stack) if part)))


class _JsonLines(logging.Formatter):
    """Formats each record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra_fields(record),
            **({"exception": self.formatException(record.exc_info)} if record.exc_info else {}),
        }
        return escape_unsafe(json.dumps(fields, ensure_ascii=False, default=str))


def _shown(value: object) -> str:
    """Returns the value of a field as a line of text has it."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _RECORD_FIELDS}


def log_to_stderr(settings: ServeSettings) -> None:
    """Sends the log of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if settings.log_json else _Lines(date=not sys.stderr.isatty()))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # the bus logs its own start and stop
    logging.getLogger("httpx").setLevel(logging.WARNING)  # at info it has a line for each request to a sidecar
    logging.getLogger("asyncio").setLevel(logging.WARNING)  # at debug it logs which selector it uses
