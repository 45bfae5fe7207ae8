"""Calls by a schedule, and never again what was refused: ``python -m lab.overload.hosts WAY ADDRESS FOLDER NAME``.

Ways: ``stream`` is one raw stream, ``rest`` is HTTP with a request for each call, ``sdk`` is a host on the SDK, which
does send again what was refused, within the call's time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import sys
from http import HTTPStatus
from typing import Any

import aiohttp
import uvloop

from lab.ledger import OK, UNANSWERED
from lab.load import peer, workload
from lab.load.schedule import BEAT_SECONDS, Pace, begin, drive, options_of
from toolbus.errors import Code, Stage
from toolbus.sdk import Host
from toolbus.v1 import tool_pb2 as pb

MAX_UNWRITTEN = 4 * peer.SLICE  # calls that wait for the stream to take them; the rest waits as numbers
BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


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


def _call(number: int, tool: str) -> pb.ToolCall:
    text = f'{{"place":"Reykjavik","days":1,"note":"{number}"}}'
    return pb.ToolCall(call_id=str(number), name=tool, arguments_json=text)


async def by_stream(options: argparse.Namespace) -> None:
    """Calls on one stream."""
    host = peer.Peer(options.address, own_connection=True)
    await host.attach(options.name, [], max_in_flight=options.max_in_flight)
    pace = await begin(options)
    reading = asyncio.create_task(_read(host, pace))
    while not pace.is_over and not reading.done():
        if numbers := pace.to_send(MAX_UNWRITTEN - len(host.calls)):
            host.calls += [_call(number, options.tool) for number in numbers]
            host.flush()
        await asyncio.sleep(BEAT_SECONDS)
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    await host.close()
    pace.close(options.folder / f"{options.name}.answers")


# -- over HTTP -------------------------------------------------------------------------------------------------------


def outcome_of(status: int, headers: Any, body: dict[str, Any]) -> tuple[int, float]:
    """Returns the code of a response and its hint, which is 0 where the response lacks something that it must have."""
    error = body.get("error")
    if status == HTTPStatus.OK and not error:
        return OK, 0.0
    if status not in (HTTPStatus.OK, *BUSY) or not isinstance(error, dict):
        return UNANSWERED, 0.0
    is_complete = (
        error["retry_safe"]
        and error["limit"]
        and error["stage"] == Stage.NOT_DISPATCHED.name
        and "Retry-After" in headers
    )
    return Code[error["code"]].value, float(error["retry_after_seconds"]) if is_complete else 0.0


async def by_rest(options: argparse.Namespace) -> None:
    """Calls over HTTP."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(pace: Pace, number: int) -> None:
            body = {"name": options.tool, "arguments": _arguments(number)}
            try:
                async with session.post(f"{options.address}/api/tools/invoke", json=body) as response:
                    is_readable = response.status in (HTTPStatus.OK, *BUSY)
                    answer = await response.json(content_type=None) if is_readable else {}
                    pace.ended(number, *outcome_of(response.status, response.headers, answer))
            except (aiohttp.ClientError, OSError, ValueError):
                pace.ended(number, UNANSWERED)

        await drive(options, ask)


def _arguments(number: int) -> dict[str, Any]:
    return {"place": "Reykjavik", "days": 1, "note": str(number)}


# -- on the SDK ------------------------------------------------------------------------------------------------------


async def _ask(host: Host, options: argparse.Namespace, pace: Pace, number: int) -> None:
    result = await host.call(options.tool, _arguments(number), timeout=options.max_wait)
    error = result.error
    if error is None:
        pace.ended(number, OK if not result.is_error else UNANSWERED)
        return
    is_complete = error.retry_safe and error.limit and error.message
    pace.ended(number, error.code.value, error.retry_after_seconds or sys.float_info.min if is_complete else 0.0)


async def by_sdk(options: argparse.Namespace) -> None:
    """Calls with `toolbus.sdk.Host`."""
    async with Host(options.address, source=options.name) as host:
        await drive(options, functools.partial(_ask, host, options))


WAYS = {"stream": by_stream, "rest": by_rest, "sdk": by_sdk}


def main() -> None:
    """Reads the command line and calls."""
    parser = options_of(__doc__)
    parser.add_argument("--max-in-flight", type=int, default=workload.MAX_IN_FLIGHT, help="as it declares to the bus")
    uvloop.run(WAYS[sys.argv[1]](parser.parse_args(sys.argv[2:])))


if __name__ == "__main__":
    main()
