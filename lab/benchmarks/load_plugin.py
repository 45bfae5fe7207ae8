"""The plugin process of a run: answers every call at once, or with ``--hold`` takes calls and never answers.

Prints ``attached`` when the bus has taken its tool. With ``--hold N`` it prints ``held`` once it holds N calls.
"""

from __future__ import annotations

import argparse

import uvloop

from lab.benchmarks import peer, workload
from toolbus.v1 import tool_pb2 as pb


async def serve(address: str, hold: int) -> None:
    """Runs until the stream ends."""
    plugin = peer.Peer(address)
    await plugin.attach("bench-plugin", [peer.tool()])
    print("attached", flush=True)
    held = 0
    while (frame := await plugin.read()) is not None:
        if hold:
            held += len(frame.calls)
            if held >= hold:
                print("held", flush=True)
            continue
        if frame.calls:
            plugin.results += [
                pb.ToolResult(call_id=call.call_id, output_json=workload.OUTPUT_JSON) for call in frame.calls
            ]
            plugin.flush()


def main() -> None:
    """Reads the command line and serves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--hold", type=int, default=0)
    options = parser.parse_args()
    uvloop.run(serve(options.address, options.hold))


if __name__ == "__main__":
    main()
