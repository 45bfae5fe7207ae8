"""Tests which paths another user could change: each part of them, its owner and its mode.

Owners are given by the tests, so that these hold for every user; where tests run as root, files really are nobody's.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.other_user import CAN_BE_NOBODY, NOBODY
from toolbus.bus import Bus, Config
from toolbus.bus.storage.store import FILE as REGISTRATIONS
from toolbus.bus.storage.store import LOCK
from toolbus.common.path_ownership import check_path, make_directory
from toolbus.errors import SetupError

Status = Callable[[Path], os.stat_result]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    directory = tmp_path / "above" / "data"
    make_directory(directory, "it")
    return directory


def _owned(uids: dict[Path, int]) -> Status:
    def lstat(part: Path) -> os.stat_result:
        status = list(os.lstat(part))
        status[stat.ST_UID] = uids.get(part, status[stat.ST_UID])
        return os.stat_result(status)

    return lstat


def _refusal(path: Path, owners: dict[Path, int] | None = None) -> str:
    with pytest.raises(SetupError) as failure:
        check_path(path, f"the data directory {path}", lstat=_owned(owners or {}))
    return str(failure.value)


def test_new_directories_are_for_their_owner_only_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_directory(tmp_path / "a" / "b", "it")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700] * 2


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o500])
def test_a_directory_that_others_may_only_read_is_taken(data: Path, mode: int) -> None:
    data.chmod(mode)
    check_path(data, "it")


@pytest.mark.parametrize("mode", [0o777, 0o702, 0o1777])
def test_a_directory_that_others_may_write_is_refused_with_the_command_that_closes_it(data: Path, mode: int) -> None:
    data.chmod(mode)
    text = _refusal(data)
    assert f"may be written by other users (mode {mode:04o})" in text
    assert f"chmod go-w {data}" in text


def test_a_directory_that_a_group_of_several_may_write_is_refused(data: Path) -> None:
    data.chmod(0o770)

    def of_group(part: Path) -> os.stat_result:
        status = list(os.lstat(part))
        status[stat.ST_GID] = 2**31 + 17 if part == data else status[stat.ST_GID]
        return os.stat_result(status)

    with pytest.raises(SetupError, match="mode 0770"):
        check_path(data, "it", lstat=of_group)


def test_a_directory_of_another_user_is_refused_with_the_command_that_takes_it(data: Path) -> None:
    text = _refusal(data, {data: NOBODY})
    assert "it belongs to user nobody (uid 65534)" in text
    assert f"chown -h {os.geteuid()} {data}" in text


def test_a_directory_of_root_is_taken(data: Path) -> None:
    check_path(data, "it", lstat=_owned({data: 0}))


@pytest.mark.parametrize(("mode", "uid"), [(0o777, None), (0o700, NOBODY), (0o1777, NOBODY)])
def test_a_directory_above_that_another_user_may_change_is_refused(data: Path, mode: int, uid: int | None) -> None:
    data.parent.chmod(mode)
    text = _refusal(data, {} if uid is None else {data.parent: uid})
    assert f"it leads through {data.parent}, which" in text


def test_a_directory_like_tmp_where_only_owners_remove_entries_may_be_above(data: Path) -> None:
    data.parent.chmod(0o1777)
    check_path(data, "it")


def test_a_link_of_another_user_is_refused_and_one_of_ours_followed(tmp_path: Path, data: Path) -> None:
    links = tmp_path / "links"
    make_directory(links, "it")
    (links / "first").symlink_to("../links/second")
    (links / "second").symlink_to(data)
    check_path(links / "first", "it")
    assert "links/second, which belongs to" in _refusal(links / "first", {links / "second": NOBODY})
    data.parent.chmod(0o777)  # what a link leads through counts too
    assert f"leads through {data.parent}" in _refusal(links / "first")
    data.parent.chmod(0o700)
    data.chmod(0o777)
    assert "mode 0777" in _refusal(links / "first")


def test_links_that_lead_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises((OSError, RuntimeError)):
        check_path(tmp_path / "circle", "it")


def test_a_file_of_another_user_is_refused(data: Path) -> None:
    file = data / "permissions.json"
    file.write_text("{}")
    check_path(file, "it")
    assert "it belongs to user nobody" in _refusal(file, {file: NOBODY})


def test_a_file_that_others_may_write_counts_where_they_can_reach_it(data: Path) -> None:
    file = data / "permissions.json"
    file.write_text("{}")
    file.chmod(0o666)
    check_path(file, "it")  # its directory is 0700: others never reached it
    data.chmod(0o755)
    assert "mode 0666" in _refusal(file)


def test_a_missing_end_is_taken_and_its_directory_checked(data: Path) -> None:
    check_path(data / "missing", "it")
    data.chmod(0o777)
    assert f"leads through {data}" in _refusal(data / "missing")


# ── the bus ──


def _for_nobody(path: Path) -> None:
    """Gives a path to another user; where tests may not do that, they let all others write to it."""
    if CAN_BE_NOBODY:
        os.chown(path, NOBODY, NOBODY)
    else:
        path.chmod(0o777)


def _start(data_dir: Path, grpc: str = "127.0.0.1:0") -> None:
    async def start() -> None:
        async with Bus(Config(grpc=(grpc,), http="off", data_dir=data_dir)):
            pass

    asyncio.run(start())


def _start_fails(data_dir: Path, grpc: str = "127.0.0.1:0") -> str:
    with pytest.raises(SetupError) as failure:
        _start(data_dir, grpc)
    return str(failure.value)


@pytest.mark.parametrize("which", ["data", "above"])
def test_a_bus_does_not_obey_a_data_directory_that_another_user_may_change(data: Path, which: str) -> None:
    directory = data if which == "data" else data.parent
    directory.chmod(0o777)
    (data / "permissions.json").write_text('{"tools": {"get_weather": ["somebody"]}}')
    assert f"chmod go-w {directory}" in _start_fails(data)
    directory.chmod(0o700)
    _start(data)
    _for_nobody(directory)
    assert str(directory) in _start_fails(data)


@pytest.mark.parametrize("name", ["permissions.json", REGISTRATIONS, f"{REGISTRATIONS}-wal", "tasks.db", LOCK])
def test_a_bus_does_not_obey_a_file_of_another_user_in_its_data_directory(data: Path, name: str) -> None:
    _start(data)
    data.chmod(0o755)
    if not (data / name).exists():
        (data / name).write_text("{}" if name.endswith(".json") else "")
    _for_nobody(data / name)
    assert str(data) in _start_fails(data)


def test_a_lock_that_is_a_link_of_another_user_is_not_written_through(data: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("content")
    (data / LOCK).symlink_to(target)
    if CAN_BE_NOBODY:
        os.lchown(data / LOCK, NOBODY, NOBODY)
    else:
        tmp_path.chmod(0o777)
    _start_fails(data)
    assert target.read_text() == "content"


@pytest.mark.parametrize("which", ["data", "above"])
def test_a_unix_socket_is_not_made_where_another_user_could_replace_it(data: Path, which: str) -> None:
    directory = data if which == "data" else data.parent
    _for_nobody(directory)
    text = _start_fails(data.parent.parent / "own", f"unix:{data}/bus.sock")
    assert "of the socket" in text
    assert not list(data.iterdir())


def test_a_unix_socket_is_not_made_through_a_link_of_another_user(data: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(data)
    if CAN_BE_NOBODY:
        os.lchown(link, NOBODY, NOBODY)
    else:
        data.parent.chmod(0o777)
    assert "of the socket" in _start_fails(tmp_path / "own", f"unix:{link}/bus.sock")
