"""An SQLite file that has to be ours: whose it is, how it is opened, what SQLite's complaints mean for its owner.

No room, but what store and tasks share. What becomes of a damaged file they decide: it is reported as `Damaged`, a
`SetupError` like every other refusal, and nothing here changes or moves it. Nor is any error's text made of what stands
in a row, which may hold passwords.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolbus.errors import SetupError

BUSY_SECONDS = 0.1  # for a person's sqlite3 shell that uses the file just now; a loop may stand still meanwhile
COMPANIONS = ("", "-wal", "-shm", "-journal")  # endings of what belongs to one database
MAX_WORDS = 200  # characters of SQLite's own words that an error repeats

_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
_OWNER_AT = 68  # where the application_id stands in the header
_CLOSE = "close the other program that uses it"
_ACCESS = "let this user read and write the file and its directory"
# What SQLite says where the file itself may well be sound; everything else counts as damage.
_CURES = {
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
        what: what is wrong with it, without the file's name and the cure.
    """

    def __init__(self, sentence: str, what: str) -> None:
        self.what = what
        super().__init__(sentence)


@dataclass(frozen=True, slots=True)
class Database:
    """Where a file lies and what it has to be. Holds no connection.

    Attributes:
        application_id: says whose file it is, to us and to file(1).
        migrations: script i lifts a file from version i to i + 1, in one transaction with its number.
        elsewhere: the cure that always helps, in words that may follow "or".
        restore: the cure where the file cannot be used any more.
        label: what errors say before its path.
    """

    path: Path
    application_id: int
    migrations: tuple[str, ...]
    elsewhere: str
    restore: str
    label: str = ""

    # -- what is wrong -------------------------------------------------------------------------------------------------

    def refused(self, what: str, cure: str) -> SetupError:
        """Returns the error for a file that is left as it is."""
        return SetupError(self._sentence(what, cure))

    def damaged(self, what: str) -> Damaged:
        """Returns the error for a file that is not whole."""
        what = what[:MAX_WORDS]
        return Damaged(self._sentence(f"it is damaged: {what}", self.restore), what)

    def inaccessible(self, problem: OSError) -> SetupError:
        """Returns the error for what the file system refuses."""
        return self.refused(problem.strerror or str(problem), f"{_ACCESS}, or {self.elsewhere}")

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turns what SQLite finds wrong with the file into an error with its cure."""
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a connection that is closed says nothing about its file
        except UnicodeDecodeError:  # SQLite's own message quotes damaged bytes; so would the cause
            raise self.damaged("its schema is no UTF-8") from None
        except sqlite3.Error as error:
            cure = _cure(error)
            if cure:
                raise self.refused(f"SQLite says: {error}", f"{cure}, or {self.elsewhere}") from error
            raise self.damaged(str(error)) from error

    def _sentence(self, what: str, cure: str) -> str:
        return f"{self.label}{self.path} cannot be used: {what}. Nothing was changed. {cure[0].upper()}{cure[1:]}"

    # -- before it is opened -------------------------------------------------------------------------------------------

    def must_be_ours(self) -> None:
        """Refuses what is somebody else's by its header: even opening a file may change it.

        SQLite plays back logs and journals as soon as it opens one.

        Raises:
            SetupError: it is no regular file, no whole SQLite file (an empty one is none), or another program's.
            OSError: it cannot be read.
        """
        leave = f"{self.elsewhere}, or move it away"
        if not self.path.is_file():
            raise self.refused("it is no regular file", leave)
        with open(self.path, "rb") as file:
            header = file.read(_HEADER_BYTES)
        if not header:
            raise self.refused("it is empty (0 bytes)", self.restore)
        if not header.startswith(_MAGIC):
            raise self.refused("it is no SQLite file, or its beginning is damaged", self.restore)
        if len(header) < _HEADER_BYTES:
            raise self.refused(f"it is cut off after {len(header)} bytes", self.restore)
        (owner,) = struct.unpack_from(">I", header, _OWNER_AT)
        if owner != self.application_id:
            raise self.refused(f"it is an SQLite file of another program (application_id {owner:#x})", leave)

    def make(self) -> None:
        """Makes an empty file that is its owner's alone from the first byte on.

        Raises:
            FileExistsError: there is one.
            OSError: it cannot be made.
        """
        os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))

    def make_private(self) -> None:
        """Takes the file and its companions from everybody but their owner: a backup may have come back otherwise."""
        for part in self.parts():
            if part.exists() and stat.S_IMODE(part.stat().st_mode) & 0o077:
                part.chmod(0o600)

    def parts(self) -> list[Path]:
        """Returns the paths of the file and of its companions, whether they exist or not."""
        return [Path(f"{self.path}{ending}") for ending in COMPANIONS]

    # -- opened --------------------------------------------------------------------------------------------------------

    def connect(self, mode: str) -> sqlite3.Connection:
        """Opens a file that exists, ``ro`` or ``rw``; never makes one. Any thread may use the connection."""
        connection = sqlite3.connect(
            f"{self.path.resolve().as_uri()}?mode={mode}",
            uri=True,
            timeout=BUSY_SECONDS,
            isolation_level=None,  # transactions stand in the code
            check_same_thread=False,
        )
        # A damaged text shall fail its checksum; the module's own error would quote it, password included.
        connection.text_factory = lambda raw: raw.decode(errors="replace")
        return connection

    def version(self, connection: sqlite3.Connection, check: str) -> int:
        """Returns the version of the file, whose structure it has SQLite check.

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

    def lift(self, connection: sqlite3.Connection) -> None:
        """Lifts the file to this version, an empty one from nothing.

        Raises:
            Damaged: a script failed; the file stays at the version that it had then.
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
                if _cure(error):
                    raise
                what = f"it cannot be lifted from version {version} to {version + 1} ({error}) and stays at {version}"
                cure = f"use the toolbus that wrote it; or {self.restore}"
                raise Damaged(self._sentence(what, cure), what) from error


def pragma(connection: sqlite3.Connection, text: str) -> Any:
    """Returns what SQLite answers to a pragma."""
    return connection.execute(f"PRAGMA {text}").fetchone()[0]


def crc_of(*parts: bytes) -> int:
    """Returns what a row is checked by: SQLite sees damaged structure, but not a flipped byte inside a value."""
    return zlib.crc32(b"\0".join(parts))


def time_bytes(when: float) -> bytes:
    """Returns a REAL for a checksum, as it will be read back."""
    return struct.pack(">d", when + 0.0)  # SQLite keeps -0.0 as 0.0


def _cure(error: sqlite3.Error) -> str | None:
    return _CURES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)  # the low byte is the kind
