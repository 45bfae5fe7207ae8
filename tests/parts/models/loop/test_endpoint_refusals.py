"""Tests turns with an endpoint that refuses some of the tools."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.parts.models.loop.scripted_model import ApiError, FunctionSource, Json, ScriptedModel, call, says
from toolbus.loop import Endpoint, LoopSettings, RoundStarted, ToolLoop, ToolsLeftOut
from toolbus.parts.models.dialects.conversation import Message
from toolbus.parts.models.dialects.export import Export
from toolbus.parts.models.dialects.names import find_dialect
from toolbus.parts.models.dialects.openai_chat import OpenAIChat, OpenAIGrammar
from toolbus.parts.models.loop.tool_loop import MAX_REQUESTS
from toolbus.parts.models.loop.tool_refusal import MAX_PROBES, EndpointRefusals, Halving
from toolbus.protocol.tool import Tool

GRAMMAR = "Failed to initialize samplers: failed to parse grammar"


def catalog(count: int = 30) -> FunctionSource:
    source = FunctionSource()
    for number in range(count):
        source.offer(lambda: "ok", name=f"tool_{number}", description=f"Does thing {number}.")
    return source


def by_place(names: Sequence[str], bad: Iterable[str]) -> str:
    place = next(place for place, name in enumerate(names) if name in bad)
    return f"Invalid schema: tools[{place}].function.parameters: array schema missing items"


def unnamed(names: Sequence[str], bad: Iterable[str]) -> str:
    return GRAMMAR


class PickyModel(ScriptedModel):
    """Refuses requests with bad tools; answers the others, short requests of the loop's own with OK."""

    def __init__(self, *answers: Any, bad: Iterable[str], says: Callable[..., str] = by_place) -> None:
        super().__init__(*answers)
        self.bad = set(bad)
        self.refused = 0
        self.probes = 0
        self._says = says

    async def _ask(self, request: Json) -> Any:
        names = [tool["function"]["name"] for tool in request.get("tools", ())]
        probe = request["messages"] == [{"role": "user", "content": "Answer with OK."}]
        self.probes += probe
        if self.bad & set(names):
            self.refused += not probe
            raise ApiError(400, self._says(names, self.bad))
        return says("OK") if probe else await super()._ask(request)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_refusal_that_names_a_tool_leaves_it_out_and_the_turn_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    model = PickyModel(says("", call("tool_4")), says("done"), says("again"), bad=["tool_3"])
    loop = ToolLoop(catalog(), model.endpoint)
    events = [event async for event in loop.stream("?")]
    (left_out,) = [event for event in events if isinstance(event, ToolsLeftOut)]
    assert [each.tool for each in left_out.left_out] == ["tool_3"]
    assert "tools[3].function.parameters" in left_out.left_out[0].why
    assert isinstance(left_out.error, ApiError)
    started = [event for event in events if isinstance(event, RoundStarted)]
    assert [[each.tool for each in event.export.left_out] for event in started if event.export] == [[], ["tool_3"]]
    (warning,) = warnings(caplog)
    assert "tool 'tool_3' is not offered" in warning
    assert model.results(1) == ["ok"]
    await loop.run("another conversation")
    assert model.refused == 1
    assert all("tool_3" not in model.offered(number) and len(model.offered(number)) == 29 for number in range(3))


async def test_a_model_that_calls_the_tool_that_was_left_out_is_offered_others() -> None:
    model = PickyModel(says("", call("tool_3")), says("hm"), bad=["tool_3"])
    source = catalog()
    reply = await ToolLoop(source, model.endpoint).run("?")
    assert [done.outcome for done in reply.calls] == ["not_found"]
    assert "tool_3," not in model.results(1)[0].partition("offered:")[2]
    assert source.calls == []


async def test_tools_that_are_named_one_by_one_are_left_out_together() -> None:
    bad = [f"tool_{number}" for number in (0, 3, 4, 29)]
    model = PickyModel(says("hi"), bad=bad)
    events = [event async for event in ToolLoop(catalog(), model.endpoint).stream("?")]
    (left_out,) = [event for event in events if isinstance(event, ToolsLeftOut)]
    assert [each.tool for each in left_out.left_out] == bad
    assert len(model.offered(0)) == 26


