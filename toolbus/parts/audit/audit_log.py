"""Writes the audit as a chain of lines in files, finds its end, and checks it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from toolbus.bus.audit import AuditRecord
from toolbus.common.text import shorten
from toolbus.errors import Code, NotAudited, SetupError
from toolbus.protocol.limits import MIB
from toolbus.protocol.questions import INPUT_REQUIRED, INPUT_REQUIRED_OUTCOME

# The files ``000001.jsonl``, ``000002.jsonl`` … of one directory are one chain. Each line is a JSON object whose
# ``prev`` is the SHA-256 of the line before it, without its newline, across files; whose ``seq`` counts from 1. So a
# line that was changed, cut or moved shows in the lines after it. Lines that were cut from the end show only with the
# hash of a later line, a *head*.

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


# Lines are on disk within a second, those of operators at once. A bounded number of lines waits while the disk fails;
# those beyond it are counted in a line ``lost``. A line that the end of the process tore is removed at the next start,
# and a line ``torn`` records that.

log = logging.getLogger("toolbus.audit")

MAX_WAITING = 10_000  # lines
MAX_FILE = 64 * MIB  # bytes; a larger file is continued in a new one
MAX_TEXT = 300  # characters of one field
BATCH_SECONDS = 0.02  # between the first line that waits and the write, so that many share one
WAIT_SECONDS = 5.0  # how long an operator's act waits for its line
RETRY_SECONDS = 1.0  # after a write that failed
ERROR_SECONDS = 60.0  # between two errors in the log


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
