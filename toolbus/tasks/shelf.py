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
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from toolbus.errors import SetupError
from toolbus.tasks.record import Status, Task
from toolbus.tool import Result
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.tasks")

APPLICATION_ID = 0x54427461  # "TBta"; says whose file it is, to us and to file(1)
BUSY_SECONDS = 0.1  # for a person's sqlite3 shell that is just reading
MOST_WAITING = 2_000  # changes that wait for a disk that takes none; there are fewer tasks than that
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
_MAGIC = b"SQLite format 3\0"
_COMPANIONS = ("", "-wal", "-shm", "-journal")
_ACCESS = "let this user read and write the file and its directory, or name another file"
# What SQLite says where the file itself may well be sound; everything else counts as damage.
_CURES = {
    sqlite3.SQLITE_BUSY: "another program uses it: stop that one, or name another file",
    sqlite3.SQLITE_LOCKED: "another program uses it: stop that one, or name another file",
    sqlite3.SQLITE_CANTOPEN: _ACCESS,
    sqlite3.SQLITE_READONLY: _ACCESS,
    sqlite3.SQLITE_PERM: _ACCESS,
    sqlite3.SQLITE_FULL: "free some space on its disk, or name another file",
    sqlite3.SQLITE_IOERR: "check its disk, and that there is space left, or name another file",
}

_Row = tuple[str, float | None, str, bytes | None, int]


class Shelf:
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
        return f"<Shelf {self.path} waiting={len(self._waiting)}>"

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
        while len(self._waiting) > MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]


def _open(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        _must_be_ours(path)
        try:
            return _connect(path)
        except sqlite3.DatabaseError as damage:
            cure = _CURES.get(getattr(damage, "sqlite_errorcode", 0) & 0xFF)  # the low byte is the kind
            if cure:
                raise _refused(path, f"SQLite says: {damage}", cure) from damage
            _move_aside(path, damage)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        return _connect(path)
    except OSError as problem:
        raise _refused(path, problem.strerror or str(problem), _ACCESS) from problem


def _must_be_ours(path: Path) -> None:
    """Refuses what is somebody else's, by its header: even opening a file may change it."""
    with open(path, "rb") as file:
        header = file.read(100)
    if not header:
        return
    if not header.startswith(_MAGIC):
        raise _refused(path, "it is no SQLite file, or its beginning is damaged", "move it away or name another file")
    owner = int.from_bytes(header[68:72], "big")
    if owner != APPLICATION_ID:
        raise _refused(
            path, f"it is an SQLite file of another program (application_id {owner:#x})", "name another file"
        )


def _connect(path: Path) -> sqlite3.Connection:
    """Opens a file that exists, locks it and lifts it to this version.

    Raises:
        sqlite3.DatabaseError: it is damaged, or cannot be used now.
        SetupError: a newer version wrote it.
    """
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.text_factory = lambda raw: raw.decode(errors="replace")  # a damaged text shall fail its checksum
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # a second program would take our tasks for ended
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > len(MIGRATIONS):
            raise _refused(
                path,
                f"a newer toolbus wrote it (version {version}; this one knows {len(MIGRATIONS)})",
                "use that one, or name another file",
            )
        verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise sqlite3.DatabaseError(str(verdict))
        for number in range(version, len(MIGRATIONS)):
            connection.executescript(
                f"BEGIN EXCLUSIVE; PRAGMA application_id = {APPLICATION_ID}; {MIGRATIONS[number]}; "
                f"PRAGMA user_version = {number + 1}; COMMIT"
            )
        connection.execute("PRAGMA journal_mode = WAL")  # after the header is whole: whose it is stands there
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript("BEGIN IMMEDIATE; SELECT count(*) FROM tasks; COMMIT")  # takes the lock for good
    except BaseException:
        connection.close()
        raise
    return connection


def _move_aside(path: Path, damage: Exception) -> None:
    aside = Path(f"{path}.damaged")  # one is kept: damaged disks must not fill themselves
    for ending in _COMPANIONS:
        part = Path(f"{path}{ending}")
        Path(f"{aside}{ending}").unlink(missing_ok=True)
        if part.exists():
            os.replace(part, f"{aside}{ending}")
    log.error("%s is damaged (%s): moved to %s, earlier tasks are gone", path, str(damage)[:200], aside)


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
    when = b"" if ended is None else struct.pack(">d", ended + 0.0)  # SQLite keeps -0.0 as 0.0
    return zlib.crc32(b"\0".join((task_id.encode(), when, fields.encode(), result or b"")))


def _refused(path: Path, what: str, cure: str) -> SetupError:
    return SetupError(
        f"the tasks' file {path} cannot be used: {what}. Nothing was changed. {cure[0].upper()}{cure[1:]}"
    )
