"""One registry, many threads and event loops."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.parts.moving.registry.example_tools import ANYTHING, BlockedTool, offer, with_tools
from tests.support.waiting import WAIT_SECONDS, within
from toolbus.tools import ToolRegistry

THREADS = 8
STRESS_SECONDS = 1.5


def run(registry: ToolRegistry, name: str, **options: Any) -> str:
    """Calls a tool on an event loop that is made for it and ends with it."""
    return asyncio.run(registry.call(name, {}, **options))


def test_a_registry_can_be_used_on_one_loop_after_the_other() -> None:
    registry = with_tools("one")
    assert [run(registry, "one") for _ in range(5)] == ["one"] * 5
    assert len(registry.records()) == 5  # of loops that have ended, too


def test_each_caller_has_its_handlers_on_its_own_loop() -> None:
    registry, meet = ToolRegistry(), threading.Barrier(THREADS)

    @registry.tool("where", "d", ANYTHING)
    async def where(ctx: Any) -> str:
        return str(ctx is asyncio.get_running_loop())

    async def ask() -> str:
        meet.wait(WAIT_SECONDS)
        return await registry.call("where", {}, ctx=asyncio.get_running_loop())

    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(lambda _: asyncio.run(ask()), range(THREADS)))
    assert answers == ["True"] * THREADS


def test_many_threads_register_call_export_and_permit_at_once() -> None:
    registry, ends = with_tools("shared"), time.monotonic() + STRESS_SECONDS
    rounds = [0] * THREADS

    async def work(number: int) -> None:
        own, common = f"own.{number}", f"common{number % 2}"
        while time.monotonic() < ends or not all(rounds):  # on a busy machine some begin late
            offer(registry, own)
            offer(registry, common)
            texts = await asyncio.gather(*(registry.call(own, {}, "ann") for _ in range(10)))
            assert texts == [own] * 10
            assert await registry.call("shared", {}) == "shared"
            exported = registry.get_openai_tools_by_names({own, "shared"})
            assert [each["function"]["name"] for each in exported] == ["shared", own.replace(".", "_")]
            assert await registry.call(exported[1]["function"]["name"], {}) == own
            assert own in registry.tool_names()
            assert {each["function"]["name"] for each in registry.get_openai_tools("ann")} >= {"shared"}
            registry.set_permissions({own: ["ann"], f"rule{number}": []})
            registry.invalidate_cache()
            assert [each.handler for each in registry.list_tools() if each.name == own]
            registry.records()
            assert registry.unregister_tool(own)
            assert (await registry.call(own, {})).startswith("there is no tool")
            rounds[number] += 1

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(asyncio.run, work(number)) for number in range(THREADS)]:
            done.result(2 * WAIT_SECONDS)
    assert registry.tool_names() == {"shared", "common0", "common1"}
    assert registry.clear_tools() == 3
    assert not registry


def test_two_threads_that_register_the_same_name_leave_one_tool_that_can_be_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry, offered, overtaken = ToolRegistry(), threading.Event(), threading.Event()
    register = registry._backend.registry.register

    def register_and_be_overtaken(*arguments: Any, **options: Any) -> Any:
        outcome = register(*arguments, **options)
        if not offered.is_set():
            offered.set()
            overtaken.wait(0.1)  # which it must not be: the other thread waits for this one
        return outcome

    monkeypatch.setattr(registry._backend.registry, "register", register_and_be_overtaken)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(offer, registry, "same")
        assert offered.wait(WAIT_SECONDS)
        second = pool.submit(offer, registry, "same")
        second.add_done_callback(lambda _: overtaken.set())
        first.result(WAIT_SECONDS)
        second.result(WAIT_SECONDS)
    assert len(registry) == 1
    assert registry.unregister_tool("same")
    assert not registry


def is_collected(what: weakref.ref[Any]) -> bool:
    gc.collect()
    return what() is None


def on_a_loop(work: Callable[[], Any]) -> weakref.ref[Any]:
    """Does some async work on a loop of its own and returns the loop, weakly."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(work())
    loop.close()
    return weakref.ref(loop)


def test_a_closed_event_loop_is_garbage_collected() -> None:
    registry = with_tools("one")
    registry.tool("plain", "d", ANYTHING)(lambda: "plain")
    for name in ("one", "plain", "nobody"):
        assert is_collected(on_a_loop(partial(registry.call, name, {})))


def test_a_closed_event_loop_with_a_cancelled_call_is_garbage_collected() -> None:
    registry, held = ToolRegistry(), BlockedTool()
    registry.tool("waits", "d", ANYTHING)(held)

    async def give_up() -> None:
        call = asyncio.create_task(registry.call("waits", {}))
        while not held.begun:
            await asyncio.sleep(0)
        call.cancel()
        while not held.cancelled:
            await asyncio.sleep(0)
        await asyncio.wait([call])

    loop = on_a_loop(give_up)
    held._waiting.clear()
    assert is_collected(loop)


def test_an_unused_registry_is_garbage_collected_and_its_threads_end() -> None:
    registry = ToolRegistry()
    threads: list[threading.Thread] = []
    registry.tool("plain", "d", ANYTHING)(lambda: threads.append(threading.current_thread()))
    run(registry, "plain")
    reference = weakref.ref(registry)
    registry.clear_tools()
    del registry
    assert is_collected(reference)
    threads[0].join(WAIT_SECONDS)
    assert not threads[0].is_alive()


async def test_a_handler_that_never_ends_blocks_no_other_event_loop() -> None:
    registry, begun, end = with_tools("one"), threading.Event(), threading.Event()

    @registry.tool("blocks", "d", ANYTHING)
    async def blocks() -> str:
        begun.set()
        end.wait(2 * WAIT_SECONDS)
        return "ended"

    other = asyncio.get_running_loop().run_in_executor(None, run, registry, "blocks")
    assert await asyncio.to_thread(begun.wait, WAIT_SECONDS)
    assert await within(registry.call("one", {})) == "one"
    end.set()
    assert await within(other) == "ended"


def test_a_deadline_is_met_while_other_event_loops_start_and_end() -> None:
    registry, held = with_tools("one"), BlockedTool()
    registry.tool("waits", "d", ANYTHING, timeout=0.1)(held)

    async def both() -> str:
        slow = asyncio.create_task(registry.call("waits", {}))
        await asyncio.to_thread(run, registry, "one")
        gc.collect()
        return await within(slow)

    assert asyncio.run(both()).startswith("no result from tool 'waits' within 0.1 s")
