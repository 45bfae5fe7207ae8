"""Calls at an even pace, answered or not: ``python -m lab.benchmarks.paced_host ADDRESS RATE``.

Prints ``busy`` once the calls of its first second are answered, and goes on until the process is ended.
"""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop

from lab.load import peer, workload

BEAT_SECONDS = 0.01


async def _call(host: peer.Peer, rate: int) -> None:
    began_at, sent = time.monotonic(), 0
    while True:
        due = int((time.monotonic() - began_at) * rate)
        host.calls += [peer.call(str(number), number % workload.MAX_IN_FLIGHT) for number in range(sent, due)]
        sent = max(sent, due)
        host.flush()
        await asyncio.sleep(BEAT_SECONDS)


async def main(address: str, rate: int) -> None:
    """Calls until the stream ends."""
    host = peer.Peer(address)
    await host.attach("bench-traffic", [])
    calling = asyncio.create_task(_call(host, rate))
    answered, is_busy = 0, False
    while (frame := await host.read()) is not None:
        for result in frame.results:
            if result.is_error:
                raise RuntimeError(f"a call failed: {result.error}")
        answered += len(frame.results)
        if answered >= rate and not is_busy:
            is_busy = True
            print("busy", flush=True)
    calling.cancel()
    raise RuntimeError("the stream ended")


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
