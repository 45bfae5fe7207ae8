"""Persists callback tools across restarts: the tools that were registered with a callback URL, in one SQLite file.

A registration is persisted when ``apply`` returns: a kill -9 of the bus loses nothing, because the operating system
then has the pages of the write-ahead log. A power cut may lose the last moments, but never damages the file
(``synchronous=NORMAL``: a commit does not wait for the disk, since it runs on the bus's loop).

A file that is damaged or another program's is refused with an error that says how to fix it, and is left as it is:
tools must not vanish silently. Every row has a checksum, because SQLite's own checks detect a damaged structure but not
a flipped byte inside a value. Damage inside the write-ahead log of a killed bus looks like a power cut: SQLite restores
the part before it.

Callback URLs are stored with their passwords and secrets, so only the owner can read the file (0600). The registry is
not known here.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from toolbus.bus.path_ownership import check_path, make_directory
from toolbus.bus.storage.database import Database, checksum_of, pragma, time_bytes, transaction
from toolbus.common.text import dump_json, is_utf8
from toolbus.errors import InvalidRequest, InvalidTool, SetupError
from toolbus.protocol.tool import Annotations, Tool

FILE = "toolbus.db"
LOCK = "toolbus.lock"
APPLICATION_ID = 0x54427573  # "TBus"

# Script i migrates a file from version i to i + 1, in one transaction with its number. Never edit a released script.
# A script that changes a value under a checksum (``_checksum``) has to update the checksum.
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
    """
    CREATE TABLE proofs (
        key TEXT NOT NULL PRIMARY KEY REFERENCES registrations (key) ON DELETE CASCADE,
        listener TEXT NOT NULL,
        secret TEXT NOT NULL,
        checksum INTEGER NOT NULL  -- of the columns above
    ) STRICT;
    """,
)

_TOOL_FIELDS = tuple(
    item.name for item in dataclasses.fields(Tool) if item.name not in ("schema_hash", "hints_trusted")
)
_ANNOTATIONS = tuple(item.name for item in dataclasses.fields(Annotations))

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

_PUT_PROOF = "INSERT OR REPLACE INTO proofs (key, listener, secret, checksum) VALUES (?, ?, ?, ?)"

Offers = tuple[tuple[str | None, int], ...]


@dataclass(frozen=True, slots=True)
class StoredRegistration:
    """One registration by callback URL, as it is persisted.

    Attributes:
        key: identifies the registration; unique, made by the caller.
        source: any string, "" too.
        tool: its ``callback_url`` is the masked one.
        callback_url: with the password.
        checked: whether arguments are checked against the schema.
        offers: role, or None for roles still to come; place in the list, below 0 where it is not in that role's.
        answered_at: when its origin last answered, in seconds since the epoch.
        listener: the id of the socket that its plugin listens with; empty where it is not known.
        secret: its `callback_secret`; empty where its plugin set none.

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
    listener: str = ""
    secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        # Detected here and not by the encoder, whose exception would carry the text, password included.
        roles = "".join(role or "" for role, _ in self.offers)
        texts = (("key", self.key), ("source", self.source), ("callback_url", self.callback_url), ("role", roles))
        for label, text in texts:
            if not is_utf8(text):
                raise InvalidRequest(
                    f"{label} holds half of a surrogate pair, which UTF-8 cannot carry: send the whole character"
                )


