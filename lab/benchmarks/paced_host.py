"""A host that keeps a bus busy at an even pace: so many calls a second, answered or not.

Prints ``busy`` once the calls of its first second are answered, and goes on until the process is ended.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import uvloop

from lab.benchmarks import peer

BEAT_SECONDS = 0.01


async def run(address: str, rate: int) -> None:
    """Calls until the stream ends."""
    host = peer.Peer(address)
    await host.attach("bench-traffic", [])
    async with asyncio.TaskGroup() as group:
        group.create_task(_call(host, rate))
        group.create_task(_count(host, rate))


async def _call(host: peer.Peer, rate: int) -> None:
    began_at, sent = time.monotonic(), 0
    while True:
        due = int((time.monotonic() - began_at) * rate)
        host.calls += [peer.call(str(number), number % 4096) for number in range(sent, due)]
        sent = max(sent, due)
        host.flush()
        await asyncio.sleep(BEAT_SECONDS)


async def _count(host: peer.Peer, rate: int) -> None:
    answered, said = 0, False
    while (frame := await host.read()) is not None:
        for result in frame.results:
            if result.is_error:
                raise RuntimeError(f"a call failed: {result.error}")
        answered += len(frame.results)
        if answered >= rate and not said:
            said = True
            print("busy", flush=True)
    raise RuntimeError("the stream ended")


def main() -> None:
    """Reads the command line and calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("rate", type=int)
    options = parser.parse_args()
    uvloop.run(run(options.address, options.rate))


if __name__ == "__main__":
    main()
