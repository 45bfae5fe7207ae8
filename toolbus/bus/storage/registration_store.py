"""What survives a restart: the tools that were registered with a callback URL, in one SQLite file.

A registration is kept from the moment ``apply`` returns: a kill -9 of the bus loses nothing, because the operating
system then has the pages of the write-ahead log. A power cut may lose the last moments, but never damages the file
(``synchronous=NORMAL``: a commit waits for no disk, since it runs on the bus's loop).

A file that is damaged or not ours is refused with what is wrong and what to do, and is left as it is: tools that
silently vanish are what this room is there to prevent. Every row carries a checksum, because SQLite's own checks see
damaged structure but not a flipped byte inside a value. One thing cannot be told from a power cut: damage inside the
write-ahead log of a killed bus, from which SQLite takes what comes before it.

Callback URLs are kept with their passwords, so the file is its owner's alone (0600). It knows nothing of the registry.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from toolbus.bus.storage.database import Database, crc_of, pragma, time_bytes
from toolbus.errors import InvalidRequest, InvalidTool, SetupError
from toolbus.tool import Annotations, Tool

FILE = "toolbus.db"
LOCK = "toolbus.lock"
APPLICATION_ID = 0x54427573  # "TBus"

# Script i lifts a file from version i to i + 1, in one transaction with its number. Never edit one that was released.
# A script that touches a value under a checksum (``_checksum``) has to leave the checksum right.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE registrations (
        key TEXT NOT NULL PRIMARY KEY,
        source TEXT NOT NULL,
        tool TEXT NOT NULL,  -- its fields as JSON
        callback_url TEXT NOT NULL,
        checked INTEGER NOT NULL,
        checksum INTEGER NOT NULL,  -- of the columns above and the offers
        answered_at REAL NOT NULL,
        answered_checksum INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE offers (
        key TEXT NOT NULL REFERENCES registrations (key) ON DELETE CASCADE,
        number INTEGER NOT NULL,
        role TEXT,  -- NULL: the roles still to come
        place INTEGER NOT NULL,
        PRIMARY KEY (key, number)
    ) STRICT, WITHOUT ROWID;
    """,
)

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_TOOL_FIELDS = tuple(item.name for item in dataclasses.fields(Tool) if item.name != "schema_hash")
_HINTS = tuple(item.name for item in dataclasses.fields(Annotations))

_AWAY = f"move {FILE} away, together with {FILE}-wal and {FILE}-shm where there are any"
_ELSEWHERE = "use another --data-dir"
_RESTORE = f"{_AWAY}, then restore a backup or start with none (its tools then have to register again); or {_ELSEWHERE}"

_SHAPE = """
    SELECT thing.type, thing.name, col.name, col.type, col."notnull", col.pk
    FROM sqlite_schema AS thing LEFT JOIN pragma_table_xinfo(thing.name) AS col
    WHERE substr(thing.name, 1, 7) <> 'sqlite_' ORDER BY 1, 2, col.cid
"""
_PUT = """
    INSERT INTO registrations (key, source, tool, callback_url, checked, checksum, answered_at, answered_checksum)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (key) DO UPDATE SET source = excluded.source, tool = excluded.tool,
        callback_url = excluded.callback_url, checked = excluded.checked, checksum = excluded.checksum,
        answered_at = excluded.answered_at, answered_checksum = excluded.answered_checksum
"""

Offers = tuple[tuple[str | None, int], ...]


@dataclass(frozen=True, slots=True)
class StoredRegistration:
    """One registration by callback URL, as it is kept.

    Attributes:
        key: names the registration; unique, made by the caller.
        source: any string, "" too.
        tool: its ``callback_url`` is the masked one.
        callback_url: with the password.
        checked: whether arguments are checked against the schema.
        offers: role, or None for roles still to come; place in the list, below 0 where it is not in that role's.
        answered_at: when its origin last answered, in seconds since the epoch.

    Raises:
        InvalidRequest: from the constructor; a text cannot be written as UTF-8.
    """

    key: str
    source: str
    tool: Tool
    callback_url: str = field(repr=False)
    checked: bool
    offers: Offers
    answered_at: float

    def __post_init__(self) -> None:
        # Found here and not by the encoder, whose exception would carry the text, password included.
        roles = "".join(role or "" for role, _ in self.offers)
        texts = (("key", self.key), ("source", self.source), ("callback_url", self.callback_url), ("role", roles))
        for label, text in texts:
            if _HALF_CHARACTER.search(text):
                raise InvalidRequest(
                    f"{label} holds half of a surrogate pair, which UTF-8 cannot carry: send the whole character"
                )


