"""Calls of the bus in a plugin's process: each answered once, without a connection and without a bus."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, cast

import pytest

from tests.support.waiting import WAIT_SECONDS, until
from toolbus.errors import Code, Stage
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import ToolSet, llm_tool, spec_of
from toolbus.functions.workers import Workers
from toolbus.protocol.session import Side
from toolbus.protocol.tool import CallError, Result
from toolbus.sdk.connection import Answer, Connection
from toolbus.sdk.incoming_calls import Runner
from toolbus.sdk.outgoing_calls import PeerSession
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

VALUE: ContextVar[str] = ContextVar("VALUE", default="unset")


class Elsewhere:
    """Stands for the connection's loop, where it runs on a thread of its own."""

    in_turn_of: asyncio.AbstractEventLoop | None = None

    def __init__(self) -> None:
        self.joined: list[asyncio.AbstractEventLoop] = []  # loops that offered their turns

    def join(self, program: asyncio.AbstractEventLoop) -> None:
        self.joined.append(program)


class Line:
    """Stands for the connection: notes what it is handed, and of several answers to a call the first."""

    def __init__(self) -> None:
        self.shared = Elsewhere()
        self.batches: list[list[Answer]] = []  # as they were handed over

    def answer_all(self, answers: list[Answer], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.batches.append([answer for answer in answers if answer[1] not in self.ids])

    def answer(self, session: PeerSession, result: Result) -> None:
        self.answer_all([(session, result.call_id, result)])

    def report(self, session: PeerSession, progress: pb.ToolProgress) -> None:
        """Drops it."""

    def postpone(self, job: object) -> bool:
        return False

    @property
    def ids(self) -> list[str]:
        return [call_id for batch in self.batches for _, call_id, _ in batch]

    @property
    def outcomes(self) -> dict[str, str | Result]:
        return {call_id: outcome for batch in self.batches for _, call_id, outcome in batch}

    def error(self, call_id: str) -> CallError:
        outcome = self.outcomes[call_id]
        assert isinstance(outcome, Result)
        assert outcome.error is not None
        return outcome.error


class Plugin:
    """A runner with the tools of a test."""

    def __init__(self, *functions: Callable[..., Any], workers: int = 32, limit: int = 256) -> None:
        self.line = Line()
        self.session = PeerSession(Side.PEER, wire.InvokeRequest, 0.0)
        self.workers = Workers(workers, "test")
        tools = ToolSet()
        for function in functions:
            tools.add(spec_of(llm_tool(function)))
        self._runner = Runner(tools, asyncio.get_running_loop(), self.workers, limit)

    def read(self, name: str, *ids: str) -> dict[str, Any]:
        """Takes one message with a call for each id."""
        calls = {id: pb.ToolCall(call_id=id, name=name, arguments_json="{}", timeout_seconds=60.0) for id in ids}
        return dict(self._runner.take(cast(Connection, self.line), self.session, calls))

    async def answered(self, count: int) -> None:
        await until(lambda: len(self.line.ids) >= count, f"{count} answers")


@pytest.fixture
def made() -> Iterator[Callable[..., Plugin]]:
    plugins: list[Plugin] = []

    def make(*functions: Callable[..., Any], **options: int) -> Plugin:
        plugins.append(Plugin(*functions, **options))
        return plugins[-1]

    yield make
    for plugin in plugins:
        plugin.workers.stop()


async def test_plain_calls_of_one_message_that_wait_for_each_other_are_all_at_work_together(
    made: Callable[..., Plugin],
) -> None:
    meeting = threading.Barrier(32)

    def meet() -> bool:
        return meeting.wait(WAIT_SECONDS) >= 0

    plugin = made(meet)
    plugin.read("meet", *map(str, range(32)))
    await plugin.answered(32)
    assert set(plugin.line.outcomes.values()) == {"true"}


async def test_the_result_of_a_plain_call_does_not_wait_for_the_call_behind_it(made: Callable[..., Plugin]) -> None:
    go = threading.Event()
    calls = iter(("first", "second"))

    def work() -> str:
        if (name := next(calls)) == "second":
            go.wait(WAIT_SECONDS)
        return name

    plugin = made(work, workers=1)
    plugin.read("work", "1", "2")
    await plugin.answered(1)
    assert plugin.line.outcomes == {"1": '"first"'}
    go.set()
    await plugin.answered(2)
    assert plugin.line.ids == ["1", "2"]


async def test_what_a_handler_sets_in_its_context_the_next_call_does_not_see(made: Callable[..., Plugin]) -> None:
    def plain() -> str:
        before = VALUE.get()
        VALUE.set("plain")
        return before

    async def on_loop() -> str:
        before = VALUE.get()
        VALUE.set("async")
        await asyncio.sleep(0)
        return f"{before} {VALUE.get()}"

    def both() -> Any:
        VALUE.set("both")
        return on_loop()

    plugin = made(plain, on_loop, both, workers=1)
    for name in ("plain", "on_loop", "both"):
        plugin.read(name, f"{name} 1", f"{name} 2")
    await plugin.answered(6)
    assert plugin.line.outcomes == {
        **{f"plain {number}": '"unset"' for number in (1, 2)},
        **{f"on_loop {number}": '"unset async"' for number in (1, 2)},
        **{f"both {number}": '"both async"' for number in (1, 2)},
    }
    assert VALUE.get() == "unset"


async def test_every_async_call_has_a_task_of_its_own_in_which_timeouts_work(made: Callable[..., Plugin]) -> None:
    tasks: set[asyncio.Task[Any] | None] = set()

    async def work() -> str:
        tasks.add(asyncio.current_task())
        try:
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        except TimeoutError:
            return "timed out"
        return ""

    plugin = made(work)
    plugin.read("work", "1", "2", "3")
    await plugin.answered(3)
    assert set(plugin.line.outcomes.values()) == {'"timed out"'}
    assert len(tasks) == 3
    assert asyncio.current_task() not in tasks | {None}


async def test_async_calls_of_one_message_that_end_at_once_are_answered_together(made: Callable[..., Plugin]) -> None:
    async def work() -> int:
        return 1

    plugin = made(work)
    plugin.read("work", "1", "2", "3")
    await plugin.answered(3)
    assert [len(batch) for batch in plugin.line.batches] == [3]


@pytest.mark.parametrize("has_plain", [False, True])
async def test_only_a_plugin_whose_handlers_are_all_async_runs_its_connection_in_turns_of_their_loop(
    made: Callable[..., Plugin], has_plain: bool
) -> None:
    async def work() -> None:
        """Does nothing."""

    def plain() -> None:
        """Does nothing."""

    plugin = made(work, *([plain] if has_plain else []))
    for id in ("1", "2"):
        plugin.read("work", id)
        await plugin.answered(int(id))
    assert plugin.line.shared.joined == ([] if has_plain else [asyncio.get_running_loop()] * 2)


async def test_a_call_that_is_cancelled_before_its_first_step_never_runs_and_is_answered(
    made: Callable[..., Plugin],
) -> None:
    ran: list[str] = []

    async def work() -> None:
        ran.append("work")

    plugin = made(work)
    jobs = plugin.read("work", "by the bus", "in time", "by the loop", "last")

    def cancel_some() -> None:  # the tasks are made, and have not begun
        jobs["by the bus"].cancel("enough")
        jobs["by the loop"].task.cancel()

    jobs["in time"].cancel("early")
    asyncio.get_running_loop().call_soon(cancel_some)
    await plugin.answered(4)
    assert sorted(plugin.line.ids) == ["by the bus", "by the loop", "in time", "last"]
    assert (plugin.line.outcomes["last"], ran) == ("null", ["work"])
    errors = {id: plugin.line.error(id) for id in ("by the bus", "by the loop", "in time")}
    assert {error.code for error in errors.values()} == {Code.CANCELLED}
    assert errors["in time"].stage is Stage.NOT_DISPATCHED
    assert "enough" in errors["by the bus"].message


async def test_async_calls_beyond_the_limit_wait_and_all_are_answered(made: Callable[..., Plugin]) -> None:
    at_work = most = 0

    async def work() -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0)
        at_work -= 1

    plugin = made(work, limit=2)
    jobs = plugin.read("work", *map(str, range(8)))

    def cancel_two() -> None:  # they have the two places, and have not begun
        for id in ("0", "1"):
            jobs[id].task.cancel()

    asyncio.get_running_loop().call_soon(cancel_two)
    await plugin.answered(8)
    assert (most, sorted(plugin.line.ids)) == (2, [str(number) for number in range(8)])


