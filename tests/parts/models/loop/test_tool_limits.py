"""Tests catalogs with more tools than a provider takes in one request, and tools that stay for a conversation."""

from __future__ import annotations

import json
import logging
import pickle
import threading
from itertools import pairwise
from typing import Any

import pytest

from tests.parts.models.loop.realtime_provider import Provider
from tests.parts.models.loop.scripted_model import FunctionSource, ScriptedModel, call, says
from toolbus.loop import Endpoint, LoopSettings, RoundStarted, Rule, ToolLoop
from toolbus.parts.models.dialects.anthropic import Anthropic
from toolbus.parts.models.dialects.conversation import Message
from toolbus.parts.models.dialects.openai_realtime import OpenAIRealtime
from toolbus.parts.models.embeddings import EmbedderChoice
from toolbus.parts.models.loop.loop_tools import MAX_INJECTED, DeferredTools
from toolbus.parts.models.loop.realtime_session import RealtimeSession
from toolbus.parts.models.search import IndexCache
from toolbus.protocol.tool import Tool

TOPICS = ("apples", "bread", "carrots", "dates", "eggs", "figs", "grapes", "honey")
OWN = ["search_tools", "request_tool_injection"]


def catalog(count: int = 200) -> FunctionSource:
    """A source of tools, some of which are about a topic."""
    source = FunctionSource()
    for number in range(count):
        topic = TOPICS[number] if number < len(TOPICS) else f"thing {number}"
        source.offer(lambda: "ok", name=f"tool_{number}", description=f"Orders {topic}.")
    return source


def loop_of(model: ScriptedModel, source: FunctionSource, **options: Any) -> ToolLoop:
    settings = LoopSettings(embedder=False, **options.pop("settings", {}))
    return ToolLoop(source, model.endpoint, settings, **options)


async def test_a_catalog_above_the_limit_offers_tools_that_match_the_message_and_the_search(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = ScriptedModel(says("", call("tool_2")), says("done"), says("again"))
    loop = loop_of(model, catalog())
    events = [event async for event in loop.stream("I need carrots")]
    started = [event for event in events if isinstance(event, RoundStarted)]
    assert model.offered(0) == [*OWN, "tool_2"]
    assert model.results(1) == ["ok"]
    assert [event.hidden for event in started] == [199, 199]
    await loop.run("bread?")
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "200 tools" in warning
    assert "takes 128" in warning
    assert "pinned=" in warning
    assert "max_tools" in warning


@pytest.mark.parametrize(("count", "own", "hidden"), [(128, 0, 0), (129, 2, 129), (127, 0, 0)])
async def test_the_mode_begins_with_the_first_tool_above_the_limit(count: int, own: int, hidden: int) -> None:
    model = ScriptedModel(says("hi"))
    events = [event async for event in loop_of(model, catalog(count)).stream("hello")]
    assert len(model.offered(0)) == (own or count)
    assert [event.hidden for event in events if isinstance(event, RoundStarted)] == [hidden]


@pytest.mark.parametrize(("limit", "offered"), [(0, 200), (200, 200), (199, 2), (None, 2)])
async def test_a_setting_replaces_the_number_of_the_dialect(limit: int | None, offered: int) -> None:
    model = ScriptedModel(says("hi"))
    await loop_of(model, catalog(), settings={"max_tools": limit}).run("hello")
    assert len(model.offered(0)) == offered


async def test_the_loops_own_tools_count_as_well() -> None:
    model = ScriptedModel(says("hi"))
    await loop_of(model, catalog(128), settings={"extension": True}).run("hello")
    assert model.offered(0) == ["extend_tool_loop", *OWN]


async def test_offered_tools_are_only_appended_over_the_turns_of_a_conversation_for_prompt_caches() -> None:
    inject = says("", call("request_tool_injection", {"names": ["tool_50"]}))
    model = ScriptedModel(inject, says("", call("tool_0")), says("a"), says("b"), says("", call("tool_50")), says("c"))
    source = catalog()
    first = await loop_of(model, source).run("apples please")
    second = await loop_of(model, source).run([*first.items, Message("user", "and eggs")])
    stored = pickle.loads(pickle.dumps(second.items))
    await loop_of(model, source).run([*stored, {"role": "user", "content": "and figs"}])
    offered = [model.offered(number) for number in range(6)]
    assert offered[0] == [*OWN, "tool_0"]
    assert offered[-1] == [*OWN, "tool_0", "tool_50", "tool_4", "tool_5"]
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(offered))


