"""Persists what a bus knows across restarts: rows of JSON, by kind and key, in one file (``bus.db``).

The owner of a kind declares it (`Kind`): what becomes of a damaged row, whether a change waits for the disk, and the
file in which earlier releases had it. The owners know their rows; this module knows none of them. A `Driver` has the
rows: `SqliteDriver` in a file, `MemoryDriver` as long as the process, a part those that several buses share. Every row
has a checksum, because a database detects a damaged structure but not a flipped byte inside a value. No error text
repeats a row: it may hold passwords.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from toolbus.bus.storage.database import Damaged, Database, pragma, transaction
from toolbus.common.path_ownership import check_path, make_directory
from toolbus.common.text import shorten
from toolbus.errors import NotKept, RequestError, SetupError

log = logging.getLogger("toolbus.storage")

FILE = "bus.db"
LOCK = "toolbus.lock"
APPLICATION_ID = 0x54426462  # "TBdb"
KEPT = ".earlier"  # suffix of a file of an earlier release, once its rows are in the store
CHECKPOINT_BYTES = 1 << 20  # written since the last checkpoint, until the next one
MAX_SHOWN = 200

Row = tuple[str, str, int]  # its key, its value as JSON, its checksum


class WriteFailed(NotKept):
    """A change could not be written, so nothing of it is stored.

    Attributes:
        in_force: whether its owner goes on with it all the same, until the process ends.
    """

    in_force = True

    def of(self, what: str) -> NotKept:
        """Returns the error for who made the change."""
        return NotKept(
            f"the {what} is in force, but could not be written down ({self}), so it ends with this bus: make the data "
            "directory writable, then do it again"
            if self.in_force
            else f"the {what} was not changed: {self}"
        )


@dataclass(frozen=True, slots=True)
class Earlier:
    """The file in which releases before ``bus.db`` had the rows of a kind.

    Attributes:
        file: its name in the data directory.
        read: returns the values by key. Raises `Damaged` where the file is damaged, and `RequestError`, `ValueError`,
            `TypeError`, `LookupError` or `AttributeError` where a value is.
    """

    file: str
    read: Callable[[Path], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Kind:
    """The rows of one owner.

    Attributes:
        name: of a table: lower-case letters and ``_``.
        needed: what damage does. True: the bus does not start, and nothing is changed. False: damaged rows are left
            out, with an error in the log (see `Store.lost`).
        without: what a start without these rows means, as a text that may follow "to".
        synced: whether a write waits for the disk, so that it survives a power cut too.
        blank: the value of a damaged row that is not needed; None: the row is left out, and deleted.
        shared: what several buses have in common where their store can do that: ``settings``, of which each bus has all
            rows in memory (`Store.on_change`); or ``results``, of which a bus reads a row when it is asked for it.
        earlier: None: no earlier release had this kind.
    """

    name: str
    needed: bool
    without: str
    synced: bool = False
    blank: Any = None
    shared: Literal["", "settings", "results"] = ""
    earlier: Earlier | None = field(default=None, compare=False)


class Driver:
    """Where the rows of a store are: all that a database has to do. `tests/contract/storage` holds every driver to it.

    A store calls one method at a time, from any thread. A driver knows neither JSON nor checksums. Its methods raise
    SetupError where the database cannot be used, with how to fix it; `write` and `declare` raise `WriteFailed`.
    """

    persistent = True  # whether rows outlive the process

    def open(self) -> frozenset[str]:
        """Connects, and migrates the database to this version. Returns the kinds of which damage has cost rows."""
        return frozenset()

    def kinds(self) -> Mapping[str, bool]:
        """Returns the kinds that were declared, and whether their first rows came from an earlier release."""
        return {}

    def declare(self, kind: Kind, rows: Sequence[Row], *, imported: bool) -> None:
        """Adds a kind with its first rows, all or nothing; waits for the disk where there are rows."""

    def load(self, kind: Kind, key: str | None = None) -> Iterable[Row]:
        """Returns the rows of a kind, in the order in which their keys came; or that of one key, if it exists."""
        return ()

    def write(self, kind: Kind, rows: Sequence[Row], deleted: Sequence[str]) -> None:
        """Deletes keys, then inserts rows or replaces their values, all or nothing. Unknown keys are ignored.

        When it returns, a kill -9 of this process cannot lose the change; if it is `synced` a power cut cannot either.
        """

    def changes(self, after: int) -> tuple[int, frozenset[str]]:
        """Returns the kinds that other buses wrote after a moment, and the moment to pass next; the first is 0."""
        return after, frozenset()

    def now(self) -> float:
        """Returns the time in seconds since the epoch, by the clock of the database: the same for all its buses."""
        return time.time()

    def tidy(self) -> None:
        """Does what `write` leaves for later. Other calls may come meanwhile."""

    def damaged(self, kind: Kind, what: str) -> SetupError:
        """Returns the error for damaged rows that are needed."""
        return SetupError(what)

    def close(self) -> None:
        """Disconnects; may be called again."""


class Store:
    """The rows of one bus. Its methods may be called from any thread.

    Args:
        driver: where the rows are.
        directory: where files of earlier releases are; None: nowhere.

    Attributes:
        age: since when, in seconds, changes of other buses may be missing; None where no other bus shares the rows.
        lost: the kinds of which damage has cost rows since the store was opened.
    """

    age: float | None = None

    def __init__(self, driver: Driver, directory: Path | None = None) -> None:
        self._driver = driver
        self._directory = directory
        self._guard = threading.Lock()  # of the driver
        self._declared: set[str] = set()  # the kinds that were used since the start
        self.lost: set[str] = set()

    @classmethod
    def of(cls, directory: Path | None) -> Store:
        """Returns the store of a data directory, locked against a second bus when it is opened; None: in memory."""
        if directory is None:
            return cls(MemoryDriver())
        return cls(SqliteDriver(directory / FILE, lock=directory / LOCK), directory)

    def __repr__(self) -> str:
        return f"<Store {self._driver!r} {sorted(self._declared)}>"

    @property
    def persistent(self) -> bool:
        """Whether rows outlive the process."""
        return self._driver.persistent

    @property
    def place(self) -> str:
        """Where the rows are, for messages."""
        return str(self._driver)

    def open(self) -> None:
        """Opens the database.

        Raises:
            SetupError: it cannot be used, or another bus uses it.
        """
        with self._guard:
            self.lost |= self._driver.open()

    def close(self) -> None:
        """Closes the database; may be called again, and from any thread."""
        with self._guard:
            self._driver.close()

    def load(self, kind: Kind) -> dict[str, Any]:
        """Returns the values of a kind by key, in the order in which the keys came.

        Raises:
            SetupError: a row is damaged, and needed.
        """
        with self._guard:
            self._declare(kind)
            rows = list(self._driver.load(kind))
        return self._read(kind, rows)

    def get(self, kind: Kind, key: str) -> Any:
        """Returns the value of a key; None where there is none. `load` says what damage does."""
        with self._guard:
            self._declare(kind)
            rows = list(self._driver.load(kind, key))
        return self._read(kind, rows).get(key)

    def _read(self, kind: Kind, rows: Sequence[Row]) -> dict[str, Any]:
        values, damaged = {}, []
        for number, (key, text, checksum) in enumerate(rows, 1):
            if checksum == _checksum(kind, key, text):
                values[key] = json.loads(text)
                continue
            what = f"row {number} of {kind.name} fails its checksum"
            if kind.needed:
                raise self._driver.damaged(kind, what)
            log.error("%s is left out: %s", what, self._driver)
            self.lost.add(kind.name)
            if kind.blank is None:
                damaged.append(key)
            else:
                values[key] = kind.blank
        if damaged:
            self.write(kind, {}, damaged)
        return values

    def put(self, kind: Kind, key: str, value: Any) -> None:
        """Inserts or replaces a row: `write`."""
        self.write(kind, {key: value})

    def delete(self, kind: Kind, key: str) -> None:
        """Deletes a row: `write`."""
        self.write(kind, {}, [key])

    def write(self, kind: Kind, rows: Mapping[str, Any], deleted: Iterable[str] = ()) -> None:
        """Deletes keys, then inserts or replaces rows, all or nothing. Unknown keys are ignored.

        When it returns, a kill -9 of this process can no longer lose the change.

        Raises:
            TypeError, ValueError: JSON cannot hold a value (NaN included); nothing has changed.
            WriteFailed: it could not be written (a full disk, say); nothing has changed, and the store stays usable.
        """
        encoded, keys = _rows(kind, rows), list(deleted)
        if not encoded and not keys:
            return
        with self._guard:
            self._declare(kind)
            self._driver.write(kind, encoded, keys)
        self._driver.tidy()

    def damaged(self, kind: Kind, error: object) -> SetupError:
        """Returns the error for a value that its owner cannot read."""
        return self._driver.damaged(kind, f"a row of {kind.name} cannot be read: {error}")

    # -- several buses: a part has a store that does more ----------------------------------------------------------

    def on_change(self, kind: Kind, changed: Callable[[], object]) -> None:
        """Has a function called after another bus changed rows of a kind, or the store undid a change."""

    def check(self, kind: Kind) -> None:
        """Raises `WriteFailed` where it is known that a write would fail and undo the change that it is for."""

    def now(self) -> float:
        """Returns the time in seconds since the epoch, by the clock that all buses of these rows have."""
        return self._driver.now()

    def other_bus(self, home: str) -> tuple[str, bool | None]:
        """Returns the name of another bus that shares the rows, and whether it is connected with them.

        Args:
            home: as the ids of its tasks end.

        Returns:
            "" and None where that is not known.
        """
        return "", None

    def secret(self, name: str) -> bytes | None:
        """Returns random bytes that all buses of these rows have; None where each bus has its own."""
        return None

    # -- rows of earlier releases ----------------------------------------------------------------------------------

    def _declare(self, kind: Kind) -> None:
        """Adds a kind, with the rows of an earlier release, where the database does not have it yet."""
        if kind.name in self._declared:
            return
        earlier = kind.earlier if self._directory is not None else None
        path = self._directory / earlier.file if self._directory is not None and earlier is not None else None
        if path is not None and os.path.lexists(path):
            check_path(path, str(path))
        else:
            path = None
        imported = self._driver.kinds().get(kind.name)
        if imported is None:
            values = self._read_earlier(kind, earlier, path) if earlier is not None and path is not None else {}
            self._driver.declare(kind, _rows(kind, values), imported=path is not None)
            imported = path is not None
        if path is not None:
            _set_aside(path, imported=imported)
        self._declared.add(kind.name)

    def _read_earlier(self, kind: Kind, earlier: Earlier, path: Path) -> Mapping[str, Any]:
        try:
            return earlier.read(path)
        except OSError as error:
            raise SetupError(f"cannot read {path}: {error.strerror}: let this user read it") from error
        except (Damaged, RequestError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            what = error.what if isinstance(error, Damaged) else shorten(str(error), MAX_SHOWN)
            if kind.needed:
                raise SetupError(
                    f"{path} is damaged ({what}): restore it, or move it away to {kind.without}. Nothing was changed."
                ) from error
            log.error("%s is damaged (%s) and left out, to %s", path, what, kind.without)
            self.lost.add(kind.name)
            return {}


def _set_aside(path: Path, *, imported: bool) -> None:
    """Renames a file of an earlier release, so that it is a backup and not read again."""
    if not imported or os.path.lexists(f"{path}{KEPT}"):
        log.warning(
            "%s is not used: %s has had these rows since an earlier start. To go back to this file, stop the bus and "
            "move both %s and the files that end with %s away", path, FILE, FILE, KEPT,
        )  # fmt: skip
        return
    for suffix in ("-wal", "-shm", "-journal", ""):  # the file itself last: then nothing is left to rename
        with suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{path}{KEPT}{suffix}")
    log.info("%s is in %s now, and its former file is kept as %s%s", path.name, FILE, path.name, KEPT)


def _rows(kind: Kind, values: Mapping[str, Any]) -> list[Row]:
    rows = []
    for key, value in values.items():
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII: half of a surrogate pair survives
        rows.append((key, text, _checksum(kind, key, text)))
    return rows


def _checksum(kind: Kind, key: str, text: str) -> int:
    return zlib.crc32("\0".join((kind.name, key, text)).encode("utf-8", "surrogatepass"))


class MemoryDriver(Driver):
    """Keeps rows as long as the process."""

    persistent = False

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, Row]] = {}

    def __repr__(self) -> str:
        return "in memory"

    def kinds(self) -> Mapping[str, bool]:
        return dict.fromkeys(self._kinds, False)

    def declare(self, kind: Kind, rows: Sequence[Row], *, imported: bool) -> None:
        self._kinds[kind.name] = {row[0]: row for row in rows}

    def load(self, kind: Kind, key: str | None = None) -> Iterable[Row]:
        return [row for row in self._kinds[kind.name].values() if key in (None, row[0])]

    def write(self, kind: Kind, rows: Sequence[Row], deleted: Sequence[str]) -> None:
        for key in deleted:
            self._kinds[kind.name].pop(key, None)
        self._kinds[kind.name].update((row[0], row) for row in rows)


# Script i migrates a file from version i to i + 1, in one transaction with its number. Never edit a released script.
MIGRATIONS: tuple[str, ...] = (
    "CREATE TABLE kinds (name TEXT NOT NULL PRIMARY KEY, needed INTEGER NOT NULL, imported INTEGER NOT NULL) STRICT;",
)
_TABLE = (  # of one kind, so that damage to the rows of one does not spread to those of another
    'CREATE TABLE "{}" (number INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, value TEXT NOT NULL, '
    "checksum INTEGER NOT NULL) STRICT"
)
_PUT = (
    'INSERT INTO "{}" (key, value, checksum) VALUES (?, ?, ?) '
    "ON CONFLICT (key) DO UPDATE SET value = excluded.value, checksum = excluded.checksum"
)
_LOAD = 'SELECT key, value, checksum FROM "{}" ORDER BY number'
_GET = 'SELECT key, value, checksum FROM "{}" WHERE key = ?'
_TABLES = "SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL"


class SqliteDriver(Driver):
    """Keeps rows in one SQLite file, a table for each kind.

    A commit does not wait for the disk unless it is `synced` (``synchronous=NORMAL``, a write-ahead log): a kill -9
    loses nothing, because the operating system then has the pages; a power cut may lose the last moments, but never
    damages the file. Damage inside the log of a killed bus looks like a power cut: SQLite restores the part before it.

    A file that is another program's, or written by a newer version, is refused and left as it is. So is a damaged one,
    unless all needed kinds in it are whole: then the bus starts with those and what else can be read, and the damaged
    file is kept under another name. A file that is used by itself has no needed kinds: it is replaced in any case.

    Args:
        path: created (0600) if it does not exist, with its directory (0700).
        lock: the lock of the data directory; None: the file is used by itself, and has a lock of its own.
        label: what errors put before the path.
    """

    def __init__(self, path: Path, *, lock: Path | None = None, label: str = "") -> None:
        self.path = path
        self._is_data_dir = lock is not None
        self._lock_path = lock or path.with_name(f"{path.name}.lock")
        elsewhere = "use another --data-dir" if lock is not None else "name another file"
        away = f"move {path.name} away, together with {path.name}-wal and {path.name}-shm where there are any"
        restore = f"{away}, then restore a backup or start without what it holds; or {elsewhere}"
        if lock is None:
            restore = f"move it away or {elsewhere}"
        self._file = Database(path, APPLICATION_ID, MIGRATIONS, elsewhere, restore, label)
        self._new = Database(Path(f"{path}.new"), APPLICATION_ID, MIGRATIONS, elsewhere, restore, label)
        self._connection: sqlite3.Connection | None = None  # None until it is open
        self._lock: IO[str] | None = None  # None until it is open; dies with the process
        self._inode = 0  # of the open file
        self._written = 0  # bytes since the last checkpoint
        self._waits = False  # whether transactions of the connection wait for the disk
        self._tidying = threading.Lock()

    def __repr__(self) -> str:
        return str(self.path)

    # -- opening ---------------------------------------------------------------------------------------------------

    def open(self) -> frozenset[str]:
        lost: frozenset[str] = frozenset()
        try:
            with self._access():
                self._lock = self._locked()
                for part in self._new.parts():  # of a start that was killed before the file was complete
                    part.unlink(missing_ok=True)
                if not os.path.lexists(self.path) or (not self._is_data_dir and self._is_empty()):
                    self._create()
                self._file.check_owner()
                self._file.make_private()  # it holds passwords and secrets
                try:
                    self._inspect()
                except Damaged as damage:
                    try:
                        lost = self._salvage(damage)
                    except Damaged:
                        if self._is_data_dir:
                            raise
                        log.error("%s is damaged (%s): moved to %s", self.path, damage.what, self._file.move_aside())
                        self._create()
            with self._file.errors():
                self._connection = self._connected()
            self._inode = os.stat(self.path).st_ino
        except BaseException:
            self.close()
            raise
        return lost

    def _locked(self) -> IO[str]:
        directory = self.path.parent
        what = f"the data directory {directory}" if self._is_data_dir else f"the directory {directory}"
        make_directory(directory, what)
        check_path(self._lock_path, what)
        descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        lock = open(descriptor, "r+", encoding="ascii", errors="replace")  # noqa: SIM115  # held as long as the store
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock.read(20).strip() or "unknown"
            lock.close()
            if not self._is_data_dir:
                fix = f"close the other program that uses it, or {self._file.elsewhere}"
                raise self._file.refused(f"process {holder} uses it", fix) from None
            raise SetupError(
                f"the data directory {directory} is in use by another toolbus, process {holder}: stop that one, "
                "choose another directory with --data-dir, or persist nothing with --ephemeral"
            ) from None
        except OSError:
            lock.close()
            raise
        lock.truncate(0)  # only now: until it is locked, it holds the other process's id
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        return lock

    def _create(self, kinds: Iterable[tuple[str, int, int, Sequence[Row]]] = ()) -> None:
        """Makes a file under another name and moves it into place, so that a file of this name is complete."""
        if not os.path.lexists(self.path):
            orphan = self._log()
            if orphan is not None:
                raise SetupError(
                    f"{self._file.label}{self.path} is missing, but {orphan.name} exists and may hold rows, which a "
                    f"new {self.path.name} would mix with its own. Nothing was changed. Put {self.path.name} back "
                    f"beside it, or move {orphan.name} away too to start without them; or {self._file.elsewhere}"
                )
        self._new.create()
        try:
            with self._new.errors(), closing(self._new.connect("rw")) as connection:
                connection.execute("PRAGMA synchronous = OFF")  # it is synced as a whole, and only then moved
                self._new.migrate(connection)
                for name, needed, imported, rows in kinds:
                    with transaction(connection):
                        _declare(connection, name, needed, imported, rows)
            _sync(self._new.path)
            os.replace(self._new.path, self.path)
        except BaseException:
            for part in self._new.parts():
                part.unlink(missing_ok=True)
            raise
        _sync(self.path.parent)  # so that the name survives a power cut too

    def _inspect(self) -> None:
        """Refuses a damaged or foreign file over a read-only connection, before anything is written to it."""
        with self._file.errors(), closing(self._file.connect("ro")) as connection:
            version = self._file.version(connection, "integrity_check")
            expected = _shape(version)
            if version:
                expected |= {(name, _TABLE.format(name)) for (name,) in connection.execute("SELECT name FROM kinds")}
            if version < 1 or set(connection.execute(_TABLES)) != expected:
                raise self._file.refused(
                    f"its tables are not those of version {version} of a store", self._file.restore
                )

    def _connected(self) -> sqlite3.Connection:
        """Opens an inspected file for writing, migrates it to this version and plays back the log of a killed bus."""
        connection = self._file.connect("rw")
        try:
            if pragma(connection, "journal_mode = WAL") != "wal":
                raise self._file.refused(
                    "its file system cannot hold a write-ahead log", f"use a local directory; or {self._file.elsewhere}"
                )
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA wal_autocheckpoint = 0")  # see `tidy`
            connection.execute(f"PRAGMA journal_size_limit = {CHECKPOINT_BYTES}")
            self._file.migrate(connection)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except BaseException:
            connection.close()
            raise
        return connection

    def _salvage(self, damage: Damaged) -> frozenset[str]:
        """Replaces a damaged file by one with all that can be read. Returns the kinds that are not whole.

        A kill at any point leaves the damaged file or the complete new one.

        Raises:
            Damaged: a needed kind is not whole; nothing was changed.
        """
        kinds: list[tuple[str, int, int, Sequence[Row]]] = []
        lost = []
        try:
            with closing(self._file.connect("ro")) as connection:
                if not self._is_whole(connection, "kinds"):
                    raise damage
                for name, needed, imported in connection.execute("SELECT name, needed, imported FROM kinds").fetchall():
                    whole = self._is_whole(connection, name)
                    if needed and not whole:
                        raise damage
                    if not whole:
                        lost.append(name)
                    kinds.append((name, needed, imported, _readable(connection, name, whole)))
            with closing(self._file.connect("rw")) as connection:  # its log would be played back into the new file
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except (sqlite3.Error, UnicodeDecodeError):  # its message would quote damaged bytes
            raise damage from None
        if self._log() is not None:
            raise damage
        aside = Path(f"{self.path}.damaged")
        shutil.copy2(self.path, aside)
        self._create(kinds)
        log.error(
            "%s is damaged (%s): kept as %s. Lost, in whole or in part: %s; everything else is as it was",
            self.path, damage.what, aside, ", ".join(lost) or "nothing",
        )  # fmt: skip
        return frozenset(lost)

    def _is_empty(self) -> bool:
        return self.path.is_file() and not self.path.stat().st_size  # what a kill of an earlier release left

    def _log(self) -> Path | None:
        """Returns a log with rows that are not in the file yet; None: there is none."""
        logs = [part for part in self._file.parts() if part.name.endswith(("-wal", "-journal"))]
        return next((log for log in logs if os.path.lexists(log) and log.stat().st_size), None)

    @staticmethod
    def _is_whole(connection: sqlite3.Connection, table: str) -> bool:
        try:
            return bool(connection.execute(f"PRAGMA integrity_check('{table}')").fetchone() == ("ok",))
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_CORRUPT:
                raise
            return False

    @contextmanager
    def _access(self) -> Iterator[None]:
        """Turns an error of the file system into one that says how to fix it."""
        try:
            yield
        except OSError as error:
            if not self._is_data_dir:
                raise self._file.inaccessible(error) from error
            directory = self.path.parent
            what = "it is a file" if directory.is_file() else error.strerror or error
            raise SetupError(
                f"the data directory {directory} cannot be used: {what} ({error.filename or directory}): let this user "
                "write to it, choose another with --data-dir, or keep nothing with --ephemeral"
            ) from error

    # -- open ------------------------------------------------------------------------------------------------------

    def _open_connection(self) -> sqlite3.Connection:
        if self._connection is None:
            raise sqlite3.ProgrammingError("the store is not open")
        return self._connection

    @contextmanager
    def _transaction(self, *, synced: bool) -> Iterator[sqlite3.Connection]:
        connection = self._open_connection()
        try:
            same = os.stat(self.path).st_ino == self._inode
        except OSError:
            same = False
        if not same:  # writes would be lost
            raise WriteFailed(f"{self.path} was removed or replaced while it was in use")
        try:
            if synced != self._waits:
                connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
                self._waits = synced
            with transaction(connection):
                yield connection
        except sqlite3.Error as error:
            raise WriteFailed(str(error)) from error

    def kinds(self) -> Mapping[str, bool]:
        with self._file.errors():
            rows = self._open_connection().execute("SELECT name, imported FROM kinds")
            return {name: bool(imported) for name, imported in rows}

    def declare(self, kind: Kind, rows: Sequence[Row], *, imported: bool) -> None:
        with self._transaction(synced=bool(rows)) as connection:
            _declare(connection, kind.name, kind.needed, imported, rows)

    def load(self, kind: Kind, key: str | None = None) -> Iterable[Row]:
        with self._file.errors():
            if key is not None:
                return self._open_connection().execute(_GET.format(kind.name), (key,)).fetchall()
            return self._open_connection().execute(_LOAD.format(kind.name)).fetchall()

    def write(self, kind: Kind, rows: Sequence[Row], deleted: Sequence[str]) -> None:
        with self._transaction(synced=kind.synced) as connection:
            connection.executemany(f'DELETE FROM "{kind.name}" WHERE key = ?', [(key,) for key in deleted])
            connection.executemany(_PUT.format(kind.name), rows)
        self._written += sum(len(row[1]) for row in rows) + 4096

    def tidy(self) -> None:
        """Moves the log into the file, over a connection of its own: it waits for the disk, and no write waits for it.

        A failure means only that the log grows until the next one.
        """
        if self._written < CHECKPOINT_BYTES or not self._tidying.acquire(blocking=False):
            return
        try:
            self._written = 0
            with suppress(sqlite3.Error), closing(self._file.connect("rw")) as connection:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        finally:
            self._tidying.release()

    def damaged(self, kind: Kind, what: str) -> SetupError:
        command = f"sqlite3 {self.path} 'DELETE FROM {kind.name}'"
        fix = f"restore a backup of it; or run `{command}` to {kind.without}; or {self._file.elsewhere}"
        return self._file.refused(f"it is damaged: {shorten(what, MAX_SHOWN)}", fix)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._lock is not None:
            self._lock.close()


def _shape(version: int) -> set[tuple[str, str]]:
    with closing(sqlite3.connect(":memory:")) as model:
        model.executescript("".join(MIGRATIONS[:version]))
        return set(model.execute(_TABLES))


def _declare(connection: sqlite3.Connection, name: str, needed: int, imported: int, rows: Sequence[Row]) -> None:
    connection.execute(_TABLE.format(name))
    connection.execute(
        "INSERT INTO kinds (name, needed, imported) VALUES (?, ?, ?)", (name, int(needed), int(imported))
    )
    connection.executemany(_PUT.format(name), rows)


def _readable(connection: sqlite3.Connection, name: str, whole: bool) -> list[Row]:
    """Returns the rows of a table; those up to the first damaged page, where it is not whole."""
    rows: list[Row] = []
    try:
        for row in connection.execute(_LOAD.format(name)):
            if whole or tuple(map(type, row)) == (str, str, int):
                rows.append(row)
    except sqlite3.Error:
        if whole:
            raise
    return rows


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_state(path: Path) -> Any:
    """Returns the content of a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON.
    """
    return json.loads(path.read_text("utf-8"))


@contextmanager
def earlier_database(path: Path, application_id: int, versions: int) -> Iterator[sqlite3.Connection]:
    """Opens an SQLite file of an earlier release for reading, with the log of a killed bus; it is not changed.

    Raises:
        Damaged: it cannot be read any more.
        SetupError: it is another program's, a newer version wrote it, or another program uses it.
    """
    elsewhere = "use another --data-dir"
    restore = f"restore a backup of it, or move it away to start without what it holds; or {elsewhere}"
    file = Database(path, application_id, ("",) * versions, elsewhere, restore)
    file.check_owner()
    file.make_private()
    with file.errors(), closing(file.connect("ro")) as connection:
        file.version(connection, "integrity_check")
        yield connection