async def test_a_call_that_was_answered_is_not_kept_alive(made: Callable[..., Plugin]) -> None:
    scopes: list[weakref.ref[ToolScope]] = []

    def plain(ctx: ToolScope) -> None:
        scopes.append(weakref.ref(ctx))

    async def on_loop(ctx: ToolScope) -> None:
        scopes.append(weakref.ref(ctx))

    async def waits(ctx: ToolScope) -> None:
        scopes.append(weakref.ref(ctx))
        await asyncio.sleep(0.001)

    plugin = made(plain, on_loop, waits)
    gc.disable()
    try:
        for name in ("plain", "on_loop", "waits"):
            plugin.read(name, f"{name} 1", f"{name} 2")
        await plugin.answered(6)
        await until(lambda: not any(scope() for scope in scopes), "the scopes to be freed")
    finally:
        gc.enable()
    assert len(scopes) == 6


async def test_a_call_of_the_bus_has_every_attribute_of_a_scope(made: Callable[..., Plugin]) -> None:
    def idle() -> None:
        """Does nothing."""

    plugin = made(idle)
    job = plugin.read("idle", "1")["1"]
    await plugin.answered(1)
    scope = ToolScope.of(pb.ToolCall(call_id="1", name="idle", timeout_seconds=60.0))
    names = {name for name in dir(ToolScope) if not name.startswith("_") and not callable(getattr(ToolScope, name))}
    assert {"call_id", "cancelled", "deadline"} <= names
    same = names - {"cancelled", "can_call", "deadline"}
    assert {name: getattr(job, name) for name in same} == {name: getattr(scope, name) for name in same}
    assert (job.can_call, job.cancelled.is_set(), repr(job)) == (True, False, "<Job idle 1 ended>")
    assert 0 < job.time_left() <= 60.0
    job.progress(0.5)


