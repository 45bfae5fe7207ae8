"""Writes OpenAI's chat completions, strictly, so that the many compatible servers accept them.

A model's reasoning is sent back only if the model wrote some: thinking models refuse a turn without it, other models
refuse a turn with it. Responses are read in `openai_chat_response`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toolbus.dialects.conversation import HistoryItem, Json, Message, Turn
from toolbus.dialects.dialect import ToolChoice, TurnStream
from toolbus.dialects.export import MAX_CACHED_SCHEMAS, Export
from toolbus.dialects.history import (
    PairedDialect,
    ProviderAnswer,
    arguments_text,
    exported_names,
    exported_tools,
    valid_arguments_text,
)
from toolbus.dialects.openai_chat_response import (
    NAME,
    ChatStream,
    named_calls,
    read_answer,
    read_message,
    reasoning_of,
)
from toolbus.dialects.provider_results import answer_text
from toolbus.dialects.result_images import OPENAI_IMAGES, data_url, image_label
from toolbus.dialects.schemas.schema_rules import OPENAI_SCHEMAS
from toolbus.dialects.tool_choice import forced_tool
from toolbus.dialects.wire_names import PLAIN_NAMES, NameTable
from toolbus.tool import Result, Tool

# The content of a message that has calls and no text. OpenAI allows null too, and answers with it; llama-cpp-python,
# SGLang, mistral-common and earlier llama.cpp refuse null, while other widely used clients send "" to every server.
_NO_TEXT = ""
# The content of a message that has neither. OpenAI allows "" here too; Mistral, Moonshot and vLLM refuse it, and so
# every later request of the conversation. Without it, others would refuse a user's message behind a tool's answer.
_NO_ANSWER = "(empty answer)"


class OpenAIChat(PairedDialect):
    """`/v1/chat/completions`.

    Args:
        strict: whether the server enforces schemas (`strict: true`). False: never, since many servers with this format
            refuse a key that they do not know. None: for schemas that qualify unchanged. True: also with optional
            properties as nullable ones; `Export.without_added_nulls` then restores the meaning of a call.
        short_ids: whether calls in a conversation have ids of nine letters and digits: Mistral refuses all others, and
            another server of this format may have given them.
    """

    name = NAME
    name_rule = PLAIN_NAMES
    schema_rules = OPENAI_SCHEMAS
    accepted_images = OPENAI_IMAGES
    # "array too long. Expected an array with maximum length 128"; Groq has the same number. Servers that only speak the
    # format may have another one, or none: `LoopSettings.max_tools`.
    max_tools = 128

    def __init__(
        self,
        max_cached_schemas: int = MAX_CACHED_SCHEMAS,
        *,
        images: bool = True,
        strict: bool | None = False,
        short_ids: bool = False,
    ) -> None:
        super().__init__(max_cached_schemas, images=images)
        self.strict = strict
        self.short_ids = short_ids

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        return nested_tool(wire_name, tool, schema)

    def write_strict_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        declaration = nested_tool(wire_name, tool, schema)
        declaration["function"]["strict"] = True
        return declaration

    def parse(self, answer: Any, names: NameTable) -> Turn:
        return read_answer(answer, names)

    def stream(self, names: NameTable) -> TurnStream:
        return ChatStream(names)

    def request(self, items: Sequence[HistoryItem], export: Export | None, tools: ToolChoice = "auto") -> Json:
        """As in `Dialect`. ``none`` writes no tools: llama.cpp and others call although tool_choice is none."""
        forced = forced_tool(export, tools)
        request = chat_request(self, items, export, tools)
        if forced is not None:
            request["tool_choice"] = {"type": "function", "function": {"name": forced}} if forced else "required"
        return request

    def read(self, items: Sequence[HistoryItem], names: NameTable) -> list[HistoryItem | ProviderAnswer]:
        return [_read(item, names) if isinstance(item, Mapping) else item for item in items]

    def write_message(self, message: Message) -> Json:
        return {
            "role": message.role,
            "content": _content(message.text) if message.role == "assistant" else message.text,
        }

    def echo(self, turn: Turn) -> list[Json] | None:
        message = copy.deepcopy(dict(turn.raw[0]))
        entries = named_calls(message.get("tool_calls"))
        if len(entries) != len(turn.calls):
            return None
        message["role"] = "assistant"
        message.pop("tool_calls", None)  # an empty list is refused
        for entry, call in zip(entries, turn.calls, strict=True):
            arguments = valid_arguments_text(arguments_text(entry["function"].get("arguments")))
            entry |= {"id": call.id, "type": "function", "function": entry["function"] | {"arguments": arguments}}
            entry.pop("index", None)
        if entries:
            message["tool_calls"] = entries
        if message.get("content") is None:
            message["content"] = _NO_TEXT if entries or not message.get("refusal") else None
        if not entries and not message.get("audio"):
            message["content"] = _content(message["content"])
        return [message]

    def rebuild(self, turn: Turn, wires: Sequence[str]) -> list[Json]:
        message: Json = {"role": "assistant", "content": turn.text if turn.calls else _content(turn.text)}
        is_own = turn.dialect == self.name
        if turn.reasoning and is_own:
            key, _ = reasoning_of(turn.raw[0] if turn.raw else {})
            message[key] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = [
                {
                    **(call.extra if is_own else {}),
                    "id": call.id,
                    "type": "function",
                    "function": {"name": wire, "arguments": valid_arguments_text(call.arguments_json)},
                }
                for call, wire in zip(turn.calls, wires, strict=True)
            ]
        return [message]

    def write_result(self, call_id: str, wire: str, result: Result) -> Json:
        return {"role": "tool", "tool_call_id": call_id, "name": wire, "content": answer_text(result)}

    def write_images(self, named_results: Sequence[tuple[str, Result]]) -> list[Json]:
        # The API takes nothing but text as the answer to a call, so the images follow as the user's.
        parts: list[Json] = []
        for wire, result in named_results:
            if images := self.images.images_of(result):
                parts.append({"type": "text", "text": image_label(wire)})
                parts += [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
        return [{"role": "user", "content": parts}] if parts else []

    def with_call_id(self, answer: ProviderAnswer, call_id: str) -> Json:
        return {**answer.message, "tool_call_id": call_id}


def _content(content: Any) -> Any:
    """Returns the content of an assistant's message without calls, never an empty text."""
    return _NO_ANSWER if isinstance(content, str) and not content.strip() else content


def nested_tool(wire_name: str, tool: Tool, schema: Json) -> Json:
    """Returns a tool as chat completions, and providers that followed them, declare it."""
    function: Json = {"name": wire_name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": function}


def chat_request(
    dialect: PairedDialect, items: Iterable[HistoryItem], export: Export | None, tools: ToolChoice
) -> Json:
    """Returns messages, and tools unless ``tools`` is ``none``."""
    declarations = exported_tools(export, dialect.name)
    request: Json = {"messages": dialect.history(items, exported_names(export, dialect.name_rule))}
    if declarations and tools != "none":
        request["tools"] = declarations
    return request


def _read(item: Mapping[str, Any], names: NameTable) -> HistoryItem | ProviderAnswer:
    """Recognizes calls and answers in a message in the provider's format, so that they are paired like all others."""
    if item.get("role") == "tool" and item.get("tool_call_id"):
        return ProviderAnswer(str(item["tool_call_id"]), item)
    if item.get("role") == "assistant" and isinstance(item.get("tool_calls"), list):
        return read_message(item, names, "")
    return item
