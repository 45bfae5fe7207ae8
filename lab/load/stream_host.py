"""Keeps N calls in flight on one raw stream and measures each of them: ``python -m lab.load.stream_host ADDRESS``.

Prints one line of JSON (`windows.Window`) for each cell. A call's time runs from the moment it is handed to the writer
to the moment its result's message is read.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import uvloop

from lab.load import peer, windows
from lab.load.windows import Cell, options_of

BEAT_SECONDS = 0.01  # of calls at an even pace


async def measure(host: peer.Peer, clock: windows.Clock, cell: Cell) -> windows.Window:
    """Runs one window and returns when no call of it is left."""
    in_flight = cell.in_flight
    calls = [peer.call(str(slot), slot, size=cell.size) for slot in range(in_flight)]
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


async def call_evenly(host: peer.Peer, rate: int) -> None:
    """Calls at an even pace, answered or not; prints ``busy`` once the calls of the first second are answered."""

    async def send() -> None:
        began_at, sent = time.monotonic(), 0
        while True:
            due = int((time.monotonic() - began_at) * rate)
            host.calls += [peer.call(str(number), number % windows.MAX_IN_FLIGHT) for number in range(sent, due)]
            sent = max(sent, due)
            host.flush()
            await asyncio.sleep(BEAT_SECONDS)

    sending = asyncio.create_task(send())
    answered = 0
    while (frame := await host.read()) is not None:
        if failures := [result.error for result in frame.results if result.is_error]:
            raise RuntimeError(f"a call failed: {failures[0]}")
        if answered < rate <= answered + len(frame.results):
            print("busy", flush=True)
        answered += len(frame.results)
    sending.cancel()
    raise RuntimeError("the stream ended")


async def run(options: argparse.Namespace) -> None:
    """Attaches and runs a window for each cell."""
    host = peer.Peer(options.address)
    await host.attach("bench-host", [])
    if options.rate:
        await call_evenly(host, options.rate)
    for cell in options.cells:
        (await measure(host, windows.Clock(cell, options, options.middle_pid), cell)).print()
    await host.close()


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument(
        "--rate", type=int, default=0, help="call so often a second instead, until the process is ended"
    )
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
