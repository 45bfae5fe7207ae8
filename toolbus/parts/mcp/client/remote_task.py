"""Follows a task with which a mounted server answered a call; for the bus it is one running call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from toolbus.common.text import clean_line, shorten
from toolbus.parts.mcp.client.call_messages import number_of
from toolbus.parts.mcp.client.mcp_connection import McpConnection
from toolbus.parts.mcp.client.transport import Busy, Lost
from toolbus.parts.mcp.messages.jsonrpc import RpcError

MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.02, 30.0
POLL_SECONDS = 0.5  # if the server sends no interval
MAX_FAILURES = 5  # consecutive polls that the server does not read
ENDS = ("completed", "failed", "cancelled")

OnChange = Callable[[Mapping[str, Any], Exception | None], None]  # the task's state, or the error that ended it


class RemoteTask:
    """One task of a server, from its creation to its end.

    Args:
        created: the answer that created it.
        on_change: called with each new state, and once at the end.
    """

    def __init__(self, connection: McpConnection, created: Mapping[str, Any], on_change: OnChange) -> None:
        self.id = str(created.get("taskId") or "")
        self._connection = connection
        self._on_change = on_change
        self._state: Mapping[str, Any] = created
        self._polling = asyncio.create_task(self._poll(), name=f"task {self.id}")

    def __repr__(self) -> str:
        return f"<RemoteTask {self.id} {self._state.get('status')}>"

    def cancel(self) -> None:
        """Cancels the task at the server, and stops following it."""
        self._polling.cancel()
        self._polling = asyncio.create_task(self._quietly("tasks/cancel", {}))

    def answer(self, answers: Mapping[str, Any]) -> None:
        """Answers the questions of the task, and follows it again."""
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
                self._on_change({}, error)
                return
            except Busy as error:
                failures += 1
                if failures == MAX_FAILURES:
                    self._on_change({}, Lost(str(error)))
                    return
                continue
            failures = 0
            before, self._state = self._state, state
            status = state.get("status")
            if status in ENDS:
                self._on_change(state, None if "result" in state else _why(state))
                return
            if status == "input_required":
                self._on_change(state, None)
                return
            if state.get("statusMessage") != before.get("statusMessage"):
                self._on_change(state, None)

    def _interval(self) -> float:
        milliseconds = self._state.get("pollIntervalMs")
        seconds = number_of(milliseconds) / 1000
        if not seconds and milliseconds != 0:  # 0 is an interval: the shortest
            return POLL_SECONDS
        return min(max(seconds, MIN_POLL_SECONDS), MAX_POLL_SECONDS)

    async def _quietly(self, method: str, params: Mapping[str, Any]) -> None:
        try:
            await self._connection.request(
                method, {"taskId": self.id, **params}, name=self.id, timeout=MAX_POLL_SECONDS
            )
        except (RpcError, Lost, Busy, TimeoutError):  # the next poll shows the effect
            pass


def _why(state: Mapping[str, Any]) -> RpcError:
    """Returns the error of a task that has no result."""
    error = state.get("error")
    if isinstance(error, Mapping) and isinstance(error.get("code"), int):
        return RpcError(error["code"], str(error.get("message") or "the task failed"), error.get("data"))
    message = shorten(clean_line(str(state.get("statusMessage") or f"the task ended as {state.get('status')}")), 300)
    return RpcError(-32603, message)
