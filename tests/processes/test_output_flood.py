"""Programs that print without end: supervisor and bus go on working, and the programs are slowed down, not blocked."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.processes import environment
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.parts.mcp.client.server_process import ServerProcess, ServerProgram
from toolbus.processes.lifeline import Lifeline
from toolbus.processes.output_tail import OutputTails
from toolbus.processes.supervisor import Command, PluginReport, ReportKind, Supervisor

TAIL_BYTES = 100_000
FLOODS = {
    "short lines": "b'y\\n' * 32_768",
    "one line without an end": "b'z' * 65_536",
    "escapes": "b'\\x1b]0;title\\x07\\x1b[2J\\x1b[31mred\\n' * 2_000 + '\\x9d'.encode() * 30_000 + b'\\n'",
}


class _Timed:
    """Passes text on, which takes as long as to print it; counts how often, and how long."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        self._function = function
        self._began = time.perf_counter()
        self.seconds = 0.0
        self.count = 0

    def __call__(self, item: PluginReport | str) -> None:
        began = time.perf_counter()
        self._function(item)
        length = len(item if isinstance(item, str) else item.text)
        while time.perf_counter() < began + max(2e-5, length * 1e-8):
            pass
        self.seconds += time.perf_counter() - began
        self.count += 1

    @property
    def share(self) -> float:
        """Which part of the time since the start they took."""
        return self.seconds / (time.perf_counter() - self._began)


@asynccontextmanager
async def _supervised(emit: Callable[[PluginReport], None], **programs: str) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(emit)
    for name, program in programs.items():
        supervisor.add(name, Command((sys.executable, "-c", program), environment({})))
    running = asyncio.create_task(supervisor.run())
    try:
        yield supervisor
    finally:
        supervisor.stop()
        supervisor.stop()
        async with asyncio.timeout(WAIT_SECONDS):
            await running


@pytest.mark.parametrize("piece", FLOODS.values(), ids=FLOODS)
async def test_a_plugin_that_prints_without_end_leaves_its_supervisor_time_and_is_never_blocked(piece: str) -> None:
    tails = OutputTails(TAIL_BYTES)
    flood = f"import os\npiece = {piece}\nwhile True:\n    os.write(1, piece)"
    quiet = "print('up', flush=True)\nimport time\ntime.sleep(600)"
    emit = _Timed(tails)
    async with _supervised(emit, flood=flood, quiet=quiet) as supervisor:
        await until(lambda: tails.has("flood") and tails.has("quiet"), "both plugins")
        seen = emit.count
        await until(lambda: emit.count > seen + 50, "the flood")
        supervisor.restart("quiet")
        await until(lambda: tails.find("quiet").restarts == 1, "the restart of the other plugin")
        seen = emit.count
        await until(lambda: emit.count > seen + 50, "more of the flood")
        answer = await tails.read("flood", 5)
        assert emit.share < 0.6  # a quarter, and what a busy machine adds
    assert len(answer["lines"]) == 5 or piece == FLOODS["one line without an end"]
    kept = tails.find("flood").read(2_000)["lines"]
    assert sum(len(line["text"]) for line in kept) <= TAIL_BYTES
    assert not any("\x9d" in line["text"] or "\x1b]" in line["text"] or "\x1b[2J" in line["text"] for line in kept)


ANSWERS = f"""
import os, sys, threading
piece = {FLOODS["short lines"]}
def flood():
    while True:
        os.write(2, piece)
threading.Thread(target=flood, daemon=True).start()
for line in sys.stdin:
    print(line, end="", flush=True)
"""


async def test_a_server_whose_log_has_no_end_is_spoken_with_all_the_same() -> None:
    tails, answers = OutputTails(TAIL_BYTES), bytearray()
    take = _Timed(lambda line: tails(PluginReport("mount", ReportKind.OUTPUT, line, "stderr")))
    lifeline = Lifeline()
    process = ServerProcess(
        ServerProgram((sys.executable, "-c", ANSWERS), environment({})),
        lifeline,
        on_output=answers.extend,
        on_log=take,
        on_end=lambda why: None,
    )
    try:
        await process.start()
        for number in (b"one\n", b"two\n", b"three\n"):
            seen = take.count
            await until(lambda seen=seen: take.count > seen + 1_000, "the flood")  # type: ignore[misc]
            process.write(number)
            await until(lambda number=number: answers.endswith(number), "its answer")  # type: ignore[misc]
        assert take.share < 0.6  # a quarter, and what a busy machine adds
        assert len(tails.find("mount").read(2_000)["lines"]) <= TAIL_BYTES
    finally:
        await process.stop()
        lifeline.close()
