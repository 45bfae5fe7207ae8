"""Makes calls on the SDK and over REST for the open loops of all scenarios, and tells how each ended in one form."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from toolbus.protocol.tool import Result

OK, LEFT = "OK", "LEFT"


@dataclass(frozen=True, slots=True)
class Reply:
    """How a call ended for its caller.

    Attributes:
        code: the error's code in the words of the protocol; OK; or what only callers see: LOST (the connection broke),
            AWAY (it could not be sent), LEFT (it did not wait), STRANGE (no answer that the contract knows).
        retry_after: seconds; over HTTP 0 where the response has no such header.
    """

    code: str
    output: Any = None
    stage: str = ""
    retry_safe: bool = False
    limit: str = ""
    retry_after: float = 0.0
    message: str = ""

    @property
    def is_complete_refusal(self) -> bool:
        """Whether it has all that a refusal must have."""
        return bool(self.retry_safe and self.limit and self.message and self.stage == "NOT_DISPATCHED")


def reply_of(result: Result) -> Reply:
    if (error := result.error) is None:
        return Reply(OK, result.output)
    limit = error.limit[0] if error.limit else ""
    known = (error.stage.name, error.retry_safe, limit, error.retry_after_seconds, error.message[:200])
    return Reply(error.code.name, None, *known)


async def invoke(session: aiohttp.ClientSession, body: Mapping[str, Any], seconds: float | None = None) -> Reply:
    """Posts a call to the bus of the session."""
    timeout = aiohttp.ClientTimeout(seconds) if seconds else session.timeout
    try:
        async with session.post("/api/tools/invoke", json=body, timeout=timeout) as response:
            return _read(await response.json(content_type=None), response.headers)
    except (aiohttp.ClientError, OSError, ValueError) as failure:
        return failed(failure)


def _read(answer: Any, headers: Mapping[str, str]) -> Reply:
    try:
        if (error := answer["error"]) is None:
            return Reply(OK, answer["output"])
        limit = error["limit"]["name"] if error["limit"] else ""
        hint = float(error["retry_after_seconds"] or 0.0) if "Retry-After" in headers else 0.0
        return Reply(error["code"], None, error["stage"], error["retry_safe"], limit, hint, error["message"][:200])
    except (KeyError, TypeError):
        return Reply("STRANGE", message=str(answer)[:200])


def failed(failure: Exception) -> Reply:
    """Returns the reply that a failure of HTTP is."""
    if isinstance(failure, aiohttp.ClientConnectorError):
        return Reply("AWAY", stage="NOT_DISPATCHED", message=str(failure))
    return Reply("LOST", stage="UNKNOWN", message=f"{type(failure).__name__}: {failure}")


async def unless_left(calling: Awaitable[Reply], seconds: float) -> Reply:
    """Waits for a call for so long, then cancels it; 0: for as long as it takes."""
    try:
        return await asyncio.wait_for(calling, seconds or None)
    except TimeoutError:
        return Reply(LEFT)


class InFlight:
    """Calls in flight, each in a task of its own."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self, seconds: float) -> int:
        """Waits for all of them, cancels those that take longer, and returns how many these were."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        late = [*self._tasks]
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return len(late)