class RegistrationStore:
    """The file of one data directory, locked against a second bus. Its methods may be called from any thread.

    Args:
        directory: made (0700) if need be; one that exists keeps its mode.

    Raises:
        SetupError: from the constructor; another bus uses the directory, or the file cannot be used. Says the cure.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self._file = _file(self.path)  # what it has to be
        self._guard = threading.Lock()  # close may come from another thread than a commit
        self._connection: sqlite3.Connection | None = None  # None until it is open
        self._lock = _lock(directory)  # dies with the process
        try:
            with _access(directory):
                _remove_leftovers(self.path)
                if not os.path.lexists(self.path):
                    _create(self.path)
                _inspect(self._file)
            with self._file.errors():
                self._connection = _open(self._file)
            self._inode = os.stat(self.path).st_ino
        except BaseException:
            self.close()
            raise

    def load(self) -> list[StoredRegistration]:
        """Returns all registrations, by their smallest place from 0; those without one come last.

        Raises:
            SetupError: a row is damaged.
            sqlite3.ProgrammingError: the store is closed.
        """
        with self._guard:
            connection = self._open_connection()
            with self._file.errors():
                found = [_kept(self._file, row) for row in _rows(self._file, connection)]
        return sorted(found, key=lambda kept: min((place for _, place in kept.offers if place >= 0), default=1 << 63))

    def apply(self, changed: Iterable[StoredRegistration], gone: Iterable[str]) -> None:
        """Deletes the gone, then inserts or replaces the changed, all or nothing.

        When it returns, a kill -9 of this process can no longer lose the change. Keys that are not there may go.

        Raises:
            sqlite3.Error: it could not be written (a full disk, say); nothing has changed, and the store stays usable.
        """
        latest = {kept.key: kept for kept in changed}
        leaving = [(key,) for key in gone]
        if not latest and not leaving:
            return
        rows = [_row(kept) for kept in latest.values()]
        offers = [(key, number, *offer) for key, kept in latest.items() for number, offer in enumerate(kept.offers)]
        with self._transaction() as connection:
            connection.executemany("DELETE FROM registrations WHERE key = ?", leaving)
            connection.executemany(_PUT, rows)
            connection.executemany("DELETE FROM offers WHERE key = ?", [(key,) for key in latest])
            connection.executemany("INSERT INTO offers (key, number, role, place) VALUES (?, ?, ?, ?)", offers)

    def save_answers(self, keys: Iterable[str], when: float) -> None:
        """Persists when the origin of these registrations last answered, in seconds since the epoch.

        Raises:
            sqlite3.Error: as ``apply``.
        """
        rows = [(when, _time_checksum(when), key) for key in keys]
        if rows:
            with self._transaction() as connection:
                connection.executemany(
                    "UPDATE registrations SET answered_at = ?, answered_checksum = ? WHERE key = ?", rows
                )

    def close(self) -> None:
        """Closes the file and releases the lock; may be called again, and from any thread."""
        with self._guard:
            if self._connection is not None:
                self._connection.close()
            self._lock.close()

    def _open_connection(self) -> sqlite3.Connection:
        if self._connection is None:  # only where the constructor failed
            raise sqlite3.ProgrammingError("the store was never opened")
        return self._connection

    def _must_be_there(self) -> None:
        """Raises sqlite3.OperationalError where the file was removed or replaced: what is written would go nowhere."""
        try:
            here = os.stat(self.path).st_ino == self._inode
        except OSError:
            here = False
        if not here:
            raise sqlite3.OperationalError(f"{self.path} was removed or replaced while it was in use")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._guard:
            connection = self._open_connection()
            self._must_be_there()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:  # SQLite has rolled back by itself after some errors
                    connection.execute("ROLLBACK")


def _file(path: Path) -> Database:
    return Database(path, APPLICATION_ID, MIGRATIONS, _ELSEWHERE, _RESTORE)


def _new(path: Path) -> Path:
    """Returns what a file is called until it is whole."""
    return Path(f"{path}.new")


def _lock(directory: Path) -> IO[str]:
    """Makes the directory and locks it for this process."""
    with _access(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        lock = open(descriptor, "r+", encoding="ascii", errors="replace")  # noqa: SIM115  # held as long as the store
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock.read(20).strip() or "unknown"
            lock.close()
            raise SetupError(
                f"the data directory {directory} is in use by another toolbus, process {holder}: stop that one, "
                "choose another directory with --data-dir, or keep nothing with --ephemeral"
            ) from None
        except OSError:
            lock.close()
            raise
        lock.truncate(0)  # only now: until it is locked, it says whose it is
        lock.write(f"{os.getpid()}\n")
        lock.flush()
    return lock


def _remove_leftovers(path: Path) -> None:
    """Removes what a start left that was killed before its file was whole; it never held a registration."""
    for part in _file(_new(path)).parts():
        part.unlink(missing_ok=True)


def _create(path: Path) -> None:
    """Makes an empty store under another name and moves it into place: what has the name is whole."""
    for ending in ("-wal", "-journal"):
        orphan = Path(path.parent, path.name + ending)
        if os.path.lexists(orphan) and orphan.stat().st_size:
            raise SetupError(
                f"{path} is gone, but {orphan.name} is there and may hold registrations; a new file would take "
                f"it for its own. Nothing was changed. Put {FILE} back beside it, or move {orphan.name} away too to "
                f"start with none (its tools then have to register again); or {_ELSEWHERE}"
            )
    new = _file(_new(path))
    new.make()
    try:
        with new.errors(), closing(new.connect("rw")) as connection:
            new.lift(connection)
        os.replace(new.path, path)
    except BaseException:
        _remove_leftovers(path)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the name, too, survives a power cut
    finally:
        os.close(directory)


def _inspect(file: Database) -> None:
    """Refuses a file that is not a sound store, before anything is written to it: by a connection that may not."""
    file.must_be_ours()
    file.make_private()  # passwords stand in it
    with file.errors(), closing(file.connect("ro")) as connection:
        version = file.version(connection, "integrity_check")
        if version < 1 or connection.execute(_SHAPE).fetchall() != _shape(version):
            raise file.refused(f"its tables are not those of version {version} of a store", _RESTORE)
        if connection.execute("PRAGMA foreign_key_check").fetchone():
            raise file.damaged("there are offers without their registration")
        if version == len(MIGRATIONS):  # rows of an older version are read once they are lifted
            for _ in _rows(file, connection):
                pass


def _shape(version: int) -> list[Any]:
    with closing(sqlite3.connect(":memory:")) as model:
        model.executescript("".join(MIGRATIONS[:version]))
        return model.execute(_SHAPE).fetchall()


def _open(file: Database) -> sqlite3.Connection:
    """Opens an inspected file for writing, lifts it to this version and plays back what a killed bus left."""
    connection = file.connect("rw")
    try:
        if pragma(connection, "journal_mode = WAL") != "wal":
            raise file.refused("its file system cannot hold a write-ahead log", "use a local directory with --data-dir")
        connection.execute("PRAGMA synchronous = NORMAL")
        file.lift(connection)
        connection.execute("PRAGMA foreign_keys = ON")  # after lifting: a script may have to rebuild a table
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


_Row = tuple[int, str, str, str, str, int, float, Offers]


def _rows(file: Database, connection: sqlite3.Connection) -> Iterator[_Row]:
    """Yields every row with its offers, its checksums verified."""
    offers: dict[str, list[tuple[str | None, int]]] = {}
    for key, role, place in connection.execute("SELECT key, role, place FROM offers ORDER BY key, number"):
        offers.setdefault(key, []).append((role, place))
    for rowid, key, source, tool, url, checked, checksum, answered_at, answered_checksum in connection.execute(
        "SELECT rowid, key, source, tool, callback_url, checked, checksum, answered_at, answered_checksum "
        "FROM registrations ORDER BY rowid"
    ):
        its_offers = tuple(offers.get(key, ()))
        if checksum != _checksum(key, source, tool, url, checked, its_offers):
            raise file.damaged(f"row {rowid} of registrations fails its checksum")
        if answered_checksum != _time_checksum(answered_at):
            raise file.damaged(f"answered_at in row {rowid} of registrations fails its checksum")
        yield rowid, key, source, tool, url, checked, answered_at, its_offers


def _kept(file: Database, row: _Row) -> StoredRegistration:
    rowid, key, source, tool, url, checked, answered_at, offers = row
    try:
        return StoredRegistration(key, source, _tool(json.loads(tool)), url, bool(checked), offers, answered_at)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidRequest, InvalidTool) as error:
        raise file.damaged(f"the tool in row {rowid} of registrations cannot be read: {error}") from None


def _tool(fields: dict[str, Any]) -> Tool:
    """Reads a tool: a field of a newer minor version is passed over, one that is missing takes its default."""
    known = {name: fields[name] for name in _TOOL_FIELDS if name in fields}
    hints = known.pop("annotations", {})
    return Tool(**known, annotations=Annotations(**{hint: hints.get(hint) for hint in _HINTS}))


def _row(kept: StoredRegistration) -> tuple[str, str, str, str, bool, int, float, int]:
    fields = dataclasses.asdict(kept.tool)
    del fields["schema_hash"]  # follows from the others
    tool = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    checksum = _checksum(kept.key, kept.source, tool, kept.callback_url, kept.checked, kept.offers)
    url, answered_at = kept.callback_url, kept.answered_at
    return kept.key, kept.source, tool, url, kept.checked, checksum, answered_at, _time_checksum(answered_at)


def _checksum(key: str, source: str, tool: str, url: str, checked: int, offers: Offers) -> int:
    values = [key, source, tool, url, int(checked), offers]
    return crc_of(json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode())


def _time_checksum(when: float) -> int:
    return crc_of(time_bytes(when))


@contextmanager
def _access(directory: Path) -> Iterator[None]:
    """Turns what the file system refuses into an error with its cure."""
    try:
        yield
    except OSError as error:
        what = "it is a file" if directory.is_file() else error.strerror or error
        raise SetupError(
            f"the data directory {directory} cannot be used: {what} "
            f"({error.filename or directory}): let this user write to it, choose another with --data-dir, or keep "
            "nothing with --ephemeral"
        ) from error
