"""Lists the tools of a bus and calls one, with the generated stubs alone.

python clients/python/host.py [--bus ADDRESS] [NAME [ARGUMENTS_JSON]]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time

import grpc
from peer import Peer, Refused

from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

CONNECT_SECONDS = 10.0  # for the bus to answer


async def show(peer: Peer, name: str, arguments: dict[str, object]) -> int:
    """Lists, calls and prints."""
    await peer.attached.wait()
    assert peer.stub is not None  # there is a stub while there is a stream
    listing = await peer.stub.List(wire.ListRequest(), metadata=peer.metadata)
    print(f"{len(listing.tools)} tools, catalog revision {listing.revision}")
    for listed in listing.tools:
        print(f"  {listed.tool.name} ({listed.source}): {listed.tool.description.splitlines()[0][:90]}")
    if not name:
        return 0
    started = time.perf_counter()
    result = await peer.call(name, arguments)
    micros = (time.perf_counter() - started) * 1e6
    print(f"{name}({json.dumps(arguments, ensure_ascii=False)}) answered after {micros:.0f} µs:")
    if result.HasField("error"):
        print(f"  {pb.ErrorCode.Name(result.error.code)}: {result.error.message}")
    print(f"  {result.output_json or 'null'}")
    return int(result.is_error)


async def session(address: str, name: str, arguments: dict[str, object]) -> int:
    """Keeps the stream up while the listing and the call happen on it."""
    credential = os.environ.get("TOOLBUS_CREDENTIAL", "")
    peer = Peer(address, "host:stubs", token=os.environ.get("TOOLBUS_TOKEN", ""), credential=credential)
    running = asyncio.create_task(peer.run())
    working = asyncio.create_task(show(peer, name, arguments))
    try:
        async with asyncio.timeout(CONNECT_SECONDS) as deadline:
            done, _ = await asyncio.wait({running, working}, return_when=asyncio.FIRST_COMPLETED)
            deadline.reschedule(None)
        if running in done:
            await running
        return await working
    except TimeoutError:
        print(
            f"no bus answered at {peer.address} within {CONNECT_SECONDS:g} s: is it running?",
            file=sys.stderr,
        )
        return 3
    except (Refused, grpc.aio.AioRpcError) as error:
        print(f"the bus at {peer.address} refused: {error}", file=sys.stderr)
        return 1
    finally:
        working.cancel()
        peer.drain()
        await asyncio.wait({running, working})


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="List the tools of a bus, and call one.")
    parser.add_argument("--bus", default=os.environ.get("TOOLBUS_ADDRESS", ""), metavar="ADDRESS")
    parser.add_argument("name", nargs="?", default="", help="the tool to call")
    parser.add_argument("arguments", nargs="?", default="{}", help="its arguments, a JSON object")
    options = parser.parse_args()
    try:
        arguments = json.loads(options.arguments)
    except ValueError as error:
        parser.error(f"ARGUMENTS_JSON is not JSON: {error}")
    if not isinstance(arguments, dict):
        parser.error(f"ARGUMENTS_JSON is {options.arguments}, it must be a JSON object")
    return asyncio.run(session(options.bus, options.name, arguments))


if __name__ == "__main__":
    sys.exit(main())
