"""The store of tasks: they are restored after any end of the process, and a damaged file stops no start."""

from __future__ import annotations

import logging
import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parts.tasks.samples import finished, running
from tests.support.examples import examples
from toolbus.bus.storage.store import APPLICATION_ID, Store
from toolbus.errors import SetupError
from toolbus.functions.reply import image
from toolbus.parts.tasks.task import Task
from toolbus.parts.tasks.task_store import TASKS, TaskStore
from toolbus.protocol.tool import KIB, Result


@contextmanager
def opened(path: Path, result_bytes: int = KIB) -> Iterator[TaskStore]:
    with closing(TaskStore(path, result_bytes)) as store:
        yield store


def loaded(path: Path) -> list[Task]:
    with opened(path) as store:
        return list(store.load())


def fill(path: Path, *tasks: Task) -> None:
    with opened(path) as store:
        for task in tasks:
            store.put(task)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "tasks.db"


def test_every_field_of_a_task_comes_back_as_it_was(path: Path) -> None:
    result = Result("task_1", '{"天気":"☀"}', content=(image(b"\x00\xff"),))
    task = Task("task_1", "天気", "猫", 1.25, channel_id="#a", platform="matrix").with_result(result, 2.5)
    failed = Task("task_2", "t", "", 3.0).with_error("no \0 'quotes'\n", 4.0)
    fill(path, task, failed)
    assert loaded(path) == [task, failed]


def test_finished_tasks_come_back_in_the_order_of_their_ends_and_running_ones_last(path: Path) -> None:
    tasks = [running("a"), finished("b", ended=9.0), finished("c", ended=3.0), running("d")]
    fill(path, *tasks)
    assert [task.task_id for task in loaded(path)] == ["c", "b", "a", "d"]


def test_the_last_word_about_a_task_counts(path: Path) -> None:
    with opened(path) as store:
        store.put(running("a"))
        store.put(running("b"))
        store.put(finished("a"))
        store.remove(["b", "never"])
        assert store.flush()
        store.put(running("c"))
    assert loaded(path) == [finished("a"), running("c")]


def test_a_result_that_is_too_large_for_the_disk_is_left_out_with_the_reason(path: Path) -> None:
    large = finished(output_json='"' + "x" * 2000 + '"')
    fill(path, large)
    (task,) = loaded(path)
    assert (task.status, task.result) == ("completed", None)
    assert "its result of 2002 bytes was dropped: it is larger than the limit result_bytes" in task.text


