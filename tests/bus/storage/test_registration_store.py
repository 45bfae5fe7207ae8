"""The store: what was answered ok is there after any kind of end, and a file that is not sound is never used."""

from __future__ import annotations

import dataclasses
import os
import random
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import TIMES, examples
from tests.support.processes import environment
from toolbus.bus.storage import registration_store as room
from toolbus.bus.storage.database import Database
from toolbus.bus.storage.registration_store import (
    APPLICATION_ID,
    FILE,
    LOCK,
    MIGRATIONS,
    RegistrationStore,
    StoredRegistration,
)
from toolbus.errors import InvalidRequest, SetupError
from toolbus.tool import Annotations, Tool

PASSWORD = "hunter2-äß"
URL = f"http://user:{PASSWORD}@127.0.0.1:9000/call"

FULL = Tool(
    name="天気 weather/now",
    description='今日の天気 \N{SNOWMAN} \0 "quoted"\n',
    parameters_json='{"type": "object", "properties": {"場所": {"type": "string"}, "n": {"const": 987654321098765}}}',
    role="猫",
    timeout_seconds=12.5,
    idle_timeout_seconds=0.25,
    callback_url="http://user:***@127.0.0.1:9000/call",
    display_name="天気",
    annotations=Annotations(read_only=True, idempotent=False, open_world=True),
    validate=False,
    no_background=True,
    allow_repeat=True,
    council_eligible=True,
    inline_available=True,
    direct_reply=True,
    metadata_json='{"a":1}',
    min_level=50,
    no_repair=True,
    output_schema_json='{"type":"object"}',
    always_background=True,
    needs=("sampling",),
    validate_output=True,
)


