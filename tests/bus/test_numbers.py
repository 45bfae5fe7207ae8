"""Catalog revisions and notification numbers rise across restarts, whatever the clock says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.fork_server import fork
from tests.support.processes import environment
from tests.support.waiting import WAIT_SECONDS

# A bus whose clock is some seconds wrong. It prints its numbers, and how it ends is the test's choice.
RUN = """
import asyncio, os, sys, time
from pathlib import Path
offset, folder, end = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
now, now_ns = time.time, time.time_ns
time.time = lambda: now() + offset
time.time_ns = lambda: now_ns() + int(offset * 1e9)
from toolbus import Bus, Config

async def main():
    async with Bus(Config(grpc=("127.0.0.1:0",), http="off", data_dir=folder)) as bus:
        def tool() -> None: ...
        bus.tool(tool)
        for text in ("one", "two"):
            sent = (await bus.call("toolbus:notify", {"text": text})).output
        known = int(sys.argv[4]) if len(sys.argv) > 4 else 0
        changes = bus.core.catalog.registry.since(known)
        print(bus.core.catalog.registry.revision, sent["number"], changes.full, flush=True)
        if end == "kill":
            os.kill(os.getpid(), 9)

asyncio.run(main())
"""


async def _run(offset: float, folder: Path, end: str, known: int = 0) -> tuple[int, int, bool]:
    script, printed = folder / "run.py", folder / "printed.txt"
    script.write_text(RUN)
    with printed.open("wb") as out:
        program = fork([str(script), str(offset), str(folder / "data"), end, str(known)], environment({}), out, out)
        async with asyncio.timeout(WAIT_SECONDS):
            await program.wait_async()
    revision, number, full = printed.read_text().split()
    return int(revision), int(number), full == "True"


@pytest.mark.parametrize("end", ["stop", "kill"])
@pytest.mark.parametrize("offsets", [(0, -3600), (0, 86_400 * 400, 0), (0, -86_400 * 9000, 0)], ids=str)
async def test_numbers_rise_across_restarts_with_a_wrong_clock(
    tmp_path: Path, offsets: tuple[float, ...], end: str
) -> None:
    known, number = 0, 0
    for offset in offsets:
        revision, newest, full = await _run(offset, tmp_path, end, known)
        assert revision > known
        assert newest > number
        assert full  # a watcher of the run before gets the whole catalog
        known, number = revision, newest
