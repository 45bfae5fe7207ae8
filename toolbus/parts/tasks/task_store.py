"""Persists tasks across restarts, in the store of the bus or in a file of their own.

No caller waits for the disk: changes are handed to a thread, which writes what has gathered. So the end of the process
may cost the last moments. Old results must not keep a bus from starting: a damaged task is left out by itself.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from toolbus.bus.storage.database import Damaged, Database, checksum_of, time_bytes
from toolbus.bus.storage.store import Earlier, Kind, SqliteDriver, Store, WriteFailed, earlier_database
from toolbus.common.text import shorten
from toolbus.errors import SetupError
from toolbus.parts.tasks.task import HOME_DIGITS, Status, Task
from toolbus.protocol.tool import Result
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.tasks")

MAX_PENDING = 2_000  # changes that wait while the disk is full; there are fewer tasks than that
MAX_BATCH = 1 << 20  # characters of one transaction, for whose length others wait
CLOSE_SECONDS = 5.0

_FIELDS = (
    "tool",
    "owner",
    "started",
    "ended",
    "status",
    "error",
    "channel_id",
    "platform",
    "updated",
    "code",
    "reason",
)
_EARLIER_ID = 0x54427461  # of the file in which earlier releases had tasks


class TaskStore:
    """The tasks of one program. Its methods may be called from any thread.

    Args:
        place: an open store; or the path of a file for tasks alone, created (0600) with its directory if it does not
            exist.
        home: the end of the ids of this bus's tasks, where several buses share the store; else "".
        result_bytes: the largest result that is written; a task with a larger one is written without it.

    Raises:
        SetupError: from the constructor; the file cannot be used. The message says how to fix it.
    """

    def __init__(self, place: Store | Path, result_bytes: int, home: str = "") -> None:
        self._owns_store = isinstance(place, Path)
        self._store, self._kind = _own_store(place) if isinstance(place, Path) else (place, _kind_of(home))
        self._result_bytes = result_bytes
        self._pending: dict[str, Task | None] = {}  # changes not yet written, by task_id; None: deleted
        self._changed = threading.Condition()  # guards the attributes above and below
        self._dirty = False  # whether there is more to write than at the last attempt
        self._writing = False  # whether the thread is writing
        self._closing = False
        self._failing = False  # whether the last write failed, so that the log says it once
        self._thread = threading.Thread(target=self._run, name="toolbus-tasks-store", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<TaskStore {self._store!r} pending={len(self._pending)}>"

    @property
    def place(self) -> str:
        """Where the tasks are."""
        return self._store.place

    def load(self) -> Iterator[Task]:
        """Yields the persisted tasks: finished ones in the order in which they ended, then those that were running.

        Must be exhausted before the first change.
        """
        tasks, damaged = [], []
        for task_id, fields in self._store.load(self._kind).items():
            try:
                tasks.append(_task(task_id, fields))
            except (ValueError, TypeError, KeyError, DecodeError) as error:
                log.error("a task in %s is damaged and left out: %s", self.place, shorten(str(error), 200))
                damaged.append(task_id)
        yield from sorted(tasks, key=lambda task: math.inf if task.ended is None else task.ended)
        self.remove(damaged)

    def find_elsewhere(self, task_id: str) -> Task | None:
        """Returns a task of another bus of a shared store, as that has written it; None where there is none."""
        try:
            fields = self._store.get(_kind_of(task_id[-HOME_DIGITS:]), task_id)
            return None if fields is None else _task(task_id, fields)
        except (SetupError, ValueError, TypeError, KeyError, DecodeError) as error:
            log.error("a task of another bus cannot be read: %s", shorten(str(error), 200))
            return None

    def home_of_task(self, task_id: str) -> tuple[str, bool | None]:
        """Returns the name of the bus of a task, and whether it is there: `Store.other_bus`."""
        return self._store.other_bus(task_id[-HOME_DIGITS:])

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
        """Writes the pending changes, and closes a file of its own; may be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)
        if self._owns_store:
            self._store.close()

    def _change(self, changes: dict[str, Task | None]) -> None:
        if not changes:
            return
        with self._changed:
            self._pending.update(changes)
            self._dirty = True
            self._changed.notify_all()

    def _run(self) -> None:
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
        """Writes changes; returns whether it could."""
        try:
            rows: dict[str, Any] = {}
            size = 0
            for task in filter(None, batch.values()):
                try:
                    fields = rows[task.task_id] = _fields(task, self._result_bytes)
                except (ValueError, TypeError) as error:  # a text that UTF-8 cannot hold; the other tasks are valid
                    log.error("%r cannot be written: %s", task, type(error).__name__)
                    continue
                size += len(fields["result"] or "")
                if size > MAX_BATCH:
                    self._store.write(self._kind, rows)
                    rows, size = {}, 0
            self._store.write(self._kind, rows, [task_id for task_id, task in batch.items() if task is None])
        except WriteFailed as error:
            if not self._failing:
                log.error("tasks cannot be written to %s, they stay in memory: %s", self.place, error)
            self._failing = True
            return False
        self._failing = False
        return True

    def _retain(self, batch: dict[str, Task | None]) -> None:
        """Makes changes pending again; a newer change of the same task wins."""
        self._pending = batch | self._pending
        while len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]


