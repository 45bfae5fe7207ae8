"""Writes the lines of the audit on a thread of its own, so that neither the disk nor the hashes delay the bus.

Lines are on disk within a second, those of operators at once. A bounded number of lines waits while the disk fails;
those beyond it are counted in a line ``lost``. A line that the end of the process tore is removed at the next start,
and a line ``torn`` records that.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from toolbus.bus.audit.audit_chain import FIRST_PREV, find_end, hash_of, name_of
from toolbus.errors import Code, NotAudited, SetupError
from toolbus.limits import MIB
from toolbus.questions import INPUT_REQUIRED, INPUT_REQUIRED_OUTCOME
from toolbus.text import shorten

log = logging.getLogger("toolbus.audit")

MAX_WAITING = 10_000  # lines
MAX_FILE = 64 * MIB  # bytes; a larger file is continued in a new one
MAX_TEXT = 300  # characters of one field
BATCH_SECONDS = 0.02  # between the first line that waits and the write, so that many share one
WAIT_SECONDS = 5.0  # how long an operator's act waits for its line
RETRY_SECONDS = 1.0  # after a write that failed
ERROR_SECONDS = 60.0  # between two errors in the log


@dataclass(slots=True, eq=False)
class AuditRecord:
    """One line to be written.

    Attributes:
        time: seconds since the epoch.
        fields: those of the line beside its place in the chain; texts are cut when it is written.
        urgent: whether it must be on disk at once.
        calls: with the act `calls`: records as the bus has them, and the offset of their times to the epoch.
        written: set when it is on disk, or cannot be; None: no act waits for it.
        error: why it could not be written.
    """

    time: float
    fields: Mapping[str, Any]
    urgent: bool = False
    calls: tuple[Sequence[tuple[Any, ...]], float] | None = None
    written: threading.Event | None = None
    error: str = field(default="", init=False)


class AuditWriter:
    """The audit of one directory, for one bus at a time. `put` and `put_now` may be called from any thread.

    Attributes:
        failing: whether the last attempt to write failed.
    """

    def __init__(
        self,
        directory: Path,
        boot: str,
        *,
        max_waiting: int = MAX_WAITING,
        max_file: int = MAX_FILE,
        sync_seconds: float = 1.0,
        head_seconds: float = 3_600.0,
    ) -> None:
        """Makes a writer that has opened nothing yet.

        Args:
            boot: identifies the run of the bus in its lines.
            sync_seconds: how often lines are forced to disk for which no act waits.
            head_seconds: how often the head is logged.
        """
        self._directory = directory
        self._boot = boot
        self._max_waiting = max_waiting
        self._max_file = max_file
        self._sync_seconds = sync_seconds
        self._head_seconds = head_seconds
        self._waiting: deque[AuditRecord] = deque()
        self._lost = self._lost_calls = 0  # lines beyond the limit, and calls in them; guarded by the lock
        self._recorded_lost = 0  # lost lines that lines `lost` count
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._urgent = threading.Event()
        self._closing = False
        self._lock_handle = -1  # of the directory
        self._file = -1  # -1: to be opened by the next write
        self._number = 0  # of the file
        self._size = 0  # of the file
        self._seq = 0
        self._head = FIRST_PREV
        self._synced_at = time.monotonic()
        self._unsynced = False
        self._head_logged_at = time.monotonic()
        self._error_logged_at = -ERROR_SECONDS
        self._thread = threading.Thread(target=self._run, name="toolbus-audit", daemon=True)
        self.failing = False

    def __repr__(self) -> str:
        return f"<AuditWriter seq={self._seq} waiting={len(self._waiting)}{' failing' if self.failing else ''}>"

    @property
    def head(self) -> tuple[int, str]:
        """The number and the hash of the newest line that was written."""
        return self._seq, self._head

    @property
    def lost(self) -> int:
        """How many lines were not written."""
        return self._recorded_lost + self._lost

    def open(self) -> None:
        """Opens the directory, repairs a torn last line, and starts the thread.

        Raises:
            SetupError: the directory cannot be used, or another bus uses it.
        """
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            self._lock_handle = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock_handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._open_file()
        except BlockingIOError:
            self._release()
            raise SetupError(f"another bus writes the audit in {self._directory}: use another --data-dir") from None
        except OSError as error:
            self._release()
            raise SetupError(
                f"cannot write the audit in {self._directory}: {error.strerror}: let this user write there, or set "
                "audit = false"
            ) from error
        self._thread.start()

    def put(self, entry: AuditRecord) -> None:
        """Queues a line; one beyond the limit is counted as lost."""
        if len(self._waiting) >= (self._max_waiting if entry.calls is None else self._max_waiting // 100):
            self.lose(1, 0 if entry.calls is None else len(entry.calls[0]))
            return
        self._waiting.append(entry)
        if entry.urgent:
            self._urgent.set()
        if not self._wake.is_set():  # a check costs a tenth of setting it
            self._wake.set()

    def lose(self, lines: int, calls: int = 0) -> None:
        """Counts lines that are not written, and calls in them."""
        with self._lock:
            self._lost, self._lost_calls = self._lost + lines, self._lost_calls + calls

    def put_now(self, entry: AuditRecord) -> None:
        """Writes a line and waits until it is on disk.

        Raises:
            NotAudited: it could not be written.
        """
        written = entry.written = threading.Event()
        entry.urgent = True
        self._waiting.append(entry)  # without the limit: it waits only briefly
        self._urgent.set()
        self._wake.set()
        if not written.wait(WAIT_SECONDS):
            error = f"the disk did not answer within {WAIT_SECONDS:g} s"
            self.put(AuditRecord(time.time(), {**entry.fields, "outcome": "refused", "why": error}))
            raise NotAudited(error)
        if entry.error:
            raise NotAudited(entry.error)

    def close(self) -> None:
        """Writes the queued lines as far as possible, and ends the thread."""
        if self._thread.is_alive():
            self._closing = True
            self._urgent.set()
            self._wake.set()
            self._thread.join()
        self._release()

    # -- on the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._wake.wait(self._pause())
            self._wake.clear()
            if self._waiting and not self._closing:
                self._urgent.wait(BATCH_SECONDS)
            self._urgent.clear()
            closing = self._closing
            self._write_waiting()
            if time.monotonic() - self._head_logged_at >= self._head_seconds or closing:
                self._log_head()
            if closing:
                return

    def _pause(self) -> float:
        """Returns how long the thread may sleep."""
        pause = self._head_logged_at + self._head_seconds - time.monotonic()
        if self.failing:
            pause = min(pause, RETRY_SECONDS)
        elif self._unsynced:
            pause = min(pause, self._synced_at + self._sync_seconds - time.monotonic())
        return max(0.0, pause)

    def _write_waiting(self) -> None:
        entries = [self._waiting.popleft() for _ in range(len(self._waiting))]
        with self._lock:
            lost, calls, self._lost, self._lost_calls = self._lost, self._lost_calls, 0, 0
        if lost:
            why = "lines were not written: too many waited, or too many acts were refused"
            fields = {"act": "lost", "outcome": "failed", "why": why, "lines": lost, "calls": calls}
            entries.append(AuditRecord(time.time(), fields))
        try:
            if entries:
                self._append(entries)
        except Exception as error:  # the thread must go on
            self.lose(lost, calls)
            self._waiting.extendleft(reversed([each for each in entries if each.fields["act"] != "lost"]))
            self._failed(entries, error)
            return
        try:
            self._sync(at_once=self._closing or any(each.urgent for each in entries))
        except OSError as error:
            self._failed(entries, error)
            self._waiting.extend(AuditRecord(each.time, each.fields) for each in entries if each.error)
            return
        self._recorded_lost += lost
        if self.failing:
            log.info("the audit can be written again seq=%d", self._seq)
            self.failing = False
        for each in entries:
            if each.written is not None:
                each.written.set()

    def _sync(self, *, at_once: bool) -> None:
        now = time.monotonic()
        if self._unsynced and (at_once or now - self._synced_at >= self._sync_seconds):
            os.fsync(self._file)
            self._synced_at, self._unsynced = now, False

    def _append(self, entries: list[AuditRecord]) -> None:
        """Appends lines, all or none of them."""
        if self._file < 0:
            self._open_file()
        elif self._size >= self._max_file:
            self._continue_in(self._number + 1)
        seq, head, lines = self._seq, self._head, []
        for each in entries:
            seq += 1
            line = _line(seq, self._boot, each, head)
            head = hash_of(line)
            lines.append(line + b"\n")
        self._write(b"".join(lines))
        self._seq, self._head, self._unsynced = seq, head, True

    def _write(self, data: bytes) -> None:
        size, rest = self._size, memoryview(data)
        try:
            while rest:
                rest = rest[os.pwrite(self._file, rest, size + len(data) - len(rest)) :]
        except OSError:
            os.ftruncate(self._file, size)  # a part may be written; the next write overwrites it if this fails
            raise
        self._size += len(data)

    def _failed(self, entries: list[AuditRecord], error: Exception) -> None:
        """Notes that lines could not be written; where an act waits, its line becomes that of a refused act."""
        self.failing = True
        text = getattr(error, "strerror", None) or repr(error)
        now = time.monotonic()
        if now - self._error_logged_at >= ERROR_SECONDS:
            self._error_logged_at = now
            log.error("cannot write the audit in %s why=%s waiting=%d", self._directory, text, len(self._waiting))
        for each in entries:
            if each.written is not None:
                each.error = text
                each.fields = {**each.fields, "outcome": "refused", "why": f"the audit could not be written: {text}"}
                each.written.set()
                each.written, each.urgent = None, False

    def _open_file(self) -> None:
        """Opens the newest file at the end of the chain, without a line that was not written to its end."""
        end = find_end(self._directory)
        self._seq, self._head = end.seq, end.head
        if end.file is None:
            self._continue_in(1)
            return
        self._number, self._size = int(end.file.stem), end.size
        self._file = os.open(end.file, os.O_RDWR | os.O_CLOEXEC)
        if end.torn:
            os.ftruncate(self._file, end.size)
            why = f"{len(end.torn)} bytes of a line that was not written to its end were removed: {_shown(end.torn)}"
            self._append([AuditRecord(time.time(), {"act": "torn", "outcome": "failed", "why": why})])

    def _continue_in(self, number: int) -> None:
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(self._directory / name_of(number), flags, 0o600)
        os.fsync(self._lock_handle)  # the directory: the name of the file must survive too
        self._number, self._size = number, 0

    def _log_head(self) -> None:
        self._head_logged_at = time.monotonic()
        log.info("audit head=%s seq=%d", self._head, self._seq)

    def _release(self) -> None:
        for handle in (self._file, self._lock_handle):
            if handle >= 0:
                os.close(handle)
        self._file = self._lock_handle = -1


_CODES = {code.value: code.name if code else "OK" for code in Code} | {INPUT_REQUIRED: INPUT_REQUIRED_OUTCOME}
_NONE = dict.fromkeys(("who", "key", "how", "peer", "source", "target"), "")


def _line(seq: int, boot: str, entry: AuditRecord, prev: str) -> bytes:
    fields = {key: shorten(value, MAX_TEXT) if type(value) is str else value for key, value in entry.fields.items()}
    place = {"seq": seq, "time": round(entry.time, 6), "boot": boot, "act": fields.pop("act")}
    if entry.calls is not None:
        fields["calls"] = [_call(row, entry.calls[1]) for row in entry.calls[0]]
    line = {**place, **_NONE, "outcome": "ok", "why": "", **fields, "prev": prev}
    try:
        return orjson.dumps(line)
    except TypeError:  # half of a surrogate pair
        return json.dumps(line, separators=(",", ":")).encode()


def _call(row: tuple[Any, ...], began: float) -> list[Any]:
    """Returns id, tool, its source, caller, user, outcome, start and seconds of a call; never its contents."""
    call_id, name, source, caller, started, ended, code, _, _, origin, *_ = row
    user = origin[0] if origin else ""
    outcome = _CODES.get(code, Code.INTERNAL.name)
    return [call_id, name, source, caller, user, outcome, round(began + started, 6), round(ended - started, 6)]


def _shown(data: bytes) -> str:
    return shorten(data.decode("utf-8", "replace"), MAX_TEXT // 2)
