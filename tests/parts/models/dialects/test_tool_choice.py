"""Tests how each dialect writes a choice of tools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from toolbus.errors import InvalidRequest
from toolbus.parts.models.dialects.conversation import Answered, Answers, HistoryItem, Message, ModelCall, Turn
from toolbus.parts.models.dialects.dialect import Dialect
from toolbus.parts.models.dialects.export import LeftOut
from toolbus.parts.models.dialects.names import find_dialect
from toolbus.protocol.tool import Result, Tool

TOOLS = [Tool("files.read", "Reads."), Tool("get_weather", "Tells the weather.")]
ASKED: list[HistoryItem] = [Message("user", "?")]
CALL = ModelCall("call_1", "files.read", "{}", wire_name="files_read")
CALLED: list[HistoryItem] = [*ASKED, Turn(calls=(CALL,)), Answers((Answered(CALL, Result(output_json="1")),)), *ASKED]


def dialect_of(name: str) -> Dialect:
    dialect = find_dialect(name)
    assert isinstance(dialect, Dialect)
    return dialect


def written(name: str, choice: str) -> Any:
    """Returns what a request says about the choice, and which tools it offers."""
    dialect = dialect_of(name)
    request = dialect.request(ASKED, dialect.export(TOOLS), choice)
    if name == "gemini":
        config = request["config"]
        offered = [each["name"] for tool in config["tools"] for each in tool["function_declarations"]]
        return config.get("tool_config"), offered
    return request.get("tool_choice"), [each.get("function", each)["name"] for each in request["tools"]]


BOTH = ["files_read", "get_weather"]
GEMINI_BOTH = ["files.read", "get_weather"]


@pytest.mark.parametrize(
    ("name", "choice", "expected", "offered"),
    [
        ("openai", "files.read", {"type": "function", "function": {"name": "files_read"}}, BOTH),
        ("openai", "required", "required", BOTH),
        ("openai", "auto", None, BOTH),
        ("openai-responses", "files.read", {"type": "function", "name": "files_read"}, BOTH),
        ("openai-responses", "required", "required", BOTH),
        ("openai-responses", "auto", None, BOTH),
        ("anthropic", "files.read", {"type": "tool", "name": "files_read"}, BOTH),
        ("anthropic", "required", {"type": "any"}, BOTH),
        ("anthropic", "auto", None, BOTH),
        (
            "gemini",
            "files.read",
            {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["files.read"]}},
            GEMINI_BOTH,
        ),
        ("gemini", "required", {"function_calling_config": {"mode": "ANY"}}, GEMINI_BOTH),
        ("gemini", "auto", None, GEMINI_BOTH),
        ("ollama", "files.read", None, ["files_read"]),
        ("ollama", "auto", None, BOTH),
    ],
)
def test_a_choice_is_written_in_the_form_of_the_provider(
    name: str, choice: str, expected: Any, offered: list[str]
) -> None:
    assert written(name, choice) == (expected, offered)


@pytest.mark.parametrize("name", ["openai", "openai-responses", "anthropic", "gemini", "ollama"])
def test_none_offers_no_tools_or_forbids_them(name: str) -> None:
    dialect = dialect_of(name)
    export = dialect.export(TOOLS)
    assert "get_weather" not in str(dialect.request(ASKED, export, "none"))
    request = dialect.request(CALLED, export, "none")
    forbidden = str(request.get("tool_choice") or request.get("config", {}).get("tool_config"))
    assert "get_weather" not in str(request) or "none" in forbidden.lower()


def test_ollama_has_no_way_to_require_a_call() -> None:
    dialect = dialect_of("ollama")
    with pytest.raises(InvalidRequest, match="which Ollama's API does not have: name one tool"):
        dialect.request(ASKED, dialect.export(TOOLS), "required")


@pytest.mark.parametrize("name", ["openai", "openai-responses", "anthropic", "gemini", "ollama"])
def test_an_unknown_tool_is_refused_with_similar_names(name: str) -> None:
    dialect = dialect_of(name)
    with pytest.raises(InvalidRequest, match=r"'get_wether', .* such as get_weather$"):
        dialect.request(ASKED, dialect.export(TOOLS), "get_wether")


@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_a_call_cannot_be_forced_where_no_tool_is_offered(choice: str) -> None:
    dialect = dialect_of("openai")
    with pytest.raises(InvalidRequest, match="no tool is offered"):
        dialect.request(ASKED, dialect.export([]), choice)
    with pytest.raises(InvalidRequest, match="no tool is offered"):
        dialect.request(ASKED, None, choice)


def test_a_tool_that_was_left_out_is_refused_with_the_reason() -> None:
    dialect = dialect_of("openai")
    export = replace(dialect.export(TOOLS), left_out=(LeftOut("tree", "the provider cannot express trees"),))
    with pytest.raises(InvalidRequest, match="'tree', which is not offered: the provider cannot express trees"):
        dialect.request(ASKED, export, "tree")
