"""What of the tasks survives a restart, in one SQLite file.

Nobody waits for the disk: changes are handed to a thread of the shelf's own, which writes whatever has gathered in one
transaction (``synchronous=NORMAL``). So the end of the process may cost the last moments, but never damages the file.

The results of yesterday must not keep a bus from starting: a damaged file is moved aside, with an error in the log that
says where to, and the shelf begins anew. A row whose checksum fails is left out by itself. What is not ours, written
by a newer version or in use is refused and left as it is, because there the cure is somebody's decision.

Results may hold anything, so the file is its owner's alone (0600). It is locked for as long as it is open.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from toolbus.bus.storage.database import Damaged, Database, crc_of, time_bytes
from toolbus.bus.tasks.task import Status, Task
from toolbus.tool import Result
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.tasks")

APPLICATION_ID = 0x54427461  # "TBta"
MAX_WAITING = 2_000  # changes that wait for a disk that takes none; there are fewer tasks than that
CLOSE_SECONDS = 5.0

# Script i lifts a file from version i to i + 1. Never edit one that was released.
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
_FIELDS = ("tool", "owner", "started", "status", "error", "channel_id", "platform")

_Row = tuple[str, float | None, str, bytes | None, int]


class TaskStore:
    """The file of one program's tasks. Its methods may be called from any thread.

    Args:
        path: made (0600) if need be, with its directory.
        result_bytes: the largest result that is written; a task with a larger one is kept without.

    Raises:
        SetupError: from the constructor; the file cannot be used. Says the cure.
    """

    def __init__(self, path: Path, result_bytes: int) -> None:
        self.path = path
        self._result_bytes = result_bytes
        self._waiting: dict[str, Task | None] = {}  # changes not yet written, by task_id; None: it goes
        self._changed = threading.Condition()  # guards what stands above and below
        self._news = False  # whether there is more to write than at the last try
        self._writing = False  # whether the thread is at it
        self._closing = False
        self._failing = False  # whether the last write failed, so that the log says it once
        self._connection = _open(path)
        self._thread = threading.Thread(target=self._run, name="toolbus-tasks-shelf", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<TaskStore {self.path} waiting={len(self._waiting)}>"

    def load(self) -> Iterator[Task]:
        """Yields what was kept: finished tasks in the order of their ends, then those that were running.

        To be done with before the first change.
        """
        rows = self._connection.execute(
            "SELECT task_id, ended, fields, result, checksum FROM tasks ORDER BY ended NULLS LAST, rowid"
        )
        damaged = []
        for row in rows:
            try:
                yield _task(*row)
            except (ValueError, TypeError, KeyError, DecodeError) as problem:
                log.error("a task in %s is damaged and left out: %s", self.path, str(problem)[:200])
                damaged.append(row[0])
        self.remove(damaged)

    def put(self, task: Task) -> None:
        """Keeps a task as it is now; returns before it is written."""
        self._change({task.task_id: task})

    def remove(self, task_ids: Iterable[str]) -> None:
        """Forgets tasks; returns before that is written."""
        self._change(dict.fromkeys(task_ids))

    def flush(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Waits until all is written; returns whether it is."""
        with self._changed:
            self._news = bool(self._waiting)
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not (self._waiting or self._writing), timeout)

    def close(self) -> None:
        """Writes what waits and closes the file; may be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)

    def _change(self, changes: dict[str, Task | None]) -> None:
        if not changes:
            return
        with self._changed:
            self._waiting.update(changes)
            self._news = True
            self._changed.notify_all()

    def _run(self) -> None:
        with closing(self._connection):
            ending = False
            while not ending:
                with self._changed:
                    self._changed.wait_for(lambda: self._news or self._closing)
                    ending = self._closing
                    batch, self._waiting = self._waiting, {}
                    self._news, self._writing = False, True
                written = self._write(batch)
                with self._changed:
                    if not written:  # the next change tries again
                        self._put_back(batch)
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
        except sqlite3.Error as problem:
            if not self._failing:
                log.error("tasks cannot be written to %s, they are kept in memory: %s", self.path, problem)
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
            except (ValueError, TypeError) as problem:  # a text that UTF-8 cannot hold; the others are sound
                log.error("%r cannot be written: %s", task, type(problem).__name__)

    def _put_back(self, batch: dict[str, Task | None]) -> None:
        """Has changes wait again, behind which newer ones may stand."""
        self._waiting = batch | self._waiting
        while len(self._waiting) > MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]


def _open(path: Path) -> sqlite3.Connection:
    file = Database(
        path,
        APPLICATION_ID,
        MIGRATIONS,
        elsewhere="name another file",
        restore="move it away or name another file",
        label="the tasks' file ",
    )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            file.make()
        if not path.is_file() or path.stat().st_size:  # an empty one is left by a program that was killed as it began
            file.must_be_ours()
        file.make_private()
        try:
            return _connect(file)
        except Damaged as damage:
            _move_aside(file, damage)
        file.make()
        return _connect(file)
    except OSError as problem:
        raise file.inaccessible(problem) from problem


def _connect(file: Database) -> sqlite3.Connection:
    """Opens a file that exists, locks it and lifts it to this version.

    Raises:
        Damaged: it cannot be read any more.
        SetupError: it cannot be used now, or a newer version wrote it.
    """
    with file.errors():
        connection = file.connect("rw")
        try:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # a second program would take our tasks for ended
            file.version(connection, "quick_check")
            file.lift(connection)
            connection.execute("PRAGMA journal_mode = WAL")  # after the header is whole: whose it is stands there
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executescript("BEGIN IMMEDIATE; SELECT count(*) FROM tasks; COMMIT")  # takes the lock for good
        except BaseException:
            connection.close()
            raise
    return connection


def _move_aside(file: Database, damage: Damaged) -> None:
    aside = Path(f"{file.path}.damaged")  # one is kept: damaged disks must not fill themselves
    for part, kept in zip(file.parts(), replace(file, path=aside).parts(), strict=True):
        kept.unlink(missing_ok=True)
        if part.exists():
            os.replace(part, kept)
    log.error("%s is damaged (%s): moved to %s, earlier tasks are gone", file.path, damage.what, aside)


def _row(task: Task, result_bytes: int) -> _Row:
    result = None if task.result is None else task.result.to_wire().SerializeToString()
    if result is not None and len(result) > result_bytes:
        task = task.without_result(
            f"it was too large to be written to disk ({result_bytes} bytes), and the program that had it has ended"
        )
        result = None
    fields = json.dumps({name: getattr(task, name) for name in _FIELDS}, separators=(",", ":"))
    return task.task_id, task.ended, fields, result, _checksum(task.task_id, task.ended, fields, result)


def _task(task_id: str, ended: float | None, fields: str, result: bytes | None, checksum: int) -> Task:
    """Reads a row.

    Raises:
        ValueError, TypeError, KeyError: it is damaged.
    """
    if checksum != _checksum(task_id, ended, fields, result):
        raise ValueError("its checksum fails")
    read: dict[str, Any] = json.loads(fields)
    kept = {field.name: read[field.name] for field in dataclasses.fields(Task) if field.name in read}
    kept["status"] = Status(kept["status"])
    kept["result"] = None if result is None else Result.from_wire(pb.ToolResult.FromString(result))
    return Task(task_id=task_id, ended=ended, **kept)


def _checksum(task_id: str, ended: float | None, fields: str, result: bytes | None) -> int:
    when = b"" if ended is None else time_bytes(ended)
    return crc_of(task_id.encode(), when, fields.encode(), result or b"")
