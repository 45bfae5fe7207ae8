"""A program that is spoken with on its standard streams: its log, and how its end is described."""

from __future__ import annotations

import asyncio
import sys

from tests.support.processes import environment
from tests.support.waiting import WAIT_SECONDS
from toolbus.parts.mcp.client.server_process import ServerProcess, ServerProgram
from toolbus.processes.lifeline import Lifeline


async def _run(program: str) -> tuple[list[str], str]:
    """Runs a program to its end; returns the lines of its log, and why it ended."""
    lines: list[str] = []
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with Lifeline() as lifeline:
        process = ServerProcess(
            ServerProgram((sys.executable, "-c", program), environment({})),
            lifeline,
            on_output=lambda data: None,
            on_log=lines.append,
            on_end=ended.set_result,
        )
        await process.start()
        async with asyncio.timeout(WAIT_SECONDS):
            reason = await ended
        await process.stop()
    return lines, reason


async def test_the_last_line_of_a_log_is_passed_on_also_without_a_line_end() -> None:
    lines, reason = await _run("import sys\nsys.stderr.write('one\\nno key')\nsys.exit(4)")
    assert lines == ["one", "no key"]
    assert reason == "ended (exit code 4)"


async def test_a_program_that_closes_its_output_counts_as_ended() -> None:
    _, reason = await _run("import os, time\nos.close(1)\ntime.sleep(600)")
    assert reason == "closed its standard output"
