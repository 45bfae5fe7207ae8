from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tests.parts.models.loop.scripted_model import ApiError, FunctionSource, ScriptedModel, call, chunks, failed, says
from tests.parts.models.loop.turn_cases import add
from tests.support.waiting import WAIT_SECONDS
from toolbus.errors import Code, PeerLost
from toolbus.loop import CallDone, CallEnded, Endpoint, LoopSettings, RoundEnded, ToolLoop
from toolbus.parts.models.dialects.conversation import Answered, Answers, Message, Turn
from toolbus.parts.models.dialects.openai_chat import OpenAIChat
from toolbus.protocol.tool import Result, Tool
from toolbus.sdk import Host


async def test_no_more_calls_are_run_than_the_settings_allow() -> None:
    source = FunctionSource(add=add)
    model = ScriptedModel(says("", *(call("add", {"a": n}) for n in range(130))), says("done"))
    reply = await ToolLoop(source, model.endpoint).run("?")
    assert len(reply.calls) == len(model.results(1)) == 130
    assert [done.outcome for done in reply.calls[126:]] == ["ok", "ok", "overloaded", "overloaded"]
    assert len(source.calls) == 128


async def test_an_endpoint_that_refuses_tools_is_not_offered_any_again() -> None:
    model = ScriptedModel(ApiError(400, "gemma does not support tools"), says("hi"), says("hi again"))
    loop = ToolLoop(FunctionSource(add=add), model.endpoint)
    assert loop.takes_tools
    assert (await loop.run("?")).text == "hi"
    assert (await loop.run("?")).text == "hi again"
    assert [model.offered(n) for n in range(3)] == [["add"], [], []]
    assert not loop.takes_tools


async def test_a_refusal_of_the_forced_answer_does_not_disable_tools() -> None:
    model = ScriptedModel(says("", call("add")), ApiError(400, "gemma does not support tools"), says("hi"))
    loop = ToolLoop(FunctionSource(add=add), model.endpoint, LoopSettings(rounds=1))
    assert (await loop.run("?")).text == "hi"
    assert (model.offered(2), loop.takes_tools) == ([], True)


async def test_an_answer_that_breaks_off_with_the_phrase_of_a_refusal_is_not_requested_again() -> None:
    attempts = 0

    async def ask(request: object) -> AsyncIterator[object]:
        nonlocal attempts
        attempts += 1
        yield chunks(says("h"))[0]
        raise ApiError(400, "gemma does not support tools")

    loop = ToolLoop(FunctionSource(add=add), Endpoint(OpenAIChat(), ask))
    with pytest.raises(ApiError):
        await loop.run("?")
    assert (attempts, loop.takes_tools) == (1, True)


async def test_a_tool_on_the_bus_that_the_model_was_not_offered_is_not_called() -> None:
    source = FunctionSource(**{"math.add": add})
    model = ScriptedModel(says("", call("math.add")), says("no"))
    (done,) = (await ToolLoop(source, model.endpoint).run("?")).calls
    assert (model.offered(0), done.outcome, source.calls) == (["math_add"], "not_found", [])


@pytest.mark.parametrize("streams", [False, True])
async def test_a_temporary_error_is_raised_and_does_not_disable_tools(streams: bool) -> None:
    fault = ApiError(503, "tools are not available just now: does not support tools")
    model = ScriptedModel(fault, says("hi"), streams=streams)
    loop = ToolLoop(FunctionSource(add=add), model.endpoint)
    with pytest.raises(ApiError, match="just now"):
        await loop.run("?")
    assert (await loop.run("?")).text == "hi"
    assert [model.offered(n) for n in range(2)] == [["add"], ["add"]]


async def test_cancelling_a_turn_cancels_its_calls_and_waits_for_them() -> None:
    started, ended = asyncio.Barrier(3), []

    async def stuck(n: int) -> None:
        await started.wait()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(n)

    model = ScriptedModel(says("", call("stuck", {"n": 1}), call("stuck", {"n": 2})))
    turn = asyncio.ensure_future(ToolLoop(FunctionSource(stuck=stuck), model.endpoint).run("?"))
    await asyncio.wait_for(started.wait(), WAIT_SECONDS)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert sorted(ended) == [1, 2]


