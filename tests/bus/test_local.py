from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.core_model import Core, error_of, offered, tool
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus.local import LocalCaller, LocalHandler
from toolbus.errors import Code, Stage
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import spec_of
from toolbus.protocol.tool import Progress, Result
from toolbus.sdk import llm_tool
from toolbus.v1 import tool_pb2 as pb


class Here:
    """A core whose clock is the loop's, with tools and a caller of this process."""

    def __init__(self) -> None:
        self.core = Core()
        self.loop = asyncio.get_running_loop()
        self.core.now = self.loop.time()
        self.caller = LocalCaller("local", self.core.dispatcher)

    def offer(self, function: Callable[..., Any], **options: Any) -> LocalHandler:
        spec = spec_of(llm_tool(**{"description": "", **options})(function))
        handler = LocalHandler("local", spec, lambda: self.core.dispatcher)
        self.core.registry.register(handler, offered(spec.tool))
        return handler

    async def call(self, name: str, arguments: str = "{}", on_progress: Any = None, **more: Any) -> Result:
        message = pb.ToolCall(name=name, arguments_json=arguments, **more)
        return await asyncio.wait_for(self.caller.call(message, on_progress), WAIT_SECONDS)

    def begin(self, name: str, call_id: str = "1") -> asyncio.Task[Result]:
        return self.loop.create_task(self.caller.call(pb.ToolCall(name=name, call_id=call_id, arguments_json="{}")))


@pytest.fixture
async def here() -> Here:
    return Here()


async def test_sync_and_async_functions_answer_alike(here: Here) -> None:
    def plain(a: int) -> int:
        return a + 1

    async def waits(a: int) -> int:
        await asyncio.sleep(0)
        return a + 1

    handlers = [here.offer(plain), here.offer(waits)]
    assert [(await here.call(name, '{"a": 1}')).unwrap() for name in ("plain", "waits")] == [2, 2]
    assert [handler.pending for handler in handlers] == [{}, {}]
    assert here.core.held == 0


async def test_a_function_that_raises_is_the_tools_error(here: Here) -> None:
    def fails() -> None:
        raise ValueError("no such city")

    here.offer(fails)
    result = await here.call("fails")
    assert result.error is not None
    assert (result.error.code, result.error.reason) == (Code.TOOL, "ValueError")
    assert "no such city" in result.error.message


async def test_arguments_are_checked_before_the_function_runs(here: Here) -> None:
    ran = []

    def takes(a: int) -> None:
        ran.append(a)

    here.offer(takes)
    result = await here.call("takes", '{"a": "x"}')
    assert result.error is not None
    assert (result.error.code, ran) == (Code.INVALID_ARGUMENTS, [])


async def test_cancelling_the_wait_cancels_the_async_function(here: Here) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def waits() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    handler = here.offer(waits)
    task = here.begin("waits")
    await asyncio.wait_for(started.wait(), WAIT_SECONDS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), WAIT_SECONDS)
    await until(lambda: not handler.pending)
    assert (handler.stuck, here.caller.in_flight, here.core.held) == (0, {}, 0)


async def test_a_function_cancelled_before_its_first_step_still_frees_its_slot(here: Here) -> None:
    ran = []

    async def never() -> None:
        ran.append(1)

    handler = here.offer(never)
    message = pb.ToolCall(name="never", call_id="1", arguments_json="{}")
    here.core.dispatcher.calls(here.caller, [message], here.core.now)
    here.core.dispatcher.endings.cancels(here.caller, [pb.ToolCancel(call_id="1")], here.core.now)
    await until(lambda: not handler.pending)
    assert (ran, handler.stuck, here.core.held, here.core.records.late) == ([], 0, 0, 1)


async def test_a_sync_function_holds_its_slot_until_its_thread_is_done_and_sees_the_cancel_in_its_scope(
    here: Here,
) -> None:
    started, go, told = threading.Event(), threading.Event(), []

    def blocks(ctx: ToolScope) -> None:
        started.set()
        told.append(ctx.cancelled.wait(20))
        go.wait(20)

    handler = here.offer(blocks)
    task = here.begin("blocks")
    await asyncio.to_thread(started.wait, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: bool(told))
    assert told == [True]
    assert (handler.stuck, len(handler.pending)) == (1, 1)
    go.set()
    await until(lambda: not handler.pending)
    assert handler.stuck == 0


async def test_progress_reaches_the_function_that_watches_the_call(here: Here) -> None:
    async def shows(ctx: ToolScope) -> str:
        ctx.progress(1, total=2, message="half")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return "done"

    here.offer(shows)
    signs: list[Progress] = []
    assert (await here.call("shows", on_progress=signs.append)).unwrap() == "done"
    assert [(sign.progress, sign.total, sign.message) for sign in signs] == [(1, 2, "half")]


async def test_a_watcher_of_progress_that_raises_harms_neither_the_call_nor_the_plugin(
    here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(sign: Progress) -> None:
        raise RuntimeError("of the host's making")

    plugin = here.core.plugin("plugin", tool("t"))
    task = here.loop.create_task(here.call("t", on_progress=broken))
    await until(lambda: bool(plugin.pending))
    here.core.progress(plugin, next(iter(plugin.pending)))
    here.core.answer(plugin, "7")
    assert (await task).unwrap() == 7
    assert "of the host's making" in caplog.text


async def test_a_refused_call_ends_at_once_as_a_result(here: Here) -> None:
    result = await here.call("nobody")
    assert result.error is not None
    assert (result.error.code, result.error.stage) == (Code.NOT_FOUND, Stage.NOT_DISPATCHED)
    assert here.caller._waiting == {}


async def test_a_call_id_in_flight_is_refused_without_disturbing_the_first(here: Here) -> None:
    plugin = here.core.plugin("plugin", tool("t"))
    task = here.begin("t", "same")
    await until(lambda: bool(plugin.pending))
    with pytest.raises(ValueError, match="'same' is already in flight"):
        await here.call("t", call_id="same")
    here.core.answer(plugin, "1")
    assert (await task).unwrap() == 1


async def test_context_and_time_left_reach_the_function(here: Here) -> None:
    seen: list[Any] = []

    async def looks(ctx: ToolScope) -> None:
        seen.append((ctx.context.user_id, ctx.time_left()))

    here.offer(looks)
    await here.call("looks", context=pb.CallContext(user_id="ann"), timeout_seconds=9.0)
    ((user, left),) = seen
    assert user == "ann"
    assert 0 < left <= 9.0


async def test_a_newer_function_of_the_same_name_replaces_the_older_while_its_call_ends(here: Here) -> None:
    go = asyncio.Event()

    async def t() -> str:
        await go.wait()
        return "older"

    older = here.offer(t)
    first = here.begin("t")
    await until(lambda: bool(older.pending))

    async def newer() -> str:
        return "newer"

    here.offer(newer, name="t")
    assert (await here.call("t")).unwrap() == "newer"
    go.set()
    assert (await asyncio.wait_for(first, WAIT_SECONDS)).unwrap() == "older"


async def test_a_function_past_its_deadline_ends_for_its_caller_and_is_cancelled(here: Here) -> None:
    ended = asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    handler = here.offer(slow)
    host = here.core.peer("host")
    call_id = here.core.call(host, "slow", timeout_seconds=1.0)
    await asyncio.sleep(0)
    here.core.advance(1.5)
    assert error_of(host, call_id).code is Code.DEADLINE_EXCEEDED
    await asyncio.wait_for(ended.wait(), WAIT_SECONDS)
    await until(lambda: not handler.pending)
    assert here.core.held == 0
