"""Tests files that only this user may see: what is refused, and what is left when a writer is killed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from toolbus.bus.keys.private_files import (
    MAX_FILE,
    check_directory,
    locked,
    make_directory,
    prepared,
    read_private,
    stamp_of,
    write_private,
)
from toolbus.errors import SetupError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_directory(tmp_path / "deep" / "keys")
    return tmp_path / "deep" / "keys"


def test_a_new_directory_and_its_files_are_ours_alone(folder: Path) -> None:
    old = os.umask(0)
    try:
        write_private(folder / "a", b"secret")
    finally:
        os.umask(old)
    assert [each.stat().st_mode & 0o777 for each in (folder.parent, folder, folder / "a")] == [0o700, 0o700, 0o600]
    assert read_private(folder / "a") == (b"secret", stamp_of(folder / "a"))
    assert [path.name for path in folder.iterdir()] == ["a"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_may_use_is_refused_with_the_command(folder: Path, mode: int) -> None:
    write_private(folder / "a", b"secret")
    (folder / "a").chmod(mode)
    with pytest.raises(SetupError, match=f"has mode 0{mode:o}, others must have no access to it: run `chmod 600 "):
        read_private(folder / "a")


def test_a_directory_that_others_may_enter_is_refused_with_the_command(folder: Path) -> None:
    folder.chmod(0o750)
    for use in (check_directory, make_directory, lambda folder: locked(folder).__enter__()):
        with pytest.raises(SetupError, match="has mode 0750, others must have no access to it: run `chmod 700 "):
            use(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_belongs_to_another_user_is_refused(folder: Path) -> None:
    write_private(folder / "a", b"secret")
    os.chown(folder / "a", 65534, -1)
    with pytest.raises(SetupError, match="belongs to user 65534, it must belong to the user of this process"):
        read_private(folder / "a")
    os.chown(folder, 65534, -1)
    with pytest.raises(SetupError, match="keys belongs to user 65534"):
        check_directory(folder)


def test_a_directory_that_others_could_replace_is_refused(folder: Path) -> None:
    folder.parent.chmod(0o777)
    for use in (check_directory, make_directory):
        with pytest.raises(SetupError, match=r"leads through .*/deep, which may be written by other users"):
            use(folder)


def test_what_is_missing_large_or_no_file_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="does not exist: make keys with `toolbus keys init"):
        read_private(folder / "a")
    with pytest.raises(SetupError, match="does not exist"):
        check_directory(tmp_path / "none")
    write_private(folder / "a", b"x" * (MAX_FILE + 1))
    with pytest.raises(SetupError, match="is larger than 4 MiB"):
        read_private(folder / "a")
    with pytest.raises(SetupError, match="is not a directory"):
        check_directory(folder / "a")
    os.mkfifo(folder / "pipe", 0o600)
    with pytest.raises(SetupError, match="is not a regular file"):
        read_private(folder / "pipe")
    with pytest.raises(SetupError, match=r"cannot be written: .*: let this user write"):
        write_private(tmp_path / "none" / "a", b"")
    with pytest.raises(SetupError, match="cannot be made"):
        make_directory(folder / "a" / "b")


def test_who_reads_a_file_while_it_is_replaced_gets_the_old_content_or_the_new_one(folder: Path) -> None:
    write_private(folder / "a", b"old")
    with open(folder / "a", "rb") as reading:
        write_private(folder / "a", b"new")
        assert reading.read() == b"old"
    assert read_private(folder / "a")[0] == b"new"


def test_a_file_that_was_not_moved_is_removed(folder: Path) -> None:
    with prepared(folder / "a", b"x") as complete:
        assert complete.read_bytes() == b"x"
    assert list(folder.iterdir()) == []


def test_what_a_killed_writer_left_is_removed_by_the_next_one(folder: Path) -> None:
    (folder / ".keys.toml.abcd.tmp").write_text("half")
    with locked(folder):
        assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_second_writer_waits_for_the_first_and_fails_if_it_does_not_end(folder: Path) -> None:
    with locked(folder), pytest.raises(SetupError, match=r"another program has changed .* for 0.05 seconds"):
        locked(folder, 0.05).__enter__()
    entered, leave, order = threading.Event(), threading.Event(), []

    def first() -> None:
        with locked(folder):
            entered.set()
            leave.wait()
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait()
    threading.Timer(0.05, leave.set).start()
    with locked(folder):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
