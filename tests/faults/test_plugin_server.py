"""A server of 35 tools by callback URLs, as N.E.K.O.'s plugin server is one, beside a bus that is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.stage import free_ports
from tests.faults.test_persisted_processes import Serve
from tests.support.processes import environment
from tests.support.waiting import until_sync

PROGRAM = Path(__file__).with_name("plugin_server.py")
TOOLS = 35


@contextmanager
def plugin_server(bus: int, port: int = 0, tools: int = TOOLS) -> Iterator[int]:
    """Runs a plugin server that registers at the bus on a port; yields its own port, and kills it at the end."""
    words = [sys.executable, str(PROGRAM), f"http://127.0.0.1:{bus}", str(port), str(tools)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment({})) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def all_work(bus: Serve) -> bool:
    """Calls every tool; tells whether all returned what belongs to them."""
    for number in range(TOOLS):
        answer = bus.ask("invoke", name=f"tool_{number}", arguments={"n": number})
        if answer["is_error"]:
            return False
        expected = {"plugin": f"plugin_{number % 5}", "tool": f"tool_{number}", "arguments": {"n": number}}
        assert answer["output"] == expected
    return True


@pytest.mark.parametrize("persisted", [True, False], ids=["persisted", "ephemeral"])
def test_all_tools_of_a_plugin_server_are_called_again_after_a_kill_of_the_bus(tmp_path: Path, persisted: bool) -> None:
    (port,) = free_ports(1)
    words = ("--http", f"127.0.0.1:{port}", *(("--data-dir", tmp_path / "data") if persisted else ("--ephemeral",)))
    with plugin_server(port):
        with Serve(tmp_path, *words) as bus:
            until_sync(lambda: all_work(bus), "all tools at first")
            bus.send(signal.SIGKILL)
            bus.code()
        with Serve(tmp_path, *words) as bus:
            begun = time.monotonic()
            until_sync(lambda: all_work(bus), "all tools after the kill")
            print(f"all {TOOLS} called again after {time.monotonic() - begun:.2f} s")


def test_a_plugin_server_that_was_started_again_without_its_plugins_leaves_no_tools(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with Serve(tmp_path, "--http", f"127.0.0.1:{port}", "--data-dir", tmp_path / "data") as bus:
        with plugin_server(port) as own:
            until_sync(lambda: all_work(bus), "all tools at first")
        for _ in range(3):  # nobody listens
            assert bus.ask("invoke", name="tool_0", arguments={})["error"]["code"] == "UNAVAILABLE"
        until_sync(lambda: "tool_0" not in str(bus.listed()), "no tool_0")
        with plugin_server(port, own):
            begun = time.monotonic()
            until_sync(lambda: all_work(bus), "all tools again")
            print(f"all {TOOLS} called again after {time.monotonic() - begun:.2f} s of the watchdog")