async def test_an_endpoint_that_refuses_one_tool_after_the_other_gets_a_limited_number_of_requests() -> None:
    model = PickyModel(bad=[f"tool_{number}" for number in range(100)])
    with pytest.raises(ApiError):
        await ToolLoop(catalog(100), model.endpoint).run("?")
    assert model.refused == MAX_REQUESTS


async def test_a_tool_that_changed_is_offered_again() -> None:
    source, model = catalog(5), PickyModel(says("a"), says("b"), bad=["tool_3"])
    loop = ToolLoop(source, model.endpoint)
    await loop.run("?")
    model.bad = set()
    source.offer(lambda: "ok", name="tool_3", description="Was repaired.")
    await loop.run("?")
    assert [len(model.offered(number)) for number in (0, 1)] == [4, 5]


async def test_a_guess_that_does_not_help_hides_nothing() -> None:
    model = ScriptedModel(*(ApiError(400, "tools[2].function.parameters: bad") for _ in range(6)), says("fine"))
    loop = ToolLoop(catalog(5), model.endpoint)
    with pytest.raises(ApiError, match="tools\\[2\\]"):
        await loop.run("?")
    assert [len(model.offered(number)) for number in range(4)] == [5, 4, 3, 2]  # the place is no longer in the request
    model = ScriptedModel(ApiError(400, "tools[2].function.parameters: bad"), ApiError(503, "busy"), says("fine"))
    loop = ToolLoop(catalog(5), model.endpoint)
    with pytest.raises(ApiError, match="busy"):
        await loop.run("?")
    await loop.run("?")
    assert len(model.offered(2)) == 5


async def test_a_tool_that_the_program_chose_is_not_left_out() -> None:
    model = PickyModel(bad=["tool_3"])
    with pytest.raises(ApiError, match="tools\\[3\\]"):
        await ToolLoop(catalog(), model.endpoint).run("?", tool_choice="tool_3")
    assert model.refused == 1


async def test_a_search_does_not_find_a_tool_that_was_left_out() -> None:
    search = says("", call("search_tools", {"query": "thing 3"}))
    model = PickyModel(search, says("done"), search, says("done"), bad=["tool_3"])
    loop = ToolLoop(catalog(), model.endpoint, LoopSettings(embedder=False), pinned=["tool_3", "tool_4"])
    await loop.run("?")
    await loop.run("?")
    assert "tool_3" not in [found["name"] for found in json.loads(model.results(3)[0])["results"]]


async def test_the_culprits_of_an_error_that_names_none_are_found_by_short_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = PickyModel(says("a"), says("b"), bad=["tool_3", "tool_20"], says=unnamed)
    loop = ToolLoop(catalog(), model.endpoint)
    await loop.run("a long conversation")
    assert len(model.offered(0)) == 28
    assert model.refused == 1
    search, *left_out = warnings(caplog)
    assert "does not say which" in search
    assert [text.split()[1] for text in left_out] == ["'tool_3'", "'tool_20'"]
    assert model.probes <= 18
    await loop.run("?")
    assert (model.refused, len(model.offered(1))) == (1, 28)


async def test_where_tools_are_refused_only_together_the_model_searches_those_beyond_an_accepted_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[int] = []

    def ask(request: Json) -> Any:
        asked.append(len(request.get("tools", ())))
        if asked[-1] > 20:
            raise ApiError(400, GRAMMAR)
        return says("OK")

    loop = ToolLoop(catalog(), Endpoint(OpenAIChat(), ask))
    assert (await loop.run("?")).text == "OK"
    first = len(asked)
    assert asked[-1] <= 15
    assert any("only together" in text for text in warnings(caplog))
    assert (await loop.run("?")).text == "OK"
    assert 2 < first < 12
    assert len(asked) == first + 1


async def test_an_error_that_has_nothing_to_do_with_tools_is_raised_and_costs_one_more_request_once() -> None:
    asked: list[int] = []

    def ask(request: Json) -> Any:
        asked.append(len(request.get("tools", ())))
        raise ApiError(400, GRAMMAR)  # of another option of the endpoint, such as its response_format

    loop = ToolLoop(catalog(), Endpoint(OpenAIChat(), ask))
    for _ in range(2):
        with pytest.raises(ApiError, match="grammar"):
            await loop.run("?")
    assert asked == [30, 0, 30]


