"""Questions in the middle of calls of mounts, in both eras, and tasks of servers."""

# ruff: noqa: F401, F811  # fixtures are imported by name and asked for by name

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.parts.mcp.client.mount_cases import ERAS, QUICK, House, house, house_of
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus.local import LocalCaller
from toolbus.errors import Code
from toolbus.parts.mcp.client.calls import MAX_FAILURES, RemoteTask
from toolbus.parts.mcp.client.connection import McpConnection
from toolbus.parts.mcp.client.entries import MountEntry
from toolbus.parts.mcp.client.mount import MountState
from toolbus.parts.mcp.client.offer import MountManifest
from toolbus.parts.mcp.client.transport import Busy, Lost
from toolbus.parts.mcp.messages.jsonrpc import RpcError
from toolbus.protocol.tool import Result
from toolbus.v1 import tool_pb2 as pb

WITHOUT = ("sampling",)
WITH = (*WITHOUT, "sampling.tools")


class TestQuestions:
    """Servers that ask in the middle of a call."""

    @staticmethod
    async def call(house: House, arguments: dict[str, Any] | None = None, user: str = "u", **fields: Any) -> Result:
        """Calls as a host that can be asked."""
        caller = LocalCaller("host", house.bus.dispatcher)
        call = pb.ToolCall(name="small:ask", arguments_json=json.dumps(arguments or {}), **fields)
        call.context.user_id = user
        async with asyncio.timeout(WAIT_SECONDS):
            return await caller.call(call)

    @ERAS
    async def test_a_question_ends_the_call_and_the_answer_goes_on_with_it(self, house: House, era: str) -> None:
        await house.live(era)
        asked = await self.call(house, accepts=["elicitation.form"])
        ((key, question),) = json.loads(asked.input_requests_json).items()
        assert question["method"] == "elicitation/create"
        assert question["params"]["message"] == "Who?"
        answers = json.dumps({key: {"action": "accept", "content": {"name": "Ada"}}})
        fields: dict[str, Any] = {"accepts": ["elicitation.form"], "input_responses_json": answers}
        result = await self.call(house, request_state=asked.request_state, **fields)
        assert '"Ada"' in result.unwrap()

    @pytest.mark.parametrize("way", ["twice", "both"])
    async def test_a_server_may_ask_again_after_an_answer_and_before_it(self, house: House, way: str) -> None:
        await house.live()
        result = await self.call(house, {"text": way}, accepts=["elicitation.form"])
        messages, keys = [], set()
        for name in ("Ada", "Bob"):
            asked = json.loads(result.input_requests_json)
            answers = {key: {"action": "accept", "content": {"name": name}} for key in asked}
            messages += [question["params"]["message"] for question in asked.values()]
            keys |= set(asked)
            fields: dict[str, Any] = {"accepts": ["elicitation.form"], "input_responses_json": json.dumps(answers)}
            result = await self.call(house, {"text": way}, request_state=result.request_state, **fields)
        assert sorted(messages) == (["One?", "Two?"] if way == "twice" else ["A", "B"])
        assert len(keys) == 2
        assert sorted(each["content"]["name"] for each in json.loads(result.unwrap())) == ["Ada", "Bob"]

    async def test_a_caller_that_cannot_be_asked_is_not_and_the_server_goes_on(self, house: House) -> None:
        await house.live()
        result = await self.call(house)
        assert "does not accept elicitation.form" in result.unwrap()
        for method in ("sampling/createMessage", "roots/list"):
            refused = await self.call(house, {"text": method}, accepts=["elicitation.form"])
            assert "does not accept" in refused.unwrap()

    @ERAS
    async def test_a_server_may_give_tools_to_the_model_of_a_caller_that_accepts_it(
        self, house: House, era: str
    ) -> None:
        await house.live(era)
        answers = {
            accepts: await self.call(house, {"text": "declared"}, accepts=accepts) for accepts in (WITH, WITHOUT)
        }
        declared = [json.loads(answer.unwrap()).get("sampling") for answer in answers.values()]
        assert declared == [{"tools": {}}, {"tools": {}} if era == "legacy" else {}]
        if era == "legacy":  # it declares once what some callers refuse
            asking = {"text": "sampling/createMessage", "more": {"messages": [], "maxTokens": 1, "tools": []}}
            assert "does not accept sampling.tools" in (await self.call(house, asking, accepts=WITHOUT)).unwrap()
            ((_, question),) = json.loads((await self.call(house, asking, accepts=WITH)).input_requests_json).items()
            assert question["params"]["tools"] == []

    async def test_a_parked_call_goes_on_for_nobody_else(self, house: House) -> None:
        await house.live()
        asked = await self.call(house, accepts=["elicitation.form"], user="owner")
        fields: dict[str, Any] = {"accepts": ["elicitation.form"], "input_responses_json": "{}"}
        fields["request_state"] = asked.request_state
        stolen = await self.call(house, user="thief", **fields)
        assert stolen.error is not None
        assert stolen.error.code is Code.INVALID_ARGUMENTS
        again = await self.call(house, user="owner", **fields)
        assert again.input_requests_json == asked.input_requests_json

    async def test_a_question_while_calls_of_two_users_run_is_refused(self, house: House) -> None:
        await house.live()
        other = asyncio.create_task(house.call("sleep", {"seconds": 1}))
        await asyncio.sleep(0)
        refused = await self.call(house, accepts=["elicitation.form"])
        assert "several users" in refused.unwrap()
        await other

    async def test_a_question_beside_a_parked_call_or_a_prompt_of_others_is_refused(
        self, house: House, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mount = await house.live()
        connection = await mount.connected()
        with monkeypatch.context() as patch:  # a server that does not answer it yet
            patch.setattr(connection.transport, "send", lambda message: None)
            waiting = connection.send("prompts/get", b"{}", lambda result, error: None)
        refused = await self.call(house, accepts=["elicitation.form"])
        assert "several users" in refused.unwrap()
        connection.cancel(waiting, "over")
        asked = await self.call(house, accepts=["elicitation.form"], user="owner")
        assert asked.request_state
        refused = await self.call(house, accepts=["elicitation.form"], user="other")
        assert "several users" in refused.unwrap()
        again = await self.call(house, accepts=["elicitation.form"], user="owner")
        assert again.request_state

    async def test_a_parked_call_ends_with_its_server(self, house: House) -> None:
        mount = await house.live()
        asked = await self.call(house, accepts=["elicitation.form"])
        os.kill(mount.status().pid, signal.SIGKILL)
        await until(lambda: mount.restarts == 1)
        await until(lambda: mount.state is MountState.LIVE)
        late = await self.call(
            house, accepts=["elicitation.form"], input_responses_json="{}", request_state=asked.request_state
        )
        assert late.error is not None
        assert "was restarted" in late.error.message


SDK_SERVER = """
from pydantic import BaseModel

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("asker")


class Answer(BaseModel):
    name: str


@server.tool(name="ask")
async def ask(context: Context) -> str:
    asked = await context.elicit("Who?", Answer)
    return f"Hello {asked.data.name}" if asked.action == "accept" else asked.action


@server.tool()
async def echo(text: str) -> str:
    return text


server.run()
"""


class TestOlderEra:
    """Servers of both eras whose tools can ask in the older one only."""

    @staticmethod
    async def answered(house: House, arguments: dict[str, Any] | None = None) -> Result:
        """Calls the tool that asks, and answers its question."""
        fields: dict[str, Any] = {"accepts": ["elicitation.form"]}
        asked = await TestQuestions.call(house, arguments, **fields)
        questions = json.loads(asked.input_requests_json or "{}")
        assert questions, asked.error
        answers = {key: {"action": "accept", "content": {"name": "Ada"}} for key in questions}
        fields |= {"input_responses_json": json.dumps(answers), "request_state": asked.request_state}
        return await TestQuestions.call(house, arguments, **fields)

    async def test_a_server_of_the_official_sdk_asks_through_the_bus(self, house: House, tmp_path: Path) -> None:
        (tmp_path / "asker.py").write_text(SDK_SERVER)
        arguments = (str(tmp_path / "asker.py"),)
        await house.mounts.apply({"small": MountEntry("small", command=sys.executable, args=arguments)})
        mount = house.mounts.get("small")
        assert mount is not None
        await until(lambda: mount.state is MountState.LIVE)
        assert mount.status().era == "modern"
        assert (await self.answered(house)).unwrap() == {"result": "Hello Ada"}
        assert mount.status().era == "legacy"
        assert (await house.call("echo", {"text": "x"})).unwrap() == {"result": "x"}

    @pytest.mark.parametrize("way", ["sdk", "fastmcp"])
    async def test_a_call_whose_tool_could_not_ask_is_made_again_in_the_older_era(self, house: House, way: str) -> None:
        mount = await house.live("both")
        other = asyncio.create_task(house.call("sleep", {"seconds": 0.2}))
        await until(lambda: mount.handler.pending)
        assert '"Ada"' in (await self.answered(house, {"text": way})).unwrap()
        assert (await other).error is None  # the server was restarted after it
        status = mount.status()
        assert (status.era, status.restarts) == ("legacy", 0)

    async def test_the_older_era_is_remembered(self) -> None:
        manifest = MountManifest(None)
        for era in ("modern", "legacy"):
            async with house_of(manifest) as house:
                assert (await house.live("both", eager=True)).status().era == era
                await self.answered(house, {"text": "sdk"})

    @pytest.mark.parametrize("way", ["sdk", "fastmcp"])
    @pytest.mark.parametrize(
        ("switch", "entry", "accepts"),
        [
            ("both", {}, []),  # nobody could be asked in the older era either
            ("both", {"era": "modern"}, ["elicitation.form"]),
            ("modern", {}, ["elicitation.form"]),  # it does not speak the older one
        ],
    )
    async def test_the_error_stays_where_the_older_era_would_not_help(
        self, house: House, way: str, switch: str, entry: dict[str, Any], accepts: list[str]
    ) -> None:
        mount = await house.live(switch, **entry)
        for _ in range(2):
            failed = await TestQuestions.call(house, {"text": way}, accepts=accepts)
            assert failed.error is not None
            assert failed.error.code is Code.TOOL
            assert "server-initiated" in failed.error.message
        assert mount.status().era == "modern"

    async def test_calls_that_do_not_end_keep_the_era(self) -> None:
        async with house_of(MountManifest(None), replace(QUICK, era_seconds=0.05)) as house:
            mount = await house.live("both")
            other = asyncio.create_task(house.call("sleep", {"seconds": 60}, timeout=1.0))
            await until(lambda: mount.handler.pending)
            failed = await TestQuestions.call(house, {"text": "sdk"}, accepts=["elicitation.form"])
            assert failed.error is not None
            assert "server-initiated" in failed.error.message
            await other
            assert mount.status().era == "modern"


# -- tasks -------------------------------------------------------------------------------------------------------------

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
