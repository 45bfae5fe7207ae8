"""The tools that the contract suite offers: how a test writes one, and those that several tests need.

A tool is written once, as a `Work`; `offers` turns it into what each way of offering asks for.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.contract.handler_cases import failure
from tests.support.waiting import WAIT_SECONDS, Stopwatch, until, within
from toolbus.errors import Stage
from toolbus.protocol.tool import CallError, Result
from toolbus.sdk import CallContext
from toolbus.v1 import tool_pb2 as pb

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "where": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
    "required": ["where"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Refuses:
    """Returned by a tool that says no without raising."""

    error: str
    output: Any = None


@dataclass(frozen=True, slots=True)
class Shows:
    """Returned by a tool that has parts beside its output."""

    output: Any = None
    content: Sequence[pb.ContentBlock] = ()


class Report(Protocol):
    """How a tool shows that it works."""

    def __call__(self, progress: float = 0.0, /, *, total: float = 0.0, message: str = "", chunk: str = "") -> None: ...


@dataclass(frozen=True, slots=True)
class Scope:
    """A call as a tool of any kind sees it.

    Attributes:
        cancelled: set when the call is taken back, for plain functions; async ones get a CancelledError.
    """

    context: CallContext
    report: Report
    cancelled: threading.Event


Run = Callable[[dict[str, Any], Scope], Any]


@dataclass(frozen=True, slots=True)
class Work:
    """A tool as a test writes it. ``run`` is a plain or an async function of the arguments and the scope."""

    name: str
    run: Run
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object"})
    description: str = ""
    timeout: float = 30.0
    idle_timeout: float | None = None


def drop(returned: Any) -> None:
    """Closes what a plain function handed back to wait for when no caller waits any more."""
    if inspect.iscoroutine(returned):
        returned.close()


class Seen:
    """What a tool was called with, from whichever thread it ran on."""

    def __init__(self) -> None:
        self.arguments: list[dict[str, Any]] = []
        self.scopes: list[Scope] = []

    def __repr__(self) -> str:
        return f"<Seen {len(self.arguments)} calls>"

    def note(self, arguments: dict[str, Any], scope: Scope) -> None:
        self.scopes.append(scope)
        self.arguments.append(arguments)


def echo(name: str = "echo", seen: Seen | None = None, **fields: Any) -> Work:
    """A tool that returns its arguments."""

    async def run(arguments: dict[str, Any], scope: Scope) -> Any:
        if seen is not None:
            seen.note(arguments, scope)
        return arguments

    return Work(name, run, **fields)


def returns(value: Any, name: str = "gives") -> Work:
    """A tool that returns a value."""

    async def run(arguments: dict[str, Any], scope: Scope) -> Any:
        return value

    return Work(name, run)


def raises(error: Exception, name: str = "fails") -> Work:
    """A tool that raises where ``fail`` is among its arguments."""

    async def run(arguments: dict[str, Any], scope: Scope) -> Any:
        if arguments.get("fail"):
            raise error
        return "fine"

    return Work(name, run)


class Waiting:
    """An async tool that works until it is let go or cancelled; it may be called many times at once."""

    def __init__(self, name: str = "waits", **fields: Any) -> None:
        self.begun = 0
        self.cancelled = 0
        self._go = threading.Event()
        self.work = Work(name, self._run, **fields)

    def __repr__(self) -> str:
        return f"<Waiting begun={self.begun} cancelled={self.cancelled}>"

    async def has_begun(self, calls: int = 1) -> None:
        """Waits until so many calls have begun."""
        await until(lambda: self.begun >= calls, f"{calls} calls to begin")

    async def was_cancelled(self) -> None:
        """Waits until a call has heard that it was taken back, a second at most."""
        watch = Stopwatch()
        await until(lambda: self.cancelled, "the tool to hear of the cancel")
        assert watch.seconds() < 1.0

    async def times_out(self, call: Callable[[float], Awaitable[Result]], timeout: float = 0.15) -> CallError:
        """Calls with a timeout, and with a longer one where a busy machine let that pass before the bus could tell.

        Returns:
            The error of the call during which the tool had begun.
        """
        while True:
            error = failure(await within(call(timeout)))
            if self.begun and error.stage not in (Stage.NOT_DISPATCHED, Stage.UNKNOWN):
                return error
            timeout *= 2

    def let_go(self) -> None:
        """Lets the calls return."""
        self._go.set()

    async def _run(self, arguments: dict[str, Any], scope: Scope) -> Any:
        self.begun += 1
        try:
            await until(self._go.is_set, "the test to let go", seconds=2 * WAIT_SECONDS)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return "let go"


class Blocking:
    """A plain tool that holds its thread until it is let go, cancelled or not."""

    def __init__(self, name: str = "blocks", **fields: Any) -> None:
        self.begun = 0
        self.scope: Scope | None = None  # of the newest call
        self._go = threading.Event()
        self.work = Work(name, self._run, **fields)

    def __repr__(self) -> str:
        return f"<Blocking begun={self.begun}>"

    async def has_begun(self, calls: int = 1) -> None:
        """Waits until so many calls have begun."""
        await until(lambda: self.begun >= calls, f"{calls} calls to begin")

    def let_go(self) -> None:
        """Lets the calls return."""
        self._go.set()

    def _run(self, arguments: dict[str, Any], scope: Scope) -> Any:
        self.scope = scope
        self.begun += 1
        assert self._go.wait(2 * WAIT_SECONDS), "the test did not let go"
        return "let go"