async def test_a_rule_calls_its_tool_also_where_not_all_tools_are_offered() -> None:
    model = ScriptedModel(says("done"))
    source = catalog()
    await loop_of(model, source, rules=[Rule("carrots", "tool_150")]).run("carrots")
    assert source.calls == [("tool_150", "{}")]
    assert model.offered(0) == [*OWN, "tool_150", "tool_2"]


async def test_a_request_never_offers_more_than_the_limit_whatever_a_model_injects(
    caplog: pytest.LogCaptureFixture,
) -> None:
    many = [
        says("", call("request_tool_injection", {"names": [f"tool_{n}" for n in range(at, at + 20)]}))
        for at in range(0, 60, 20)
    ]
    model = ScriptedModel(*many, says("", call("tool_59")), says("end"))
    pinned = [f"tool_{number}" for number in reversed(range(40, 100))]
    source = catalog()
    loop = loop_of(model, source, pinned=pinned, settings={"max_tools": 51, "rounds": 5, "extension": True})
    await loop.run("?")
    assert [len(model.offered(number)) for number in range(5)] == [31, 51, 51, 51, 51]
    assert model.offered(0) == [
        "extend_tool_loop",
        *OWN,
        *(f"tool_{number}" for number in range(72, 100)),
    ]  # the first of `pinned`
    third = json.loads(model.results(3)[2])
    assert third["injected"] == [f"tool_{number}" for number in range(40, 60)]
    assert third["no_longer_offered"] == [f"tool_{number}" for number in range(20, 40)]
    assert source.calls == [("tool_59", "{}")]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "32 pinned tools are not offered from the start" in warning


def tools(count: int) -> list[Tool]:
    return [Tool(f"tool_{number}", f"Orders thing {number}.") for number in range(count)]


def test_a_tool_that_was_called_lately_is_not_the_next_to_leave() -> None:
    deferred = DeferredTools(cache=IndexCache(False), limit=6)
    deferred.offered(tools(20))
    deferred.inject({"names": ["tool_1", "tool_2", "tool_3", "tool_4"]})
    deferred.offer(["tool_1"])
    assert deferred.inject({"names": ["tool_5"]}).output["no_longer_offered"] == ["tool_2"]
    assert deferred.injected == ("tool_1", "tool_3", "tool_4", "tool_5")


def test_a_tool_that_is_suggested_again_is_not_the_next_to_leave() -> None:
    deferred = DeferredTools(cache=IndexCache(False), limit=6)
    deferred.offered([Tool(f"tool_{number}", f"Orders {topic}.") for number, topic in enumerate(TOPICS)])
    for topic in ("apples", "bread", "carrots", "dates", "apples", "eggs"):
        deferred.suggest(topic)
    assert deferred.injected == ("tool_0", "tool_3", "tool_4")


def test_a_pinned_tool_that_fits_after_it_was_injected_is_offered_once() -> None:
    deferred = DeferredTools(["tool_1", "tool_2", "tool_3", "tool_4"], cache=IndexCache(False), limit=8)
    deferred.offered(tools(20))
    deferred.inject({"names": ["tool_4"]})
    assert [tool.name for tool in deferred.offered(tools(20))][2:] == ["tool_1", "tool_2", "tool_3", "tool_4"]
    without = [tool for tool in tools(20) if tool.name != "tool_1"]
    assert [tool.name for tool in deferred.offered(without)][2:] == ["tool_2", "tool_3", "tool_4"]
    assert deferred.injected == ()


async def test_a_tool_that_the_model_calls_outlives_those_that_it_only_requested() -> None:
    def request(*numbers: int) -> Any:
        return says("", call("request_tool_injection", {"names": [f"tool_{number}" for number in numbers]}))

    asks = request(10, 11, 12), says("", call("tool_10")), request(20, 21, 22), request(30, 31)
    model = ScriptedModel(*asks, says("done"))
    await loop_of(model, catalog(60), pinned=[], settings={"max_tools": 8, "rounds": 5}).run("?")
    assert model.offered(4) == [*OWN, "tool_10", "tool_20", "tool_21", "tool_22", "tool_30", "tool_31"]


