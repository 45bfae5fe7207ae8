"""Tests the loop's own tools in whole turns: more rounds, search and injection."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

import pytest

from tests.parts.models.loop.scripted_model import FunctionSource, ScriptedModel, call, says
from toolbus.loop import LoopSettings, ToolLoop
from toolbus.parts.models.dialects.conversation import Message
from toolbus.parts.models.embeddings import EmbedderChoice
from toolbus.parts.models.search import MODES, WORD_MODES


def add(a: int = 0) -> int:
    return a


def many(count: int = 30) -> FunctionSource:
    source = FunctionSource()
    for number in range(count):
        source.offer(lambda: "ok", name=f"tool_{number}", description=f"Does thing {number}.")
    source.offer(add, description="Adds apples to pears.")
    return source


async def test_the_extension_is_offered_only_where_it_is_enabled() -> None:
    model = ScriptedModel(says("a"), says("b"))
    await ToolLoop(FunctionSource(add=add), model.endpoint).run("?")
    await ToolLoop(FunctionSource(add=add), model.endpoint, LoopSettings(extension=True)).run("?")
    assert [model.offered(n) for n in range(2)] == [["add"], ["extend_tool_loop", "add"]]


@pytest.mark.parametrize(("arguments", "rounds"), [("{}", 6), ('{"rounds": 2}', 3), ('{"rounds": 20}', 21), ("", 6)])
async def test_a_model_gets_the_rounds_that_it_requests(arguments: str, rounds: int) -> None:
    asks = says("", call("extend_tool_loop", arguments))
    model = ScriptedModel(asks, *(says("", call("add", {"a": n})) for n in range(rounds - 1)), says("end"))
    reply = await ToolLoop(FunctionSource(add=add), model.endpoint, LoopSettings(rounds=1, extension=True)).run("?")
    assert (reply.rounds, reply.stopped) == (rounds + 1, "round_limit")


@pytest.mark.parametrize("rounds", [0, 21, -1, "5", True, 2.5])
async def test_a_number_of_rounds_outside_its_range_is_refused_with_the_range(rounds: object) -> None:
    model = ScriptedModel(says("", call("extend_tool_loop", {"rounds": rounds})), says("end"))
    reply = await ToolLoop(FunctionSource(), model.endpoint, LoopSettings(rounds=1, extension=True)).run("?")
    assert reply.rounds == 2
    assert "must be from 1 to 20" in model.results(1)[0]


async def test_no_turn_gets_more_than_25_rounds() -> None:
    asks = [says("", call("extend_tool_loop", {"rounds": 20})) for _ in range(25)]
    model = ScriptedModel(*asks, says("end"))
    reply = await ToolLoop(FunctionSource(), model.endpoint, LoopSettings(extension=True)).run("?")
    assert (reply.rounds, reply.stopped) == (26, "round_limit")
    assert json.loads(model.results(2)[1]) == {"granted": 2, "rounds_in_all": 25}
    assert "25 rounds, the maximum" in model.results(3)[2]


async def test_in_deferred_mode_a_model_searches_injects_and_calls_a_tool() -> None:
    model = ScriptedModel(
        says("", call("search_tools", {"query": "apples"})),
        says("", call("request_tool_injection", {"names": ["add"]})),
        says("", call("add", {"a": 5})),
        says("five"),
    )
    reply = await ToolLoop(many(), model.endpoint, pinned=["tool_3"]).run("?")
    own = ["search_tools", "request_tool_injection"]
    assert [model.offered(n) for n in range(3)] == [[*own, "tool_3"], [*own, "tool_3"], [*own, "tool_3", "add"]]
    assert json.loads(model.results(1)[0])["results"][0]["name"] == "add"
    assert [done.outcome for done in reply.calls] == ["ok", "ok", "ok"]


async def test_a_pinned_text_instead_of_a_list_is_refused_with_the_fix() -> None:
    with pytest.raises(TypeError, match=r"pinned is 'add', one text: give a list of names, \['add'\]"):
        ToolLoop(many(), ScriptedModel().endpoint, pinned="add")


async def test_a_tool_that_was_not_injected_cannot_be_called() -> None:
    model = ScriptedModel(says("", call("add")), says("hm"))
    reply = await ToolLoop(many(), model.endpoint, pinned=[]).run("?")
    assert [done.outcome for done in reply.calls] == ["not_found"]
    assert "search_tools" in model.results(1)[0]


async def test_the_tools_that_a_conversation_called_are_offered_again_to_it_alone() -> None:
    inject = says("", call("request_tool_injection", {"names": ["add"]}))
    model = ScriptedModel(inject, says("", call("add")), says("0"), says("other"), says("again"))
    loop = ToolLoop(many(), model.endpoint, pinned=[])
    first = await loop.run("?")
    await loop.run("?")
    await loop.run([*first.items, Message("user", "more")])
    own = ["search_tools", "request_tool_injection"]
    assert [model.offered(n) for n in (3, 4)] == [own, [*own, "add"]]


async def test_a_search_finds_tools_that_were_registered_during_the_turn() -> None:
    source = many()
    model = ScriptedModel(says("hi"), says("", call("search_tools", {"query": "bananas"})), says("found"))
    loop = ToolLoop(source, model.endpoint, pinned=[])
    await loop.run("?")
    source.offer(add, name="peel", description="Peels bananas.")
    await loop.run("?")
    assert json.loads(model.results(2)[0])["results"][0]["name"] == "peel"


async def test_the_loops_own_tools_hide_others_of_their_name() -> None:
    source = many()
    source.offer(lambda **arguments: "fake", name="search_tools")
    model = ScriptedModel(says("", call("search_tools", {"query": "apples"})), says("ok"))
    await ToolLoop(source, model.endpoint, pinned=[]).run("?")
    assert source.calls == []
    assert model.offered(0) == ["search_tools", "request_tool_injection"]


async def test_a_source_may_use_those_names_where_the_mode_is_off() -> None:
    source = FunctionSource()
    source.offer(lambda **arguments: "mine", name="search_tools")
    model = ScriptedModel(says("", call("search_tools")), says("ok"))
    await ToolLoop(source, model.endpoint).run("?")
    assert model.results(1) == ["mine"]


async def test_a_model_searches_by_meaning_with_the_embedder_of_the_settings_and_off_the_event_loop() -> None:
    threads: set[int] = set()

    def embed(texts: Sequence[str]) -> list[list[float]]:
        threads.add(threading.get_ident())
        return [[float("fruit" in text or "apples" in text), 0.5] for text in texts]

    cases: list[tuple[EmbedderChoice, tuple[str, ...]]] = [(embed, MODES), (False, WORD_MODES)]
    for embedder, modes in cases:
        model = ScriptedModel(says("", call("search_tools", {"query": "count fruit"})), says("found"))
        await ToolLoop(many(), model.endpoint, LoopSettings(embedder=embedder), pinned=[]).run("?")
        parameters = model.requests[0]["tools"][0]["function"]["parameters"]
        assert parameters["properties"]["mode"]["enum"] == [*modes]
        found = [result["name"] for result in json.loads(model.results(1)[0])["results"]]
        assert found[:1] == (["add"] if embedder else [])
    assert threads
    assert threading.get_ident() not in threads
