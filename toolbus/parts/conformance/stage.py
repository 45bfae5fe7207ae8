"""Sets up one scenario: a scripted bus and a client process, with a method that waits for the client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections import deque
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from toolbus.parts.conformance.certificates import FIRST_TOKEN, address_of, write_credential
from toolbus.parts.conformance.match import Bindings, Mismatch
from toolbus.parts.conformance.proxy import Proxy
from toolbus.parts.conformance.script import Scenario
from toolbus.parts.conformance.scripted_bus import Arrived, ClientStream, Line, Transcript
from toolbus.processes.lifeline import Lifeline

MAX_LINES = 200
FIRST_LINES = 8
LINE_BYTES = 1 << 20


RUN_VARIABLE = "TOOLBUS_CONFORMANCE_RUN"  # marks the processes of one run


@contextlib.contextmanager
def run_of_clients() -> Iterator[None]:
    """Ends all clients that are started inside with it, and what they start, also where this process is killed.

    They would look for their bus without end, and find that of a later run.
    """
    os.environ[RUN_VARIABLE] = mark = secrets.token_hex(16)  # of clients and of all that they start
    with Lifeline() as lifeline:
        lifeline.mark(f"{RUN_VARIABLE}={mark}")
        yield


class ClientProcess:
    """One process of the client under test, in a group of its own, which `stop` kills with its children.

    Attributes:
        first_lines: the first lines of its output and its errors, which often say what is wrong with a program.
        lines: the last ones, in the order in which they came.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._changed = asyncio.Condition()
        self.first_lines: list[str] = []
        self.lines: deque[str] = deque(maxlen=MAX_LINES)
        self.exited = asyncio.create_task(process.wait())
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> ClientProcess:
        """Starts a client.

        Raises:
            OSError: it cannot be started.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=LINE_BYTES,
        )
        return cls(process)

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.returncode

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the program that was started, not to its children."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def shows(self, text: str) -> None:
        """Waits until its output has a text."""
        async with self._changed:
            await self._changed.wait_for(lambda: any(text in line for line in self.lines))

    async def stop(self) -> None:
        """Ends it at once, with its children, and reads the rest of its output."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self.exited
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._reading, 1.0)  # a child in a group of its own may hold the pipe

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # a line longer than the limit is dropped
                continue
            if not line:
                return
            async with self._changed:
                text = line.decode(errors="replace").rstrip()
                if len(self.first_lines) < FIRST_LINES:
                    self.first_lines.append(text)
                self.lines.append(text)
                self._changed.notify_all()


STEP_SECONDS = 5.0  # for a step that names no time
START_SECONDS = 30.0  # for the first stream of a process: some languages take long, on a busy machine above all
TOKEN = "conformance-token"
DRIVEN = "drive-"  # begins the ids of calls of the tool `host`
LAST_WORDS_SECONDS = 0.2  # between the end of a client and its last messages
END_SECONDS = 2.0  # between the end of its stream and of its process, if both end

T = TypeVar("T")


