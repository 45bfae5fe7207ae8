"""Compares what each provider's official client sends with what the tools say.

The tools are those of `lab/exports`: real shapes, and shapes that exports find hard.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jsonschema_rs
import pytest

from lab.exports.tools import read_calls, read_tools
from tests.parts.models.dialects.sample_tools import PLAIN, SAMPLES
from tests.support.provider_rules import refusals
from tests.support.wire_accounting import Account, account
from tests.support.wire_capture import Capture, Sent, SentTool, capturing
from tests.support.wire_forms import plain_schema
from toolbus.dialects import DIALECTS, Dialect, Loss, Message, find_dialect
from toolbus.protocol.tool import Tool

TOOLS = (*read_tools(), *SAMPLES)


@pytest.fixture(scope="module")
def capture() -> Iterator[Capture]:
    with capturing() as running:
        yield running


@pytest.fixture(scope="module")
def offered(capture: Capture) -> dict[str, Sent]:
    return {name: capture.sent(name, TOOLS) for name in DIALECTS}


@pytest.fixture(scope="module")
def unreported(offered: dict[str, Sent]) -> Callable[[str], list[str]]:
    """Returns the keywords of which neither the wire nor the losses of a dialect say anything.

    Many dialects write the same schema, which is accounted for once.
    """
    known: dict[tuple[str, str, tuple[Loss, ...]], list[str]] = {}

    def of(tool: Tool, written: SentTool, losses: tuple[Loss, ...]) -> list[str]:
        key = (tool.name, json.dumps([written.schema, written.description]), losses)
        if key not in known:
            facts = account(tool.parameters, written, losses, tool.description).unreported
            known[key] = [f"{tool.name}, {fact}" for fact in facts]
        return known[key]

    def of_all(dialect: str) -> list[str]:
        sent = offered[dialect]
        losses: dict[str, list[Loss]] = defaultdict(list)
        for loss in sent.export.losses:
            losses[loss.tool].append(loss)
        written = {tool: sent.tool(tool.name) for tool in TOOLS}
        return [
            line
            for tool, offer in written.items()
            if offer is not None
            for line in of(tool, offer, tuple(losses[tool.name]))
        ]

    return of_all


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_plain_tool_leaves_the_process_with_its_name_description_and_arguments(
    dialect: str, capture: Capture
) -> None:
    sent = capture.sent(dialect, [PLAIN])
    (tool,) = sent.tools
    assert tool.name == PLAIN.name
    assert tool.description.startswith(PLAIN.description)
    assert tool.schema is not None
    assert set(tool.schema["properties"]) == {"city", "days", "unit"}
    assert tool.schema["properties"]["city"]["description"].startswith("Name of the city.")


_CHOICES: dict[str, tuple[str, Any]] = {
    "openai": ("tool_choice", {"type": "function", "function": {"name": "play"}}),
    "openai-responses": ("tool_choice", {"type": "function", "name": "play"}),
    "anthropic": ("tool_choice", {"type": "tool", "name": "play"}),
    "gemini": ("toolConfig", {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["play"]}}),
    "ollama": ("tool_choice", None),
}


@pytest.mark.parametrize("name", _CHOICES)
def test_a_chosen_tool_leaves_the_process_in_the_form_of_the_provider(name: str, capture: Capture) -> None:
    dialect = find_dialect(name)
    assert isinstance(dialect, Dialect)
    export = dialect.export([Tool("play", "Plays."), Tool("stop", "Stops.")])
    body = capture.request(name, dialect.request([Message("user", "?")], export, "play"))
    key, choice = _CHOICES[name]
    assert body.get(key) == choice
    assert ("stop" in json.dumps(body["tools"])) is (choice is not None)  # without a choice the tool is offered alone


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_tool_is_sent_or_left_out_with_a_reason(dialect: str, offered: dict[str, Sent]) -> None:
    sent = offered[dialect]
    left_out = {each.tool for each in sent.export.left_out}
    assert all(each.why for each in sent.export.left_out)
    assert {tool.name for tool in TOOLS if sent.tool(tool.name) is None} == left_out
    assert left_out <= {"日程.添加", "unicode_names"}  # a required property has a name that the provider refuses


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_keyword_is_on_the_wire_or_in_words_or_reported_as_lost(
    dialect: str, unreported: Callable[[str], list[str]]
) -> None:
    assert unreported(dialect) == []


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_tool_makes_a_provider_refuse_the_request(dialect: str, offered: dict[str, Sent]) -> None:
    assert refusals(dialect, offered[dialect]) == []


@pytest.mark.parametrize("dialect", DIALECTS)
def test_calls_that_a_tool_allows_are_allowed_on_the_wire(dialect: str, offered: dict[str, Sent]) -> None:
    """What is sent may be wider than the tool's own schema, never narrower."""
    sent = offered[dialect]
    calls = read_calls()
    refused = [
        f"{tool.name}: {json.dumps(call, ensure_ascii=False)}: {error.message}"
        for tool in TOOLS
        if (written := sent.tool(tool.name)) is not None and not _is_strict(written)
        for call in calls.get(tool.name, ())
        for error in jsonschema_rs.validator_for(plain_schema(written)).iter_errors(call)
    ]
    assert refused == []


