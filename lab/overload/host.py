"""A host on one raw stream: ``python -m lab.overload.host ADDRESS FOLDER NAME``; repeats nothing that was refused."""

from __future__ import annotations

import argparse
import asyncio
import contextlib

import uvloop

from lab.benchmarks import peer, workload
from lab.overload.load import OK
from lab.overload.pace import Pace, begin, options_of
from toolbus.v1 import tool_pb2 as pb

MAX_UNWRITTEN = 4 * peer.SLICE  # calls that wait for the stream to take them; the rest waits as numbers


def call(number: int, tool: str) -> pb.ToolCall:
    """Returns a call whose arguments name it."""
    text = f'{{"place":"Reykjavik","days":1,"note":"{number}"}}'
    return pb.ToolCall(call_id=str(number), name=tool, arguments_json=text)


def hint_of(error: pb.CallError) -> float:
    """Returns when a refused caller may return; 0 where the refusal lacks anything that it has to say."""
    whole = error.retry_safe and error.limit.name and error.limit.value > 0 and error.message
    return error.retry_after_seconds if whole and error.stage == pb.CALL_STAGE_NOT_DISPATCHED else 0.0


async def _read(host: peer.Peer, pace: Pace) -> None:
    while (frame := await host.read()) is not None:
        for result in frame.results:
            if result.is_error:
                pace.ended(int(result.call_id), result.error.code, hint_of(result.error))
            else:
                pace.ended(int(result.call_id), OK)


async def run(options: argparse.Namespace) -> None:
    """Calls as scheduled, then writes down what came of it."""
    host = peer.Peer(options.address, own_connection=True)
    await host.attach(options.name, [], max_in_flight=options.max_in_flight)
    pace = await begin(options)
    reading = asyncio.create_task(_read(host, pace))
    while not pace.is_over and not reading.done():
        room = MAX_UNWRITTEN - len(host.calls)
        if numbers := pace.to_send(room):
            host.calls += [call(number, options.tool) for number in numbers]
            host.flush()
        await pace.beat()
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    await host.close()
    pace.close(options.folder / f"{options.name}.answers")


def main() -> None:
    """Reads the command line and calls."""
    parser = options_of(__doc__)
    parser.add_argument("--max-in-flight", type=int, default=workload.MAX_IN_FLIGHT, help="as it tells the bus")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
