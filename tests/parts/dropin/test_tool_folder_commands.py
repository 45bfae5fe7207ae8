"""``toolbus run DIR`` and ``toolbus serve --tools-dir DIR``: what they print and leave."""

import json
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.processes import Running, alive, toolbus
from tests.support.tool_folders import slow, tool
from tests.support.waiting import until_sync
from toolbus.errors import Code
from toolbus.sdk import SyncHost

HANGS = tool("one", "1", "import time; time.sleep(60)")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "a.py").write_text(tool("one", "1"))
    return folder


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[str]:
    with Running(tmp_path, "serve", "--ephemeral", "--http", "off", "--grpc", "127.0.0.1:0") as running:
        yield _address(running)
        running.send(signal.SIGTERM)
        assert running.code() == 0


def _serve(tmp_path: Path, *words: str | Path, grpc: str = "127.0.0.1:0") -> Running:
    return Running(tmp_path, "serve", "--ephemeral", "--http", "off", "--grpc", grpc, *words)


def _address(running: Running) -> str:
    running.says("toolbus ready")
    until_sync(lambda: running.out.endswith("\n"), "the whole line")
    return str(re.findall(r"grpc=(\S+)", running.out)[0])


def _pids(running: Running, count: int = 1) -> list[int]:
    until_sync(lambda: len(re.findall(r"started \(pid \d+", running.err)) >= count, "the start")
    return [int(pid) for pid in re.findall(r"started \(pid (\d+)", running.err)]


def _call(address: str, name: str) -> object:
    with SyncHost(address) as host:
        result = host.call(name, {}, timeout=10.0)
        return result.error or result.output


def test_run_offers_a_folder_and_prints_its_events(tmp_path: Path, tools: Path, bus: str) -> None:
    (tools / "bad.py").write_text("1/0")
    with Running(tmp_path, "run", tools, "--bus", bus) as running:
        running.says("dropin#1 * offers one (")
        assert "tools    | bad.py: ZeroDivisionError: division by zero (line 1)\n" in running.err
        assert re.search(r"^dropin#1 \* started \(pid \d+\)$", running.err, re.MULTILINE)
        assert running.out == ""
        assert _call(bus, "one") == "1"
        running.send(signal.SIGTERM)
        assert running.code() == 0
        assert "dropin#1 * ended (exit code 0)\n" in running.err


KEYS = """import os
TOOL_NAME, TOOL_DESCRIPTION = "keys", "Names its keys."
def run(): return [name for name in ("GRANTED", "OTHER") if name in os.environ]
"""


def test_a_file_of_secrets_gives_each_file_what_the_manifest_grants_it(tmp_path: Path, tools: Path, bus: str) -> None:
    (tools / "a.py").write_text(KEYS)
    (tools / "_manifest.json").write_text('{"files": {"a.py": {"secrets": ["GRANTED"]}}}')
    secrets = tmp_path / "secrets.toml"
    secrets.write_text('GRANTED = "1"\nOTHER = "2"\n')
    secrets.chmod(0o644)
    refused = toolbus("run", tools, "--bus", bus, "--secrets", secrets)
    assert (refused.returncode, "chmod 600" in refused.stderr) == (2, True)
    secrets.chmod(0o600)
    with Running(tmp_path, "run", tools, "--bus", bus, "--secrets", secrets) as running:
        running.says("offers keys (")
        assert _call(bus, "keys") == ["GRANTED"]
        running.send(signal.SIGTERM)
        assert running.code() == 0


def test_run_prints_everything_as_json_lines(tmp_path: Path, tools: Path, bus: str) -> None:
    (tools / "a.py").write_text(tool("one", "1", "print('hello')"))
    with Running(tmp_path, "run", tools, "--bus", bus, "--json") as running:
        running.says('"offered"')
        running.send(signal.SIGINT)
        assert running.code() == 0
        events = [json.loads(line) for line in running.out.splitlines()]
        assert [event["event"] for event in events] == ["started", "output", "offered", "ended"]
        assert events[1] == {"plugin": "dropin#1", "event": "output", "stream": "stdout", "text": "hello"}
        assert running.err == ""


