"""Calls by a schedule, and never again what was refused: ``python -m lab.overload.hosts WAY ADDRESS FOLDER NAME``.

Ways: ``stream`` is one raw stream, ``rest`` is HTTP with a request for each call, ``sdk`` is a host on the SDK, which
does send again what was refused, within the call's time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from typing import Any

import aiohttp
import uvloop

from lab.ledger import OK, UNANSWERED
from lab.load import peer, workload
from lab.load.callers import Reply, invoke, reply_of
from lab.load.schedule import BEAT_SECONDS, Pace, begin, drive, options_of
from toolbus.errors import Code
from toolbus.sdk import Host
from toolbus.v1 import tool_pb2 as pb

MAX_UNWRITTEN = 4 * peer.SLICE  # calls that wait for the stream to take them; the rest waits as numbers


# -- on a raw stream -------------------------------------------------------------------------------------------------


def hint_of(error: pb.CallError) -> float:
    """Returns when a refused caller may return; 0 where the refusal lacks something that it must have."""
    is_complete = error.retry_safe and error.limit.name and error.limit.value > 0 and error.message
    return error.retry_after_seconds if is_complete and error.stage == pb.CALL_STAGE_NOT_DISPATCHED else 0.0


async def _read(host: peer.Peer, pace: Pace) -> None:
    while (frame := await host.read()) is not None:
        for result in frame.results:
            if result.is_error:
                pace.ended(int(result.call_id), result.error.code, hint_of(result.error))
            else:
                pace.ended(int(result.call_id), OK)


def _call(number: int) -> pb.ToolCall:
    text = f'{{"place":"Reykjavik","days":1,"note":"{number}"}}'
    return pb.ToolCall(call_id=str(number), name=workload.TOOL_NAME, arguments_json=text)


async def by_stream(options: argparse.Namespace) -> None:
    host = peer.Peer(options.address, own_connection=True)
    await host.attach(options.name, [], max_in_flight=options.max_in_flight)
    pace = await begin(options)
    reading = asyncio.create_task(_read(host, pace))
    while not pace.is_over and not reading.done():
        if numbers := pace.to_send(MAX_UNWRITTEN - len(host.calls)):
            host.calls += [_call(number) for number in numbers]
            host.flush()
        await asyncio.sleep(BEAT_SECONDS)
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    await host.close()
    pace.close(options.folder / f"{options.name}.answers")


# -- one call after the other ----------------------------------------------------------------------------------------


def answer_of(reply: Reply, least_hint: float = 0.0) -> tuple[int, float]:
    """Returns the code of a reply and its hint, which is 0 where the reply lacks something that it must have."""
    if reply.code == "OK":
        return OK, 0.0
    code = Code.__members__.get(reply.code)
    hint = max(reply.retry_after, least_hint) if reply.is_complete_refusal else 0.0
    return (code.value, hint) if code else (UNANSWERED, 0.0)


async def by_rest(options: argparse.Namespace) -> None:
    async with aiohttp.ClientSession(options.address, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(pace: Pace, number: int) -> None:
            reply = await invoke(session, {"name": workload.TOOL_NAME, "arguments": _arguments(number)})
            pace.ended(number, *answer_of(reply))

        await drive(options, ask)


async def by_sdk(options: argparse.Namespace) -> None:
    """Calls with `toolbus.sdk.Host`."""
    async with Host(options.address, source=options.name) as host:

        async def ask(pace: Pace, number: int) -> None:
            result = await host.call(workload.TOOL_NAME, _arguments(number), timeout=options.max_wait)
            pace.ended(number, *answer_of(reply_of(result), sys.float_info.min))  # it has called again in its time

        await drive(options, ask)


def _arguments(number: int) -> dict[str, Any]:
    return {"place": "Reykjavik", "days": 1, "note": str(number)}


WAYS = {"stream": by_stream, "rest": by_rest, "sdk": by_sdk}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--max-in-flight", type=int, default=workload.MAX_IN_FLIGHT, help="as it declares to the bus")
    uvloop.run(WAYS[sys.argv[1]](parser.parse_args(sys.argv[2:])))


if __name__ == "__main__":
    main()
