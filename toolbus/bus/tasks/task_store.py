"""Persists tasks across restarts, in one SQLite file.

No caller waits for the disk: changes are handed to a thread of the store's own, which writes all that have gathered in
one transaction (``synchronous=NORMAL``). So the end of the process may cost the last moments, but never damages the
file.

Old results must not keep a bus from starting: a damaged file is moved aside, an error in the log says where,
and a new one begins. A row whose checksum fails is left out by itself. A file that is another program's, written by a
newer version or in use is refused and left as it is, because there the operator has to decide.

Results may hold anything, so only the owner can read the file (0600). It is locked for as long as it is open.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from toolbus.bus.storage.database import Database, checksum_of, time_bytes
from toolbus.bus.tasks.task import Status, Task
from toolbus.common.text import shorten
from toolbus.protocol.tool import Result
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.tasks")

APPLICATION_ID = 0x54427461  # "TBta"
MAX_PENDING = 2_000  # changes that wait while the disk is full; there are fewer tasks than that
CLOSE_SECONDS = 5.0

# Script i migrates a file from version i to i + 1. Never edit a released script.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE tasks (
        task_id TEXT NOT NULL PRIMARY KEY,
        ended REAL,  -- NULL: it was running
        fields TEXT NOT NULL,  -- the others of its record, as JSON
        result BLOB,  -- a ToolResult of the wire; NULL: there is none
        checksum INTEGER NOT NULL  -- of the columns above
    ) STRICT;
    """,
)
_PUT = "INSERT INTO tasks (task_id, ended, fields, result, checksum) VALUES (?, ?, ?, ?, ?)"
_FIELDS = ("tool", "owner", "started", "status", "error", "channel_id", "platform", "updated", "code", "reason")

_Row = tuple[str, float | None, str, bytes | None, int]


class TaskStore:
    """The file of one program's tasks. Its methods may be called from any thread.

    Args:
        path: created (0600) if it does not exist, with its directory.
        result_bytes: the largest result that is written; a task with a larger one is written without it.

    Raises:
        SetupError: from the constructor; the file cannot be used. The message says how to fix it.
    """

    def __init__(self, path: Path, result_bytes: int) -> None:
        self.path = path
        self._result_bytes = result_bytes
        self._pending: dict[str, Task | None] = {}  # changes not yet written, by task_id; None: deleted
        self._changed = threading.Condition()  # guards the attributes above and below
        self._dirty = False  # whether there is more to write than at the last attempt
        self._writing = False  # whether the thread is writing
        self._closing = False
        self._failing = False  # whether the last write failed, so that the log says it once
        self._connection = _open(path)
        self._thread = threading.Thread(target=self._run, name="toolbus-tasks-store", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<TaskStore {self.path} pending={len(self._pending)}>"

    def load(self) -> Iterator[Task]:
        """Yields the persisted tasks: finished ones in the order in which they ended, then those that were running.

        Must be exhausted before the first change.
        """
        rows = self._connection.execute(
            "SELECT task_id, ended, fields, result, checksum FROM tasks ORDER BY ended NULLS LAST, rowid"
        )
        damaged = []
        for row in rows:
            try:
                yield _task(*row)
            except (ValueError, TypeError, KeyError, DecodeError) as error:
                log.error("a task in %s is damaged and left out: %s", self.path, shorten(str(error), 200))
                damaged.append(row[0])
        self.remove(damaged)

    def put(self, task: Task) -> None:
        """Persists a task as it is now; returns before it is written."""
        self._change({task.task_id: task})

    def remove(self, task_ids: Iterable[str]) -> None:
        """Deletes tasks; returns before that is written."""
        self._change(dict.fromkeys(task_ids))

    def flush(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Waits until all is written; returns whether it is."""
        with self._changed:
            self._dirty = bool(self._pending)
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not (self._pending or self._writing), timeout)

    def close(self) -> None:
        """Writes the pending changes and closes the file; may be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)

    def _change(self, changes: dict[str, Task | None]) -> None:
        if not changes:
            return
        with self._changed:
            self._pending.update(changes)
            self._dirty = True
            self._changed.notify_all()

    def _run(self) -> None:
        with closing(self._connection):
            ending = False
            while not ending:
                with self._changed:
                    self._changed.wait_for(lambda: self._dirty or self._closing)
                    ending = self._closing
                    batch, self._pending = self._pending, {}
                    self._dirty, self._writing = False, True
                written = self._write(batch)
                with self._changed:
                    if not written:  # the next change retries them
                        self._retain(batch)
                    self._writing = False
                    self._changed.notify_all()

    def _write(self, batch: dict[str, Task | None]) -> bool:
        """Writes changes, all or nothing; returns whether it could."""
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("DELETE FROM tasks WHERE task_id = ?", [(task_id,) for task_id in batch])
            connection.executemany(_PUT, self._rows(batch))
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            if not self._failing:
                log.error("tasks cannot be written to %s, they stay in memory: %s", self.path, error)
            self._failing = True
            return False
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        self._failing = False
        return True

    def _rows(self, batch: dict[str, Task | None]) -> Iterator[_Row]:
        for task in batch.values():
            try:
                if task is not None:
                    yield _row(task, self._result_bytes)
            except (ValueError, TypeError) as error:  # a text that UTF-8 cannot hold; the other tasks are valid
                log.error("%r cannot be written: %s", task, type(error).__name__)

    def _retain(self, batch: dict[str, Task | None]) -> None:
        """Makes changes pending again; a newer change of the same task wins."""
        self._pending = batch | self._pending
        while len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]


def _open(path: Path) -> sqlite3.Connection:
    file = Database(
        path,
        APPLICATION_ID,
        MIGRATIONS,
        elsewhere="name another file",
        restore="move it away or name another file",
        label="the tasks' file ",
    )

    def damaged(what: str, aside: Path) -> None:
        log.error("%s is damaged (%s): moved to %s, earlier tasks are lost", path, what, aside)

    return file.open_or_replace("tasks", damaged, exclusive=True)  # a second program would mark our tasks as ended


def _row(task: Task, result_bytes: int) -> _Row:
    result = None if task.result is None else task.result.to_wire().SerializeToString()
    if result is not None and len(result) > result_bytes:
        task = task.without_result(
            f"it is larger than the limit result_bytes = {result_bytes}, so it was not written to disk, and the "
            "program that held it has ended"
        )
        result = None
    # ASCII, so that half of a surrogate pair survives.
    fields = json.dumps({name: getattr(task, name) for name in _FIELDS}, separators=(",", ":"))
    return task.task_id, task.ended, fields, result, _checksum(task.task_id, task.ended, fields, result)


def _task(task_id: str, ended: float | None, fields: str, result: bytes | None, checksum: int) -> Task:
    """Returns the task of a row.

    Raises:
        ValueError, TypeError, KeyError: it is damaged.
    """
    if checksum != _checksum(task_id, ended, fields, result):
        raise ValueError("its checksum fails")
    stored: dict[str, Any] = json.loads(fields)
    values = {field.name: stored[field.name] for field in dataclasses.fields(Task) if field.name in stored}
    values["status"] = Status(values["status"])
    values["result"] = None if result is None else Result.from_wire(pb.ToolResult.FromString(result))
    return Task(task_id=task_id, ended=ended, **values)


def _checksum(task_id: str, ended: float | None, fields: str, result: bytes | None) -> int:
    end = b"" if ended is None else time_bytes(ended)
    return checksum_of(task_id.encode(), end, fields.encode(), result or b"")
