"""Persists the fingerprints of sources in a database; subclasses may store more in it.

A write of `save_fingerprints` that has returned survives a kill -9 (a write-ahead log, `synchronous=NORMAL`: a power
cut may lose the last moments). A damaged file is moved aside, with an error in the log; a row whose checksum fails
reads as never approved.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from toolbus.bus.pins.fingerprints import Pinned
from toolbus.bus.storage.database import Database, checksum_of, transaction

log = logging.getLogger("toolbus.pins")

FILE = "pins.db"
APPLICATION_ID = 0x54427069  # "TBpi"
# Script i lifts a file from version i to i + 1. Never edit one that was released.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE fingerprints (
        source TEXT NOT NULL,
        command TEXT NOT NULL,  -- digest of the command line of a mount; empty: of other sources
        subject TEXT NOT NULL,
        approved TEXT NOT NULL,  -- the text that is trusted; empty: none yet
        pending TEXT NOT NULL,  -- the text that is declared instead; empty: none
        checksum INTEGER NOT NULL,  -- of the columns above
        PRIMARY KEY (source, command, subject)
    ) STRICT, WITHOUT ROWID;
    """,
)
_PUT = "INSERT INTO fingerprints (source, command, subject, approved, pending, checksum) VALUES (?,?,?,?,?,?)"


class FingerprintFile:
    """The fingerprints of one file; without a path they last as long as the process.

    Its methods may be called from any thread; those of a large source take some milliseconds to be written.

    Args:
        path: created (0600) if it does not exist, with its directory.

    Attributes:
        application_id, migrations: of the file, see `Database`.
        contents, lost: what the file holds, and what is lost with a damaged one; for messages.

    Raises:
        SetupError: from the constructor; the file cannot be used now, or is another program's.
    """

    application_id = APPLICATION_ID
    migrations = MIGRATIONS
    contents = "fingerprints"
    lost = "the approvals of plugins are lost, those pinned to block wait for `toolbus approve`"

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.was_damaged = False  # whether earlier fingerprints were lost
        self._guard = threading.Lock()
        self._connection = self._open(path) if path is not None else self._in_memory()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path or 'in memory'}>"

    def fingerprints(self, source: str, command: str = "") -> dict[str, Pinned]:
        """Returns the fingerprints of a source, by subject; a damaged row reads as never approved."""
        with self._guard:
            rows = self._connection.execute(
                "SELECT subject, approved, pending, checksum FROM fingerprints WHERE source = ? AND command = ?",
                (source, command),
            ).fetchall()
        known = {}
        for subject, approved, pending, checksum in rows:
            if checksum != _checksum(source, command, subject, approved, pending):
                log.error("the fingerprint of %s of source %s in %s is damaged", subject, source, self.path)
                approved = ""
            known[subject] = Pinned(approved, pending)
        return known

    def save_fingerprints(self, source: str, command: str, known: Mapping[str, Pinned]) -> None:
        """Replaces the fingerprints of a source.

        Raises:
            sqlite3.Error: they could not be written; the earlier ones stay.
        """
        before = self.fingerprints(source, command)
        rows = [
            (source, command, subject, *texts, _checksum(source, command, subject, *texts))
            for subject, each in known.items()
            if before.get(subject) != each
            for texts in [(each.approved, each.pending)]
        ]
        stale = [(source, command, subject) for subject in before if before[subject] != known.get(subject)]
        if not rows and not stale:
            return
        with self._transaction() as connection:
            connection.executemany("DELETE FROM fingerprints WHERE source = ? AND command = ? AND subject = ?", stale)
            connection.executemany(_PUT, rows)

    def sources(self) -> list[str]:
        """Returns the sources that have fingerprints."""
        with self._guard:
            return [name for (name,) in self._connection.execute("SELECT DISTINCT source FROM fingerprints")]

    def close(self) -> None:
        """Closes the file; may be called again."""
        with self._guard:
            self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._guard, transaction(self._connection) as connection:
            yield connection

    def _open(self, path: Path) -> sqlite3.Connection:
        file = Database(
            path,
            self.application_id,
            self.migrations,
            elsewhere="use another --data-dir",
            restore=f"move {path.name} away ({self.lost}); or use another --data-dir",
            label=f"the file of {self.contents} ",
        )

        def damaged(what: str, aside: Path) -> None:
            self.was_damaged = True
            log.error("%s is damaged (%s): moved to %s; %s", path, what, aside, self.lost)

        return file.open_or_replace(self.contents, damaged)

    def _in_memory(self) -> sqlite3.Connection:
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        connection.executescript(";".join(self.migrations))
        return connection


def _checksum(*texts: str) -> int:
    return checksum_of(*(each.encode("utf-8", "surrogatepass") for each in texts))
