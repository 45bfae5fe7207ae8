"""Servers on pipes that behave badly: they do not read, write too much, close one pipe, or outlive who started them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.waiting import until, until_sync
from toolbus.errors import Stage
from toolbus.parts.mcp.client.server_process import ServerProgram
from toolbus.parts.mcp.client.transport import (
    MAX_LINE_BYTES,
    MAX_UNREAD_BYTES,
    SLICE_LINES,
    Busy,
    Lost,
    Outgoing,
    RequestId,
    StdioTransport,
)
from toolbus.processes.lifeline import Lifeline
from toolbus.processes.lifeline_program import kill_marked

HOLD = "import sys,time; sys.stdin.read(); "


class Inbox:
    """Collects what a transport hands on."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.lost_requests: list[tuple[RequestId, Lost]] = []
        self.why: list[str] = []
        self.moves = 0

    def received(self, data: bytes, stream: str = "") -> bool:
        self.messages.append(data)
        return False

    def lost(self, request: RequestId, error: Lost) -> None:
        self.lost_requests.append((request, error))

    def closed(self, why: str) -> None:
        self.why.append(why)

    def activity(self) -> None:
        self.moves += 1


@asynccontextmanager
async def running(code: str) -> AsyncIterator[tuple[StdioTransport, Inbox]]:
    inbox = Inbox()
    with Lifeline() as lifeline:
        program = ServerProgram((sys.executable, "-I", "-S", "-c", code), {})
        transport = StdioTransport("bad", program, lambda: lifeline)
        await transport.start(inbox)
        try:
            yield transport, inbox
        finally:
            await transport.close()


async def test_a_server_that_does_not_read_is_busy_and_the_loop_goes_on() -> None:
    async with running("import time; time.sleep(600)") as (transport, _):
        message = Outgoing(b"x" * MAX_UNREAD_BYTES)
        transport.send(message)
        with pytest.raises(Busy, match="has not read"):
            transport.send(message)


async def test_messages_are_whole_however_their_bytes_arrive() -> None:
    code = (
        "import sys,time\n"
        "for piece in (b'{\"a\"', b': 1}\\n\\n{\"b\": 2}\\r\\n', b'  \\n', b'{\"c\": 3}\\n'):\n"
        "    sys.stdout.buffer.write(piece); sys.stdout.flush(); time.sleep(0.01)\n" + HOLD
    )
    async with running(code) as (_, inbox):
        await until(lambda: len(inbox.messages) == 3)
        assert [message.strip() for message in inbox.messages] == [b'{"a": 1}', b'{"b": 2}', b'{"c": 3}']


async def test_lines_without_end_are_delivered_in_slices_between_which_the_loop_goes_on() -> None:
    code = (
        "import sys\n"
        "for _ in range(3): sys.stdout.buffer.write(b'x\\n' * 100_000)\n"
        "sys.stdout.buffer.write(b'last\\n')\n"
    )
    async with running(code) as (_, inbox):
        most, before = 0, 0
        while not inbox.why:
            await asyncio.sleep(0)  # one turn of the loop
            most, before = max(most, len(inbox.messages) - before), len(inbox.messages)
        assert most <= 2 * SLICE_LINES
        assert len(inbox.messages) == 300_001
        assert inbox.messages[-1] == b"last"  # all, and then the end
        assert inbox.why == ["ended (exit code 0)"]


@pytest.mark.parametrize("written", ['{"jsonrpc":"2.0","id":"c-1","result":"%s"}', '{"result":"%s","id":"c-1"}'])
async def test_an_answer_that_is_too_long_ends_its_call_and_the_next_line_is_read(written: str) -> None:
    code = f"import sys; print({written!r} % ('x' * {MAX_LINE_BYTES})); print('next', flush=True); sys.stdin.read()"
    async with running(code) as (_, inbox):
        await until(lambda: inbox.messages)
        assert inbox.messages == [b"next"]
        ((request, error),) = inbox.lost_requests
        assert (request, error.stage) == ("c-1", Stage.ACCEPTED)
        assert str(MAX_LINE_BYTES) in str(error)


@pytest.mark.parametrize(("number", "name"), [(1, "output"), (0, "input")])
async def test_a_server_that_closes_a_pipe_and_stays_is_dead(number: int, name: str) -> None:
    async with running(f"import os,time; os.close({number}); time.sleep(600)") as (transport, inbox):
        await until(lambda: inbox.why)
        assert inbox.why == [f"closed its standard {name}"]
        await transport.close()
        assert transport.pid == 0


async def test_what_a_server_writes_to_its_log_is_kept_and_counts_as_activity() -> None:
    code = "import sys; print('one\\x1b[0m', file=sys.stderr); print('two', file=sys.stderr, flush=True); " + HOLD
    async with running(code) as (transport, inbox):
        await until(lambda: inbox.moves == 2)
        assert list(transport.log_lines) == ["one\N{REPLACEMENT CHARACTER}[0m", "two"]


async def test_a_program_that_does_not_exist_is_refused_by_name() -> None:
    with Lifeline() as lifeline:
        transport = StdioTransport("bad", ServerProgram(("/nowhere",), {}), lambda: lifeline)
        with pytest.raises(Lost, match="cannot run '/nowhere'"):
            await transport.start(Inbox())
        await transport.close()


# A process that starts a server as the bus does and is killed: the server ignores signals and the end of its input, and
# has started another one in a session of its own.
OWNER = """
import asyncio, sys
from toolbus.parts.mcp.client.transport import StdioTransport
from toolbus.parts.mcp.client.server_process import ServerProgram
from toolbus.processes.lifeline import Lifeline

class Inbox:
    received = lost = closed = lambda *_: None
    def activity(self): print(transport.pid, flush=True)

async def main():
    await transport.start(Inbox())
    await asyncio.sleep(600)

lifeline = Lifeline()
program = ServerProgram((sys.executable, sys.argv[1], "forks", "stubborn"), {})
transport = StdioTransport("orphan", program, lambda: lifeline)
asyncio.run(main())
"""


def test_no_process_outlives_a_bus_that_is_killed() -> None:
    server = Path(__file__).parents[3] / "support" / "mcp_server.py"
    with subprocess.Popen([sys.executable, "-c", OWNER, str(server)], stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None
            pid = int(owner.stdout.readline())
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            mark = next(each for each in variables if each.startswith(b"TOOLBUS_MOUNT="))
            until_sync(lambda: len(_marked(mark)) == 3, "the server and its processes")
        finally:
            owner.kill()
    until_sync(lambda: not _marked(mark))


def test_only_processes_with_the_very_variable_are_killed() -> None:
    code = "import time; print('up', flush=True); time.sleep(600)"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "MARK": value})
        for value in ("one", "one-more")
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        assert kill_marked("MARK=one") == 1
        assert processes[0].wait(30) == -signal.SIGKILL
        assert processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _marked(mark: bytes) -> list[int]:
    found = []
    for environ in [each / "environ" for each in Path("/proc").iterdir() if each.name.isdigit()]:
        try:
            if mark in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
        except OSError:
            pass
    return found
