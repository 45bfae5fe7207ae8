"""Reads parts of a stored result: a path in JSON, lines, lines with a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from toolbus.common.text import quote
from toolbus.errors import InvalidRequest

MAX_READ = 32_768  # characters of one answer
MAX_LINE = 2_000  # characters; a longer line counts as several
MAX_KEYS = 100  # of an object that is too large to be shown
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})?)?")


def read_part(text: str, path: str, lines: str, grep: str) -> dict[str, Any]:
    """Returns a part of a text.

    Args:
        path: of a value in JSON, keys and indexes with dots between: ``items.0.name``.
        lines: ``10-20``, ``10-`` or ``10``, from 1.
        grep: only lines that have this text, in any case.

    Raises:
        InvalidRequest: there is no such part.
    """
    if path:
        if lines or grep:
            raise InvalidRequest("path goes without lines and grep: leave one of them out")
        return _at(text, path)
    first, last = _range(lines)
    shown: list[str] = []
    size, number, wanted = 0, 0, grep.lower()
    for number, line in enumerate(_lines(text), 1):
        if number < first or number > last or (wanted and wanted not in line.lower()):
            continue
        entry = f"{number}: {line}" if grep else line
        size += len(entry) + 1
        if size > MAX_READ:
            part = f"grep = {quote(grep)} and lines" if grep else "lines"
            return {"text": "\n".join(shown), "more": f"the next line is {number}: go on with {part} = '{number}-'"}
        shown.append(entry)
    if first > number:
        raise InvalidRequest(f"lines is {quote(lines)}, and the result has {number} lines")
    return {"text": "\n".join(shown), "lines": number}


def count_lines(text: str) -> int:
    """Returns how many lines `read_part` sees."""
    return sum(1 for _ in _lines(text))


def _lines(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        for start in range(0, len(line) or 1, MAX_LINE):
            yield line[start : start + MAX_LINE]


def _range(lines: str) -> tuple[int, int]:
    if not lines:
        return 1, 1 << 62
    match = _RANGE.fullmatch(lines)
    if match is None:
        raise InvalidRequest(f"lines is {quote(lines)}, it must be a range such as 10-20, 10- or 10")
    first = int(match[1])
    last = int(match[2]) if match[2] else first if "-" not in lines else 1 << 62
    if not 1 <= first <= last:
        raise InvalidRequest(f"lines is {quote(lines)}: lines are counted from 1, and the first is not above the last")
    return first, last


def _at(text: str, path: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest("the result is not JSON, so it has no paths: read it with lines or grep") from None
    walked: list[str] = []
    for step in path.split("."):
        where = ".".join(walked) or "the result"
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            raise InvalidRequest(f"path is {quote(path)}: {where} is {_shape(value)}, it has no {quote(step)}")
        walked.append(step)
    shown = json.dumps(value, ensure_ascii=False)
    if len(shown) <= MAX_READ:
        return {"value": value}
    return {"shape": _shape(value), "more": "it is too large to be shown at once: go on with a longer path"}


def _shape(value: Any) -> str:
    if isinstance(value, dict):
        keys = list(value)
        more = f" and {len(keys) - MAX_KEYS} more" if len(keys) > MAX_KEYS else ""
        return f"an object with the keys {', '.join(key[:64] for key in keys[:MAX_KEYS])}{more}"
    if isinstance(value, list):
        return f"a list of {len(value)} items"
    return f"a text of {len(value)} characters" if isinstance(value, str) else "a single value"