def test_without_a_limit_of_the_provider_there_is_one_of_the_mode() -> None:
    deferred = DeferredTools(cache=IndexCache(False))
    deferred.offered(tools(300))
    for start in range(0, 200, 20):
        deferred.inject({"names": [f"tool_{number}" for number in range(start, start + 20)]})
    assert len(deferred.injected) == MAX_INJECTED
    assert deferred.injected[-1] == "tool_199"


def test_where_too_much_was_suggested_half_leaves_at_once_so_that_the_rest_keeps_its_place() -> None:
    deferred = DeferredTools(cache=IndexCache(False), limit=22)
    deferred.offered(tools(300))
    seen = []
    for number in range(40):
        deferred.suggest(f"order thing {number}")
        seen.append(deferred.injected)
        assert f"tool_{number}" in deferred.injected
        assert len(deferred.injected) <= 20
    moved = sum(later[: len(earlier)] != earlier for earlier, later in pairwise(seen))
    assert moved <= 3


async def test_only_the_newest_messages_of_a_long_conversation_are_searched_for() -> None:
    model = ScriptedModel(says("hi"))
    chat = [Message("user", "apples"), *(Message("user", "well") for _ in range(24)), Message("user", "bread")]
    await loop_of(model, catalog()).run(chat)
    assert model.offered(0) == [*OWN, "tool_1"]


@pytest.mark.parametrize(("keep", "again"), [(True, ["tool_7", "tool_9"]), (False, ["tool_7"])])
async def test_tools_that_were_injected_but_not_called_stay_for_the_conversation_unless_that_is_off(
    keep: bool, again: list[str]
) -> None:
    inject = says("", call("request_tool_injection", {"names": ["tool_7", "tool_9", "unheard_of"]}))
    model = ScriptedModel(inject, says("", call("tool_7")), says("done"), says("again"))
    source = catalog(20)
    first = await loop_of(model, source, pinned=[]).run("?")
    later = loop_of(model, source, pinned=[], settings={"keep_injected": keep})
    await later.run([*pickle.loads(pickle.dumps(first.items)), Message("user", "more")])
    assert model.offered(3) == [*OWN, *again]


async def test_a_request_for_tools_that_failed_is_not_remembered() -> None:
    inject = says("", call("request_tool_injection", {"names": ["tool_30"]}))
    model = ScriptedModel(inject, says("hm"), says("again"))
    source = catalog(20)
    first = await loop_of(model, source, pinned=[]).run("?")
    source.offer(lambda: "ok", name="tool_30")
    await loop_of(model, source, pinned=[]).run([*first.items, Message("user", "more")])
    assert model.offered(2) == OWN


async def test_an_embedder_that_suggests_runs_off_the_event_loop() -> None:
    threads: set[int] = set()

    def embed(texts: Any) -> list[list[float]]:
        threads.add(threading.get_ident())
        return [[1.0 if "fruit" in text or "apples" in text else 0.0, 0.1] for text in texts]

    embedder: EmbedderChoice = embed
    model = ScriptedModel(says("hi"))
    await ToolLoop(catalog(), model.endpoint, LoopSettings(embedder=embedder)).run("some fruit")
    assert "tool_0" in model.offered(0)
    assert threads
    assert threading.get_ident() not in threads


async def test_a_realtime_session_offers_the_first_tools_and_says_how_many_it_leaves_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, provider = catalog(130), Provider()
    session = RealtimeSession(OpenAIRealtime(), source, provider.send)
    await session.sync()
    assert provider.tools == [f"tool_{number}" for number in range(128)]
    assert [each.tool for each in session.export.left_out] == ["tool_128", "tool_129"]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "2 tools are not offered" in warning
    assert "130 tools, and a session takes 128" in warning
    await session.close()


async def test_the_first_event_names_the_tools_that_cannot_be_offered() -> None:
    source = catalog(3)
    source.offer(
        lambda: "ok",
        name="keyed",
        parameters_json='{"type": "object", "properties": {"城市": {}}, "required": ["城市"]}',
    )
    loop = ToolLoop(source, Endpoint(Anthropic(), lambda request: {"content": [{"type": "text", "text": "hi"}]}))
    started = [event async for event in loop.stream("?") if isinstance(event, RoundStarted)]
    assert started[0].export is not None
    assert [each.tool for each in started[0].export.left_out] == ["keyed"]
