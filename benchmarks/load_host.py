"""The host process of a run: keeps N calls in flight on one stream and measures each of them.

Prints one line of JSON (``window.Window``) for each N. A call's time runs from the moment it is handed to the
writer to the moment its result's frame is read.
"""

from __future__ import annotations

import argparse
import time

import uvloop

from benchmarks import peer, window


async def measure(host: peer.Peer, clock: window.Clock, in_flight: int) -> window.Window:
    """Runs one window and returns when no call of it is left."""
    calls = [peer.call(str(slot), slot) for slot in range(in_flight)]
    now = time.perf_counter_ns()
    sent_at = [now] * in_flight
    host.calls += calls
    host.flush()
    figures: window.Window | None = None  # None until the window has closed
    owed = in_flight
    while owed:
        frame = await host.read()
        now = time.perf_counter_ns()
        if frame is None:
            raise RuntimeError("the stream ended in the middle of a window")
        if now >= clock.begins_at:
            clock.begin(now)
        latencies = clock.latencies
        going_on = now < clock.ends_at
        for result in frame.results:
            if result.is_error:
                raise RuntimeError(f"a call failed: {result.error}")
            slot = int(result.call_id)
            latencies.append(now - sent_at[slot])
            if going_on:
                sent_at[slot] = now
                host.calls.append(calls[slot])
            else:
                owed -= 1
        if going_on:
            host.flush()
        elif figures is None:
            figures = clock.close(now)
    assert figures is not None
    return figures


async def run(options: argparse.Namespace) -> None:
    """Attaches and runs a window for each number of calls in flight."""
    host = peer.Peer(options.address)
    await host.attach("bench-host", [])
    for in_flight in options.in_flight:
        clock = window.Clock(in_flight, options.warm_up, options.seconds, options.middle_pid)
        (await measure(host, clock, in_flight)).print()
    await host.close()


def options_of(description: str | None) -> argparse.ArgumentParser:
    """Returns the command line that every load generator understands."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("address")
    parser.add_argument("--middle-pid", type=int, required=True)
    parser.add_argument("--in-flight", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64, 512])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warm-up", type=float, default=0.5)
    return parser


def main() -> None:
    """Reads the command line and measures."""
    uvloop.run(run(options_of(__doc__).parse_args()))


if __name__ == "__main__":
    main()
