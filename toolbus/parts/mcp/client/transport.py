"""Declares the transport of a connection to an MCP server, and carries messages over the pipes of a process.

A transport knows only those parts of requests that go into headers. It delivers every message to its `Receiver`, and
reports lost requests. It never blocks the loop: a message that cannot be sent now is refused. `http.py` has the one
for servers over HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from toolbus.common.text import clean_line
from toolbus.errors import Stage, ToolBusError
from toolbus.parts.mcp.client.server_process import ServerProcess, ServerProgram
from toolbus.processes.lifeline import Lifeline

RequestId = str | int


class Lost(ToolBusError):
    """A request gets no answer, since the server has ended or the connection to it.

    Attributes:
        stage: how far the request had got.
    """

    def __init__(self, text: str, stage: Stage = Stage.UNKNOWN) -> None:
        self.stage = stage
        super().__init__(text)


class Busy(ToolBusError):
    """The server does not read its input: its pipe is full. Nothing of the message was sent."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """A refusal over HTTP that requires another token.

    Attributes:
        status: 401 or 403.
        headers: of the answer, in order.
        used: the Authorization header of the request; "" without one.
        version: of the protocol, as in the request.
    """

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    used: str
    version: str = ""


class NeedsLogin(Lost):
    """A server requires a login; the text has the command.

    Attributes:
        challenge: the refusal; None where it is not known.
    """

    def __init__(self, text: str, challenge: Challenge | None = None) -> None:
        self.challenge = challenge
        super().__init__(text, Stage.NOT_DISPATCHED)


def other_form(request: RequestId) -> RequestId:
    """Returns the id as which some servers answer a request: the number for its text, or the text for a number."""
    if isinstance(request, int):
        return str(request)
    return int(request) if request.isascii() and request.isdecimal() and len(request) < 20 else request


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to the server.

    Attributes:
        data: the JSON text, without line breaks.
        id: of a request; None: a notification or a response.
        method: "" for a response.
        name: for the header `Mcp-Name`: a tool, a prompt, the URI of a resource, the id of a task.
        version: of the protocol; "" before the handshake, and in `initialize`.
        headers: additional ones for HTTP: `Mcp-Param-*`.
        stream: of a response: the stream of the server's request, as the transport named it.
    """

    data: bytes
    id: RequestId | None = None
    method: str = ""
    name: str = ""
    version: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: str = ""


class Receiver(Protocol):
    """Takes messages and events of a transport, on its loop. `Transport.send` never calls these methods."""

    def received(self, data: bytes, stream: str = "") -> bool:
        """Takes one message; returns whether nobody asked for it.

        Args:
            stream: over HTTP, the id of our request on whose stream the message came, as text; else "".
        """

    def lost(self, request: RequestId, error: Lost) -> None:
        """Ends one request that gets no response."""

    def closed(self, why: str) -> None:
        """Ends all requests, since the server has disconnected or the transport is closed; called once."""

    def activity(self) -> None:
        """Notes that the server is active: it has written to its log."""


class Transport(Protocol):
    """The transport to one MCP server."""

    shares_one_pipe: bool  # whether all messages have one order, so that a ping can follow a probe

    async def start(self, receiver: Receiver) -> None:
        """Starts the server, or prepares the connection.

        Raises:
            Lost: the server cannot be started or reached.
        """

    def send(self, message: Outgoing) -> None:
        """Sends a message, or starts to; the receiver gets the outcome.

        Raises:
            Busy: the message cannot be sent now.
            Lost: the transport is closed.
        """

    def cancel(self, request: RequestId) -> None:
        """Abandons a request after its notification was sent: over HTTP its stream is closed."""

    def agreed(self, version: str, *, modern: bool) -> None:
        """Takes the version of the handshake; over legacy HTTP, calls now wait for the standing stream."""

    async def close(self) -> None:
        """Ends the transport and its processes."""


# -- pipes: one message a line -----------------------------------------------------------------------------------------

log = logging.getLogger("toolbus.mounts")

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_UNREAD_BYTES = 1024 * 1024  # in the pipe of a server that does not read its input
SLICE_LINES, SLICE_SECONDS = 100, 0.0005  # that are delivered in one turn of the loop: a server may write without end
PAUSE = 9.0  # times what lines took that nobody asked for, before more are read
LOG_LINES = 200  # of the server's log; older ones are dropped
_ID = rb'"id"\s*:\s*("(?:[^"\\]|\\.)*"|-?\d+)'
_FIRST_ID = re.compile(rb'\s*\{\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*' + _ID)
_LAST_ID = re.compile(_ID + rb"\s*\}\s*$")
_END_BYTES = 1024  # at both ends of a line that is too long, to find its id


