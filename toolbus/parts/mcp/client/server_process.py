"""Runs the program of a mounted MCP server, spoken with on its standard streams: one process, from start to end.

The process leads a group of its own, and a variable of its environment marks it and all processes that it starts. So
all of them are killed when it has ended, also those that have left its group and its session. If this process is
killed, the `Lifeline` does the same. Standard error is the program's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolbus.processes.lifeline import Lifeline
from toolbus.processes.lifeline_program import kill_marked
from toolbus.processes.supervisor import describe_exit, read_lines, signal_group

MARK_VARIABLE = "TOOLBUS_MOUNT"
STOP_SECONDS = 2.0  # from the end of its input until SIGTERM, and from there until SIGKILL
_REAP_SECONDS = 5.0  # for a killed process to end: one that hangs in the kernel may not
_LAST_MOMENT_SECONDS = 0.2  # between the ends of a process, of its output and of its log, on a busy machine too
_READ_BYTES = 256 * 1024
_STDIN, _STDOUT = 0, 1


@dataclass(frozen=True, slots=True)
class ServerProgram:
    """A program to run.

    Attributes:
        arguments: the program and its arguments.
        environment: all of its variables, except for the mark.
        directory: its working directory; None means this process's.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    directory: str | None = None


class ServerProcess(asyncio.SubprocessProtocol):
    """One run of a program. All methods belong to the loop that started it.

    Args:
        on_output: takes bytes of its standard output, as they come.
        on_log: takes a line of its standard error.
        on_end: called once with the reason, as soon as the process cannot answer any more, and after its last output.
    """

    def __init__(
        self,
        program: ServerProgram,
        lifeline: Lifeline,
        *,
        on_output: Callable[[bytes], None],
        on_log: Callable[[str], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._program = program
        self._lifeline = lifeline
        self._on_output = on_output
        self._on_end: Callable[[str], None] | None = on_end  # None once it was called
        self._mark = f"{MARK_VARIABLE}={secrets.token_hex(16)}"
        self._transport: Any = None  # None until started
        self._stdin: asyncio.WriteTransport | None = None  # None until started
        self._outbox: list[bytes] = []  # written in one piece at the end of this turn of the loop
        self._outbox_bytes = 0
        self._exited = asyncio.Event()
        self._on_log = on_log
        self._logging: asyncio.Task[None] | None = None  # reads its standard error; None until started
        self._stopping: asyncio.Task[None] | None = None  # None until `stop`
        self._is_held = False  # whether its standard output is not read for now
        self.pid = 0  # 0 until started

    def __repr__(self) -> str:
        return f"<ServerProcess {self._program.arguments[0]} pid={self.pid}>"

    async def start(self) -> None:
        """Starts the program.

        Raises:
            OSError: it does not exist, or cannot be executed.
        """
        program = self._program
        name, _, value = self._mark.partition("=")
        self._lifeline.mark(self._mark)
        reading, writing = os.pipe()
        try:
            await asyncio.get_running_loop().subprocess_exec(
                lambda: self,
                *program.arguments,
                stderr=writing,
                env={**program.environment, name: value},
                cwd=program.directory,
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            self._lifeline.unmark(self._mark)
            raise
        finally:
            os.close(writing)
        self._logging = asyncio.create_task(read_lines(reading, self._take_log, self._exited))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes the pipes of the process that has just started."""
        self._transport = transport
        self.pid = self._transport.get_pid()
        self._stdin = self._transport.get_pipe_transport(_STDIN)
        self._lifeline.add(self.pid)

    @property
    def unread_bytes(self) -> int:
        """How many bytes wait for the process to read, without those in the kernel's pipe."""
        return self._outbox_bytes + (0 if self._stdin is None else self._stdin.get_write_buffer_size())

    def write(self, data: bytes) -> None:
        """Writes to its standard input, together with the other writes of this turn of the loop.

        Bytes that do not fit into the pipe wait in memory.
        """
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(data)
        self._outbox_bytes += len(data)

    def _flush(self) -> None:
        outbox, self._outbox, self._outbox_bytes = self._outbox, [], 0
        if outbox and self._stdin is not None and not self._stdin.is_closing():
            self._stdin.write(outbox[0] if len(outbox) == 1 else b"".join(outbox))

    def hold_output(self, held: bool) -> None:
        """Stops reading its standard output, or reads on: a program that writes without end waits meanwhile."""
        pipe = None if self._transport is None else self._transport.get_pipe_transport(_STDOUT)
        if held is not self._is_held and pipe is not None and not pipe.is_closing():
            self._is_held = held
            (pipe.pause_reading if held else pipe.resume_reading)()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Passes output on."""
        self._on_output(data)

    def _take_log(self, line: bytes) -> None:
        self._on_log(line.decode(errors="replace").rstrip("\r"))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Counts a process that closes its input or output as dead: it cannot answer any more."""
        if self._on_end is not None:
            closed = f"closed its standard {'output' if fd == _STDOUT else 'input'}"
            if self._exit_code():
                self._closed(closed)
            else:  # usually it is about to end, and its exit code is the better reason
                asyncio.get_running_loop().call_later(_LAST_MOMENT_SECONDS, self._closed, closed)

    def _closed(self, why: str) -> None:
        code = self._exit_code()
        self._end(f"ended ({describe_exit(code)})" if code else why)

    def _exit_code(self) -> int:
        """Returns the exit code of a process that has ended and is not reaped yet; 0 if that is not known."""
        with contextlib.suppress(AttributeError, OSError):  # another system, or reaped
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        return 0

    def process_exited(self) -> None:
        """Takes the last output of the process, then reports its end."""
        self._exited.set()
        with contextlib.suppress(OSError, AttributeError, ValueError):  # the pipe is empty or closed
            pipe = self._transport.get_pipe_transport(_STDOUT).get_extra_info("pipe").fileno()
            while data := os.read(pipe, _READ_BYTES):
                self._on_output(data)
        self._end(f"ended ({describe_exit(self._transport.get_returncode())})")

    def _end(self, why: str) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(why)

    async def stop(self) -> None:
        """Ends the process and its children: end of input, SIGTERM, SIGKILL. May be called again."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        is_dead, self._on_end = self._on_end is None, None
        if self._transport is None:
            return
        self._flush()
        if self._stdin is not None:
            if self.unread_bytes:
                self._stdin.abort()  # the process does not read, and `close` would wait until it does
            else:
                self._stdin.close()
        if not is_dead:
            await self._exits_within(STOP_SECONDS)
        if not self._exited.is_set():
            signal_group(self.pid, signal.SIGTERM)
            await self._exits_within(STOP_SECONDS)
        signal_group(self.pid, signal.SIGKILL)
        await asyncio.to_thread(kill_marked, self._mark)
        await self._exits_within(_REAP_SECONDS)
        self._transport.close()
        if self._logging is not None:  # all that wrote there is dead
            await asyncio.wait((self._logging,), timeout=_LAST_MOMENT_SECONDS)
            self._logging.cancel()
        self._lifeline.remove(self.pid)
        self._lifeline.unmark(self._mark)

    async def _exits_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), seconds)