def _is_strict(sent: SentTool) -> bool:
    """Tells whether arguments that may be left out are sent as null instead."""
    return sent.declaration.get("function", sent.declaration).get("strict") is True


# ── that the account itself finds what is lost

_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^x$", "format": "date", "description": "First"},
        "b": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
        "c": {"type": "array", "items": {"$ref": "#/$defs/C"}, "minItems": 2},
        "d": {"type": "object", "additionalProperties": {"type": "number"}},
        "e": {"oneOf": [{"const": "x"}, {"const": "y"}]},
    },
    "required": ["a", "b"],
    "$defs": {"C": {"type": "object", "properties": {"f": {"enum": [1, 2]}}, "required": ["f"]}},
}


def _sent(schema: Mapping[str, object], description: str = "") -> SentTool:
    return SentTool("t", description, json.loads(json.dumps(schema)), {})


def _lost(change: dict[str, object], *losses: Loss, description: str = "") -> Account:
    """Accounts for the schema with some of its properties changed on the wire."""
    wire = {**_PARAMETERS, "properties": {**_PARAMETERS["properties"], **change}}
    return account(_PARAMETERS, _sent(wire, description), losses)


@pytest.mark.parametrize(
    ("name", "written", "keywords"),
    [
        ("a", {"type": "string", "description": "First"}, {"pattern", "format"}),
        ("a", {"type": "string", "pattern": "^x$", "format": "date"}, {"description"}),
        ("b", {"type": "integer", "minimum": 1}, {"anyOf"}),
        ("b", {"type": ["integer", "null"]}, {"minimum"}),
        ("b", {}, {"anyOf", "type", "minimum"}),
        (
            "c",
            {"type": "array", "items": {"type": "object", "properties": {"f": {}}}, "minItems": 2},
            {"enum", "required"},
        ),
        ("d", {"type": "object"}, {"additionalProperties", "type"}),
        ("e", {"enum": ["x"]}, {"oneOf", "const"}),
    ],
)
def test_the_account_names_the_losses_of_a_wire(name: str, written: dict[str, object], keywords: set[str]) -> None:
    unreported = _lost({name: written}).unreported
    assert {fact.keyword for fact in unreported} == keywords
    assert {fact.place[0] for fact in unreported} == {name}


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("b", {"type": ["integer", "null"], "minimum": 1}),
        ("b", {"type": ["integer", "null"], "exclusiveMinimum": 0, "minimum": 1}),
        (
            "c",
            {
                "type": "array",
                "minItems": 2,
                "items": {"type": "object", "properties": {"f": {"enum": [1, 2]}}, "required": ["f"]},
            },
        ),
        ("e", {"enum": ["x", "y"]}),
        ("e", {"anyOf": [{"enum": ["x"]}, {"enum": ["y"]}]}),
    ],
)
def test_the_account_takes_another_form_of_the_same_rule(name: str, written: dict[str, object]) -> None:
    assert _lost({name: written}).lost == 0


def test_one_loss_does_not_hide_a_second_one_of_the_same_kind() -> None:
    parameters: dict[str, object] = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"]}
    one = Loss("t", "", "required", '"a" is not required')
    half = account(parameters, _sent({"type": "object", "properties": {"a": {}, "b": {}}}), [one])
    assert [fact.value for fact in half.unreported] == ['"b"']
    both = account(parameters, _sent({"type": "object", "properties": {"a": {}, "b": {}}}), [one, one])
    assert both.unreported == []


def test_words_count_where_they_stand_and_only_if_the_export_added_them() -> None:
    bare = {"type": "string", "format": "date", "description": "First"}
    in_place = _lost({"a": {**bare, "description": "First\nMatches ^x$."}})
    assert [fact.keyword for fact in in_place.in_words] == ["pattern"]
    elsewhere = _lost({"a": bare, "e": {"enum": ["x", "y"], "description": "^x$"}})
    assert [fact.keyword for fact in elsewhere.unreported] == ["pattern"]
    above = _lost({"a": bare}, description="The argument a matches ^x$.")
    assert [fact.keyword for fact in above.in_words] == ["pattern"]