class StdioTransport:
    """The pipes of one server process, from its start to its end.

    Args:
        program: to run, or what returns it.
        on_log: takes each line of the server's log.

    Attributes:
        log_lines: the newest lines of the server's log.
    """

    shares_one_pipe = True

    def __init__(
        self,
        name: str,
        program: ServerProgram | Callable[[], Awaitable[ServerProgram]],
        lifeline: Callable[[], Lifeline],
        on_log: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.log_lines: deque[str] = deque(maxlen=LOG_LINES)
        self._name = name
        self._program = program
        self._lifeline = lifeline
        self._on_log = on_log
        self._process: ServerProcess | None = None  # None until started
        self._receiver: Receiver | None = None  # None until started
        self._lines: deque[bytes] = deque()  # complete, and not delivered yet
        self._unasked = 0.0  # seconds that lines took which nobody asked for, since the last pause
        self._end_why: str | None = None  # why the process ended, while lines of it wait; None while it runs
        self._rest: list[bytes] = []  # pieces of an incomplete line
        self._rest_bytes = 0
        self._too_long = b""  # the beginning of an incomplete line that is too long

    def __repr__(self) -> str:
        return f"<StdioTransport {self._name} {self._process!r}>"

    @property
    def pid(self) -> int:
        """The process id; 0 while no process runs."""
        return 0 if self._process is None else self._process.pid

    async def start(self, receiver: Receiver) -> None:
        """Starts the server.

        Raises:
            Lost: the program does not exist, or cannot be executed.
        """
        self._receiver = receiver
        program = self._program if isinstance(self._program, ServerProgram) else await self._program()
        self._process = ServerProcess(
            program, self._lifeline(), on_output=self._take, on_log=self._log, on_end=self._end
        )
        try:
            await self._process.start()
        except OSError as error:
            self._process = None
            where = f" in {program.directory}" if program.directory else ""
            raise Lost(
                f"cannot run {program.arguments[0]!r}{where}: {error.strerror or error}: install it, or correct the "
                "command of the mount",
                Stage.NOT_DISPATCHED,
            ) from None

    def send(self, message: Outgoing) -> None:
        """Writes a message as one line.

        Raises:
            Busy: the server has not read its earlier input.
            Lost: the server does not run.
        """
        process = self._process
        if process is None:
            raise Lost("the server does not run", Stage.NOT_DISPATCHED)
        unread = process.unread_bytes
        if unread and unread + len(message.data) > MAX_UNREAD_BYTES:
            raise Busy(f"server {self._name!r} has not read the last {unread} bytes: retry later")
        process.write(message.data + b"\n")

    def cancel(self, request: RequestId) -> None:
        """Does nothing: the notification cancels the request."""

    def agreed(self, version: str, *, modern: bool) -> None:
        """Does nothing: a pipe is the same for all versions."""

    async def close(self) -> None:
        """Ends the server and all its processes."""
        if self._process is not None:
            await self._process.stop()
            self._process = None

    def _take(self, data: bytes) -> None:
        """Takes a piece of standard output; delivers each line that is complete with it."""
        assert self._receiver is not None  # it runs
        first, *lines = data.split(b"\n")
        self._append(first)
        if not lines:
            return
        waited = bool(self._lines)
        self._end_line(self._receiver)
        self._lines.extend(filter(bytes.strip, lines[:-1]))
        self._append(lines[-1])
        if not waited:
            self._deliver()

    def _deliver(self) -> None:
        """Delivers the lines that wait, as many as one turn of the loop takes."""
        process, receiver, lines = self._process, self._receiver, self._lines
        if process is None or receiver is None:  # closed meanwhile
            lines.clear()
            return
        began = now = time.perf_counter()
        for _ in range(min(SLICE_LINES, len(lines))):
            unasked, before = receiver.received(lines.popleft()), now
            now = time.perf_counter()
            self._unasked += now - before if unasked else 0.0
            if now - began > SLICE_SECONDS:
                break
        pause = PAUSE * self._unasked if self._unasked > SLICE_SECONDS and self._end_why is None else 0.0
        process.hold_output(bool(lines or pause))
        if pause:
            self._unasked = 0.0
            asyncio.get_running_loop().call_later(pause, self._deliver)
        elif lines:
            asyncio.get_running_loop().call_soon(self._deliver)
        elif self._end_why is not None:
            receiver.closed(self._end_why)

    def _end(self, why: str) -> None:
        """Reports the end of the process, after its last lines."""
        self._end_why = why
        if not self._lines and self._receiver is not None:
            self._receiver.closed(why)

    def _append(self, piece: bytes) -> None:
        if not piece:
            return
        self._rest.append(piece)
        self._rest_bytes += len(piece)
        if self._rest_bytes > MAX_LINE_BYTES:
            whole = b"".join(self._rest)
            self._too_long = self._too_long or whole[:_END_BYTES]
            self._rest, self._rest_bytes = [whole[-_END_BYTES:]], _END_BYTES

    def _end_line(self, receiver: Receiver) -> None:
        line = self._rest[0] if len(self._rest) == 1 else b"".join(self._rest)
        self._rest, self._rest_bytes = [], 0
        if self._too_long:
            first, self._too_long = self._too_long, b""
            self._refuse(first, line[-_END_BYTES:], receiver)
        elif line.strip():
            self._lines.append(line)

    def _refuse(self, first: bytes, last: bytes, receiver: Receiver) -> None:
        """Ends the request whose answer exceeds the limit of a line, if its id can be found."""
        text = f"server {self._name!r} wrote a line of more than {MAX_LINE_BYTES} bytes: ask for less"
        log.warning("%s", text)
        match = _FIRST_ID.match(first) or _LAST_ID.search(last)
        if match is not None:
            written = match[1].decode(errors="replace")
            receiver.lost(written[1:-1] if written[0] == '"' else int(written), Lost(text, Stage.ACCEPTED))

    def _log(self, line: str) -> None:
        shown = clean_line(line)
        self.log_lines.append(shown)
        self._on_log(line)
        log.debug("%s: %s", self._name, shown)
        if self._receiver is not None:
            self._receiver.activity()