class ScenarioStage:
    """The scripted bus and the client of one scenario.

    Args:
        command: starts the client.
        patience: multiplies all times that the client may take.

    Attributes:
        bindings: values that the scenario remembers.
        lines: the addresses of the scripted bus, "plugin" and "host".
        client: the process of the client; None before the start.
        tools: the names of the tools that the client offers.
        outcomes: results of driven calls that no step has taken yet, by their ids.
        opened: whether the client has ever opened a stream.
        starting: whether its process has not opened one yet.
        aside: rules that were broken without effect on the scenario, each with the reason.
    """

    def __init__(self, command: Sequence[str], scenario: Scenario, patience: float) -> None:
        self._command = command
        self._scenario = scenario
        self.patience = patience
        self.bindings: Bindings = {}
        self.trace = Transcript()
        self.lines: dict[str, Line] = {}
        self.client: ClientProcess | None = None
        self.tools: set[str] = set()
        self.outcomes: dict[str, Any] = {}
        self.opened = False
        self.starting = True
        self.aside: dict[str, str] = {}
        self._environment: dict[str, str] = {}  # of the client
        self._credential: Path | None = None  # the file that the client got; None for none

    async def last_words(self) -> str:
        """Returns a text about the client's end, to add to a reason; "" if the client still runs."""
        assert self.client is not None
        gone = any(line.current is not None and line.current.over for line in self.lines.values())
        await asyncio.wait({self.client.exited}, timeout=END_SECONDS if gone else LAST_WORDS_SECONDS)
        code = self.client.code
        return "" if code is None else f"; the client ended with exit code {code}"

    async def start(self, folder: Path) -> None:
        """Starts the bus and the client.

        Raises:
            OSError: the client cannot be started.
        """
        for name in ("plugin", "host"):
            path = folder / f"{name}.sock" if self._scenario.unix else None
            access, late = self._scenario.access, self._scenario.late_headers
            self.lines[name] = line = Line(name, Proxy(path), self.trace, access, late_headers=late)
            await line.start()
        environment = {"TOOLBUS_ADDRESS": self.address("plugin"), "TOOLBUS_TOKEN": TOKEN}
        if self._scenario.access != "none":
            self._credential = folder / "credential.toml"
            self.write_credential(FIRST_TOKEN)
            environment["TOOLBUS_CREDENTIAL"] = str(self._credential)
        self._environment = environment
        self.client = await ClientProcess.start(self._command, environment)

    async def restart(self) -> None:
        """Kills the client, and starts it again."""
        assert self.client is not None
        await self.client.stop()
        for line in self.lines.values():
            line.forget()
        self.starting = True
        self.client = await ClientProcess.start(self._command, self._environment)

    def address(self, line: str) -> str:
        """Returns the address to which the client connects."""
        return address_of(self._scenario.access, self.lines[line].proxy.address)

    def write_credential(self, token: str) -> None:
        assert self._credential is not None
        scenario = self._scenario
        write_credential(self._credential, scenario.access, self.address("plugin"), token, mode=scenario.mode)

    async def stop(self) -> None:
        """Ends both at once."""
        if self.client is not None:
            await self.client.stop()
        for line in self.lines.values():
            await line.stop()

    async def within(self, step: Mapping[str, Any], waiting: Awaitable[T], expected: object) -> T:
        """Waits for an event of the client, as long as the step allows, or until the client ends.

        Args:
            expected: the event, for the error text.

        Raises:
            Mismatch: it did not come, or the client ended.
        """
        assert self.client is not None
        seconds = step.get("within", STEP_SECONDS) * self.patience
        if self.starting:
            seconds = max(seconds, START_SECONDS)
        task = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait({task, self.client.exited}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self.client.exited.done():
                await asyncio.wait({task}, timeout=LAST_WORDS_SECONDS)  # what it sent before its end
            if task.done():
                return task.result()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if self.client.exited.done():
            raise Mismatch(f"the client ended; expected: {expected}")
        raise Mismatch(f"nothing came for {seconds:g} s; expected: {expected}")

    async def next(self, step: Mapping[str, Any], stream: ClientStream, expected: object) -> Arrived:
        """Returns the next event on a stream, after the checks of every scenario."""
        while True:
            arrived = await self.within(step, stream.arrived.get(), expected)
            stream.take(arrived)
            if not self.is_outcome(arrived):
                return arrived

    def is_outcome(self, arrived: Arrived) -> bool:
        """Tells whether an event is the result of a driven call, and stores that for the step that takes it."""
        if arrived.field != "results" or not arrived.item["call_id"].startswith(DRIVEN):
            return False
        self.outcomes[arrived.item["call_id"]] = arrived.item
        return True

    def current(self, line: Line) -> ClientStream:
        """Returns the stream that the scenario plays on."""
        if line.current is None:
            raise ValueError(f"the scenario is wrong: nothing was accepted on {line.name} before this step")
        return line.current
