"""Tests that what was registered by a callback URL survives whatever is killed: with ``toolbus serve`` as it is run."""

from __future__ import annotations

import base64
import json
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.callbacks import CallbackPlugin, no_text_has
from tests.support.processes import Running, environment, toolbus
from tests.support.waiting import WAIT_SECONDS, until_sync
from toolbus.bus.storage.store import FILE, LOCK

PASSWORD = "s3cret-pass"


class Serve(Running):
    """A bus on free ports, ready."""

    def __init__(self, folder: Path, *words: str | Path, ready: bool = True) -> None:
        super().__init__(folder, "serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", *words)
        self._client: httpx.Client | None = None  # None until asked
        if ready:
            self.says_or_ends("toolbus ready")

    @property
    def grpc(self) -> str:
        return self.out.partition("grpc=")[2].split()[0]

    @property
    def client(self) -> httpx.Client:
        if self._client is None:
            http = self.out.partition("http=")[2].split()[0]
            self._client = httpx.Client(base_url=f"http://{http}", trust_env=False, verify=False, timeout=WAIT_SECONDS)
        return self._client

    def ask(self, verb: str, **body: Any) -> dict[str, Any]:
        answer = self.client.post(f"/api/tools/{verb}", json=body)
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()
        return said

    def listed(self) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = self.client.get("/api/tools").json()["tools_by_role"]
        return found

    def __exit__(self, *error: Any) -> None:
        if self._client is not None:
            self._client.close()
        super().__exit__(*error)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_tools_are_listed_again_after_a_bus_was_ended(tmp_path: Path, end: signal.Signals) -> None:
    options = ("--data-dir", tmp_path / "data", "--role", "A", "--role", "B")
    with CallbackPlugin().come() as plugin:
        with Serve(tmp_path, *options) as bus:
            for number, role in enumerate((None, "B", "", "A", None)):
                bus.ask("register", name=f"t{number}", callback_url=plugin.url(), role=role, timeout_seconds=1 + number)
            wanted = bus.listed()
            assert [tool["name"] for tool in wanted["A"]] == ["t0", "t2", "t3", "t4"]
            bus.send(end)
            assert bus.code() == (0 if end is signal.SIGTERM else -end)
        with Serve(tmp_path, *options) as bus:
            until_sync(lambda: bus.listed() == wanted, "the same list")
            assert plugin.bytes == 0
            called = bus.ask("invoke", name="t4", arguments={"a": 1})
            assert (called["output"], called["is_error"]) == ({"a": 1}, False)


def test_a_killed_plugin_is_back_after_a_kill_of_the_bus_when_it_registers_and_not_before(tmp_path: Path) -> None:
    with CallbackPlugin().come() as plugin:
        with Serve(tmp_path, "--data-dir", tmp_path) as bus:
            bus.ask("register", name="x", callback_url=plugin.url())
            plugin.leave()
            bus.send(signal.SIGKILL)
            bus.code()
        with Serve(tmp_path, "--data-dir", tmp_path) as bus:
            assert bus.listed() == {"default": []}
            error = bus.ask("invoke", name="x", arguments={})["error"]
            assert (error["code"], error["retry_safe"]) == ("UNAVAILABLE", True)
            plugin.come()
            error = bus.ask("invoke", name="x", arguments={"private": 1})["error"]
            assert (error["code"], error["stage"]) == ("UNAVAILABLE", "NOT_DISPATCHED")
            assert bus.listed() == {"default": []}
            assert plugin.bytes == 0
            bus.ask("register", name="x", callback_url=plugin.url())
            assert bus.ask("invoke", name="x", arguments={"a": 1})["output"] == {"a": 1}


