"""Keeps N calls in flight on one raw stream and measures each of them: ``python -m lab.load.stream_host ADDRESS``.

Prints one line of JSON (`windows.Window`) for each cell. A call's time runs from the moment it is handed to the writer
to the moment its result's message is read.
"""

from __future__ import annotations

import argparse
import time

import uvloop

from lab.load import peer, windows, workload
from lab.load.windows import Cell, options_of


async def measure(host: peer.Peer, clock: windows.Clock, cell: Cell, tool: str = workload.TOOL_NAME) -> windows.Window:
    """Runs one window and returns when no call of it is left."""
    in_flight = cell.in_flight
    calls = [peer.call(str(slot), slot, tool, cell.size) for slot in range(in_flight)]
    host.slice = peer.slice_of(cell.size)
    now = time.perf_counter_ns()
    sent_at = [now] * in_flight
    host.calls += calls
    host.flush()
    figures: windows.Window | None = None  # None until the window has closed
    pending = in_flight
    while pending:
        frame = await host.read()
        now = time.perf_counter_ns()
        if frame is None:
            raise RuntimeError("the stream ended in the middle of a window")
        latencies = clock.latencies
        if begins := now >= clock.begins_at:
            clock.begin(now)
        goes_on = now < clock.ends_at
        for result in frame.results:
            if result.is_error:
                raise RuntimeError(f"a call failed: {result.error.message}")
            slot = int(result.call_id)
            latencies.append(now - sent_at[slot])
            if goes_on:
                sent_at[slot] = now
                host.calls.append(calls[slot])
            else:
                pending -= 1
        if begins:
            latencies.clear()  # these calls began before
        if goes_on:
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
        (await measure(host, windows.Clock(cell, options, options.middle_pid), cell, options.tool)).print()
    await host.close()


if __name__ == "__main__":
    parser = options_of(__doc__)
    parser.add_argument("--tool", default=workload.TOOL_NAME)
    uvloop.run(run(parser.parse_args()))