async def test_guesses_that_did_not_help_are_not_tried_again_with_the_same_tools() -> None:
    asked: list[int] = []

    def ask(request: Json) -> Any:
        asked.append(len(request["tools"]))
        raise ApiError(400, "tools[2].function.parameters: bad")

    loop = ToolLoop(source := catalog(5), Endpoint(OpenAIChat(), ask))
    for _ in range(2):
        with pytest.raises(ApiError):
            await loop.run("?")
    assert asked == [5, 4, 3, 2, 5]
    source.remove("tool_0")
    with pytest.raises(ApiError):
        await loop.run("?")
    assert asked[5:] == [4, 3, 2]


async def test_a_fault_while_culprits_are_searched_raises_the_refusal_and_they_are_searched_later() -> None:
    class Busy(PickyModel):
        async def _ask(self, request: Json) -> Any:
            if self.refused == 1 and len(request.get("tools", ())) < 30 and not self.probes:
                self.probes += 1
                raise ApiError(503, "busy")
            return await super()._ask(request)

    model = Busy(says("fine"), bad=["tool_3"], says=unnamed)
    loop = ToolLoop(catalog(), model.endpoint)
    with pytest.raises(ApiError, match="grammar"):
        await loop.run("?")
    await loop.run("?")
    assert len(model.offered(0)) == 29


async def test_an_undecided_tool_is_left_out_of_one_request_only_and_found_in_later_ones() -> None:
    bad = [f"tool_{number}" for number in range(0, 100, 2)]
    model = PickyModel(*(says("hi") for _ in range(7)), bad=bad, says=unnamed)
    loop = ToolLoop(catalog(100), model.endpoint)
    offered, probes = [], []
    for _ in range(7):
        before = model.probes
        await loop.run("?")
        probes.append(model.probes - before)
        offered.append(len(model.offered(-1)))
    assert max(probes) <= MAX_PROBES
    assert offered[0] < 50
    assert offered[-1] == 50
    assert probes[-1] == 0


async def test_an_answer_that_began_is_never_repeated() -> None:
    asked: list[Json] = []

    async def ask(request: Json) -> Any:
        asked.append(request)

        async def events() -> Any:
            yield {"choices": [{"index": 0, "delta": {"content": "half"}}]}
            raise ApiError(400, "tools[1].function.parameters: bad")

        return events()

    with pytest.raises(ApiError):
        await ToolLoop(catalog(3), Endpoint(OpenAIChat(), ask)).run("?")
    assert len(asked) == 1


async def test_a_tool_of_the_loop_itself_is_left_out_too() -> None:
    model = PickyModel(says("a"), says("b"), bad=["request_tool_injection"])
    loop = ToolLoop(catalog(), model.endpoint, pinned=["tool_1"])
    await loop.run("?")
    await loop.run("?")
    assert (model.refused, model.offered(1)) == (1, ["search_tools", "tool_1"])


async def test_a_number_of_tools_that_was_not_known_is_learned_from_the_refusal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = "Invalid 'tools': array too long. Expected an array with maximum length 16, but got an array with length 30"
    model = ScriptedModel(ApiError(400, text), says("", call("tool_7")), says("a"), says("b"))
    source = catalog()
    loop = ToolLoop(source, model.endpoint, LoopSettings(embedder=False, max_tools=0))
    await loop.run([Message("user", "thing 7")])
    await loop.run("hello")
    own = ["search_tools", "request_tool_injection"]
    assert model.offered(1)[:2] == own
    assert "tool_7" in model.offered(1)
    assert len(model.offered(1)) <= 16
    assert source.calls == [("tool_7", "{}")]
    assert model.offered(3) == own
    assert any("30 tools" in warning and "takes 16" in warning for warning in warnings(caplog))


@pytest.mark.parametrize("max_tools", [0, 100])
async def test_a_number_that_is_learned_holds_for_pinned_tools_too(max_tools: int) -> None:
    text = "Invalid 'tools': array too long. Expected an array with maximum length 16, but got an array with length 30"
    model = ScriptedModel(ApiError(400, text), says("a"))
    pinned = [f"tool_{number}" for number in range(30)]
    await ToolLoop(catalog(), model.endpoint, LoopSettings(max_tools=max_tools), pinned=pinned).run("?")
    assert [len(model.offered(number)) for number in (0, 1)] == [32, 9]


