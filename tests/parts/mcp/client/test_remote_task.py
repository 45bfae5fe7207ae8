"""Tests what a server answers about its task, and what becomes of the running call; without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from tests.support.waiting import until
from toolbus.parts.mcp.client.calls import MAX_FAILURES, RemoteTask
from toolbus.parts.mcp.client.connection import McpConnection
from toolbus.parts.mcp.client.transport import Busy, Lost
from toolbus.parts.mcp.messages.jsonrpc import RpcError

CREATED = {"taskId": "t-1", "pollIntervalMs": 0}


class _Server:
    """Answers `tasks/get` with states or errors in turn, the last one for ever."""

    def __init__(self, *answers: Mapping[str, Any] | Exception) -> None:
        self._answers = list(answers)
        self.requests: list[tuple[str, Mapping[str, Any]]] = []
        self.moves: list[tuple[Mapping[str, Any], Exception | None]] = []
        self.task = RemoteTask(
            cast(McpConnection, self), CREATED, lambda state, error: self.moves.append((state, error))
        )

    async def request(self, method: str, params: Mapping[str, Any], **_: Any) -> Mapping[str, Any]:
        self.requests.append((method, params))
        if method != "tasks/get":
            raise Busy("its pipe is full")
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return {**CREATED, **answer}

    async def move(self) -> tuple[Mapping[str, Any], Exception | None]:
        """Waits for the next change of the task's state."""
        await until(lambda: self.moves, "a state of the task")
        state, error = self.moves.pop(0)
        return {key: value for key, value in state.items() if key not in CREATED}, error


async def test_a_task_reports_each_new_message_once_and_then_its_result() -> None:
    working, done = {"status": "working", "statusMessage": "half"}, {"status": "completed", "result": {}}
    server = _Server(Busy("full"), working, working, done)
    assert await server.move() == (working, None)
    assert await server.move() == (done, None)
    assert server.requests == [("tasks/get", {"taskId": "t-1"})] * 4


@pytest.mark.parametrize(
    ("state", "code", "message"),
    [
        ({"status": "failed", "error": {"code": -7, "message": "no disk"}}, -7, "no disk"),
        ({"status": "failed", "error": {"code": -7}}, -7, "the task failed"),
        ({"status": "failed", "statusMessage": "out of\npaper"}, -32603, "out of paper"),
        ({"status": "cancelled"}, -32603, "the task ended as cancelled"),
    ],
)
async def test_a_task_without_a_result_fails_with_the_reason_of_its_server(
    state: Mapping[str, Any], code: int, message: str
) -> None:
    _, error = await _Server(state).move()
    assert isinstance(error, RpcError)
    assert (error.code, error.message) == (code, message)


async def test_an_interval_of_0_polls_as_often_as_the_bus_polls_at_all() -> None:
    server = _Server(*[{"status": "working"}] * 30, {"status": "completed", "result": {}})
    async with asyncio.timeout(10):  # with the interval for servers that send none it would take 15 s
        assert await server.move() == ({"status": "completed", "result": {}}, None)


@pytest.mark.parametrize("interval", [10**400, "soon", True, None])
async def test_an_interval_that_is_not_a_usable_number_does_not_stop_the_polls(interval: object) -> None:
    working = {"status": "working", "statusMessage": "half"}
    server = _Server({**working, "pollIntervalMs": interval}, {"status": "completed", "result": {}})
    for _ in range(2):
        _, error = await server.move()
        assert error is None


@pytest.mark.parametrize("error", [RpcError(-32602, "unknown task"), Lost("the server has ended")])
async def test_a_task_that_cannot_be_read_fails_at_once(error: Exception) -> None:
    server = _Server(error)
    assert await server.move() == ({}, error)
    assert len(server.requests) == 1


async def test_a_task_fails_after_several_polls_that_its_server_does_not_read() -> None:
    server = _Server(Busy("its pipe is full"))
    _, error = await server.move()
    assert isinstance(error, Lost)
    assert len(server.requests) == MAX_FAILURES


async def test_a_task_that_asks_continues_after_the_answers() -> None:
    asks, done = {"status": "input_required", "inputRequests": {"name": {}}}, {"status": "completed", "result": {}}
    server = _Server(asks, done)
    assert await server.move() == (asks, None)
    server.task.answer({"name": "Ann"})
    assert await server.move() == (done, None)
    assert server.requests[1] == ("tasks/update", {"taskId": "t-1", "inputResponses": {"name": "Ann"}})


async def test_a_cancelled_task_is_cancelled_at_its_server_and_reports_nothing_more() -> None:
    server = _Server({"status": "completed", "result": {}})
    server.task.cancel()
    await until(lambda: server.requests, "the cancel")
    await asyncio.sleep(0)
    assert (server.requests, server.moves) == ([("tasks/cancel", {"taskId": "t-1"})], [])
