"""Tests what errors of endpoints refuse: all tools, some of them, their number."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.parts.models.loop.recorded_refusals import (
    NAMING,
    OTHERS,
    STRICT_KEY,
    STRICT_TOOLS,
    TOO_MANY,
    UNNAMED,
    Recorded,
)
from toolbus.loop import refuses_tools
from toolbus.parts.models.dialects.export import Export
from toolbus.parts.models.dialects.names import find_dialect
from toolbus.parts.models.loop.tool_refusal import SchemaRefusal, schema_refusal, tool_limit
from toolbus.protocol.tool import Tool


class Client(Exception):
    """An error with whatever attributes a client gives it."""

    def __init__(self, text: str, **attributes: Any) -> None:
        super().__init__(text)
        vars(self).update(attributes)


# Who says it, with which status, and the words.
REFUSALS = [
    ("Ollama", 400, "registry.ollama.ai/library/gemma:latest does not support tools"),
    ("vLLM", 400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'),
    ("llama.cpp", 500, "tools param requires --jinja flag"),
    ("llama.cpp", 500, "Unsupported param: tools"),
    ("OpenAI", 400, "Unsupported parameter: 'tools' is not supported with this model."),
    ("OpenAI", 400, "tools is not supported in this model. For a list of supported models, refer to …"),
    ("OpenAI", 400, "Unrecognized request argument supplied: tools"),
    ("Azure", 400, "Functions are not supported for this API version or this model version."),
    ("Gemini", 400, "Function calling is not enabled for models/gemma-3-27b-it"),
    ("Gemini by REST", 400, 'Invalid JSON payload received. Unknown name "tools": Cannot find field.'),
    ("OpenRouter", 404, "No endpoints found that support tool use. To learn more about provider routing, visit …"),
    ("DeepSeek", 400, "deepseek-reasoner does not support Function Calling"),
    ("Qwen", 400, "<400> InternalError.Algo.InvalidParameter: The tool call is not supported."),
    ("a gateway", 400, "Function call is not supported for this model"),
    ("Bedrock", 400, "This model doesn't support tool use."),
    ("Bedrock", 400, "This model doesn't support tool use in streaming mode."),
    (
        "pydantic",
        422,
        "[{'type': 'extra_forbidden', 'loc': ('body', 'tools'), 'msg': 'Extra inputs are not permitted'}]",
    ),
    ("a proxy", 501, "tool calling is not supported"),
    ("Chinese", 400, "该模型不支持工具调用"),
]

NOT_REFUSALS = [
    (503, "the model does not support tools while it is loading"),
    (429, "tools are not available: too many requests"),
    (500, "this model does not support tools"),
    (401, "does not support tools"),
    (400, "Invalid schema for function 'add': 'type' is required"),
    (400, "Invalid 'tools[0].function.name': string does not match pattern. Expected a string that matches …"),
    (400, "Invalid 'tools': array too long. Expected an array with maximum length 128"),
    (400, "messages with role 'tool' must be a response to a preceding message with 'tool_calls'"),
    (400, "tools.0.custom.input_schema: JSON schema is invalid"),
    (400, "`tool_use` ids were found without `tool_result` blocks immediately after"),
    (400, "Unknown parameter: 'tools[0].strict'"),
    (400, "Unsupported value: 'tool_choice' does not support 'required' with this model"),
    (400, "this model does not support parallel tool calls"),
    (400, "the context of 4096 tokens is exceeded"),
    (404, "The model `gpt-9` does not exist"),
    (422, "[{'loc': ('body', 'tools', 0, 'function', 'strict'), 'msg': 'Extra inputs are not permitted'}]"),
]


@pytest.mark.parametrize(("who", "status", "words"), REFUSALS)
def test_a_refusal_of_tools_is_detected(who: str, status: int, words: str) -> None:
    assert refuses_tools(Client(words, status_code=status))


@pytest.mark.parametrize(("status", "words"), NOT_REFUSALS)
def test_another_error_is_not_a_refusal(status: int, words: str) -> None:
    assert not refuses_tools(Client(words, status_code=status))


@pytest.mark.parametrize("error", [TimeoutError("does not support tools"), ConnectionError(), ValueError("tools")])
def test_an_error_without_a_status_is_not_a_refusal(error: Exception) -> None:
    assert not refuses_tools(error)


WORDS = "this model does not support tools"


class Response:
    def __init__(self, text: str | None) -> None:
        self.status_code = 400
        self._text = text

    @property
    def text(self) -> str:
        if self._text is None:
            raise RuntimeError("the stream was not read")
        return self._text


@pytest.mark.parametrize(
    "error",
    [
        Client("Error code: 400", status_code=400, body={"error": {"message": WORDS}}),
        Client("Error code: 400", status_code=400, body=json.dumps({"error": WORDS})),
        Client("", status_code=400, message=WORDS),
        Client("400 INVALID_ARGUMENT", code=400, details={"error": {"message": WORDS}}),
        Client("400 Bad Request", response=Response(WORDS)),
    ],
)
def test_the_phrase_is_found_in_every_attribute_of_an_error(error: Exception) -> None:
    assert refuses_tools(error)


def test_a_body_that_was_not_read_is_ignored() -> None:
    assert not refuses_tools(Client("400 Bad Request", response=Response(None)))


# -- refusals of some tools ------------------------------------------------------------------------------------------


def export_of(dialect: str, **more: Any) -> Export:
    export = find_dialect(dialect).export([Tool(f"tool_{number}", "A tool.") for number in range(30)])
    return replace(export, tools=tuple({**tool, **more} for tool in export.tools))


QUOTES = "I do not support tools. at most 9 function declarations. tools[1].function.parameters"


@pytest.mark.parametrize(
    "error",
    [
        Client("", status_code=400, body={"error": {"code": "tool_use_failed", "failed_generation": QUOTES}}),
        Client(f"400 - {{'error': {{'message': 'Failed', 'failed_generation': '{QUOTES}'}}}}", status_code=400),
        Client("", status_code=400, body={"message": f"[{{'loc': ('body', 'messages'), 'input': '{QUOTES}'}}]"}),
        Client("", status_code=422, body={"detail": [{"loc": ["body", "messages"], "input": {"content": QUOTES}}]}),
        Client("", status_code=422, body={"message": json.dumps([{"loc": ["body", "messages"], "input": QUOTES}])}),
    ],
)
def test_quotes_of_the_conversation_in_an_error_refuse_nothing(error: Exception) -> None:
    assert not refuses_tools(error)
    assert tool_limit(error) is None
    assert schema_refusal(error, export_of("openai")) is None


def error_of(recorded: Recorded) -> Client:
    status = {} if recorded.status is None else {"status_code": recorded.status}
    return Client(f"Error code: {recorded.status} - {recorded.body}", body=recorded.body, **status)


def who(case: Recorded | tuple[Recorded, int]) -> str:
    return case.who if isinstance(case, Recorded) else case[0].who


@pytest.mark.parametrize("recorded", NAMING + UNNAMED, ids=who)
def test_a_refusal_of_a_declaration_is_read_with_the_tools_that_it_names(recorded: Recorded) -> None:
    refusal = schema_refusal(error_of(recorded), export_of(recorded.dialect))
    assert refusal == SchemaRefusal(tuple(f"tool_{number}" for number in recorded.names))
    assert not refuses_tools(error_of(recorded))


@pytest.mark.parametrize("recorded", [*OTHERS, *(case for case, _ in TOO_MANY)], ids=who)
def test_an_error_of_something_else_blames_no_declaration(recorded: Recorded) -> None:
    assert schema_refusal(error_of(recorded), export_of(recorded.dialect)) is None


@pytest.mark.parametrize("error", [ConnectionError("failed to parse grammar"), TimeoutError("failed to parse grammar")])
def test_an_error_of_the_connection_blames_no_declaration(error: Exception) -> None:
    assert schema_refusal(error, export_of("openai")) is None


@pytest.mark.parametrize("recorded", STRICT_KEY, ids=who)
def test_a_refusal_of_the_key_strict_is_one_only_where_declarations_have_it(recorded: Recorded) -> None:
    assert schema_refusal(error_of(recorded), export_of("openai", strict=False)) == SchemaRefusal(strict="key")
    refusal = schema_refusal(error_of(recorded), export_of("openai"))
    assert refusal is None or not refusal.strict


@pytest.mark.parametrize("recorded", STRICT_TOOLS, ids=who)
def test_too_many_strict_tools_are_read_only_where_declarations_are_strict(recorded: Recorded) -> None:
    assert schema_refusal(error_of(recorded), export_of("openai", strict=True)) == SchemaRefusal(strict="tools")
    assert schema_refusal(error_of(recorded), export_of("openai", strict=False)) is None


@pytest.mark.parametrize("case", TOO_MANY, ids=who)
def test_the_number_that_an_endpoint_takes_is_read_from_its_refusal(case: tuple[Recorded, int]) -> None:
    recorded, number = case
    assert tool_limit(error_of(recorded)) == number
    assert not refuses_tools(error_of(recorded))


@pytest.mark.parametrize("recorded", NAMING + UNNAMED + OTHERS, ids=who)
def test_other_errors_name_no_number(recorded: Recorded) -> None:
    assert tool_limit(error_of(recorded)) is None
