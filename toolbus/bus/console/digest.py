"""Makes digests: the state of a bus as operators see it, whole or as the changes since the digest before.

Pure: readings of the bus in, an object for JSON out, with bounded rows and bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from toolbus.bus.calls.call_record import CallRecord

MAX_CALLS = 50  # newest calls of a digest, whatever their outcome
MAX_FAILED = 50  # further calls of a digest that failed
MAX_RUNNING = 100  # calls in flight, the oldest
MAX_CALLED = 250  # tools with new counts: a thousand busy ones are all shown every two seconds
MAX_TOOLS = 1_000  # tools of a full digest, those that were called most
MAX_ROWS = 1_000  # sessions, and as many sources, of a full digest
MAX_BYTES = 1_000_000  # of an encoded digest: the longest list is cut until it fits
_LISTS = ("tools", "calls", "running", "sessions", "sources", "closed", "gone")
_CONTENTS = ("arguments", "output")  # of a record; ten kilobytes a call would be most of a digest

Row = dict[str, Any]


class KnownRows:
    """The rows of one list as a reader of every digest knows them."""

    def __init__(self) -> None:
        self._rows: Mapping[str, Row] = {}  # by key

    def __repr__(self) -> str:
        return f"<KnownRows {len(self._rows)}>"

    @property
    def all(self) -> list[Row]:
        """All of them."""
        return list(self._rows.values())

    def update(self, rows: Mapping[str, Row]) -> tuple[list[Row], list[str]]:
        """Replaces the rows. Returns those that are new or changed, and the keys of those that were removed."""
        before, self._rows = self._rows, rows
        changed = [row for key, row in rows.items() if before.get(key) != row]
        return changed, [key for key in before if key not in rows]


def describe_call(record: CallRecord, began: float) -> Row:
    """Returns an ended call without its contents, which a reader gets from the records by its number."""
    row = record.described(began)
    for name in _CONTENTS:
        row.pop(name, None)
    return row


def encode(digest: Row) -> bytes:
    """Returns a digest as JSON of at most `MAX_BYTES`: its longest lists are cut until it fits."""
    body = orjson.dumps(digest)
    while len(body) > MAX_BYTES and any(digest.get(name) for name in _LISTS):
        digest = dict(digest)
        longest = max(_LISTS, key=lambda name: len(digest.get(name, ())))
        digest[longest] = digest[longest][: len(digest[longest]) // 2]
        body = orjson.dumps(digest)
    return body


def is_quiet(before: Row, digest: Row) -> bool:
    """Tells whether a digest has no news since the one before it."""
    moving = ("number", "at", "full", "seconds", "rate", "loop_lag", "held_bytes", "running")
    same = all(digest[key] == before.get(key) for key in digest if key not in moving and key not in _LISTS)
    news = any(digest[key] for key in _LISTS if key != "running")
    return same and not news and _seen(digest["running"]) == _seen(before["running"])


def _seen(running: Iterable[Row]) -> list[tuple[str, str]]:
    return [(row["id"], row["stage"]) for row in running]
