"""A file that has to be ours: whose it is, what SQLite's complaints become, how it gets to this version."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from toolbus.bus.storage.database import MAX_SHOWN, Damaged, Database, checksum_of, pragma, time_bytes
from toolbus.errors import SetupError

FIRST = "CREATE TABLE notes (text TEXT)"


def database(path: Path, *migrations: str) -> Database:
    return Database(path, 0x54427431, migrations or (FIRST,), "name another file", "restore a backup", "the notes ")


@pytest.fixture
def made(tmp_path: Path) -> Database:
    file = database(tmp_path / "notes.db")
    file.create()
    with closing(file.connect("rw")) as connection:
        file.migrate(connection)
    return file


def test_a_file_that_was_created_is_ours_and_of_this_version(made: Database) -> None:
    made.check_owner()
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    with closing(made.connect("ro")) as connection:
        assert made.version(connection, "integrity_check") == 1
        with pytest.raises(sqlite3.OperationalError):
            connection.execute("INSERT INTO notes VALUES ('x')")


def test_a_file_is_never_made_by_opening_or_over_another(made: Database) -> None:
    with pytest.raises(FileExistsError):
        made.create()
    missing = replace(made, path=made.path.with_name("missing"))
    with pytest.raises(SetupError, match=r"Let this user .* its directory, or name another"), missing.errors():
        missing.connect("rw")
    assert not missing.path.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", r"it is empty \(0 bytes\).* Restore a backup"),
        (b"my thesis" * 20, "it is not an SQLite file, or its beginning is damaged.* Restore a backup"),
        (b"SQLite format 3\0" + bytes(34), "it is cut off after 50 bytes.* Restore a backup"),
        (
            b"SQLite format 3\0" + bytes(84),
            r".* another program \(application_id 0x0\).* Name another file, or move it",
        ),
    ],
    ids=["empty", "text", "short", "foreign"],
)
def test_what_is_not_ours_is_refused_by_its_header_and_counts_as_no_damage(
    tmp_path: Path, content: bytes, words: str
) -> None:
    file = database(tmp_path / "notes.db")
    file.path.write_bytes(content)
    with pytest.raises(SetupError, match=f"^the notes .*notes.db cannot be used: {words}") as caught:
        file.check_owner()
    assert not isinstance(caught.value, Damaged)
    assert file.path.read_bytes() == content


def test_everything_that_belongs_to_the_file_becomes_its_owners_alone(made: Database) -> None:
    for part in made.parts()[:3]:
        part.touch()
        part.chmod(0o644)
    made.make_private()
    assert [stat.S_IMODE(part.stat().st_mode) for part in made.parts() if part.exists()] == [0o600] * 3


def test_a_file_in_use_is_refused_with_how_to_fix_it(made: Database) -> None:
    with closing(made.connect("rw")) as first, closing(made.connect("rw")) as second:
        first.execute("BEGIN EXCLUSIVE")
        with pytest.raises(SetupError, match=r"SQLite says: .* Close the") as caught, made.errors():
            second.execute("SELECT * FROM notes")
    assert not isinstance(caught.value, Damaged)


def raising(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def test_what_sqlite_cannot_read_is_damage_in_a_short_text(made: Database) -> None:
    with (
        pytest.raises(Damaged, match=r"it is damaged: x+…. Nothing was changed. Restore a backup") as caught,
        made.errors(),
    ):
        raising(sqlite3.DatabaseError("x" * 1000))()
    assert caught.value.what == "x" * (MAX_SHOWN - 1) + "…"


def test_text_that_is_not_utf8_is_damage_and_is_not_quoted(made: Database) -> None:
    with pytest.raises(Damaged) as caught, made.errors():
        raising(UnicodeDecodeError("utf-8", b"hunter2\xff", 7, 8, "invalid"))()
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_closed_connection_says_nothing_about_the_file(made: Database) -> None:
    connection = made.connect("ro")
    connection.close()
    with pytest.raises(sqlite3.ProgrammingError), made.errors():
        connection.execute("SELECT 1")


def test_damaged_pages_are_found_by_either_check(made: Database) -> None:
    with open(made.path, "r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * 200)
    for check in ("quick_check", "integrity_check"):
        with closing(made.connect("ro")) as connection, pytest.raises(Damaged, match="Restore"), made.errors():
            made.version(connection, check)


def test_a_newer_file_is_refused_and_counts_as_no_damage(made: Database) -> None:
    older = replace(made, migrations=())
    with closing(older.connect("ro")) as connection, pytest.raises(SetupError) as caught:
        older.version(connection, "quick_check")
    assert "it was written by a newer toolbus (version 1 of the file; this one knows 0)" in str(caught.value)
    assert not isinstance(caught.value, Damaged)


def test_a_script_that_fails_leaves_the_file_at_the_version_before_it(made: Database) -> None:
    newer = replace(made, migrations=(FIRST, "ALTER TABLE notes ADD COLUMN at REAL", "CREATE TABLE more (a); nonsense"))
    with closing(newer.connect("rw")) as connection:
        with pytest.raises(
            Damaged, match=r"cannot be migrated from version 2 to 3 .* and stays at 2.* Use the toolbus"
        ):
            newer.migrate(connection)
        assert not connection.in_transaction
        assert pragma(connection, "user_version") == 2
        assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("notes",)]


def test_a_file_that_cannot_be_written_now_is_not_called_damaged_by_lifting_it(made: Database) -> None:
    newer = replace(made, migrations=(FIRST, "CREATE TABLE more (a)"))
    with closing(made.connect("rw")) as other, closing(newer.connect("rw")) as connection:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(SetupError, match=r"SQLite says: .* Close") as caught, newer.errors():
            newer.migrate(connection)
    assert not isinstance(caught.value, Damaged)


def test_a_checksum_tells_parts_apart_and_takes_zero_as_it_is_read_back() -> None:
    assert checksum_of(b"a", b"b") != checksum_of(b"ab", b"")
    assert time_bytes(-0.0) == time_bytes(0.0)
