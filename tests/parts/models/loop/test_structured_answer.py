"""Answers as values of a program's type, loops without asyncio, and what a loop refuses unless it is allowed."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, TypedDict

import pydantic
import pytest

from tests.parts.models.loop.scripted_model import FunctionSource
from toolbus.errors import InvalidRequest, SetupError
from toolbus.loop import OutputMismatch, SyncToolLoop, ToolLoop, allow_all
from toolbus.protocol.tool import Annotations
from toolbus.sdk import Plugin, SyncHost
from toolbus.testing import ScriptedModel, Step, calls, running_bus, says


@dataclass
class Place:
    name: str
    degrees: float


class Typed(TypedDict):
    name: str
    degrees: float


class Model(pydantic.BaseModel):
    name: str
    degrees: float = pydantic.Field(ge=-90)


GOOD = '{"name": "Oslo", "degrees": 4}'


@pytest.mark.parametrize("answer", [GOOD, f"Here it is:\n```json\n{GOOD}\n```"], ids=["bare", "fenced"])
@pytest.mark.parametrize("kind", [Place, Typed, Model])
async def test_the_answer_is_a_value_of_the_output_type(kind: Any, answer: str) -> None:
    with ScriptedModel(calls("weather"), says(answer)) as model:
        loop = ToolLoop(FunctionSource(weather=lambda: "4 degrees in Oslo"), model.endpoint)
        reply = await loop.run("How is it?", output_type=kind)
    assert reply.output == kind(name="Oslo", degrees=4)
    assert '"degrees"' in str(model.requests[0]["messages"])


@pytest.mark.parametrize("kind", [Place, Typed, Model])
@pytest.mark.parametrize("bad", ["It is cold.", '{"name": "Oslo"}', '{"name": 3, "degrees": 4}'])
async def test_an_answer_that_does_not_fit_is_repaired_once(kind: Any, bad: str) -> None:
    with ScriptedModel(calls("weather"), says(bad), says(GOOD)) as model:
        reply = await ToolLoop(FunctionSource(weather=lambda: 4), model.endpoint).run("How?", output_type=kind)
    assert (reply.output, reply.rounds, len(reply.calls)) == (kind(name="Oslo", degrees=4), 3, 1)
    assert "Your answer does not fit" in model.requests[2]["messages"][-1]["content"]
    with ScriptedModel(says(bad), says(bad)) as stubborn, pytest.raises(OutputMismatch) as error:
        await ToolLoop(FunctionSource(), stubborn.endpoint).run("How?", output_type=kind)
    assert error.value.reply.text == bad


async def test_a_type_that_json_cannot_hold_and_unknown_pinned_names_are_refused() -> None:
    model = ScriptedModel(says("never"))
    with pytest.raises(SetupError, match="give a dataclass"):
        await ToolLoop(FunctionSource(), model.endpoint).run("How?", output_type=object)
    source = FunctionSource(get_weather=lambda: 4)
    loop = ToolLoop(source, ScriptedModel(says("Fine."), says("Still.")).endpoint, pinned=["get_wether"])
    with pytest.raises(InvalidRequest, match=r"pinned has 'get_wether', .*did you mean 'get_weather'\?"):
        await loop.run("How?")
    source.offer(lambda: 4, name="get_wether")
    assert (await loop.run("How?")).text == "Fine."
    source.remove("get_wether")  # its plugin restarts
    assert (await loop.run("How?")).text == "Still."


async def test_a_destructive_tool_runs_only_where_the_program_says_so(caplog: pytest.LogCaptureFixture) -> None:
    source = FunctionSource()
    source.offer(lambda: "gone", name="wipe", annotations=Annotations(destructive=True))
    script = [calls("wipe"), says("Done.")]
    reply = await ToolLoop(source, ScriptedModel(*script).endpoint).run("Wipe it.")
    assert source.calls == []
    assert reply.calls[0].outcome == "permission_denied"
    assert "pass approve= to ToolLoop" in reply.calls[0].result.text
    assert "allow_all" in caplog.text
    reply = await ToolLoop(source, ScriptedModel(*script).endpoint, approve=allow_all).run("Wipe it.")
    assert [each.result.output for each in reply.calls] == ["gone"]


async def test_a_program_without_asyncio_runs_turns_on_its_sync_host_from_several_threads() -> None:
    plugin = Plugin("sums")
    plugin.add_tool(lambda a, b: a + b, name="add", description="Adds.")
    texts: list[str] = []
    seen: list[str] = []

    def program(address: str) -> None:
        own = asyncio.new_event_loop()
        asyncio.set_event_loop(own)
        with SyncHost(address) as host:
            model = ScriptedModel(*(Step("", [("add", {"a": 1, "b": 2})]), says("3")) * 2, says(GOOD))
            with SyncToolLoop(host, model.endpoint) as loop:
                texts.append(loop.run("Add.").text)
                texts.append(loop.run("Add.", on_event=lambda event: seen.append(type(event).__name__)).text)
                assert loop.run("Where?", output_type=Place).output == Place("Oslo", 4)
            with pytest.raises(SetupError, match="is closed"):
                loop.run("Again.")
        assert asyncio.get_event_loop() is own  # the program's, which still runs
        own.run_until_complete(asyncio.sleep(0))
        own.close()

    async with running_bus() as bus:
        await plugin.start(address=bus.grpc_addresses[0])
        await plugin.ready()
        await asyncio.to_thread(program, bus.grpc_addresses[0])
        await plugin.close()
    assert texts == ["3", "3"]
    assert (seen[0], seen[-1]) == ("RoundStarted", "Finished")
    assert not [thread for thread in threading.enumerate() if thread.name == "toolbus turns"]


def test_a_turn_that_begins_while_its_loop_is_closed_ends_as_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = SyncToolLoop(FunctionSource(), ScriptedModel(says("Hi.")).endpoint)
    closing = threading.Thread(target=loop.close)
    start = asyncio.run_coroutine_threadsafe

    def close_first(*arguments: Any) -> Any:
        closing.start()
        closing.join(0.1)  # as another thread that runs right now
        return start(*arguments)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", close_first)
    try:
        assert loop.run("Hello.").text == "Hi."  # where the turn was faster than the end of the loop
    except CancelledError:
        pass
    closing.join()
    with pytest.raises(SetupError, match="is closed"):
        loop.run("Again.")
