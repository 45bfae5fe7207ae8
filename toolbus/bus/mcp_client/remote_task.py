"""Follows a task that a mounted server made of a call, so that it is one running call for the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from toolbus.bus.mcp_client.mcp_connection import McpConnection
from toolbus.bus.mcp_client.transport import Busy, Lost
from toolbus.mcp.jsonrpc import RpcError
from toolbus.text import clean_line, shorten

MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.02, 30.0
POLL_SECONDS = 0.5  # where the server names no interval
MAX_FAILURES = 5  # polls in a row that get no answer
ENDS = ("completed", "failed", "cancelled")

OnMove = Callable[[Mapping[str, Any], Exception | None], None]  # the task's state, or why there is none any more


class RemoteTask:
    """One task of a server, from its creation to its end.

    Args:
        created: the answer that made it.
        on_move: called with each state that says something new, and once at the end.
    """

    def __init__(self, connection: McpConnection, created: Mapping[str, Any], on_move: OnMove) -> None:
        self.id = str(created.get("taskId") or "")
        self._connection = connection
        self._on_move = on_move
        self._state: Mapping[str, Any] = created
        self._polling = asyncio.create_task(self._poll(), name=f"task {self.id}")

    def __repr__(self) -> str:
        return f"<RemoteTask {self.id} {self._state.get('status')}>"

    def cancel(self) -> None:
        """Cancels the task at the server, and follows it no more."""
        self._polling.cancel()
        self._polling = asyncio.create_task(self._quietly("tasks/cancel", {}))

    def answer(self, answers: Mapping[str, Any]) -> None:
        """Answers what the task asked, and follows it again."""
        self._polling.cancel()
        self._polling = asyncio.create_task(self._answer_and_poll(answers))

    async def _answer_and_poll(self, answers: Mapping[str, Any]) -> None:
        await self._quietly("tasks/update", {"inputResponses": dict(answers)})
        self._state = {**self._state, "status": "working"}
        await self._poll()

    async def _poll(self) -> None:
        failures = 0
        while True:
            await asyncio.sleep(self._interval())
            try:
                state = await self._connection.request("tasks/get", {"taskId": self.id}, name=self.id)
            except (RpcError, Lost) as error:
                self._on_move({}, error)
                return
            except Busy as error:
                failures += 1
                if failures == MAX_FAILURES:
                    self._on_move({}, Lost(str(error)))
                    return
                continue
            failures = 0
            before, self._state = self._state, state
            status = state.get("status")
            if status in ENDS:
                self._on_move(state, None if "result" in state else _why(state))
                return
            if status == "input_required":
                self._on_move(state, None)
                return
            if state.get("statusMessage") != before.get("statusMessage"):
                self._on_move(state, None)

    def _interval(self) -> float:
        milliseconds = self._state.get("pollIntervalMs")
        if not isinstance(milliseconds, (int, float)):
            return POLL_SECONDS
        return min(max(milliseconds / 1000, MIN_POLL_SECONDS), MAX_POLL_SECONDS)

    async def _quietly(self, method: str, params: Mapping[str, Any]) -> None:
        try:
            await self._connection.request(
                method, {"taskId": self.id, **params}, name=self.id, timeout=MAX_POLL_SECONDS
            )
        except (RpcError, Lost, Busy, TimeoutError):  # the next poll shows what came of it
            pass


def _why(state: Mapping[str, Any]) -> RpcError:
    """Returns the error of a task that has no result."""
    error = state.get("error")
    if isinstance(error, Mapping) and isinstance(error.get("code"), int):
        return RpcError(error["code"], str(error.get("message") or "the task failed"), error.get("data"))
    message = shorten(clean_line(str(state.get("statusMessage") or f"the task ended as {state.get('status')}")), 300)
    return RpcError(-32603, message)