async def test_a_number_that_did_not_help_is_forgotten() -> None:
    model = ScriptedModel(ApiError(400, "at most 16 function declarations"), ApiError(400, "bad"), says("a"))
    loop = ToolLoop(catalog(), model.endpoint)
    with pytest.raises(ApiError, match="bad"):
        await loop.run("?")
    await loop.run("?")
    assert len(model.offered(2)) == 30


async def test_an_endpoint_that_refuses_without_tools_too_is_offered_them_again() -> None:
    model = ScriptedModel(ApiError(400, "it does not support tools"), ApiError(400, "bad"), says("a"))
    loop = ToolLoop(catalog(), model.endpoint)
    with pytest.raises(ApiError, match="bad"):
        await loop.run("?")
    await loop.run("?")
    assert (len(model.offered(2)), loop.takes_tools) == (30, True)


# -- strict ----------------------------------------------------------------------------------------------------------


class StrictChat(OpenAIChat):
    """Writes `strict` into every declaration, whatever the tools."""

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        declaration = super().write_tool(wire_name, tool, schema)
        return {**declaration, "function": {**declaration["function"], "strict": True}}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("Unknown parameter: 'tools[0].function.strict'.", None),
        ("The compiled grammar is too large. Reduce the number of strict tools.", False),
        (GRAMMAR, False),
    ],
)
async def test_where_strict_is_refused_declarations_are_not_strict_any_more(text: str, left: bool | None) -> None:
    asked: list[list[Any]] = []

    def ask(request: Json) -> Any:
        asked.append([tool["function"].get("strict") for tool in request["tools"]])
        if True in asked[-1]:
            raise ApiError(400, text)
        return says("hi")

    loop = ToolLoop(catalog(3), Endpoint(StrictChat(), ask))
    await loop.run("?")
    await loop.run("?")
    assert asked == [[True] * 3, [left] * 3, [left] * 3]


async def test_a_tool_that_is_refused_as_strict_is_offered_without_and_the_others_stay_strict() -> None:
    asked: list[list[Any]] = []

    def ask(request: Json) -> Any:
        asked.append([tool["function"].get("strict") for tool in request["tools"]])
        if asked[-1][1]:
            raise ApiError(400, "Invalid schema for function 'tool_1': 'pattern' is not permitted")
        return says("hi")

    loop = ToolLoop(catalog(3), Endpoint(StrictChat(), ask))
    await loop.run("?")
    await loop.run("?")
    assert asked == [[True] * 3, [True, False, True], [True, False, True]]


async def test_where_loose_declarations_do_not_help_the_culprit_is_left_out_and_the_others_stay_strict() -> None:
    model = PickyModel(says("a"), says("b"), bad=["tool_3"], says=unnamed)
    loop = ToolLoop(catalog(8), replace(model.endpoint, dialect=StrictChat()))
    await loop.run("?")
    await loop.run("?")
    for request in model.requests:
        assert [tool["function"].get("strict") for tool in request["tools"]] == [True] * 7
    assert model.refused == 2


async def test_a_refusal_that_is_not_about_strict_after_all_keeps_it() -> None:
    text = "Unknown parameter: 'tools[0].function.strict'."
    model = ScriptedModel(ApiError(400, text), ApiError(400, text), says("hi"))
    loop = ToolLoop(catalog(3), replace(model.endpoint, dialect=StrictChat()))
    with pytest.raises(ApiError):
        await loop.run("?")
    await loop.run("?")
    strict = [[tool["function"].get("strict") for tool in request["tools"]] for request in model.requests]
    assert strict == [[True] * 3, [None] * 3, [True] * 3]


def test_strict_is_found_beside_the_name_too_and_the_export_itself_does_not_change() -> None:
    dialect = find_dialect("openai-responses")
    export: Export = dialect.export([Tool("a", "A tool.")])
    written = replace(export, tools=tuple({**tool, "strict": True} for tool in export.tools))
    refused = EndpointRefusals()
    assert refused.relaxed(written, dialect) is written
    refused.strict = "off"
    assert [tool["strict"] for tool in refused.relaxed(written, dialect).tools] == [False]
    refused.strict = "absent"
    assert ["strict" in tool for tool in refused.relaxed(written, dialect).tools] == [False]
    assert [tool["strict"] for tool in written.tools] == [True]