class RegistrationStore:
    """The file of one data directory, locked against a second bus. Its methods may be called from any thread.

    Args:
        directory: created (0700) if it does not exist; one that others may write is refused.

    Raises:
        SetupError: from the constructor; another bus uses the directory, or the file cannot be used. The message says
            how to fix it.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self._file = _file(self.path)
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
        """Returns all registrations, by their lowest place; those without a place come last.

        Raises:
            SetupError: a row is damaged.
            sqlite3.ProgrammingError: the store is closed.
        """
        with self._guard:
            connection = self._open_connection()
            with self._file.errors():
                records = [_record(self._file, row) for row in _rows(self._file, connection)]
        return sorted(records, key=lambda each: min((place for _, place in each.offers if place >= 0), default=1 << 63))

    def apply(self, changed: Iterable[StoredRegistration], removed: Iterable[str]) -> None:
        """Deletes the removed keys, then inserts or replaces the changed registrations, all or nothing.

        When it returns, a kill -9 of this process can no longer lose the change. Unknown keys are ignored.

        Raises:
            sqlite3.Error: it could not be written (a full disk, say); nothing has changed, and the store stays usable.
        """
        latest = {record.key: record for record in changed}
        deleted = [(key,) for key in removed]
        if not latest and not deleted:
            return
        rows = [_row(record) for record in latest.values()]
        offers = [(key, number, *offer) for key, record in latest.items() for number, offer in enumerate(record.offers)]
        with self._transaction() as connection:
            connection.executemany("DELETE FROM registrations WHERE key = ?", deleted)
            connection.executemany(_PUT, rows)
            connection.executemany(_PUT_PROOF, [_proof(record) for record in latest.values()])
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

    def _check_file(self) -> None:
        """Raises sqlite3.OperationalError where the file was removed or replaced: writes would be lost."""
        try:
            same = os.stat(self.path).st_ino == self._inode
        except OSError:
            same = False
        if not same:
            raise sqlite3.OperationalError(f"{self.path} was removed or replaced while it was in use")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._guard:
            connection = self._open_connection()
            self._check_file()
            with transaction(connection):
                yield connection


def _file(path: Path) -> Database:
    return Database(path, APPLICATION_ID, MIGRATIONS, _ELSEWHERE, _RESTORE)


def _new(path: Path) -> Path:
    """Returns the name of a file until it is complete."""
    return Path(f"{path}.new")


def _lock(directory: Path) -> IO[str]:
    """Creates the directory and locks it for this process."""
    with _access(directory):
        make_directory(directory, f"the data directory {directory}")
        check_path(directory / LOCK, f"the data directory {directory}")
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        lock = open(descriptor, "r+", encoding="ascii", errors="replace")  # noqa: SIM115  # held as long as the store
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock.read(20).strip() or "unknown"
            lock.close()
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


def _remove_leftovers(path: Path) -> None:
    """Removes the incomplete file of a start that was killed; it never held a registration."""
    for part in _file(_new(path)).parts():
        part.unlink(missing_ok=True)


def _create(path: Path) -> None:
    """Creates an empty store under another name and moves it into place, so that a file of this name is complete."""
    for suffix in ("-wal", "-journal"):
        orphan = Path(path.parent, path.name + suffix)
        if os.path.lexists(orphan) and orphan.stat().st_size:
            raise SetupError(
                f"{path} is missing, but {orphan.name} exists and may hold registrations, which a new {FILE} would "
                f"mix with its own. Nothing was changed. Put {FILE} back beside it, or move {orphan.name} away too to "
                f"start with none (its tools then have to register again); or {_ELSEWHERE}"
            )
    new = _file(_new(path))
    new.create()
    try:
        with new.errors(), closing(new.connect("rw")) as connection:
            new.migrate(connection)
        os.replace(new.path, path)
    except BaseException:
        _remove_leftovers(path)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # so that the name survives a power cut too
    finally:
        os.close(directory)


def _inspect(file: Database) -> None:
    """Refuses a damaged or foreign file over a read-only connection, before anything is written to it."""
    file.check_owner()
    file.make_private()  # it holds passwords and secrets
    with file.errors(), closing(file.connect("ro")) as connection:
        version = file.version(connection, "integrity_check")
        if version < 1 or connection.execute(_SHAPE).fetchall() != _shape(version):
            raise file.refused(f"its tables are not those of version {version} of a store", _RESTORE)
        if connection.execute("PRAGMA foreign_key_check").fetchone():
            raise file.damaged("there are offers without their registration")
        if version == len(MIGRATIONS):  # rows of an older version are read after the migration
            for _ in _rows(file, connection):
                pass


def _shape(version: int) -> list[Any]:
    with closing(sqlite3.connect(":memory:")) as model:
        model.executescript("".join(MIGRATIONS[:version]))
        return model.execute(_SHAPE).fetchall()


def _open(file: Database) -> sqlite3.Connection:
    """Opens an inspected file for writing, migrates it to this version and plays back the log of a killed bus."""
    connection = file.connect("rw")
    try:
        if pragma(connection, "journal_mode = WAL") != "wal":
            raise file.refused("its file system cannot hold a write-ahead log", "use a local directory with --data-dir")
        connection.execute("PRAGMA synchronous = NORMAL")
        file.migrate(connection)
        connection.execute("PRAGMA foreign_keys = ON")  # after the migration: a script may have to rebuild a table
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


_Row = tuple[int, str, str, str, str, int, float, Offers, tuple[str, str]]


def _rows(file: Database, connection: sqlite3.Connection) -> Iterator[_Row]:
    """Yields every row with its offers, its checksums verified."""
    offers: dict[str, list[tuple[str | None, int]]] = {}
    for key, role, place in connection.execute("SELECT key, role, place FROM offers ORDER BY key, number"):
        offers.setdefault(key, []).append((role, place))
    proofs: dict[str, tuple[str, str]] = {}
    for rowid, key, listener, secret, checksum in connection.execute("SELECT rowid, * FROM proofs"):
        if checksum != _proof_checksum(key, listener, secret):
            raise file.damaged(f"row {rowid} of proofs fails its checksum")
        proofs[key] = (listener, secret)
    for rowid, key, source, tool, url, checked, checksum, answered_at, answered_checksum in connection.execute(
        "SELECT rowid, key, source, tool, callback_url, checked, checksum, answered_at, answered_checksum "
        "FROM registrations ORDER BY rowid"
    ):
        own_offers = tuple(offers.get(key, ()))
        if checksum != _checksum(key, source, tool, url, checked, own_offers):
            raise file.damaged(f"row {rowid} of registrations fails its checksum")
        if answered_checksum != _time_checksum(answered_at):
            raise file.damaged(f"answered_at in row {rowid} of registrations fails its checksum")
        proof = proofs.get(key, ("", ""))  # none: the row is of the first version
        yield rowid, key, source, tool, url, checked, answered_at, own_offers, proof


def _record(file: Database, row: _Row) -> StoredRegistration:
    rowid, key, source, tool, url, checked, answered_at, offers, proof = row
    try:
        return StoredRegistration(key, source, _tool(json.loads(tool)), url, bool(checked), offers, answered_at, *proof)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidRequest, InvalidTool) as error:
        raise file.damaged(f"the tool in row {rowid} of registrations cannot be read: {error}") from None


def _tool(fields: dict[str, Any]) -> Tool:
    """Reads a tool: a field of a newer minor version is ignored, a missing one has its default."""
    known = {name: fields[name] for name in _TOOL_FIELDS if name in fields}
    annotations, needs = known.pop("annotations", {}), tuple(known.pop("needs", ()))
    return Tool(**known, needs=needs, annotations=Annotations(**{name: annotations.get(name) for name in _ANNOTATIONS}))


def _row(record: StoredRegistration) -> tuple[str, str, str, str, bool, int, float, int]:
    fields = dataclasses.asdict(record.tool)
    del fields["schema_hash"], fields["hints_trusted"]  # the one follows from the others, the other is of mounts
    tool = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    checksum = _checksum(record.key, record.source, tool, record.callback_url, record.checked, record.offers)
    url, answered_at = record.callback_url, record.answered_at
    return record.key, record.source, tool, url, record.checked, checksum, answered_at, _time_checksum(answered_at)


def _proof(record: StoredRegistration) -> tuple[str, str, str, int]:
    key, listener, secret = record.key, record.listener, record.secret
    return key, listener, secret, _proof_checksum(key, listener, secret)


def _proof_checksum(key: str, listener: str, secret: str) -> int:
    return checksum_of(dump_json([key, listener, secret]).encode())


def _checksum(key: str, source: str, tool: str, url: str, checked: int, offers: Offers) -> int:
    return checksum_of(dump_json([key, source, tool, url, int(checked), offers]).encode())


def _time_checksum(seconds: float) -> int:
    return checksum_of(time_bytes(seconds))


@contextmanager
def _access(directory: Path) -> Iterator[None]:
    """Turns an error of the file system into one that says how to fix it."""
    try:
        yield
    except OSError as error:
        what = "it is a file" if directory.is_file() else error.strerror or error
        raise SetupError(
            f"the data directory {directory} cannot be used: {what} "
            f"({error.filename or directory}): let this user write to it, choose another with --data-dir, or keep "
            "nothing with --ephemeral"
        ) from error
