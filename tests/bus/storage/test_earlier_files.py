"""The files of releases before `bus.db`: all that they hold is in the store after the first start, whatever ends it.

`data/` has the data directories of two buses of such a release: `killed` (kill -9: most of it is in the logs) and
`stopped`, each with what that release itself read from them (`.json`).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.bus.storage.store_cases import edit_file
from tests.support.examples import TIMES
from tests.support.processes import environment
from toolbus.bus.operators.grants import PERMISSIONS
from toolbus.bus.roles import ROLES
from toolbus.bus.storage.registration_store import REGISTRATIONS, RegistrationStore
from toolbus.bus.storage.store import KEPT, Kind, Store
from toolbus.errors import SetupError
from toolbus.parts.mcp.client.offer import MOUNTS, MountManifest
from toolbus.parts.mcp.server.mcp_listing import NAMES
from toolbus.parts.moving.upstream.ownership import UPSTREAM
from toolbus.parts.pins.pins import FINGERPRINTS
from toolbus.parts.tasks.task import Status, Task
from toolbus.parts.tasks.task_store import TASKS, TaskStore

DATA = Path(__file__).parent / "data"
KINDS: tuple[Kind, ...] = (REGISTRATIONS, PERMISSIONS, ROLES, TASKS, FINGERPRINTS, MOUNTS, UPSTREAM, NAMES)


def unpacked(directory: Path, name: str) -> dict[str, Any]:
    """Fills a data directory. Returns what the release that wrote it read from it."""
    directory.mkdir(mode=0o700)
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    expected: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return expected


def opened(directory: Path) -> Store:
    store = Store.of(directory)
    store.open()
    return store


def everything(directory: Path) -> dict[str, Any]:
    with closing(opened(directory)) as store:
        return {kind.name: store.load(kind) for kind in KINDS}


@pytest.fixture(params=["killed", "stopped"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_registrations_are_those_of_the_earlier_release(tmp_path: Path, name: str) -> None:
    expected = unpacked(tmp_path / "data", name)["registrations"]
    for _ in range(2):
        with closing(opened(tmp_path / "data")) as store:
            found = [dataclasses.asdict(record) for record in RegistrationStore(store).load()]
        for record, each in zip(found, expected, strict=True):
            record["tool"] = {name: record["tool"][name] for name in each["tool"]}  # not those that are new since
        assert json.loads(json.dumps(found)) == expected


def test_roles_and_permissions_are_those_of_the_earlier_release(tmp_path: Path, name: str) -> None:
    expected = unpacked(tmp_path / "data", name)
    found = everything(tmp_path / "data")
    assert [list(each) for each in found["roles"].items()] == expected["roles"]["roles"]
    tables: dict[str, dict[str, Any]] = {}
    for key, value in found["permissions"].items():
        table, row = json.loads(key)
        tables.setdefault(table, {})[row] = value
    assert tables == expected["permissions"]


def test_fingerprints_mounts_and_names_are_those_of_the_earlier_release(tmp_path: Path, name: str) -> None:
    expected = unpacked(tmp_path / "data", name)
    found = everything(tmp_path / "data")
    for kind, table in (("pins", "pins"), ("mounts", "mcp_pins")):
        rows = [[*json.loads(key), *each.values()] for key, each in found[kind].items() if "approved" in each]
        assert rows == expected[table]
    assert any(row[4] for row in expected["pins"]), "one waits for an approval"
    with closing(opened(tmp_path / "data")) as store:
        manifest = MountManifest(store)
        for mount, command, peer, declarations in expected["mcp_servers"]:
            server = manifest.load(mount, command)
            assert server is not None
            assert (server.peer, server.declarations) == (json.loads(peer), json.loads(declarations))
            assert not manifest.is_new(mount, command)
    assert found["upstream"] == expected["upstream"]
    assert found["mcp_names"] == expected["mcp-names"]


def as_listed(task: Task) -> dict[str, Any]:
    fields = {item.name: getattr(task, item.name) for item in dataclasses.fields(task)}
    return {**fields, "result": None if task.result is None else task.result.output_json}


def test_tasks_are_those_of_the_earlier_release(tmp_path: Path, name: str) -> None:
    expected = unpacked(tmp_path / "data", name)["tasks"]
    for _ in range(2):
        with closing(opened(tmp_path / "data")) as store, closing(TaskStore(store, 1 << 20)) as tasks:
            assert [as_listed(task) for task in tasks.load()] == expected
    assert {each["status"] for each in expected} >= {Status.COMPLETED, Status.FAILED}


def test_a_file_of_tasks_alone_that_an_earlier_release_wrote_is_taken_over_under_its_name(
    tmp_path: Path, name: str
) -> None:
    expected = unpacked(tmp_path / "data", name)["tasks"]
    path = tmp_path / "data" / "tasks.db"
    for _ in range(2):
        with closing(TaskStore(path, 1 << 20)) as tasks:
            assert [as_listed(task) for task in tasks.load()] == expected
    assert path.with_name(f"tasks.db.former{KEPT}").exists()


def test_a_damaged_task_of_an_earlier_release_costs_itself_and_a_damaged_file_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    unpacked(data, "stopped")
    edit_file(data / "tasks.db", "UPDATE tasks SET ended = 1 WHERE rowid = (SELECT min(rowid) FROM tasks)")
    with closing(opened(data)) as store:
        assert len(store.load(TASKS)) == 3
    assert "a task in" in caplog.text
    other = tmp_path / "other"
    unpacked(other, "stopped")
    whole = (other / "tasks.db").read_bytes()
    (other / "tasks.db").write_bytes(whole[:4096] + b"\xa5" * 2000 + whole[6096:])
    with closing(opened(other)) as store:
        assert store.load(TASKS) == {}
        assert store.lost == {"tasks"}
    assert "tasks.db is damaged" in caplog.text


def test_files_stay_as_a_backup_and_are_not_read_again(tmp_path: Path, name: str) -> None:
    data = tmp_path / "data"
    unpacked(data, name)
    files = {kind.earlier.file for kind in KINDS if kind.earlier is not None}
    before = {path.name: path.read_bytes() for path in data.iterdir()}
    first = everything(data)
    assert not any((data / file).exists() for file in files)
    for file in files:  # with its log, so that the earlier release can use it again
        for suffix in ("", "-wal"):
            kept = data / f"{file}{KEPT}{suffix}"
            assert (kept.read_bytes() if kept.exists() else b"") == before.get(f"{file}{suffix}", b"")
    assert everything(data) == first


def test_a_bus_that_goes_back_to_the_earlier_release_and_returns_gets_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    unpacked(data, "stopped")
    first = everything(data)
    for kind in KINDS:
        assert kind.earlier is not None
        (data / kind.earlier.file).write_bytes(b"written since")
    with caplog.at_level(logging.WARNING):
        assert everything(data) == first
    assert [text.partition(" is not used")[0] for text in caplog.messages] == [
        str(data / kind.earlier.file) for kind in KINDS if kind.earlier is not None
    ]
    assert all((data / kind.earlier.file).exists() for kind in KINDS if kind.earlier is not None)


DAMAGES = {
    "a byte of a value": "UPDATE registrations SET source = 'x' WHERE rowid = 1",
    "a place": "UPDATE offers SET place = 9",
    "a time": "UPDATE registrations SET answered_at = 0",
    "a secret": "UPDATE proofs SET secret = 'x'",
    "offers alone": "DELETE FROM registrations WHERE rowid = 1",
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_registrations_are_refused_and_nothing_changes(tmp_path: Path, case: str) -> None:
    data = tmp_path / "data"
    unpacked(data, "stopped")
    edit_file(data / "toolbus.db", DAMAGES[case])
    before = (data / "toolbus.db").read_bytes()
    for _ in range(2):
        with closing(opened(data)) as store:
            with pytest.raises(SetupError, match=r"toolbus.db is damaged .* move it away to start with none") as caught:
                store.load(REGISTRATIONS)
            assert "0123456789abcdef" not in str(caught.value)
    assert (data / "toolbus.db").read_bytes() == before
    (data / "toolbus.db").unlink()
    with closing(opened(data)) as store:
        assert store.load(REGISTRATIONS) == {}


def test_a_file_of_the_first_version_has_registrations_without_listener_and_secret(tmp_path: Path) -> None:
    data = tmp_path / "data"
    expected = unpacked(data, "stopped")["registrations"]
    edit_file(data / "toolbus.db", "DROP TABLE proofs", "PRAGMA user_version = 1")
    with closing(opened(data)) as store:
        records = RegistrationStore(store).load()
    assert [record.key for record in records] == [each["key"] for each in expected]
    assert {(record.listener, record.secret) for record in records} == {("", "")}


KILLS = """
import os, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from tests.bus.storage.test_earlier_files import everything, unpacked

