"""Lists the tools of a bus and calls one, with the generated stubs alone.

python clients/python/show.py [--bus ADDRESS] [NAME [ARGUMENTS_JSON]]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time

from peer import Peer, Refused, StatusError

from toolbus.v1 import tool_pb2 as pb

CONNECT_SECONDS = 10.0  # for the bus to answer


async def show(peer: Peer, name: str, arguments: dict[str, object]) -> int:
    """Lists, calls and prints."""
    async with asyncio.timeout(CONNECT_SECONDS):
        listing = await peer.list()
    print(f"{len(listing.tools)} tools, catalog revision {listing.revision}")
    for listed in listing.tools:
        print(f"  {listed.tool.name} ({listed.source}): {first_line(listed.tool.description)}")
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


def first_line(text: str) -> str:
    """Returns the beginning of a text."""
    return text.partition("\n")[0][:90]


async def session(address: str, name: str, arguments: dict[str, object]) -> int:
    """Runs a peer while it lists and calls."""
    peer = Peer(address, "host:stubs")
    try:
        async with peer:
            return await show(peer, name, arguments)
    except TimeoutError:
        print(
            f"no bus answered at {peer.address} within {CONNECT_SECONDS:g} s: is it running?",
            file=sys.stderr,
        )
        return 3
    except (Refused, StatusError) as error:
        print(f"the bus at {peer.address} refused: {error}", file=sys.stderr)
        return 1


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="List the tools of a bus, and call one.")
    parser.add_argument("--bus", default="", metavar="ADDRESS")
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
