"""Catalog revisions and notification numbers rise across restarts, whatever the clock says."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import httpx
import pytest

from lab.stage import free_ports
from tests.support.fork_server import fork
from tests.support.processes import environment
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.sdk import Host

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


# A bus whose clock is some seconds wrong, at the same addresses each time; it says a text once two clients follow.
SERVE = """
import asyncio, sys, time
from pathlib import Path
offset, folder, text, port = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
now, now_ns = time.time, time.time_ns
time.time = lambda: now() + offset
time.time_ns = lambda: now_ns() + int(offset * 1e9)
from toolbus import Bus, Config

async def main():
    async with Bus(Config(grpc=(f"unix:{folder}/bus",), http=f"127.0.0.1:{port}", data_dir=folder / "data")) as bus:
        def tool() -> None: ...
        bus.tool(tool, name=text)
        if text != "one":
            offset_now = offset * -1
            time.time = lambda: now() + offset_now  # and the clock changes while it runs
            time.time_ns = lambda: now_ns() + int(offset_now * 1e9)
        while text == "one" and not (await bus.call("toolbus:notify", {"text": "anybody?"})).output["hosts"]:
            await asyncio.sleep(0.1)  # a host that is new gets what comes after it
        sent = (await bus.call("toolbus:notify", {"text": text})).output
        print(sent["number"], flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("offset", [-3600, 86_400 * 400, -86_400 * 9000])
async def test_who_comes_back_gets_everything_whatever_the_clock_of_the_bus(tmp_path: Path, offset: int) -> None:
    await asyncio.to_thread(tmp_path.chmod, 0o700)
    script, said, tools = tmp_path / "serve.py", list[str](), set[str]()
    script.write_text(SERVE)
    (port,) = free_ports(1)
    numbers: list[int] = []

    def arrived(text: str) -> bool:
        return text in said and text in tools and (tmp_path / text).read_text().endswith("\n")

    async def follow(host: Host) -> None:
        async for each in host.notifications():
            said.extend([each.text] if each.text != "anybody?" else [])

    async def watch(host: Host) -> None:
        async for change in host.watch():
            tools.update(each.name for each in change.added)

    async with Host(f"unix:{tmp_path}/bus") as host:
        following = [asyncio.create_task(follow(host)), asyncio.create_task(watch(host))]
        for text, wrong in (("one", 0), ("two", offset), ("three", 0)):
            printed = tmp_path / text
            with printed.open("wb") as out:
                words = [str(script), str(wrong), str(tmp_path), text, str(port)]
                program = fork(words, environment({}), out, out)
            await until(partial(arrived, text), f"{text!r} at the host")
            numbers.append(int(printed.read_text().split()[0]))
            url = f"http://127.0.0.1:{port}/api/notifications"
            async with httpx.AsyncClient(trust_env=False, timeout=WAIT_SECONDS) as client:
                headers = {"Accept": "text/event-stream", "Last-Event-ID": str(numbers[0])}
                async with client.stream("GET", url, headers=headers) as stream:
                    seen, lines = list[str](), stream.aiter_lines()
                    while not seen and len(numbers) > 1:
                        line = await anext(lines)
                        assert line != "event: lost"
                        if line.startswith("data: "):
                            seen.append(json.loads(line[6:])["text"])
                assert seen == ([text] if len(numbers) > 1 else [])  # of this run, whose numbers are higher
            program.kill()
            await program.wait_async()
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
    assert said == ["one", "two", "three"]
    assert numbers == sorted(set(numbers))