def kept(number: int = 0, **changes: object) -> StoredRegistration:
    plain = StoredRegistration(
        key=f"key-{number}",
        source="external",
        tool=Tool(name=f"tool{number}", description="x" * 40, callback_url=f"http://127.0.0.1:9000/{number}"),
        callback_url=f"http://127.0.0.1:9000/{number}",
        checked=False,
        offers=((None, number), ("default", number)),
        answered_at=1_700_000_000.0 + number,
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


@contextmanager
def opened(directory: Path) -> Iterator[RegistrationStore]:
    with closing(RegistrationStore(directory)) as store:
        yield store


def loaded(directory: Path) -> list[StoredRegistration]:
    with opened(directory) as store:
        return store.load()


def fill(directory: Path, count: int = 3) -> list[StoredRegistration]:
    rows = [kept(number) for number in range(count)]
    with opened(directory) as store:
        store.apply(rows, ())
    return rows


def refusal(directory: Path) -> str:
    """The sentence of a refused start; nothing of the file may have changed."""
    path = directory / FILE
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(SetupError) as caught:
        loaded(directory)
    assert (path.read_bytes() if path.is_file() else None) == before
    text = str(caught.value)
    assert str(directory) in text
    assert "--data-dir" in text
    assert PASSWORD not in text
    return text


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def edit(directory: Path, *statements: str) -> None:
    """Does to the file what no toolbus does."""
    with closing(sqlite3.connect(directory / FILE, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


# ── what is kept ──


def test_every_field_of_a_registration_comes_back_as_it_was(tmp_path: Path) -> None:
    offers = (("猫", 7), (None, 3), ("", 4))
    row = StoredRegistration("鍵", "", FULL, URL, True, offers, 1_700_000_000.123456, "boot:1:2", "s" * 16)
    with opened(tmp_path) as store:
        store.apply([row], ())
        assert store.load() == [row]
    (again,) = loaded(tmp_path)
    assert again == row
    assert again.tool.schema_hash == FULL.schema_hash
    fields = [item for item in dataclasses.fields(Tool) if item.name != "hints_trusted"]  # of mounts alone
    assert all(getattr(again.tool, item.name) != item.default for item in fields)
    with pytest.raises(SetupError):
        RegistrationStore(tmp_path / FILE)  # closed stores leave no lock, but a file is no directory


def test_registrations_come_back_by_their_smallest_place_and_those_without_one_last(tmp_path: Path) -> None:
    rows = [
        kept(1, offers=()),
        kept(2, offers=(("a", 9), ("b", 2))),
        kept(3, offers=((None, 5),)),
        kept(4, offers=(("a", 0),)),
        kept(5, offers=((None, 7), ("a", -1))),
    ]
    with opened(tmp_path) as store:
        store.apply(rows, ())
    assert [row.key for row in loaded(tmp_path)] == ["key-4", "key-2", "key-3", "key-5", "key-1"]


def test_a_registration_of_the_same_key_replaces_the_older_one_with_all_its_offers(tmp_path: Path) -> None:
    newer = kept(1, tool=FULL, offers=(("猫", 1),), checked=True, source="b")
    with opened(tmp_path) as store:
        store.apply([kept(1)], ())
        store.apply([kept(1, tool=Tool("other")), newer], ())
    assert loaded(tmp_path) == [newer]


def test_what_is_gone_takes_its_offers_along_and_unknown_keys_may_go(tmp_path: Path) -> None:
    fill(tmp_path)
    with opened(tmp_path) as store:
        store.apply((), ["key-1", "never"])
        store.apply([kept(5)], ["key-0", "key-5"])  # gone first, then changed
        store.apply((), ())
    assert loaded(tmp_path) == [kept(2), kept(5)]
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        assert connection.execute("SELECT count(*) FROM offers").fetchone() == (4,)


def test_the_time_of_an_answer_is_noted_for_each_key_and_nothing_else_changes(tmp_path: Path) -> None:
    fill(tmp_path)
    with opened(tmp_path) as store:
        store.save_answers(["key-0", "key-2", "never"], 1_800_000_000.5)
        store.save_answers([], 1.0)
    assert loaded(tmp_path) == [
        kept(0, answered_at=1_800_000_000.5),
        kept(1),
        kept(2, answered_at=1_800_000_000.5),
    ]


def test_a_time_of_minus_zero_which_sqlite_stores_as_zero_is_not_damage(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.apply([kept(1, answered_at=-0.0)], ())
        store.save_answers(["key-1"], -0.0)
    assert loaded(tmp_path) == [kept(1, answered_at=0.0)]


def test_a_field_of_a_newer_minor_version_is_passed_over_and_a_missing_one_takes_its_default() -> None:
    read = room._tool({"name": "a", "colour": "red", "annotations": {"read_only": True, "loud": True}})
    assert read == Tool("a", annotations=Annotations(read_only=True))
    assert room._tool({"name": "a"}) == Tool("a")


def test_a_change_that_cannot_be_written_changes_nothing_and_the_store_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.apply([kept(1)], ())
        with pytest.raises(sqlite3.IntegrityError):
            store.apply([kept(2), kept(3, answered_at=float("nan"))], ["key-1"])
        assert store.load() == [kept(1)]
        store.apply([kept(2)], ())
    assert loaded(tmp_path) == [kept(1), kept(2)]


def test_a_full_disk_is_an_sqlite_error_and_the_store_goes_on_once_there_is_room(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path) as store:
        store.apply([kept(1)], ())
        big = [kept(number, source="s" * 4000) for number in range(2, 100)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(sqlite3.OperationalError):
                store.apply(big, ["key-1"])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert store.load() == [kept(1)]
        store.apply(big, ())
    assert loaded(tmp_path) == [kept(1), *big]


@settings(max_examples=examples(10))
@given(
    st.lists(
        st.tuples(
            st.lists(
                st.builds(
                    StoredRegistration,
                    key=st.sampled_from(["a", "b", "鍵", ""]),
                    source=st.text(max_size=5),
                    tool=st.builds(Tool, name=st.text(min_size=1, max_size=5), description=st.text(max_size=5)),
                    callback_url=st.text(max_size=5),
                    checked=st.booleans(),
                    offers=st.lists(
                        st.tuples(st.none() | st.text(max_size=3), st.integers(0, (1 << 63) - 1)), max_size=3
                    ).map(tuple),
                    answered_at=st.floats(allow_nan=False),
                ),
                max_size=4,
            ),
            st.lists(st.sampled_from(["a", "b", "鍵", "", "never"]), max_size=2),
            st.booleans(),
        ),
        max_size=6,
    )
)
def test_any_sequence_of_changes_leaves_what_a_dict_would_hold(
    steps: list[tuple[list[StoredRegistration], list[str], bool]],
) -> None:
    model: dict[str, StoredRegistration] = {}
    with tempfile.TemporaryDirectory() as name:
        store = RegistrationStore(Path(name))
        try:
            for changed, gone, restart in steps:
                store.apply(changed, gone)
                for key in gone:
                    model.pop(key, None)
                model.update({row.key: row for row in changed})
                if restart:
                    store.close()
                    store = RegistrationStore(Path(name))
                assert {row.key: row for row in store.load()} == model
        finally:
            store.close()


# ── who may read it, who may use it ──


def test_a_password_stands_in_no_repr_and_a_text_that_cannot_be_written_is_refused_without_it(tmp_path: Path) -> None:
    row = kept(callback_url=URL)
    with opened(tmp_path) as store:
        store.apply([row], ())
        assert PASSWORD not in repr(row) + repr(store) + repr(store.load())
    with pytest.raises(InvalidRequest, match="callback_url holds half of a surrogate pair") as caught:
        kept(callback_url=URL + "\ud800")
    assert PASSWORD not in repr(caught.value)
    with pytest.raises(InvalidRequest, match="source holds half"):
        kept(source="\udfff")


@pytest.mark.parametrize("existing", [False, True])
def test_every_file_is_its_owners_alone_whatever_the_umask(tmp_path: Path, existing: bool) -> None:
    directory = tmp_path / "new" / "data"
    with umask(0):
        if existing:
            fill(directory)
            (directory / FILE).chmod(0o666)
        with opened(directory) as store:
            store.apply([kept(1, callback_url=URL)], ())
            names = {path.name: mode(path) for path in directory.iterdir()}
    assert names == dict.fromkeys((FILE, f"{FILE}-wal", f"{FILE}-shm", LOCK), 0o600)
    assert mode(directory) == 0o700


def test_an_existing_directory_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    fill(tmp_path)
    assert mode(tmp_path) == 0o755


def test_a_file_is_its_owners_alone_before_its_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    connect = Database.connect

    def watched(file: Database, how: str) -> sqlite3.Connection:
        seen.append((file.path.name, mode(file.path)))
        return connect(file, how)

    monkeypatch.setattr(Database, "connect", watched)
    with umask(0):
        fill(tmp_path)
    assert seen == [(f"{FILE}.new", 0o600), (FILE, 0o600), (FILE, 0o600)]


HOLD = """
import sys, time
from pathlib import Path
from toolbus.bus.storage.registration_store import RegistrationStore
store = RegistrationStore(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


@contextmanager
def python(script: str, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment({}),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_a_second_bus_is_refused_with_the_process_of_the_first_until_that_is_killed(tmp_path: Path) -> None:
    with python(HOLD, tmp_path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"open\n"
        text = refusal(tmp_path)
        assert f"in use by another toolbus, process {first.pid}" in text
        assert "--ephemeral" in text
        first.send_signal(signal.SIGKILL)
        first.wait(20)
        assert loaded(tmp_path) == []


def test_a_second_store_in_the_same_process_is_refused_and_close_frees_it(tmp_path: Path) -> None:
    store = RegistrationStore(tmp_path)
    assert f"process {os.getpid()}" in refusal(tmp_path)
    thread = threading.Thread(target=store.close)
    thread.start()
    thread.join(20)
    store.close()
    assert loaded(tmp_path) == []
    for use in (store.load, lambda: store.apply([kept()], ()), lambda: store.save_answers(["a"], 1.0)):
        with pytest.raises(sqlite3.ProgrammingError):
            use()


def test_an_unusable_directory_is_an_error_with_how_to_fix_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "it is a file" in refusal(tmp_path / "file")
    assert "Not a directory" in refusal(tmp_path / "file" / "below")
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        assert "Permission denied" in refusal(tmp_path / "new")
        tmp_path.chmod(0o700)


# ── files that are not sound ──


def write(data: bytes) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        (directory / FILE).write_bytes(data)

    return make


def other_database(directory: Path) -> None:
    edit(directory, "CREATE TABLE notes (text)", "INSERT INTO notes VALUES ('mine')")


def filled_then(*statements: str) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        fill(directory)
        edit(directory, *statements)

    return make


def cut(to: Callable[[int], int]) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        fill(directory, 100)
        os.truncate(directory / FILE, to((directory / FILE).stat().st_size))

    return make


def damaged_type_name(directory: Path) -> None:
    fill(directory)
    path = directory / FILE
    path.write_bytes(path.read_bytes().replace(b"callback_url TEXT", b"callback_url \xf4EXT"))


def no_regular_file(directory: Path) -> None:
    (directory / FILE).mkdir()


def fifo(directory: Path) -> None:
    os.mkfifo(directory / FILE)


def dangling_link(directory: Path) -> None:
    (directory / FILE).symlink_to(directory / "nowhere")


def nothing_but_a_log(directory: Path) -> None:
    (directory / f"{FILE}-wal").write_bytes(b"registrations")


BAD_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (write(b""), "it is empty (0 bytes)"),
    "text": (write(b"hello\n" * 1000), "it is not an SQLite file"),
    "header only": (cut(lambda size: 50), "it is cut off after 50 bytes"),
    "half": (cut(lambda size: size // 2), "it is damaged"),
    "one page short": (cut(lambda size: size - 4096), "it is damaged"),
    "one byte short": (cut(lambda size: size - 1), "it is damaged"),
    "another program's": (other_database, "SQLite file of another program (application_id 0x0)"),
    "another id": (filled_then("PRAGMA application_id = 77"), "another program (application_id 0x4d)"),
    "newer": (
        filled_then("PRAGMA user_version = 99"),
        f"newer toolbus (version 99 of the file; this one knows {len(MIGRATIONS)})",
    ),
    "version 0": (filled_then("PRAGMA user_version = 0"), "not those of version 0"),
    "another table": (filled_then("CREATE TABLE notes (text)"), f"not those of version {len(MIGRATIONS)}"),
    "a trigger": (
        filled_then("CREATE TRIGGER t AFTER INSERT ON offers BEGIN DELETE FROM registrations; END"),
        f"not those of version {len(MIGRATIONS)}",
    ),
    "a table less": (filled_then("DROP TABLE offers"), f"not those of version {len(MIGRATIONS)}"),
    "another column": (filled_then("ALTER TABLE offers ADD COLUMN x TEXT"), f"not those of version {len(MIGRATIONS)}"),
    "an edited row": (
        filled_then("UPDATE registrations SET source = 'x'"),
        "row 1 of registrations fails its checksum",
    ),
    "an edited offer": (filled_then("UPDATE offers SET place = 9"), "fails its checksum"),
    "an offer less": (filled_then("DELETE FROM offers WHERE key = 'key-2' AND number = 1"), "row 3 of"),
    "a registration less": (
        filled_then("PRAGMA foreign_keys = OFF", "DELETE FROM registrations WHERE key = 'key-2'"),
        "offers without their registration",
    ),
    "an edited time": (filled_then("UPDATE registrations SET answered_at = 0"), "answered_at in row 1"),
    "an edited proof": (filled_then("UPDATE proofs SET listener = 'x'"), "row 1 of proofs fails its checksum"),
    "no UTF-8": (
        filled_then(f"UPDATE registrations SET callback_url = CAST(x'ff' || '{PASSWORD}' AS TEXT)"),
        "fails its checksum",
    ),
    "no UTF-8 in the schema": (damaged_type_name, "it is damaged: its schema is not UTF-8"),
    "a directory": (no_regular_file, "it is not a regular file"),
    "a pipe": (fifo, "it is not a regular file"),
    "a dangling link": (dangling_link, "it is not a regular file"),
    "a log without its file": (nothing_but_a_log, "is missing, but toolbus.db-wal exists"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_damaged_or_foreign_file_is_refused_with_how_to_fix_it_and_not_changed(tmp_path: Path, case: str) -> None:
    make, expected = BAD_FILES[case]
    make(tmp_path)
    text = refusal(tmp_path)
    assert expected in text
    assert "Nothing was changed." in text
    assert refusal(tmp_path) == text  # the lock was released, and nothing has healed by itself


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"name": 5}', '{"name": ""}', '{"name":"a","annotations":5}'])
def test_a_row_with_a_right_checksum_whose_tool_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    fill(tmp_path, 1)
    row = kept()
    checksum = room._checksum(row.key, row.source, text, row.callback_url, row.checked, row.offers)
    edit(tmp_path, f"UPDATE registrations SET tool = '{text}', checksum = {checksum}")
    assert "the tool in row 1 of registrations cannot be read" in refusal(tmp_path)


def test_the_log_of_another_programs_file_is_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.db"
    with closing(sqlite3.connect(elsewhere, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE notes (text)")
        for ending in ("", "-wal"):
            (tmp_path / (FILE + ending)).write_bytes(Path(f"{elsewhere}{ending}").read_bytes())
    log = (tmp_path / f"{FILE}-wal").read_bytes()
    assert log
    refusal(tmp_path)
    assert (tmp_path / f"{FILE}-wal").read_bytes() == log


def test_a_file_that_another_program_writes_to_is_refused_until_that_is_done(tmp_path: Path) -> None:
    rows = fill(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as connection:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        assert "Close the other program that uses it" in refusal_without_reading(tmp_path)
    assert loaded(tmp_path) == rows


def refusal_without_reading(directory: Path) -> str:
    """As ``refusal``; closing the file in this process would release the locks that SQLite holds on it."""
    with pytest.raises(SetupError) as caught:
        RegistrationStore(directory)
    return str(caught.value)


def test_a_start_that_was_killed_halfway_leaves_nothing_that_counts_as_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (f"{FILE}.new", f"{FILE}.new-journal", f"{FILE}-wal"):
        (tmp_path / name).write_bytes(b"" if name.endswith("-wal") else b"half")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        assert "No space left on device" in refusal(tmp_path)
    assert not (tmp_path / FILE).exists()
    fill(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {FILE, LOCK}


DAMAGES = ("flip", "zero a page", "zero some", "cut", "swap pages")


def damage(data: bytes, how: str, dice: random.Random) -> bytes:
    at, page = dice.randrange(len(data)), 4096 * dice.randrange(len(data) // 4096)
    if how == "flip":
        return data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :]
    if how == "zero a page":
        return data[:page] + bytes(4096) + data[page + 4096 :]
    if how == "zero some":
        size = min(dice.randrange(1, 200), len(data) - at)
        return data[:at] + bytes(size) + data[at + size :]
    if how == "swap pages":
        return data[:page] + data[-4096:] + data[page + 4096 : -4096] + data[page : page + 4096]
    return data[:at]


def test_no_damage_to_the_file_ever_changes_or_loses_a_registration_in_silence(tmp_path: Path) -> None:
    rows = fill(tmp_path, 60)
    path = tmp_path / FILE
    sound = path.read_bytes()
    dice, refused = random.Random(20), 0
    for round_ in range(200):
        how = DAMAGES[round_ % len(DAMAGES)]
        path.write_bytes(damage(sound, how, dice))
        try:
            found = loaded(tmp_path)
        except SetupError:
            refused += 1
        else:
            assert found == rows, f"round {round_}: {how}"
            assert how != "cut", f"round {round_}"
        for ending in ("-wal", "-shm"):
            Path(f"{path}{ending}").unlink(missing_ok=True)
    assert refused > 100


# ── versions ──


def test_a_file_of_an_older_version_is_migrated_with_everything_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = fill(tmp_path)
    more = "ALTER TABLE registrations ADD COLUMN note TEXT; CREATE INDEX by_source ON registrations (source)"
    monkeypatch.setattr(room, "MIGRATIONS", (*MIGRATIONS, more))
    assert loaded(tmp_path) == rows
    assert loaded(tmp_path) == rows
    fill(tmp_path / "new")
    with closing(sqlite3.connect(tmp_path / FILE)) as old, closing(sqlite3.connect(tmp_path / "new" / FILE)) as new:
        for question in ("PRAGMA user_version", "PRAGMA application_id", room._SHAPE):
            assert old.execute(question).fetchall() == new.execute(question).fetchall()
        assert old.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    monkeypatch.undo()
    versions = f"version {len(MIGRATIONS) + 1} of the file; this one knows {len(MIGRATIONS)}"
    assert f"newer toolbus ({versions})" in refusal(tmp_path)


def test_a_file_of_the_first_version_has_registrations_without_listener_and_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = fill(tmp_path)
    edit(tmp_path, "DROP TABLE proofs", "PRAGMA user_version = 1")
    assert loaded(tmp_path) == rows
    with opened(tmp_path) as store:
        store.apply([kept(1, listener="boot:1:2", secret="s" * 16)], ())
    assert [(row.listener, len(row.secret)) for row in loaded(tmp_path)] == [("", 0), ("boot:1:2", 16), ("", 0)]


def test_a_file_that_cannot_be_migrated_stays_as_it_was_and_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = fill(tmp_path)
    bad = "ALTER TABLE registrations ADD COLUMN note TEXT; INSERT INTO nowhere VALUES (1)"
    with monkeypatch.context() as patch:
        patch.setattr(room, "MIGRATIONS", (*MIGRATIONS, bad))
        text = refusal(tmp_path)
    version = len(MIGRATIONS)
    why = f"from version {version} to {version + 1} (no such table: nowhere) and stays at {version}"
    assert f"cannot be migrated {why}" in text
    assert loaded(tmp_path) == rows


# ── kill -9 ──

LOOP = """
import itertools, os, sys
from pathlib import Path
from toolbus.bus.storage.registration_store import StoredRegistration, RegistrationStore
from toolbus.tool import Tool
os.write(1, b"-1\\n")
store = RegistrationStore(Path(sys.argv[1]))
first = len(store.load())
for number in itertools.count(first):
    tool = Tool(f"t{number}")
    row = StoredRegistration(f"key-{number}", "s", tool, "http://127.0.0.1:1/", False, ((None, number),), 0.0)
    store.apply([row], ())
    os.write(1, b"%d\\n" % number)
"""


@pytest.mark.hypothesis  # so that `make thorough` makes more rounds of it
def test_a_kill_at_any_moment_loses_nothing_that_was_persisted(tmp_path: Path) -> None:
    dice, answered = random.Random(9), -1
    for round_ in range(6 * TIMES):
        with python(LOOP, tmp_path) as process:
            assert process.stdout is not None
            for _ in range(dice.choice((1, 2, 3, dice.randrange(4, 400)))):
                answered = max(answered, int(process.stdout.readline()))
            process.send_signal(signal.SIGKILL)
            # What it printed before the signal came has been answered too.
            answered = max([answered, *map(int, process.stdout.read().split())])
        found = [row.key for row in loaded(tmp_path)]
        assert found == [f"key-{number}" for number in range(len(found))]
        assert len(found) - 1 in (answered, answered + 1), f"round {round_}"  # one may be kept and not yet printed
        with closing(sqlite3.connect(tmp_path / FILE)) as connection:
            assert connection.execute("PRAGMA quick_check").fetchall() == [("ok",)]
