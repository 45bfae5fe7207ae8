"""The host process of a run: keeps N calls in flight on one stream and measures each of them.

Prints one line of JSON (``window.Window``) for each cell. A call's time runs from the moment it is handed to the
writer to the moment its result's frame is read.
"""

from __future__ import annotations

import argparse
import time

import uvloop

from lab.benchmarks import peer, window
from lab.benchmarks.cells import Cell, options_of


async def measure(host: peer.Peer, clock: window.Clock, cell: Cell) -> window.Window:
    """Runs one window and returns when no call of it is left."""
    in_flight = cell.in_flight
    calls = [peer.call(str(slot), slot, size=cell.size) for slot in range(in_flight)]
    host.slice = peer.slice_of(cell.size)
    now = time.perf_counter_ns()
    sent_at = [now] * in_flight
    host.calls += calls
    host.flush()
    figures: window.Window | None = None  # None until the window has closed
    pending = in_flight
    while pending:
        frame = await host.read()
        now = time.perf_counter_ns()
        if frame is None:
            raise RuntimeError("the stream ended in the middle of a window")
        latencies = clock.latencies
        if begins := now >= clock.begins_at:
            clock.begin(now)
        going_on = now < clock.ends_at
        for result in frame.results:
            if result.is_error:
                raise RuntimeError(f"a call failed: {result.error.message}")
            slot = int(result.call_id)
            latencies.append(now - sent_at[slot])
            if going_on:
                sent_at[slot] = now
                host.calls.append(calls[slot])
            else:
                pending -= 1
        if begins:
            latencies.clear()  # these were asked before
        if going_on:
            host.flush()
        elif figures is None:
            figures = clock.close(now)
    assert figures is not None
    return figures


async def run(options: argparse.Namespace) -> None:
    """Attaches and runs a window for each cell."""
    host = peer.Peer(options.address)
    await host.attach("bench-host", [])
    for cell in options.cells:
        clock = window.Clock(cell, options.warm_up, options.seconds, options.middle_pid)
        (await measure(host, clock, cell)).print()
    await host.close()


def main() -> None:
    """Reads the command line and measures."""
    uvloop.run(run(options_of(__doc__).parse_args()))


if __name__ == "__main__":
    main()