folder, points = Path(sys.argv[1]), int(sys.argv[2])


def start(directory, stop_after):
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        if frame.f_code.co_filename.endswith(("store.py", "database.py", "pathlib.py", "shutil.py")):
            calls += 1
            if calls == stop_after:
                os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        sys.setprofile(count)
        everything(directory)
        sys.setprofile(None)
        (folder / "calls").write_text(str(calls))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


for name in ("killed", "stopped"):
    unpacked(folder / name, name)
    shutil.copytree(folder / name, folder / "whole")
    assert start(folder / "whole", 0) == 0
    wanted, total = everything(folder / "whole"), int((folder / "calls").read_text())
    for point in range(points):
        shutil.copytree(folder / name, folder / "cut")
        at = 1 + (total - 1) * point // points
        assert start(folder / "cut", at) == -signal.SIGKILL
        if point % 3 == 0:  # and the second start, too
            start(folder / "cut", at)
        assert everything(folder / "cut") == wanted, (name, at)
        shutil.rmtree(folder / "cut")
    shutil.rmtree(folder / "whole")
print("same")
"""


@pytest.mark.hypothesis  # so that `make thorough` kills it at more points
def test_a_migration_that_is_killed_at_any_point_is_repeated_and_loses_nothing(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path), str(12 * TIMES)],
        capture_output=True,
        text=True,
        env=environment({}),
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert ended.stdout == "same\n", ended.stderr
