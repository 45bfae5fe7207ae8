"""Tests the output of commands on streams that are not read."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from tests.support.processes import environment
from tests.support.waiting import HANG_SECONDS, WAIT_SECONDS, Stopwatch, until_sync
from toolbus.cli.steady_output import SteadyStream, json_note, text_note
from toolbus.testing import running_bus

LINE = "x" * 99 + "\n"


class Pipe:
    """A pipe, and the stream that writes into it."""

    def __init__(self, stuck_seconds: float = 0.05) -> None:
        self.reader, writer = os.pipe()
        self.file = os.fdopen(writer, "w", encoding="utf-8")
        self.stream = SteadyStream(self.file, text_note, stuck_seconds=stuck_seconds, waiting_bytes=10_000)

    def read_to_end(self) -> list[str]:
        """Reads in a thread until all is written; returns the lines."""
        shown: list[str] = []

        def read() -> None:
            with os.fdopen(self.reader, encoding="utf-8") as reader:
                shown.extend(line.rstrip("\n") for line in reader)

        reading = Thread(target=read)
        reading.start()
        self.stream.finish(60)
        self.file.close()
        reading.join(60)
        return shown


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    if not pipe.file.closed:
        pipe.file.close()
        os.close(pipe.reader)


def test_a_line_is_written_when_its_print_returns_and_the_beginning_of_one_when_it_is_flushed(pipe: Pipe) -> None:
    print("é", 1, file=pipe.stream)
    assert os.read(pipe.reader, 100) == "é 1\n".encode()
    print("no end", end="", file=pipe.stream, flush=True)
    assert os.read(pipe.reader, 100) == b"no end"


def test_a_stream_that_is_not_read_holds_its_writer_once_and_reports_later_how_many_lines_it_left_out(
    pipe: Pipe,
) -> None:
    watch = Stopwatch()
    for _ in range(3_000):
        pipe.stream.write(LINE)
    assert watch.seconds() < 10  # 3,000 waits of 0.05 s take 150
    *lines, note = pipe.read_to_end()
    assert set(lines) == {LINE.rstrip()}
    assert note == f"toolbus: {3_000 - len(lines)} lines were not shown, because this output was not read for a while"


def test_a_stream_that_is_read_again_shows_all_that_follows(pipe: Pipe) -> None:
    for _ in range(3_000):
        pipe.stream.write(LINE)
    shown = b""
    while b"not shown" not in shown:
        shown += os.read(pipe.reader, 65_536)
    pipe.stream.write("again\n")
    assert os.read(pipe.reader, 100).endswith(b"again\n")


def test_a_reader_who_is_only_slow_gets_every_line() -> None:
    pipe = Pipe(stuck_seconds=60)
    printing = Thread(target=lambda: [pipe.stream.write(f"{n}\n") for n in range(30_000)])
    printing.start()  # more than a pipe holds
    until_sync(lambda: "waiting=0" not in repr(pipe.stream), "a full pipe")
    shown: list[str] = []
    with os.fdopen(os.dup(pipe.reader), encoding="utf-8") as reader:
        while len(shown) < 30_000:
            shown.append(next(reader))
    printing.join(60)
    assert shown == [f"{n}\n" for n in range(30_000)]


def test_a_reader_who_has_gone_is_noticed_by_the_next_line(pipe: Pipe) -> None:
    os.close(pipe.reader)
    with pytest.raises(BrokenPipeError):
        pipe.stream.write(LINE)
    with pytest.raises(BrokenPipeError):
        pipe.stream.write(LINE)
    pipe.reader = os.open(os.devnull, os.O_RDONLY)


def test_the_note_among_json_lines_is_one() -> None:
    note = json.loads(json_note("text", plugin="toolbus")(1))
    assert note == {"plugin": "toolbus", "text": "1 line was not shown, because this output was not read for a while"}


def test_output_on_a_full_disk_is_dropped_and_the_program_continues() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        stream = SteadyStream(full, text_note)
        for _ in range(100):
            print("x" * 100, file=stream, flush=True)
        stream.write("y" * 100_000 + "\n")  # so long that the thread writes it
        stream.finish(60)
        print("after", file=stream, flush=True)


FILLS = """
import resource, sys
from toolbus.cli.steady_output import SteadyStream, text_note, json_note
note = json_note("text") if sys.argv[2] == "json" else text_note
stream = SteadyStream(open(sys.argv[1], "w", encoding="utf-8"), note)
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (250, most))  # a file may have no more: as with a full disk
for number in range(10):
    print("x" * 99, file=stream, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
print("there is room", file=stream, flush=True)
stream.finish(60)
"""


@pytest.mark.parametrize("kind", ["text", "json"])
def test_output_comes_back_when_there_is_room_with_the_number_of_lines_that_had_none(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "out"
    subprocess.run(
        [sys.executable, "-c", FILLS, str(file), kind], check=True, env=environment({}), timeout=WAIT_SECONDS
    )
    lines = file.read_text().split("\n")
    assert lines[:3] == ["x" * 99, "x" * 99, "x" * 50]
    said = json.loads(lines[3])["text"] if kind == "json" else lines[3].removeprefix("toolbus: ")
    assert said == "8 lines were not shown, because there was no room for them (File too large)"
    assert lines[4:] == ["there is room", ""]


TALKS = """
import os, sys
from toolbus import llm_tool
@llm_tool
def talk(die: bool = False) -> str:
    print("x" * 1000, flush=True)
    print("e" * 1000, file=sys.stderr, flush=True)
    if die:
        os._exit(3)
    return "talked"
"""


async def test_plugins_live_on_while_what_they_print_finds_a_full_disk(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(TALKS.replace("def talk", f"def talk_{name}"))
    full = os.open("/dev/full", os.O_WRONLY)
    async with running_bus() as bus:
        run = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "toolbus.cli", "run", str(tmp_path / "one.py"), str(tmp_path / "two.py")),
            env=environment({"TOOLBUS_ADDRESS": bus.grpc_addresses[0]}),
            stdout=full,
            stderr=full,
        )
        try:
            async with asyncio.timeout(HANG_SECONDS):
                async for _ in bus.watch():
                    if len(bus.list()) == 2:
                        break
            for _ in range(20):
                assert (await bus.call("talk_one", {})).output == "talked"
            await bus.call("talk_two", {"die": True})
            assert (await bus.call("talk_one", {})).output == "talked"
            async with asyncio.timeout(HANG_SECONDS):
                while (await bus.call("talk_two", {})).output != "talked":  # it was started again
                    await asyncio.sleep(0.05)
            assert run.returncode is None
        finally:
            run.terminate()
            await run.wait()
            os.close(full)