def test_a_process_that_was_given_up_is_exit_code_1(tmp_path: Path, tools: Path, bus: str) -> None:
    (tools / "a.py").write_text("import os\nos._exit(3)\n")
    with Running(tmp_path, "run", tools, "--once", "--bus", bus) as running:
        running.says("dropin#1 * died (exit code 3)")
        running.send(signal.SIGTERM)
        assert running.code() == 1


def test_the_exit_code_is_0_again_once_the_file_is_fixed(tmp_path: Path, tools: Path, bus: str) -> None:
    (tools / "a.py").write_text("import os\nos._exit(3)\n")
    with Running(tmp_path, "run", tools, "--once", "--bus", bus) as running:
        running.says("dropin#1 * died (exit code 3)")
        (tools / "a.py").write_text(tool("one", "1"))
        running.says("dropin#2 * offers one")
        running.send(signal.SIGTERM)
        assert running.code() == 0


def test_a_folder_beside_files_is_wrong_usage(tools: Path) -> None:
    ended = toolbus("run", tools, tools / "a.py")
    assert ended.returncode == 2
    assert (
        "is a folder of drop-in tools, since neither it nor a folder in it has a plugin.toml: name it alone"
        in ended.stderr
    )


def test_serve_refuses_a_missing_folder(tmp_path: Path) -> None:
    ended = toolbus("serve", "--tools-dir", tmp_path / "none")
    assert ended.returncode == 2
    assert "is not a folder: create it or name another one" in ended.stderr


def test_require_manifest_loads_nothing_without_one(tmp_path: Path, tools: Path, bus: str) -> None:
    with Running(tmp_path, "run", tools, "--require-manifest", "--bus", bus) as running:
        running.says("has no _manifest.json, so no file of it may be loaded")
        assert "dropin#1 * started" not in running.err
        (tools / "_manifest.json").write_text('{"allow": ["a.py"]}')
        running.says("dropin#1 * offers one")


@pytest.mark.parametrize("command", ["run", "serve"])
@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_finishes_calls_and_a_second_one_ends_them(
    tmp_path: Path, tools: Path, command: str, signals: int
) -> None:
    scratch = tools / "scratch"
    scratch.mkdir()
    (tools / "_manifest.json").write_text(json.dumps({"files": {"a.py": {"write": ["scratch"]}}}))
    (tools / "a.py").write_text(slow("slow", "done", scratch))
    words = ("--tools-dir", tools) if command == "serve" else ()
    with ExitStack() as ends:
        bus = owner = ends.enter_context(_serve(tmp_path, *words))
        address = _address(bus)
        if command == "run":
            owner = ends.enter_context(Running(tmp_path, "run", tools, "--bus", address))
        owner.says("offers slow")
        (pid,) = _pids(owner)
        calling = ends.enter_context(ThreadPoolExecutor()).submit(_call, address, "slow")
        until_sync((scratch / "called").exists, "the call")
        owner.send(signal.SIGTERM)
        if signals == 2:
            bus.says("draining" if owner is bus else "draining source=dropin:a")
            owner.send(signal.SIGTERM)
            assert getattr(calling.result(), "code", None) is Code.UNAVAILABLE
        else:
            (scratch / "go").touch()
            assert calling.result() == "done"
        assert owner.code() == 0
        assert not alive(pid)


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path, tools: Path, bus: str) -> None:
    with Running(tmp_path, "run", tools, "--bus", bus) as running:
        running.says("offers one")
        (pid,) = _pids(running)
        running.send(signal.SIGKILL)
        running.code()
        until_sync(lambda: not alive(pid), "the end of the process")


def test_a_process_that_is_still_loading_does_not_outlive_a_killed_supervisor(
    tmp_path: Path, tools: Path, bus: str
) -> None:
    (tools / "a.py").write_text(HANGS)
    with Running(tmp_path, "run", tools, "--bus", bus) as running:
        (pid,) = _pids(running)
        running.send(signal.SIGKILL)
        running.code()
        until_sync(lambda: not alive(pid), "the end of the process")


def test_nothing_outlives_a_killed_bus_and_the_next_one_has_the_tools_again(tmp_path: Path, tools: Path) -> None:
    with _serve(tmp_path, "--tools-dir", tools) as running:
        address = _address(running)
        running.says("offers one")
        (pid,) = _pids(running)
        running.send(signal.SIGKILL)
        running.code()
        until_sync(lambda: not alive(pid), "the end of the process")
    with _serve(tmp_path, "--tools-dir", tools, grpc=address) as running:
        running.says("offers one")
        assert _call(address, "one") == "1"