# -- servers that turn schemas into grammars ---------------------------------------------------------------------------

# What llguidance 1.9 says of each, as vLLM passes it on.
IN_WORDS: dict[str, tuple[Json, str]] = {
    "alternatives": (
        {"a": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}},
        "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
    ),
    "negation": ({"a": {"type": "string", "not": {"const": "x"}}}, 'Unimplemented keys: ["not"]'),
    "unique": (
        {"a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
        'Unimplemented keys: ["uniqueItems"]',
    ),
    "format": ({"a": {"type": "string", "format": "regex"}}, "Unknown format: regex"),
}
KEYWORDS = {"alternatives": '"oneOf":', "negation": '"not":', "unique": '"uniqueItems":', "format": '"regex"'}


class GrammarModel(ScriptedModel):
    """Refuses requests with a keyword that llguidance does not know, or with a schema that nothing can satisfy."""

    async def _ask(self, request: Json) -> Any:
        text = json.dumps(request.get("tools", ()))
        for name, keyword in KEYWORDS.items():
            if keyword in text:
                raise ApiError(400, IN_WORDS[name][1])
        if '"minimum": 5' in text:
            raise ApiError(400, "grammar error: Unsatisfiable schema: required property 'a' is unsatisfiable")
        if request["messages"] == [{"role": "user", "content": "Answer with OK."}]:
            return says("OK")
        return await super()._ask(request)


def grammar_catalog(*names: str, impossible: bool = False) -> FunctionSource:
    source = catalog(3)
    for name in names:
        schema = {"type": "object", "properties": IN_WORDS[name][0], "required": ["a"]}
        source.offer(lambda a: f"got {a}", name=name, description="Takes a.", parameters_json=json.dumps(schema))
    if impossible:
        never = {"type": "integer", "minimum": 5, "maximum": 3}
        schema = {"type": "object", "properties": {"a": never}, "required": ["a"]}
        source.offer(lambda a: "", name="impossible", description="Takes a.", parameters_json=json.dumps(schema))
    return source


@pytest.mark.parametrize("name", IN_WORDS)
async def test_a_tool_that_a_grammar_cannot_hold_is_declared_in_plain_keywords_and_in_words(name: str) -> None:
    arguments = {"a": ["z"] if name == "unique" else "z"}
    model = GrammarModel(says("", call(name, arguments)), says("done"), says("again"))
    loop = ToolLoop(grammar_catalog(name), model.endpoint)
    reply = await loop.run("?")
    assert reply.text == "done"
    assert model.results(1) == [f"got {arguments['a']}"]
    offered = model.requests[0]["tools"]
    assert len(offered) == 4
    await loop.run("another conversation")  # nothing is refused twice
    assert model.requests[-1]["tools"] == offered


async def test_only_the_schema_that_stays_impossible_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model = GrammarModel(says("done"))
    loop = ToolLoop(grammar_catalog("negation", "unique", impossible=True), model.endpoint)
    await loop.run("?")
    assert model.offered(0) == ["tool_0", "tool_1", "tool_2", "negation", "unique"]
    assert any("'impossible' is not offered" in line for line in warnings(caplog))


async def test_a_program_that_knows_its_server_declares_plain_schemas_from_the_start() -> None:
    model = GrammarModel(says("done"))
    loop = ToolLoop(grammar_catalog(*IN_WORDS), replace(model.endpoint, dialect=OpenAIGrammar()))
    await loop.run("?")
    assert [len(request["tools"]) for request in model.requests] == [7]


# -- halving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1, 63, 64, 100, 127])
async def test_one_tool_among_128_is_found_with_14_requests_or_fewer(place: int) -> None:
    tools = [Tool(f"tool_{number}", "A tool.") for number in range(128)]
    asked = 0

    async def refuses(group: Sequence[Tool]) -> bool:
        nonlocal asked
        asked += 1
        return tools[place] in group

    halving = Halving(refuses)
    await halving.search(tools)
    assert (halving.found, halving.undecided) == ([tools[place]], [])
    assert asked <= 14