def _fields(task: Task, result_bytes: int) -> dict[str, Any]:
    result = None if task.result is None else task.result.to_wire().SerializeToString()
    if result is not None and len(result) > result_bytes:
        task = task.without_result(
            f"it is larger than the limit result_bytes = {result_bytes}, so it was not written to disk, and the "
            "program that held it has ended"
        )
        result = None
    encoded = None if result is None else base64.b64encode(result).decode()
    return {**{name: getattr(task, name) for name in _FIELDS}, "result": encoded}


def _task(task_id: str, fields: Mapping[str, Any]) -> Task:
    """Returns the task of a row.

    Raises:
        ValueError, TypeError, KeyError, DecodeError: it is damaged.
    """
    values = {name: fields[name] for name in _FIELDS if name in fields}
    values["status"] = Status(values["status"])
    if fields["result"] is not None:
        values["result"] = Result.from_wire(pb.ToolResult.FromString(base64.b64decode(fields["result"])))
    return Task(task_id=task_id, **values)


def _kind_of(home: str) -> Kind:
    """Returns the kind of the tasks of a bus; each of several has one, so that it restores and deletes only its own."""
    return replace(TASKS, name=f"{TASKS.name}_{home}", shared="results", earlier=None) if home else TASKS


def _own_store(path: Path) -> tuple[Store, Kind]:
    """Opens a file for tasks alone, and the kind that finds what an earlier release wrote under the same name."""
    earlier = Earlier(f"{path.name}.former", _read_earlier)
    _move_former(path, path.with_name(earlier.file))
    store = Store(SqliteDriver(path, label="the tasks' file "), path.parent)
    store.open()
    return store, replace(TASKS, earlier=earlier)


def _move_former(path: Path, former: Path) -> None:
    """Makes room for a store, where an earlier release had a file of tasks."""
    fix = "name another file"
    file = Database(path, _EARLIER_ID, ("",), fix, f"move it away or {fix}", "the tasks' file ")
    if not path.is_file() or not path.stat().st_size or file.owner() != _EARLIER_ID:
        return
    with suppress(Damaged), file.errors(), closing(file.connect("rw")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    for suffix in ("-wal", "-shm", ""):
        with suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{former}{suffix}")


def _read_earlier(path: Path) -> Mapping[str, Any]:
    """Reads ``tasks.db`` of earlier releases; a damaged row is left out."""
    values = {}
    with earlier_database(path, _EARLIER_ID, versions=1) as connection:
        for task_id, ended, text, result, checksum in connection.execute(
            "SELECT task_id, ended, fields, result, checksum FROM tasks ORDER BY ended NULLS LAST, rowid"
        ):
            end = b"" if ended is None else time_bytes(ended)
            if checksum != checksum_of(task_id.encode(), end, text.encode(), result or b""):
                log.error("a task in %s is damaged and left out: its checksum fails", path)
                continue
            encoded = None if result is None else base64.b64encode(result).decode()
            values[task_id] = {**json.loads(text), "ended": ended, "result": encoded}
    return values


TASKS = Kind("tasks", needed=False, without="start without earlier tasks", earlier=Earlier("tasks.db", _read_earlier))
