"""Persists what is known of mounted servers: what they declared, in which era they spoke, what of it is trusted.

So the tools of a server are offered before its process has started, and a change is noticed across restarts. What is
known belongs to a mount and its command line: another program under the same name is another server. What `save`
returned from survives a kill -9 (a write-ahead log, `synchronous=NORMAL`: a power cut may lose the last moments).

A damaged file is moved aside, with an error in the log: servers can say again what they declare. What was trusted is
gone then, so that servers with `pin = "block"` wait for an approval (`is_new` says so). A row whose checksum fails is
left out by itself.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolbus.bus.mcp_client.fingerprints import Pinned
from toolbus.bus.path_ownership import make_directory
from toolbus.bus.storage.database import Damaged, Database, checksum_of, time_bytes
from toolbus.text import shorten

log = logging.getLogger("toolbus.mcp_client")

FILE = "mcp.db"
APPLICATION_ID = 0x5442746D  # "TBtm"
MAX_COMMANDS = 4  # command lines that are remembered of one mount
KINDS = ("tools", "prompts", "resources", "templates")

# Script i lifts a file from version i to i + 1. Never edit one that was released.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE servers (
        mount TEXT NOT NULL,
        command TEXT NOT NULL,  -- digest of its command line
        peer TEXT NOT NULL,  -- what it said of itself, its era included, as JSON
        declarations TEXT NOT NULL,  -- lists by kind, as JSON
        saved REAL NOT NULL,
        checksum INTEGER NOT NULL,  -- of the columns above
        PRIMARY KEY (mount, command)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE fingerprints (
        mount TEXT NOT NULL,
        command TEXT NOT NULL,
        subject TEXT NOT NULL,
        approved TEXT NOT NULL,  -- the text that is trusted; empty: none yet
        pending TEXT NOT NULL,  -- the text that is declared instead; empty: none
        checksum INTEGER NOT NULL,  -- of the columns above
        PRIMARY KEY (mount, command, subject)
    ) STRICT, WITHOUT ROWID;
    """,
)
_PUT_SERVER = (
    "INSERT OR REPLACE INTO servers (mount, command, peer, declarations, saved, checksum) VALUES (?,?,?,?,?,?)"
)
_PUT_PINNED = "INSERT INTO fingerprints (mount, command, subject, approved, pending, checksum) VALUES (?,?,?,?,?,?)"


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a server said when it was last asked.

    Attributes:
        peer: about itself: era, version, capabilities, instructions; a JSON object whose keys are its writer's.
        declarations: objects as the protocol has them, by kind, see `KINDS`.
    """

    peer: Mapping[str, Any] = field(default_factory=dict)
    declarations: Mapping[str, list[Any]] = field(default_factory=dict)


class Manifest:
    """The file of one data directory; without a path it remembers for the life of the process only.

    Its methods may be called from any thread; a large server takes some milliseconds to be written.

    Args:
        path: created (0600) if it does not exist, with its directory.

    Raises:
        SetupError: from the constructor; the file cannot be used now, or is another program's.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.was_damaged = False  # whether earlier knowledge was lost
        self._guard = threading.Lock()
        self._connection = self._open(path) if path is not None else _in_memory()

    def __repr__(self) -> str:
        return f"<Manifest {self.path or 'in memory'}>"

    def load(self, mount: str, command: str) -> Remembered | None:
        """Returns what a server said last; None where it was never asked, or its row is damaged.

        Args:
            command: the digest of its command line (`MountEntry.command_digest`).
        """
        with self._guard:
            row = self._connection.execute(
                "SELECT peer, declarations, saved, checksum FROM servers WHERE mount = ? AND command = ?",
                (mount, command),
            ).fetchone()
        if row is None:
            return None
        peer, declarations, saved, checksum = row
        try:
            if checksum != _server_checksum(mount, command, peer, declarations, saved):
                raise ValueError("its checksum fails")
            return Remembered(json.loads(peer), json.loads(declarations))
        except ValueError as error:
            log.error("what %s holds of mount %s is damaged and left out: %s", self.path, mount, error)
            return None

    def save(self, mount: str, command: str, remembered: Remembered) -> None:
        """Persists what a server said.

        Raises:
            sqlite3.Error: it could not be written; what was known before stays.
        """
        peer, declarations = (json.dumps(dict(each)) for each in (remembered.peer, remembered.declarations))
        saved = time.time()
        checksum = _server_checksum(mount, command, peer, declarations, saved)
        with self._transaction() as connection:
            connection.execute(_PUT_SERVER, (mount, command, peer, declarations, saved, checksum))
            old = connection.execute(
                "SELECT command FROM servers WHERE mount = ? ORDER BY saved DESC LIMIT -1 OFFSET ?",
                (mount, MAX_COMMANDS),
            ).fetchall()
            for table in ("servers", "fingerprints"):
                connection.executemany(
                    f"DELETE FROM {table} WHERE mount = ? AND command = ?",  # one of two names
                    [(mount, each) for (each,) in old],
                )

    def fingerprints(self, mount: str, command: str) -> dict[str, Pinned]:
        """Returns what is trusted of a server, by subject; a damaged row reads as never approved."""
        with self._guard:
            rows = self._connection.execute(
                "SELECT subject, approved, pending, checksum FROM fingerprints WHERE mount = ? AND command = ?",
                (mount, command),
            ).fetchall()
        known = {}
        for subject, approved, pending, checksum in rows:
            if checksum != _pinned_checksum(mount, command, subject, approved, pending):
                log.error("the fingerprint of %s of mount %s in %s is damaged", subject, mount, self.path)
                approved = ""
            known[subject] = Pinned(approved, pending)
        return known

    def save_fingerprints(self, mount: str, command: str, known: Mapping[str, Pinned]) -> None:
        """Persists what is trusted of a server, in the place of what was.

        Raises:
            sqlite3.Error: it could not be written; what was known before stays.
        """
        before = self.fingerprints(mount, command)
        rows = [
            (mount, command, subject, *texts, _pinned_checksum(mount, command, subject, *texts))
            for subject, each in known.items()
            if before.get(subject) != each
            for texts in [(each.approved, each.pending)]
        ]
        stale = [(mount, command, subject) for subject in before if before[subject] != known.get(subject)]
        if not rows and not stale:
            return
        with self._transaction() as connection:
            connection.executemany("DELETE FROM fingerprints WHERE mount = ? AND command = ? AND subject = ?", stale)
            connection.executemany(_PUT_PINNED, rows)

    def is_new(self, mount: str, command: str) -> bool:
        """Tells whether a server that has no fingerprints is seen for the first time, and was not merely forgotten."""
        return not self.was_damaged and self.load(mount, command) is None

    def close(self) -> None:
        """Closes the file; may be called again."""
        with self._guard:
            self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._guard:
            connection = self._connection
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:  # SQLite has rolled back by itself after some errors
                    connection.execute("ROLLBACK")

    def _open(self, path: Path) -> sqlite3.Connection:
        file = Database(
            path,
            APPLICATION_ID,
            MIGRATIONS,
            elsewhere="use another --data-dir",
            restore=f"move {path.name} away (what servers declared is asked again); or use another --data-dir",
            label="the file of mounts ",
        )
        try:
            make_directory(path.parent, f"the directory {path.parent} of the mounts")
            with suppress(FileExistsError):
                file.create()
            if not path.is_file() or path.stat().st_size:  # a bus that was killed at its start leaves an empty one
                file.check_owner()
            file.make_private()
            try:
                return _connect(file)
            except Damaged as damage:
                self.was_damaged = True
                log.error(
                    "%s is damaged (%s): moved to %s; what was approved of mounts is gone, those with pin = block "
                    "wait for `toolbus mounts approve`",
                    path,
                    shorten(damage.what, 200),
                    file.move_aside(),
                )
            file.create()
            return _connect(file)
        except OSError as error:
            raise file.inaccessible(error) from error


def _connect(file: Database) -> sqlite3.Connection:
    with file.errors():
        connection = file.connect("rw")
        try:
            file.version(connection, "quick_check")
            file.migrate(connection)
            connection.execute("PRAGMA journal_mode = WAL")  # only now that the header has the application_id
            connection.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            connection.close()
            raise
    return connection


def _in_memory() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.executescript(";".join(MIGRATIONS))
    return connection


def _server_checksum(mount: str, command: str, peer: str, declarations: str, saved: float) -> int:
    return checksum_of(mount.encode(), command.encode(), peer.encode(), declarations.encode(), time_bytes(saved))


def _pinned_checksum(mount: str, command: str, subject: str, approved: str, pending: str) -> int:
    parts = (mount, command, subject, approved, pending)
    return checksum_of(*(each.encode("utf-8", "surrogatepass") for each in parts))