@pytest.mark.parametrize("others", [0, 1])
async def test_a_call_that_is_cancelled_elsewhere_is_answered_and_the_turn_continues(others: int) -> None:
    async def gone() -> None:
        raise asyncio.CancelledError

    model = ScriptedModel(says("", call("gone"), *[call("add")] * others), says("done"))
    reply = await ToolLoop(FunctionSource(gone=gone, add=add), model.endpoint).run("?")
    assert [done.outcome for done in reply.calls] == ["cancelled", *["ok"] * others]


async def test_the_last_known_catalog_is_used_where_it_cannot_be_listed_again() -> None:
    source = FunctionSource(add=add)
    model = ScriptedModel(says("", call("add")), says("done"), says("never"))
    loop = ToolLoop(source, model.endpoint)
    known = await loop.run("?")
    assert known.text == "done"

    async def lost() -> object:
        raise PeerLost("no bus answered")

    source.tools = lost  # type: ignore[method-assign,assignment]
    assert (await loop.run("?")).text == "never"
    assert model.offered(2) == ["add"]
    with pytest.raises(PeerLost, match="no bus answered"):
        await ToolLoop(source, model.endpoint).run("?")


async def test_without_a_bus_the_error_names_its_address_and_the_fix(tmp_path: Path) -> None:
    async with Host(f"unix:{tmp_path}/nobody.sock") as host:
        loop = ToolLoop(host, ScriptedModel(says("never")).endpoint, LoopSettings(list_timeout=0.05))
        with pytest.raises(PeerLost, match=r"^no bus answered at unix:\S+/nobody.sock within 0.05 s.*`toolbus serve`"):
            await loop.run("?")


async def test_the_timeout_of_another_source_is_an_error_with_its_cause() -> None:
    source = FunctionSource(add=add)
    source.tools = asyncio.Event().wait  # type: ignore[method-assign,assignment]
    loop = ToolLoop(source, ScriptedModel(says("never")).endpoint, LoopSettings(list_timeout=0.01))
    with pytest.raises(PeerLost, match=r"cannot list tools: no answer within 0.01 s"):
        await loop.run("?")


async def test_the_events_before_a_failure_form_a_conversation_that_can_continue() -> None:
    calls = says("", call("add", {"a": 1}), call("add", {"a": 2}))
    model = ScriptedModel(calls, ApiError(503, "overloaded"), says("1 and 2"))
    loop = ToolLoop(FunctionSource(add=add), model.endpoint)
    question = Message("user", "?")
    turns: list[Turn] = []
    ended: list[CallDone] = []

    async def keep() -> None:
        async for event in loop.stream([question]):
            match event:
                case RoundEnded(turn=turn):
                    turns.append(turn)
                case CallEnded(done):
                    ended.append(done)

    with pytest.raises(ApiError):
        await keep()
    answers = Answers(tuple(Answered(done.call, done.result) for done in sorted(ended, key=lambda each: each.order)))
    reply = await loop.run([question, *turns, answers])
    assert reply.text == "1 and 2"
    assert model.results(2) == ["1", "2"]


class RestartingSource(FunctionSource):
    """A source with a tool `roll` that goes offline while it is called, and one that stays."""

    def __init__(self, *results: Result) -> None:
        super().__init__(roll=self.roll, add=add)
        self.results = list(results)

    async def roll(self) -> Result:
        self.revision += 1
        return self.results.pop(0)

    async def tools(self) -> tuple[int, Sequence[Tool]]:
        revision, tools = await super().tools()
        return revision, [tool for tool in tools if tool.name == "add" or not self.calls]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (Result(output_json="6"), "6"),
        (failed(Code.UNAVAILABLE, "tool 'roll' is offline: its plugin may reconnect"), "may reconnect"),
        (failed(Code.NOT_FOUND, "there is no tool 'roll'; there are: secret"), "no tool 'roll'. Call one that is off"),
    ],
    ids=["back", "still away", "withdrawn"],
)
async def test_the_call_of_a_tool_that_went_offline_in_the_turn_goes_to_the_source(result: Result, text: str) -> None:
    source = RestartingSource(Result(output_json="1"), result)
    model = ScriptedModel(says("", call("roll")), says("", call("roll")), says("done"))
    await ToolLoop(source, model.endpoint, LoopSettings(repeats=0)).run("?")
    assert model.offered(1) == ["add"]
    assert len(source.calls) == 2
    assert text in model.results(2)[1]
