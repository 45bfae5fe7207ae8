"""The model that tests of programs script: the same steps on every dialect's wire."""

from __future__ import annotations

import pytest

from tests.parts.models.loop.scripted_model import FunctionSource
from toolbus.loop import ToolLoop
from toolbus.testing import ScriptedModel, Step, breaks, calls, cut, refuses, says

DIALECTS = ("openai", "responses", "anthropic", "gemini", "ollama")


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_script_of_calls_texts_and_endings_is_read_alike_on_every_wire(dialect: str, stream: bool) -> None:
    tools = FunctionSource(add=lambda a, b: a + b)
    tools.offer(lambda word: word.upper(), name="kb:shout", parameters_json='{"type": "object"}')
    model = ScriptedModel(
        Step("One moment.", [("add", {"a": 1, "b": 2}), ("kb:shout", {"word": "hey"})]),
        says("Three, HEY."),
        cut("The story beg"),
        says("after a broken answer"),
        dialect=dialect,
        stream=stream,
    )
    with model:
        loop = ToolLoop(tools, model.endpoint)
        reply = await loop.run("Add them.")
        assert (reply.text, reply.stopped) == ("Three, HEY.", "answered")
        assert [each.result.output for each in reply.calls] == [3, "HEY"]
        assert (await loop.run("Tell a story.")).stopped == "cut"
        await loop.run("Once more.")
    assert len(model.requests) == 4
    if dialect != "ollama":
        refusing = ScriptedModel(refuses("I must not"), dialect=dialect, stream=stream)
        assert (await ToolLoop(tools, refusing.endpoint).run("Do it.")).stopped == "refused"


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_step_that_breaks_ends_the_stream_in_the_middle(dialect: str) -> None:
    model = ScriptedModel(breaks("This will not be all of it"), dialect=dialect)
    with pytest.raises(ConnectionError, match="as the script says"):
        await ToolLoop(FunctionSource(), model.endpoint).run("Go on.")


async def test_a_step_too_few_or_too_many_fails_the_test_and_errors_and_functions_are_played() -> None:
    with pytest.raises(AssertionError, match="asked 0 times, and 1 steps are left"), ScriptedModel(says("unused")):
        pass
    model = ScriptedModel(calls("add", {"a": 1}))
    with pytest.raises(AssertionError, match="no step for that"):
        await ToolLoop(FunctionSource(add=lambda a: a), model.endpoint).run("Add.")
    raising = ScriptedModel(lambda request: OSError("no route"))
    with pytest.raises(OSError, match="no route"):
        await ToolLoop(FunctionSource(), raising.endpoint).run("Go.")
    with pytest.raises(ValueError, match="dialect is 'claude', it must be one of openai"):
        ScriptedModel(dialect="claude")