def test_a_second_bus_on_a_data_directory_is_refused_and_an_ephemeral_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with CallbackPlugin().come() as plugin, Serve(tmp_path, "--data-dir", folder) as bus:
        bus.ask("register", name="x", callback_url=plugin.url())
        second = toolbus("serve", "--grpc", "127.0.0.1:0", "--http", "off", "--data-dir", folder)
        assert (second.returncode, second.stdout) == (1, "")
        for part in (str(folder), str(bus.process.pid), "--data-dir", "--ephemeral"):
            assert part in second.stderr.replace("\n", ""), second.stderr
        assert "Traceback" not in second.stderr
        before = sorted(path.name for path in folder.iterdir())
        with Serve(tmp_path, "--ephemeral") as beside:
            assert beside.listed() == {"default": []}
            beside.ask("register", name="y", callback_url=plugin.url())
            assert [tool["name"] for tool in beside.listed()["default"]] == ["y"]
        with Serve(tmp_path, "--ephemeral") as beside:
            assert beside.listed() == {"default": []}
        assert sorted(path.name for path in folder.iterdir()) == before
        assert [tool["name"] for tool in bus.listed()["default"]] == ["x"]


def _below_a_file(folder: Path) -> Path:
    (folder / "file").write_text("mine")
    return folder / "file" / "data"


def _a_file(folder: Path) -> Path:
    (folder / "file").write_text("mine")
    return folder / "file"


def _damaged(folder: Path) -> Path:
    (folder / FILE).write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 40)
    return folder


def _no_database(folder: Path) -> Path:
    (folder / FILE).write_text("name,callback_url\n")
    return folder


@pytest.mark.parametrize("make", [_below_a_file, _a_file, _damaged, _no_database], ids=lambda make: make.__name__[1:])
def test_a_data_directory_that_cannot_be_used_ends_the_start_with_how_to_fix_it(tmp_path: Path, make: Any) -> None:
    folder = make(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    ended = toolbus("serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--data-dir", folder)
    assert (ended.returncode, ended.stdout) == (1, "")
    said = ended.stderr.replace("\n", "")
    assert str(folder) in said
    assert "--data-dir" in said
    assert "Traceback" not in said
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != LOCK} == before


def test_a_password_is_sent_after_a_restart_and_shown_nowhere(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    options = ("--data-dir", folder, "--log-level", "debug")
    shown: list[str] = []
    basic = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
    with CallbackPlugin().come() as plugin:
        for restored in (False, True):
            with Serve(tmp_path, *options) as bus:
                if not restored:
                    bus.ask("register", name="x", callback_url=plugin.url("x", f"me:{PASSWORD}@"), source="plugin:p")
                assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o600
                assert not bus.ask("invoke", name="x", arguments={})["is_error"]
                head, _ = plugin.requests.pop()
                assert f"authorization: basic {basic.lower()}" in head
                plugin.leave()
                failures = [json.dumps(bus.ask("invoke", name="x", arguments={})) for _ in range(4)]  # offline at last
                listed = toolbus("list", "--json", "--bus", bus.grpc).stdout
                refused = bus.client.post(
                    "/api/tools/register", json={"name": "", "callback_url": plugin.url("x", f"me:{PASSWORD}@")}
                )
                assert refused.status_code == 422
                plugin.come()
                if restored:  # what was restored trusts nobody who takes its port
                    bus.ask("register", name="x", callback_url=plugin.url("x", f"me:{PASSWORD}@"), source="plugin:p")
                until_sync(lambda: bool(bus.listed()["default"]), "the tool to be back")
                assert not bus.ask("invoke", name="x", arguments={})["is_error"]  # so that it is known after a restart
                shown += [*failures, listed, refused.text, json.dumps(bus.listed())]
                assert "me:***@" in shown[-1]
                bus.send(signal.SIGTERM)
                assert bus.code() == 0
                shown += [bus.out, bus.err]
                assert ("unconfirmed" if restored else "offline") in bus.err
    for secret in (PASSWORD, basic):
        no_text_has(secret, shown)


def test_a_bus_that_serves_no_http_and_keeps_nothing_yet_stays_small(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from toolbus.testing import running_bus\n"
        "async def main():\n"
        "    async with running_bus(data_dir=Path(sys.argv[1])) as bus:\n"
        "        await bus.call('toolbus:stats')\n"
        "        print(*sorted({'aiohttp', 'fastapi', 'starlette', 'uvicorn', 'pydantic', 'yarl'} & {*sys.modules}))\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=30,
        env=environment({}),
        check=True,
    )
    assert ended.stdout.split() == []
