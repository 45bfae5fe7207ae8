"""Defines the chain of the audit's lines, finds its end, and checks it.

The files ``000001.jsonl``, ``000002.jsonl`` … of one directory are one chain. Each line is a JSON object whose ``prev``
is the SHA-256 of the line before it, without its newline, across files; whose ``seq`` counts from 1. So a line that was
changed, cut or moved shows in the lines after it. Lines that were cut from the end show only with the hash of a
later line, a *head*.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FOLDER = "audit"  # in the data directory
FIRST_PREV = "0" * 64  # stands for the line before the first one
_PATTERN = "[0-9]" * 6 + ".jsonl"


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """Where a chain ends.

    Attributes:
        seq: of the newest line; 0 before the first.
        head: its hash; `FIRST_PREV` before the first.
        file: the newest file; None before the first.
        size: bytes of that file up to the end of its last whole line.
        torn: the bytes that follow: a line that was not written to its end.
    """

    seq: int
    head: str
    file: Path | None
    size: int
    torn: bytes


@dataclass(frozen=True, slots=True)
class ChainVerdict:
    """The result of a check of a chain.

    Attributes:
        lines: how many lines are intact, from the first on.
        head: the hash of the last one of them.
        fault: the first fault, with its place; "" where the chain is intact.
    """

    lines: int
    head: str
    fault: str = ""


def hash_of(line: bytes) -> str:
    """Returns the hash of a line, given without its newline."""
    return hashlib.sha256(line).hexdigest()


def name_of(number: int) -> str:
    """Returns the name of a file by its number, from 1."""
    return f"{number:06d}.jsonl"


def files_of(directory: Path) -> list[Path]:
    """Returns the files of a chain, the oldest first."""
    return sorted(directory.glob(_PATTERN))


def read_line(line: bytes) -> dict[str, Any] | None:
    """Returns a line's object; None if it is not a line of a chain."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or type(entry.get("seq")) is not int or not isinstance(entry.get("prev"), str):
        return None
    return entry


def find_end(directory: Path) -> ChainEnd:
    """Finds the end of a chain; reads and checks only the end."""
    newest: Path | None = None
    whole, torn = 0, b""
    for file in reversed(files_of(directory)):
        data = file.read_bytes()
        end = len(data)
        line = b""
        while end and not line:
            newline = data.rfind(b"\n", 0, end)
            if newline < 0:
                end = 0
                break
            start = data.rfind(b"\n", 0, newline) + 1
            if read_line(data[start:newline]) is not None:
                line, end = data[start:newline], newline + 1
            else:
                end = start
        if newest is None:
            newest, whole, torn = file, end, data[end:]
        entry = read_line(line)
        if entry is not None:
            return ChainEnd(entry["seq"], hash_of(line), newest, whole, torn)
    return ChainEnd(0, FIRST_PREV, newest, whole, torn)


@dataclass(frozen=True, slots=True)
class _Line:
    place: str  # FILE:LINE
    entry: dict[str, Any] | None  # None: not a line of a chain
    hash: str

    @property
    def shown(self) -> str:
        return f"line {self.entry['seq']} ({self.place})" if self.entry is not None else self.place


def verify(directory: Path, head: str = "") -> ChainVerdict:
    """Checks a chain from its first line to its last, across files.

    Args:
        head: the hash of a line that was in the chain at some time; "": lines cut from the end are not detected.

    Raises:
        OSError: a file cannot be read.
    """
    count, prev, known = 0, FIRST_PREV, not head
    before: _Line | None = None
    lines = _lines(directory)
    for line in lines:
        if line.entry is None or line.entry["seq"] != count + 1:
            return ChainVerdict(count, prev, _misplaced(directory, line, before, count + 1))
        if line.entry["prev"] != prev:
            return _changed(line, next(lines, None), before, ChainVerdict(count, prev))
        count, prev, before = count + 1, line.hash, line
        known = known or line.hash == head
    if not known:
        fault = f"no line has the hash {head}: lines were cut from the end, or the whole chain was written anew"
        return ChainVerdict(count, prev, fault)
    return ChainVerdict(count, prev)


def _misplaced(directory: Path, line: _Line, before: _Line | None, expected: int) -> str:
    """Explains why another line is in the place of the expected one."""
    where = f"after {before.shown}" if before is not None else "at the beginning"
    if line.entry is None:
        return f"line {expected} ({line.place}) was changed: it is not a line of the audit"
    for other in _lines(directory):
        if other.entry is not None and other.entry["seq"] == expected:
            return f"line {expected} was moved: it is at {other.place}, and {line.shown} is in its place"
    if line.entry["seq"] < expected:
        return f"{line.shown} was moved or repeated: line {expected} is missing {where}"
    missing = line.entry["seq"] - expected
    lines = f"line {expected} was" if missing == 1 else f"lines {expected} to {line.entry['seq'] - 1} were"
    return f"{lines} cut {where}: {line.shown} follows"


def _changed(line: _Line, after: _Line | None, before: _Line | None, whole: ChainVerdict) -> ChainVerdict:
    """Explains which of two lines was changed, where the second does not have the hash of the first.

    Args:
        whole: the chain up to the first of them.
    """
    is_intact = after is None or (after.entry is not None and after.entry["prev"] == line.hash)
    if before is not None and before.entry is not None and is_intact:
        fault = f"{before.shown} was changed: {line.shown} has another hash of it"
        return ChainVerdict(whole.lines - 1, before.entry["prev"], fault)
    return replace(whole, fault=f"{line.shown} was changed: it has another hash of the line before it")


def _lines(directory: Path) -> Iterator[_Line]:
    for file in files_of(directory):
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                text = line.removesuffix(b"\n")
                yield _Line(f"{file.name}:{number}", read_line(text), hash_of(text))
