"""A host over HTTP: ``python -m lab.overload.rest_host URL FOLDER NAME``. Each call is a request of its own."""

from __future__ import annotations

import argparse
import functools
from http import HTTPStatus
from typing import Any

import aiohttp
import uvloop

from lab.overload.load import OK, UNANSWERED
from lab.overload.pace import Pace, drive, options_of
from toolbus.errors import Code, Stage

BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


def outcome_of(status: int, headers: Any, body: dict[str, Any]) -> tuple[int, float]:
    """Returns the code of an answer and its hint, which is 0 where the answer lacks anything that it has to say."""
    error = body.get("error")
    if status == HTTPStatus.OK and not error:
        return OK, 0.0
    if status not in (HTTPStatus.OK, *BUSY) or not isinstance(error, dict):
        return UNANSWERED, 0.0
    whole = (
        error["retry_safe"]
        and error["limit"]
        and error["stage"] == Stage.NOT_DISPATCHED.name
        and "Retry-After" in headers
    )
    return Code[error["code"]].value, float(error["retry_after_seconds"]) if whole else 0.0


async def _ask(session: aiohttp.ClientSession, options: argparse.Namespace, pace: Pace, number: int) -> None:
    body = {"name": options.tool, "arguments": {"place": "Reykjavik", "days": 1, "note": str(number)}}
    try:
        async with session.post(f"{options.address}/api/tools/invoke", json=body) as answer:
            said = await answer.json(content_type=None) if answer.status in (HTTPStatus.OK, *BUSY) else {}
            pace.ended(number, *outcome_of(answer.status, answer.headers, said))
    except (aiohttp.ClientError, OSError, ValueError):
        pace.ended(number, UNANSWERED)


async def run(options: argparse.Namespace) -> None:
    """Calls as scheduled, then writes down what came of it."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await drive(options, functools.partial(_ask, session, options))


def main() -> None:
    """Reads the command line and calls."""
    uvloop.run(run(options_of(__doc__).parse_args()))


if __name__ == "__main__":
    main()
