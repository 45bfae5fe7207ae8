"""Keeps N calls in flight as a host on the SDK does: ``python -m lab.load.sdk_host tasks|many|sync ADDRESS``.

``tasks`` awaits `Host.call` in N tasks, ``many`` gives `call_many` N calls at a time, ``sync`` has N threads that block
in `SyncHost.call`. Prints one line of JSON (`windows.Window`) for each cell.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from lab.load import windows, workload
from lab.load.windows import Clock, Window
from toolbus.sdk import Host, SyncHost
from toolbus.tool import Result

ROOM = windows.MAX_IN_FLIGHT


def _check(result: Result) -> None:
    if result.is_error:
        raise RuntimeError(f"a call failed: {result.error}")


def by_tasks(options: argparse.Namespace) -> None:
    """Calls in as many tasks as calls in flight."""
    asyncio.run(_by_tasks(options))


def by_many(options: argparse.Namespace) -> None:
    """Makes as many calls as there are in flight at once, again and again."""
    asyncio.run(_by_many(options))


async def _by_tasks(options: argparse.Namespace) -> None:
    async with Host(options.address, max_in_flight=ROOM) as host:

        async def ask(text: str) -> None:
            _check(await host.call(workload.TOOL_NAME, text))

        await windows.run_cells(windows.preparing(lambda texts: texts, ask), options, options.middle_pid)


async def _by_many(options: argparse.Namespace) -> None:
    async with Host(options.address, max_in_flight=ROOM) as host:
        for cell in options.cells:
            calls = [(workload.TOOL_NAME, workload.arguments_json(n, cell.size)) for n in range(cell.in_flight)]
            clock = Clock(cell, options, options.middle_pid)
            while not clock.is_over:
                began_at = time.perf_counter_ns()
                for result in await host.call_many(calls):
                    _check(result)
                clock.ended(began_at, time.perf_counter_ns(), len(calls))
            clock.window.print()


def by_threads(options: argparse.Namespace) -> None:
    """Calls in as many threads as calls in flight."""
    with SyncHost(options.address, max_in_flight=ROOM) as host:
        for cell in options.cells:
            texts = [workload.arguments_json(slot, cell.size) for slot in range(cell.in_flight)]
            _keep_threads_calling(host, Clock(cell, options, options.middle_pid), texts).print()


def _keep_threads_calling(host: SyncHost, clock: Clock, texts: Sequence[str]) -> Window:
    guard = threading.Lock()
    failures: list[Exception] = []

    def call_again(text: str) -> None:
        try:
            while not clock.is_over and not failures:
                began_at = time.perf_counter_ns()
                _check(host.call(workload.TOOL_NAME, text))
                with guard:
                    clock.ended(began_at, time.perf_counter_ns())
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=call_again, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return clock.window


WAYS: Mapping[str, Callable[[argparse.Namespace], None]] = {"tasks": by_tasks, "many": by_many, "sync": by_threads}


def main() -> None:
    """Reads the command line and measures."""
    WAYS[sys.argv[1]](windows.options_of(__doc__).parse_args(sys.argv[2:]))


if __name__ == "__main__":
    main()
