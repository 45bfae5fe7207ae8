"""Commands that are added and retired while others run, and what a process is told and reports."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.processes import environment
from toolbus.processes.supervisor import Command, Happened, PluginReport, Restarts, Supervisor

QUICK = Restarts(first_seconds=0.01, deaths=3)
WAITS = "print('up', flush=True)\nimport time\ntime.sleep(60)"
FINISHES = (
    "import signal, sys, threading\nasked = threading.Event()\nsignal.signal(signal.SIGTERM, lambda *_: asked.set())\n"
    "print('up', flush=True)\nasked.wait()\nprint('asked', flush=True)\n"
)


class _Told:
    """A supervisor that stays, and what it said."""

    def __init__(self, **options: Any) -> None:
        self.reports: list[PluginReport] = []
        self._more = asyncio.Event()
        self.supervisor = Supervisor(self._emit, restarts=QUICK, stays=True, **options)

    def _emit(self, report: PluginReport) -> None:
        self.reports.append(report)
        self._more.set()

    def add(self, name: str, program: str, **options: Any) -> None:
        self.supervisor.add(name, Command((sys.executable, "-c", program), environment({}), **options))

    async def until(self, plugin: str, happened: Happened, text: str = "", times: int = 1) -> str:
        async with asyncio.timeout(10):
            while len(found := [r.text for r in self._of(plugin, happened) if text in r.text]) < times:
                self._more.clear()
                await self._more.wait()
        return found[-1]

    def _of(self, plugin: str, happened: Happened) -> list[PluginReport]:
        return [report for report in self.reports if report.plugin == plugin and report.happened is happened]


@asynccontextmanager
async def _staying(**options: Any) -> AsyncIterator[_Told]:
    told = _Told(**options)
    running = asyncio.create_task(told.supervisor.run())
    try:
        yield told
    finally:
        told.supervisor.stop()
        async with asyncio.timeout(10):
            await running


async def test_a_supervisor_that_stays_takes_plugins_and_goes_on_without_any() -> None:
    async with _staying() as told:
        told.add("one", "print('hello')")
        await told.until("one", Happened.ENDED, "exit code 0")
        told.add("two", WAITS)
        await told.until("two", Happened.OUTPUT, "up")
        told.supervisor.retire("two")
        await told.until("two", Happened.ENDED, "SIGTERM")
        told.supervisor.retire("nobody")
        told.add("three", "print('hello')")
        await told.until("three", Happened.ENDED)


async def test_a_plugin_that_is_retired_between_two_lives_is_not_started_again() -> None:
    async with _staying() as told:
        told.supervisor._restarts = Restarts(first_seconds=60.0)
        told.add("dies", "raise SystemExit(3)")
        await told.until("dies", Happened.DIED)
        told.supervisor.retire("dies")
    assert len(told._of("dies", Happened.STARTED)) == 1


async def test_a_plugin_that_is_retired_has_its_own_time_until_all_are_stopped() -> None:
    async with _staying(stop_seconds=0.2, kill_seconds=0.1) as told:
        told.add("one", FINISHES + "import time\ntime.sleep(60)")
        told.add("two", FINISHES + "import time\ntime.sleep(60)")
        for name in ("one", "two"):
            await told.until(name, Happened.OUTPUT, "up")
        told.supervisor.retire("one", 60.0)
        told.supervisor.retire("two", 0.1)
        await told.until("two", Happened.ENDED, "SIGKILL")
        await told.until("one", Happened.OUTPUT, "asked")
        assert not told._of("one", Happened.ENDED)
    assert told._of("one", Happened.ENDED)[0].text == "ended (SIGKILL)"


async def test_an_endless_plugin_that_ends_has_died() -> None:
    async with _staying() as told:
        told.add("one", "print('hello')", endless=True)
        await told.until("one", Happened.DIED, "died (exit code 0)")
        assert "exit code 0: given up" in await told.until("one", Happened.GIVEN_UP)


async def test_a_command_reads_what_it_is_told_and_its_reports_are_heard() -> None:
    heard: list[str] = []
    program = "import os, sys\nnumber = int(sys.stdin.read())\nos.write(number, b'one\\ntwo\\xff\\n' + b'x' * 200_000)"
    async with _staying() as told:
        told.add("one", program, told=lambda report: str(report).encode(), hear=heard.append)
        await told.until("one", Happened.ENDED, "exit code 0")
    assert heard[:2] == ["one", "two\N{REPLACEMENT CHARACTER}"]
    assert "".join(heard[2:]) == "x" * 200_000


async def test_a_command_that_does_not_read_what_it_is_told_harms_nobody() -> None:
    async with _staying() as told:
        told.add("one", "import sys\nsys.stdin.close()", told=lambda report: b"x" * 1_000_000)
        await told.until("one", Happened.ENDED, "exit code 0")


async def test_a_command_that_is_not_told_anything_has_no_descriptor_to_report_on() -> None:
    program = "import os\nprint(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:-1], flush=True)"
    async with _staying() as told:
        told.add("one", program)
        assert await told.until("one", Happened.OUTPUT) == "[0, 1, 2]"


async def test_a_process_that_ends_while_it_is_told_to_ends_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(process: asyncio.subprocess.Process) -> None:
        os.kill(process.pid, signal.SIGKILL)
        raise ProcessLookupError

    monkeypatch.setattr(asyncio.subprocess.Process, "terminate", too_late)
    async with _staying() as told:
        told.add("one", WAITS)
        told.add("two", WAITS)
        for name in ("one", "two"):
            await told.until(name, Happened.OUTPUT, "up")
        told.supervisor.retire("one", 1.0)
        await told.until("one", Happened.ENDED)
        told.supervisor.kill("two")  # and goes on: it is started again
        await told.until("two", Happened.OUTPUT, "up", times=2)


async def test_a_program_that_is_not_there_is_given_up_with_its_reason() -> None:
    async with _staying() as told:
        told.supervisor.add("one", Command(("/nowhere/program",), {}))
        assert "No such file" in await told.until("one", Happened.OUTPUT, "cannot start a process")
        await told.until("one", Happened.GIVEN_UP)
