"""Tests turns whose first request is bound to a choice of tools."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parts.models.loop.scripted_model import ApiError, FunctionSource, ScriptedModel, call, says
from toolbus.errors import InvalidRequest
from toolbus.loop import Endpoint, Finished, Rule, ToolLoop
from toolbus.parts.models.dialects.ollama import Ollama


def add(a: int = 0) -> int:
    return a


def greet() -> str:
    return "hello"


ADD = {"type": "function", "function": {"name": "add"}}


async def test_a_choice_holds_for_the_first_request_of_a_turn_only() -> None:
    model = ScriptedModel(says("", call("add")), says("0"), says("again"))
    loop = ToolLoop(FunctionSource(add=add, greet=greet), model.endpoint)
    reply = await loop.run("?", tool_choice="add")
    await loop.run("?")
    assert reply.text == "0"
    assert [request.get("tool_choice") for request in model.requests] == [ADD, None, None]


async def test_a_streamed_turn_takes_a_choice_too() -> None:
    model = ScriptedModel(says("", call("add")), says("0"), streams=True)
    loop = ToolLoop(FunctionSource(add=add), model.endpoint)
    events = [event async for event in loop.stream("?", tool_choice="required")]
    assert isinstance(events[-1], Finished)
    assert [request.get("tool_choice") for request in model.requests] == ["required", None]


async def test_with_none_nothing_runs_even_if_the_model_calls_or_a_rule_matches() -> None:
    source = FunctionSource(add=add)
    model = ScriptedModel(says("text", call("add")))
    loop = ToolLoop(source, model.endpoint, rules=[Rule(".", "add")])
    reply = await loop.run("?", tool_choice="none")
    assert (reply.text, reply.stopped, source.calls) == ("text", "no_convergence", [])
    assert model.offered(0) == []


async def test_a_choice_that_is_not_offered_is_refused_before_anything_runs() -> None:
    source, model = FunctionSource(add=add), ScriptedModel()
    loop = ToolLoop(source, model.endpoint, rules=[Rule(".", "add")])
    with pytest.raises(InvalidRequest, match=r"such as add$"):
        await loop.run("?", tool_choice="ad")
    assert (source.calls, model.requests) == ([], [])


@pytest.mark.parametrize("choice", [None, 1, {"type": "function", "function": {"name": "add"}}])
async def test_a_choice_that_is_not_a_text_is_refused_with_the_valid_choices(choice: Any) -> None:
    model = ScriptedModel()
    with pytest.raises(InvalidRequest, match=r"^tool_choice is .*: give 'auto', 'none', 'required' or the name of a"):
        await ToolLoop(FunctionSource(add=add), model.endpoint).run("?", tool_choice=choice)
    assert model.requests == []


async def test_a_chosen_tool_is_offered_where_tools_are_searched() -> None:
    model = ScriptedModel(says("", call("add")), says("0"))
    loop = ToolLoop(FunctionSource(add=add, greet=greet), model.endpoint, pinned=())
    reply = await loop.run("?", tool_choice="add")
    assert model.offered(0) == ["search_tools", "request_tool_injection", "add"]
    assert [done.outcome for done in reply.calls] == ["ok"]


async def test_a_dialect_without_the_choice_says_so() -> None:
    loop = ToolLoop(FunctionSource(add=add), Endpoint(Ollama(), lambda request: None))
    with pytest.raises(InvalidRequest, match="Ollama"):
        await loop.run("?", tool_choice="required")


@pytest.mark.parametrize(
    "error",
    [
        ApiError(400, "Thinking may not be enabled when tool_choice forces tool use."),
        ApiError(400, "this model does not support tools"),
    ],
)
async def test_the_error_of_an_endpoint_that_refuses_a_forced_call_reaches_the_program(error: ApiError) -> None:
    model = ScriptedModel(error, says("with tools"))
    loop = ToolLoop(FunctionSource(add=add), model.endpoint)
    with pytest.raises(ApiError) as raised:
        await loop.run("?", tool_choice="required")
    assert raised.value is error
    await loop.run("?")
    assert model.offered(1) == ["add"]  # the loop is as it was


async def test_an_endpoint_without_tools_refuses_a_forced_call() -> None:
    model = ScriptedModel(ApiError(400, "this model does not support tools"), says("a"))
    loop = ToolLoop(FunctionSource(add=add), model.endpoint)
    await loop.run("?")
    with pytest.raises(InvalidRequest, match="no tool is offered"):
        await loop.run("?", tool_choice="add")


async def test_a_server_that_ignores_the_choice_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    model = ScriptedModel(says("no"), says("", call("add")), says("yes"))
    loop = ToolLoop(FunctionSource(add=add), model.endpoint)
    reply = await loop.run("?", tool_choice="add")
    assert reply.text == "no"
    assert "did not follow tool_choice 'add'" in caplog.text
    caplog.clear()
    await loop.run("?", tool_choice="required")
    assert caplog.text == ""
