"""Plugins that are added and removed while others run; standard input and reports of a process."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.processes import environment
from tests.support.waiting import WAIT_SECONDS
from toolbus.errors import InvalidRequest
from toolbus.processes.supervisor import Command, PluginReport, ReportKind, RestartPolicy, Supervisor

QUICK = RestartPolicy(backoff_seconds=0.01, max_deaths=3)
WAITS = "print('up', flush=True)\nimport time\ntime.sleep(60)"
FINISHES = (
    "import signal, sys, threading\nasked = threading.Event()\nsignal.signal(signal.SIGTERM, lambda *_: asked.set())\n"
    "print('up', flush=True)\nasked.wait()\nprint('asked', flush=True)\n"
)


class _Supervised:
    """A supervisor that stays, and its reports."""

    def __init__(self, **options: Any) -> None:
        self.reports: list[PluginReport] = []
        self._changed = asyncio.Event()
        self.supervisor = Supervisor(self._emit, **{"restarts": QUICK, "stays": True, **options})

    def _emit(self, report: PluginReport) -> None:
        self.reports.append(report)
        self._changed.set()

    def add(self, name: str, program: str, **options: Any) -> None:
        self.supervisor.add(name, Command((sys.executable, "-c", program), environment({}), **options))

    async def until(self, plugin: str, kind: ReportKind, text: str = "", times: int = 1) -> str:
        async with asyncio.timeout(WAIT_SECONDS):
            while len(texts := [r.text for r in self.of(plugin, kind) if text in r.text]) < times:
                self._changed.clear()
                await self._changed.wait()
        return texts[-1]

    def of(self, plugin: str, kind: ReportKind) -> list[PluginReport]:
        return [report for report in self.reports if report.plugin == plugin and report.kind is kind]


@asynccontextmanager
async def _staying(**options: Any) -> AsyncIterator[_Supervised]:
    supervised = _Supervised(**options)
    running = asyncio.create_task(supervised.supervisor.run())
    try:
        yield supervised
    finally:
        supervised.supervisor.stop()
        async with asyncio.timeout(WAIT_SECONDS):
            await running


async def test_a_supervisor_that_stays_runs_added_plugins_and_goes_on_without_any() -> None:
    async with _staying() as supervised:
        supervised.add("one", "print('hello')")
        await supervised.until("one", ReportKind.ENDED, "exit code 0")
        supervised.add("two", WAITS)
        await supervised.until("two", ReportKind.OUTPUT, "up")
        supervised.supervisor.remove("two")
        await supervised.until("two", ReportKind.ENDED, "SIGTERM")
        supervised.supervisor.remove("unknown")
        supervised.add("three", "print('hello')")
        await supervised.until("three", ReportKind.ENDED)


async def test_a_plugin_that_is_removed_during_its_backoff_is_not_restarted() -> None:
    async with _staying(restarts=RestartPolicy(backoff_seconds=60.0)) as supervised:
        supervised.add("dies", "raise SystemExit(3)")
        await supervised.until("dies", ReportKind.DIED)
        supervised.supervisor.remove("dies")
        await supervised.until("dies", ReportKind.ENDED, "was not restarted")
    assert len(supervised.of("dies", ReportKind.STARTED)) == 1


async def test_a_removed_plugin_has_its_own_stop_seconds_until_all_are_stopped() -> None:
    async with _staying(stop_seconds=0.2, kill_seconds=0.1) as supervised:
        supervised.add("one", FINISHES + "import time\ntime.sleep(60)")
        supervised.add("two", FINISHES + "import time\ntime.sleep(60)")
        for name in ("one", "two"):
            await supervised.until(name, ReportKind.OUTPUT, "up")
        supervised.supervisor.remove("one", 60.0)
        supervised.supervisor.remove("two", 0.1)
        await supervised.until("two", ReportKind.ENDED, "SIGKILL")
        await supervised.until("one", ReportKind.OUTPUT, "asked")
        assert not supervised.of("one", ReportKind.ENDED)
    assert supervised.of("one", ReportKind.ENDED)[0].text == "ended (SIGKILL)"


async def test_a_plugin_that_should_run_forever_and_ends_has_died() -> None:
    async with _staying() as supervised:
        supervised.add("one", "print('hello')", runs_forever=True)
        await supervised.until("one", ReportKind.DIED, "died (exit code 0)")
        assert "exit code 0 (a crash loop" in await supervised.until("one", ReportKind.GIVEN_UP)


async def test_a_process_reads_its_standard_input_and_its_reports_arrive_line_by_line() -> None:
    lines: list[str] = []
    program = "import os, sys\nnumber = int(sys.stdin.read())\nos.write(number, b'one\\ntwo\\xff\\n' + b'x' * 200_000)"
    async with _staying() as supervised:
        supervised.add("one", program, stdin=lambda report: str(report).encode(), on_report=lines.append)
        await supervised.until("one", ReportKind.ENDED, "exit code 0")
    assert lines[:2] == ["one", "two\N{REPLACEMENT CHARACTER}"]
    assert "".join(lines[2:]) == "x" * 200_000


async def test_a_process_that_does_not_read_its_standard_input_ends_normally() -> None:
    async with _staying() as supervised:
        supervised.add("one", "import sys\nsys.stdin.close()", stdin=lambda report: b"x" * 1_000_000)
        await supervised.until("one", ReportKind.ENDED, "exit code 0")


async def test_a_process_without_standard_input_has_no_descriptor_to_report_on() -> None:
    program = "import os\nprint(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:-1], flush=True)"
    async with _staying() as supervised:
        supervised.add("one", program)
        assert await supervised.until("one", ReportKind.OUTPUT) == "[0, 1, 2]"


async def test_a_process_that_ends_just_before_its_sigterm_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_late(process: asyncio.subprocess.Process) -> None:
        os.kill(process.pid, signal.SIGKILL)
        raise ProcessLookupError

    monkeypatch.setattr(asyncio.subprocess.Process, "terminate", too_late)
    async with _staying() as supervised:
        supervised.add("one", WAITS)
        supervised.add("two", WAITS)
        for name in ("one", "two"):
            await supervised.until(name, ReportKind.OUTPUT, "up")
        supervised.supervisor.remove("one", 1.0)
        await supervised.until("one", ReportKind.ENDED)
        supervised.supervisor.kill("two")  # and goes on: it is started again
        await supervised.until("two", ReportKind.OUTPUT, "up", times=2)


async def test_a_program_that_does_not_exist_is_given_up_with_the_reason() -> None:
    async with _staying() as supervised:
        supervised.supervisor.add("one", Command(("/nowhere/program",), {}))
        assert "No such file" in await supervised.until("one", ReportKind.OUTPUT, "cannot start a process")
        await supervised.until("one", ReportKind.GIVEN_UP)


async def test_a_plugin_restarts_as_often_as_an_operator_asks_and_is_never_given_up_for_it() -> None:
    async with _staying() as supervised:
        supervised.add("one", WAITS)
        for times in range(1, QUICK.max_deaths + 2):
            await supervised.until("one", ReportKind.OUTPUT, "up", times)
            supervised.supervisor.restart("one")
            await supervised.until("one", ReportKind.DIED, "as an operator asked", times)
        await supervised.until("one", ReportKind.OUTPUT, "up", QUICK.max_deaths + 2)
        assert not supervised.of("one", ReportKind.GIVEN_UP)
    assert len(supervised.of("one", ReportKind.ENDED)) == 1


async def test_a_plugin_that_was_given_up_or_stopped_can_be_started_again() -> None:
    async with _staying(restarts=RestartPolicy(enabled=False)) as supervised:
        supervised.add("dies", "raise SystemExit(3)")
        supervised.add("waits", WAITS)
        await supervised.until("dies", ReportKind.GIVEN_UP)
        assert supervised.supervisor.failed == ["dies"]
        supervised.supervisor.restart("dies")
        assert supervised.supervisor.failed == []
        await supervised.until("dies", ReportKind.GIVEN_UP, times=2)
        await supervised.until("waits", ReportKind.OUTPUT, "up")
        supervised.supervisor.stop_plugin("waits")
        await supervised.until("waits", ReportKind.ENDED)
        supervised.supervisor.restart("waits")
        await supervised.until("waits", ReportKind.OUTPUT, "up", times=2)
        with pytest.raises(InvalidRequest, match="no plugin 'other' here; there are: dies, waits"):
            supervised.supervisor.restart("other")
