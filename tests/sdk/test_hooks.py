"""Tests the hooks of a plugin: in what order they get events, and what a slow one gets."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.support.waiting import until
from toolbus.sdk import CatalogChange
from toolbus.sdk.plugin_client import Hooks


async def _run(work: Any) -> Any:
    return await asyncio.to_thread(work)


async def test_a_hook_gets_events_in_order_and_delays_no_other_hook() -> None:
    hooks = Hooks(_run)
    heard: list[int] = []
    slow: list[int] = []
    first = asyncio.Event()

    async def waits(number: int) -> None:
        await first.wait()
        slow.append(number)

    def plain(number: int) -> None:
        time.sleep(0.02 if number == 0 else 0.0)
        heard.append(number)

    hooks.add("change", waits)
    hooks.add("change", plain)
    hooks.open(asyncio.get_running_loop())
    for number in range(5):
        hooks.fire("change", number)
    await until(lambda: len(heard) == 5)
    assert (heard, slow) == ([0, 1, 2, 3, 4], [])
    first.set()
    await until(lambda: len(slow) == 5)
    assert slow == [0, 1, 2, 3, 4]


async def test_a_slow_hook_gets_the_changes_that_came_meanwhile_as_one() -> None:
    hooks = Hooks(_run)
    slow: list[int] = []
    fast: list[int] = []
    first = asyncio.Event()

    async def waits(change: CatalogChange) -> None:
        slow.append(change.revision)
        await first.wait()

    async def quick(change: CatalogChange) -> None:
        fast.append(change.revision)

    hooks.add("tools_changed", waits)
    hooks.add("tools_changed", quick)
    hooks.open(asyncio.get_running_loop())
    for revision in range(1, 101):
        hooks.fire_change("tools_changed", CatalogChange(revision, False))
        await until(lambda: revision in fast)  # noqa: B023 - awaited at once
    assert slow == [1]
    first.set()
    await until(lambda: len(slow) == 2)
    await hooks.settle(1.0)
    assert slow == [1, 100]