@pytest.mark.parametrize("taken", [False, True], ids=["its port is free", "its port is in use"])
def test_a_folder_is_offered_again_after_the_bus_restarts(tmp_path: Path, tools: Path, taken: bool) -> None:
    with _serve(tmp_path) as first, Running(tmp_path, "run", tools, "--bus", address := _address(first)) as running:
        running.says("offers one")
        dropin_address = _call(address, "toolbus:dropin_address")
        first.send(signal.SIGKILL)
        first.code()
        with ExitStack() as ends:
            if taken:
                host, _, port = str(dropin_address).rpartition(":")
                ends.enter_context(socket.create_server((host, int(port))))
            second = ends.enter_context(_serve(tmp_path, grpc=address))
            second.says("attached source=dropin")
            assert _call(address, "one") == "1"
            assert (_call(address, "toolbus:dropin_address") == dropin_address) is not taken
            old, *new = _pids(running)
            assert len(new) == int(taken)
            until_sync(lambda: alive(old) is not taken, "the end of the process that knew the other port")
            running.send(signal.SIGTERM)
            assert running.code() == 0


def test_run_waits_for_a_bus_and_reports_it(tmp_path: Path, tools: Path) -> None:
    with _serve(tmp_path) as first:
        address = _address(first)
    with Running(tmp_path, "run", tools, "--bus", address) as running:
        running.says(f"not attached to the bus at {address} yet")
        assert "dropin#1 * started" not in running.err
        with _serve(tmp_path, grpc=address):
            running.says("offers one")
            assert _call(address, "one") == "1"


def test_a_folder_is_run_for_a_bus_on_a_unix_socket(tmp_path: Path, tools: Path) -> None:
    home = tmp_path / "bus"
    with _serve(tmp_path, grpc=f"unix:{home}/bus.sock") as first:
        address = _address(first)
        with Running(tmp_path, "run", tools, "--bus", address) as running:
            running.says("offers one")
            assert _call(address, "one") == "1"


def test_a_process_does_not_know_the_address_of_the_bus_itself(tmp_path: Path, tools: Path, bus: str) -> None:
    knows = "import os; print('KNOWS', dict(os.environ), flush=True)"
    (tools / "a.py").write_text(tool("one", "1", knows))
    with Running(tmp_path, "run", tools, "--bus", bus, TOOLBUS_ADDRESS=bus) as running:
        running.says("offers one")
        (line,) = re.findall("KNOWS .*", running.out)
        assert bus not in line
        assert str(_call(bus, "toolbus:dropin_address")) in line


def test_serve_logs_the_reports_of_its_tools(tmp_path: Path, tools: Path) -> None:
    with _serve(tmp_path, "--tools-dir", tools, "--json") as running:
        running.says("offers one")
        (pid,) = _pids(running)
        running.send(signal.SIGTERM)
        assert running.code() == 0
        assert [json.loads(line)["event"] for line in running.out.splitlines()] == ["ready", "draining", "stopped"]
        assert re.search(r" info toolbus\.dropin: dropin#1: offers one \(", running.err)
        assert not alive(pid)
        assert "Traceback" not in running.err


def test_serve_logs_lines_of_its_tools_at_their_own_level(tmp_path: Path, tools: Path) -> None:
    speaks = """
import logging, sys
log = logging.getLogger("speaks")
log.setLevel(logging.DEBUG)
log.info("a word")
log.error("a fault")
print("INFO", file=sys.stderr)
print("no level", file=sys.stderr)
"""
    (tools / "a.py").write_text(tool("one", "1", speaks))
    with _serve(tmp_path, "--tools-dir", tools) as running:
        running.says("offers one")
        lines = re.findall(r" (\w+) toolbus\.dropin: dropin#1: ((?:speaks|INFO|no level).*)", running.err)
        assert lines == [
            ("info", "speaks: a word"),
            ("error", "speaks: a fault"),
            ("warning", "INFO"),
            ("warning", "no level"),
        ]
        running.send(signal.SIGTERM)
        assert running.code() == 0
