"""Opens SQLite files of the bus: checks their owner and version, migrates them, and explains SQLite's errors.

A damaged file is reported as `Damaged`, a `SetupError` like every other refusal. No error text repeats values of a row,
which may hold passwords.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolbus.common.path_ownership import check_path
from toolbus.common.text import shorten
from toolbus.errors import SetupError

BUSY_SECONDS = 0.1  # for an operator's sqlite3 shell that uses the file now; an event loop may be blocked meanwhile
SUFFIXES = ("", "-wal", "-shm", "-journal")  # of the files that belong to one database
MAX_SHOWN = 200  # characters of SQLite's error text that an error repeats

_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
_OWNER_OFFSET = 68  # of the application_id in the header
_CLOSE = "close the other program that uses it"
_ACCESS = "let this user read and write the file and its directory"
# How to fix errors with which the file itself may be intact; every other error counts as damage.
_FIXES = {
    sqlite3.SQLITE_BUSY: _CLOSE,
    sqlite3.SQLITE_LOCKED: _CLOSE,
    sqlite3.SQLITE_CANTOPEN: _ACCESS,
    sqlite3.SQLITE_READONLY: _ACCESS,
    sqlite3.SQLITE_PERM: _ACCESS,
    sqlite3.SQLITE_FULL: "free some space on its disk",
    sqlite3.SQLITE_IOERR: "check its disk, and that there is space left",
}


class Damaged(SetupError):
    """A file of ours that cannot be read any more.

    Attributes:
        what: what is wrong with it, without the file's name and how to fix it.
    """

    def __init__(self, message: str, what: str) -> None:
        self.what = what
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Database:
    """The path of a file, its owner and its migrations. Holds no connection.

    Attributes:
        application_id: says which program the file belongs to, to us and to file(1).
        migrations: script i migrates a file from version i to i + 1, in one transaction with its number.
        elsewhere: the fix that always helps, as a text that may follow "or".
        restore: the fix where the file cannot be used any more.
        label: what errors put before its path.
    """

    path: Path
    application_id: int
    migrations: tuple[str, ...]
    elsewhere: str
    restore: str
    label: str = ""

    # -- errors -------------------------------------------------------------------------------------------------

    def refused(self, what: str, fix: str) -> SetupError:
        """Returns the error for a file that is left as it is."""
        return SetupError(self._message(what, fix))

    def damaged(self, what: str) -> Damaged:
        """Returns the error for a damaged file."""
        what = shorten(what, MAX_SHOWN)
        return Damaged(self._message(f"it is damaged: {what}", self.restore), what)

    def inaccessible(self, error: OSError) -> SetupError:
        """Returns the error for a refusal of the file system."""
        return self.refused(error.strerror or str(error), f"{_ACCESS}, or {self.elsewhere}")

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turns an error of SQLite into one that says how to fix it."""
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a closed connection does not mean that its file is damaged
        except UnicodeDecodeError:  # SQLite's own message quotes damaged bytes; so would the cause
            raise self.damaged("its schema is not UTF-8") from None
        except sqlite3.Error as error:
            fix = _fix(error)
            if fix:
                raise self.refused(f"SQLite says: {error}", f"{fix}, or {self.elsewhere}") from error
            raise self.damaged(str(error)) from error

    def _message(self, what: str, fix: str) -> str:
        return f"{self.label}{self.path} cannot be used: {what}. Nothing was changed. {fix[0].upper()}{fix[1:]}"

    # -- before it is opened -------------------------------------------------------------------------------------------

    def check_owner(self) -> None:
        """Refuses a file of another program by its header: even opening it may change it.

        SQLite plays back logs and journals as soon as it opens a file.

        Raises:
            SetupError: it is not a regular file, not a complete SQLite file (an empty one is not), or another
                program's.
            OSError: it cannot be read.
        """
        leave = f"{self.elsewhere}, or move it away"
        if not self.path.is_file():
            raise self.refused("it is not a regular file", leave)
        with open(self.path, "rb") as file:
            header = file.read(_HEADER_BYTES)
        if not header:
            raise self.refused("it is empty (0 bytes)", self.restore)
        if not header.startswith(_MAGIC):
            raise self.refused("it is not an SQLite file, or its beginning is damaged", self.restore)
        if len(header) < _HEADER_BYTES:
            raise self.refused(f"it is cut off after {len(header)} bytes", self.restore)
        owner = self.owner()
        if owner != self.application_id:
            raise self.refused(f"it is an SQLite file of another program (application_id {owner:#x})", leave)

    def owner(self) -> int | None:
        """Returns the application_id in the header of the file; None where it is cut off."""
        with open(self.path, "rb") as file:
            header = file.read(_HEADER_BYTES)
        return None if len(header) < _HEADER_BYTES else int(struct.unpack_from(">I", header, _OWNER_OFFSET)[0])

    def create(self) -> None:
        """Creates an empty file that only its owner can read, from the first byte on.

        Raises:
            FileExistsError: it exists.
            OSError: it cannot be created.
        """
        os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))

    def make_private(self) -> None:
        """Makes the file, with its logs, readable for its owner only: a restored backup may have another mode.

        Raises:
            SetupError: another user owns one of them, or may have written to it.
        """
        for part in self.parts():
            check_path(part, f"{self.label}{part}")
            if part.exists() and stat.S_IMODE(part.stat().st_mode) & 0o077:
                part.chmod(0o600)

    def parts(self) -> list[Path]:
        """Returns the paths of the file and of its logs, whether they exist or not."""
        return [Path(f"{self.path}{suffix}") for suffix in SUFFIXES]

    def move_aside(self) -> Path:
        """Moves a damaged file away, with its logs, and returns its new path; only the newest one stays."""
        aside = Path(f"{self.path}.damaged")
        for part, target in zip(self.parts(), replace(self, path=aside).parts(), strict=True):
            target.unlink(missing_ok=True)
            if part.exists():
                os.replace(part, target)
        return aside

    # -- opened --------------------------------------------------------------------------------------------------------

    def connect(self, mode: str) -> sqlite3.Connection:
        """Opens a file that exists, ``ro`` or ``rw``; never creates one. Any thread may use the connection."""
        connection = sqlite3.connect(
            f"{self.path.resolve().as_uri()}?mode={mode}",
            uri=True,
            timeout=BUSY_SECONDS,
            isolation_level=None,  # transactions are explicit
            check_same_thread=False,
        )
        # A damaged text must fail its checksum; the error of the sqlite3 module would quote it, password included.
        connection.text_factory = lambda raw: raw.decode(errors="replace")
        return connection

    def version(self, connection: sqlite3.Connection, check: str) -> int:
        """Returns the version of the file, after SQLite has checked its structure.

        Args:
            check: ``quick_check``, or ``integrity_check``, which also compares indexes with their tables.

        Raises:
            SetupError: a newer version wrote it.
            Damaged: the check found something.
        """
        version = int(pragma(connection, "user_version"))
        if version > len(self.migrations):
            raise self.refused(
                f"it was written by a newer toolbus (version {version} of the file; this one knows "
                f"{len(self.migrations)})",
                f"use that toolbus; or {self.restore}",
            )
        verdict = str(pragma(connection, f"{check}(1)"))
        if verdict != "ok":
            raise self.damaged(verdict.removeprefix("*** in database main ***").strip())
        return version

    def migrate(self, connection: sqlite3.Connection) -> None:
        """Migrates the file to this version; an empty file gets its tables.

        Raises:
            Damaged: a script failed; the file stays at the version before that script.
            sqlite3.Error: it cannot be written now.
        """
        for version in range(int(pragma(connection, "user_version")), len(self.migrations)):
            try:
                connection.executescript(
                    f"BEGIN EXCLUSIVE; PRAGMA application_id = {self.application_id}; {self.migrations[version]}; "
                    f"PRAGMA user_version = {version + 1}; COMMIT"
                )
            except sqlite3.Error as error:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                if _fix(error):
                    raise
                what = f"it cannot be migrated from version {version} to {version + 1} ({error}) and stays at {version}"
                fix = f"use the toolbus that wrote it; or {self.restore}"
                raise Damaged(self._message(what, fix), what) from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Commits what is written in its body, or nothing of it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:  # SQLite has rolled back by itself after some errors
            connection.execute("ROLLBACK")


def pragma(connection: sqlite3.Connection, text: str) -> Any:
    """Returns the value of a pragma."""
    return connection.execute(f"PRAGMA {text}").fetchone()[0]


def checksum_of(*parts: bytes) -> int:
    """Returns the checksum of a row: SQLite detects a damaged structure, but not a flipped byte inside a value."""
    return zlib.crc32(b"\0".join(parts))


def time_bytes(seconds: float) -> bytes:
    """Returns a REAL as bytes for a checksum, as it will be read back."""
    return struct.pack(">d", seconds + 0.0)  # SQLite stores -0.0 as 0.0


def _fix(error: sqlite3.Error) -> str | None:
    return _FIXES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)  # the low byte is the primary error code