def test_the_file_is_its_owners_alone(path: Path) -> None:
    with opened(path) as store:
        store.put(running())
        assert store.flush()
        modes = {part.name: stat.S_IMODE(part.stat().st_mode) for part in path.parent.iterdir()}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_that_came_back_readable_by_others_is_taken_from_them(path: Path) -> None:
    fill(path, finished())
    path.chmod(0o644)
    assert loaded(path) == [finished()]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_empty_file_is_what_a_killed_program_left(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    fill(path, finished())
    assert loaded(path) == [finished()]


def test_a_second_program_cannot_use_the_file(path: Path) -> None:
    with opened(path), pytest.raises(SetupError, match="Close the other program that uses it, or name another"):
        TaskStore(path, KIB)
    assert loaded(path) == []


@pytest.mark.parametrize("where", [100, 4096, 12288])
def test_a_damaged_file_is_moved_aside_and_logged(path: Path, where: int, caplog: pytest.LogCaptureFixture) -> None:
    fill(path, *(finished(f"task_{number}", output_json='"' + "x" * 800 + '"') for number in range(20)))
    sound = path.read_bytes()
    damaged = sound[:where] + b"\xa5" * 2000 + sound[where + 2000 :]
    path.write_bytes(damaged)
    with opened(path) as store, caplog.at_level(logging.ERROR):
        assert len(list(store.load())) < 20  # what could be read
        store.put(finished("new", ended=99.0))
    assert loaded(path)[-1].task_id == "new"
    assert "is damaged" in caplog.text
    assert "xxx" not in caplog.text
    assert Path(f"{path}.damaged").read_bytes() == damaged


def test_a_flipped_byte_costs_its_own_row_only(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(path, finished("a"), finished("b", owner="abcdefgh"), finished("c"))
    path.write_bytes(path.read_bytes().replace(b"abcdefgh", b"abcdefgi"))
    assert [task.task_id for task in loaded(path)] == ["a", "c"]
    assert "row 2 of tasks fails its checksum is left out" in caplog.text
    caplog.clear()
    assert [task.task_id for task in loaded(path)] == ["a", "c"]
    assert not caplog.text  # it was taken out


def edit(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(statement)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (
            "PRAGMA user_version = 99",
            r"a newer toolbus \(version 99 of the file; this one knows 1\).* Use that toolbus",
        ),
        ("PRAGMA application_id = 7", r"another program \(application_id 0x7\)"),
    ],
    ids=["newer", "foreign"],
)
def test_a_file_that_is_not_ours_to_replace_is_refused_and_left(path: Path, statement: str, words: str) -> None:
    fill(path, finished())
    edit(path, statement)
    before = path.read_bytes()
    with pytest.raises(SetupError, match=words):
        TaskStore(path, KIB)
    assert path.read_bytes() == before


def test_a_file_that_is_not_sqlite_is_refused_and_left(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("my thesis")
    with pytest.raises(SetupError, match=r"not an SQLite file.* Move it away or name another file"):
        TaskStore(path, KIB)
    assert path.read_text() == "my thesis"


def test_a_path_that_cannot_be_written_is_refused_with_how_to_fix_it(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"it is not a regular file.* Name another file"):
        TaskStore(tmp_path, KIB)


def test_whose_file_it_is_stands_in_its_header_from_the_start(path: Path) -> None:
    with opened(path):
        assert int.from_bytes(path.read_bytes()[68:72], "big") == APPLICATION_ID


def test_what_a_full_disk_did_not_take_is_written_when_there_is_room_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(path, result_bytes=10**6) as store:
        store.put(finished("first"))
        assert store.flush()
        connection = store._store._driver._connection  # type: ignore[attr-defined]
        limit = connection.execute("PRAGMA page_count").fetchone()[0] + 2
        connection.execute(f"PRAGMA max_page_count = {limit}")
        for number in range(3):
            store.put(finished(f"task_{number}", output_json='"' + "x" * 50_000 + '"'))
        assert not store.flush(timeout=0.05)
        assert not store.flush(timeout=0.05)
        assert caplog.text.count("tasks cannot be written") == 1
        assert "database or disk is full" in caplog.text
        connection.execute("PRAGMA max_page_count = 100000")
        store.remove(["task_1"])
        assert store.flush()
    assert [task.task_id for task in loaded(path)] == ["first", "task_0", "task_2"]


def test_a_task_that_cannot_be_written_costs_no_other(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(path, finished("a", output_json='"\ud800"'), finished("b"))
    assert loaded(path) == [finished("b")]
    assert "<Task a report completed> cannot be written: UnicodeEncodeError" in caplog.text


def test_tasks_in_the_store_of_a_bus_come_back_and_leave_it_open(tmp_path: Path) -> None:
    for round_ in range(2):
        with closing(Store.of(tmp_path)) as place:
            place.open()
            with closing(TaskStore(place, KIB)) as store:
                assert list(store.load()) == [finished("a")] * round_
                store.put(finished("a"))
            assert list(place.load(TASKS)) == ["a"]


def test_large_results_are_written_in_several_transactions(path: Path) -> None:
    tasks = [finished(f"task_{number}", ended=number, output_json='"' + "x" * 400_000 + '"') for number in range(9)]
    with opened(path, result_bytes=10**6) as store:
        for task in tasks:
            store.put(task)
        store.remove(["task_3"])
    with opened(path) as store:
        assert list(store.load()) == [*tasks[:3], *tasks[4:]]


def test_threads_may_all_write_at_once(path: Path) -> None:
    with opened(path) as store:

        def work(letter: str) -> None:
            for number in range(50):
                store.put(running(f"{letter}{number}"))
                store.put(finished(f"{letter}{number}"))

        threads = [threading.Thread(target=work, args=(letter,)) for letter in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {task.status for task in loaded(path)} == {"completed"}
    assert len(loaded(path)) == 200


TIMES = st.floats(allow_nan=False, allow_infinity=False)
IDS = st.sampled_from(["a", "b", "c"])
CHANGES = st.one_of(
    st.builds(running, IDS, st.text(max_size=5)),
    st.builds(
        finished,
        IDS,
        ended=st.floats(allow_nan=False, allow_infinity=False),
        output_json=st.sampled_from(["1", '"ä"', "no json"]),
    ),
    IDS,
)


@settings(max_examples=examples(10))
@given(st.lists(st.tuples(CHANGES, st.booleans()), max_size=8))
def test_any_history_leaves_what_a_dict_would_hold(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[Task | str, bool]]
) -> None:
    path = tmp_path_factory.mktemp("shelf") / "tasks.db"
    model: dict[str, Task] = {}
    store = TaskStore(path, KIB)
    for change, restart in history:
        if isinstance(change, str):
            model.pop(change, None)
            store.remove([change])
        else:
            model[change.task_id] = change
            store.put(change)
        if restart:
            store.close()
            store = TaskStore(path, KIB)
    store.close()
    assert {task.task_id: task for task in loaded(path)} == model
