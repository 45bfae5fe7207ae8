# ruff: noqa: F401, F811  # fixtures are imported by name and asked for by name

import asyncio
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.parts.mcp.client.mount_cases import ERAS, QUICK, House, house, house_of
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus.local import LocalCaller
from toolbus.errors import Code
from toolbus.parts.mcp.client.entries import MountEntry
from toolbus.parts.mcp.client.mount import MountState
from toolbus.parts.mcp.client.offer import MountManifest
from toolbus.protocol.tool import Result
from toolbus.v1 import tool_pb2 as pb


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