async def test_a_task_factory_of_the_program_is_called_in_its_own_loop_never_in_the_connections(
    made: Callable[..., Plugin],
) -> None:
    async def work() -> int:
        return 1

    loop, tasks = asyncio.get_running_loop(), list[Any]()

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        tasks.append(coroutine)
        return asyncio.Task(coroutine, loop=loop, **options)

    plugin = made(work)
    plugin.line.shared.in_turn_of = loop
    loop.set_task_factory(make)
    try:
        plugin.read("work", "a")
        assert tasks == []  # the connection's loop runs while it reads
        plugin.line.shared.in_turn_of = None
        await plugin.answered(1)
        assert len(tasks) == 1
    finally:
        loop.set_task_factory(None)


async def test_a_handler_that_raises_generator_exit_is_answered_and_gives_its_place_back(
    made: Callable[..., Plugin],
) -> None:
    async def leave() -> int:
        raise GeneratorExit

    plugin = made(leave, limit=1)
    plugin.read("leave", "a", "b")
    await plugin.answered(2)
    assert [plugin.line.error(id).reason for id in ("a", "b")] == ["GeneratorExit"] * 2


def test_what_a_scope_lacks_is_named_with_what_it_has() -> None:
    with pytest.raises(AttributeError, match=r"the ctx of a call has no redis: it has context, user_id"):
        _ = ToolScope().redis  # type: ignore[attr-defined]
