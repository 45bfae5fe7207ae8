"""Writes OpenAI's Responses: a conversation is a list of items, of which a call and its answer are two.

The model's output items are echoed unchanged, reasoning included: a reasoning model continues where it was. Responses
are read in `openai_responses_answer`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
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
from toolbus.dialects.openai_responses_answer import NAME, ResponseStream, read_answer, turn_of
from toolbus.dialects.provider_results import answer_text
from toolbus.dialects.result_images import OPENAI_IMAGES, data_url
from toolbus.dialects.schemas.schema_rules import OPENAI_SCHEMAS
from toolbus.dialects.tool_choice import forced_tool, function_choice
from toolbus.dialects.wire_names import PLAIN_NAMES, NameTable
from toolbus.tool import Result, Tool


class OpenAIResponses(PairedDialect):
    """`/v1/responses`.

    Args:
        strict: as in `OpenAIChat`; every server of this API knows the key.
    """

    name = NAME
    name_rule = PLAIN_NAMES
    schema_rules = OPENAI_SCHEMAS
    accepted_images = OPENAI_IMAGES
    max_tools = 128  # as in chat completions

    def __init__(
        self, max_cached_schemas: int = MAX_CACHED_SCHEMAS, *, images: bool = True, strict: bool | None = None
    ) -> None:
        super().__init__(max_cached_schemas, images=images)
        self.strict = strict

    def write_strict_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        return {**self.write_tool(wire_name, tool, schema), "strict": True}

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        # Strict is the default of this API, and refuses every schema with an optional property.
        return {
            "type": "function",
            "name": wire_name,
            "description": tool.description,
            "parameters": schema,
            "strict": False,
        }

    def parse(self, answer: Any, names: NameTable) -> Turn:
        return read_answer(answer, names)

    def stream(self, names: NameTable) -> TurnStream:
        return ResponseStream(names)

    def request(self, items: Sequence[HistoryItem], export: Export | None, tools: ToolChoice = "auto") -> Json:
        """As in `Dialect`. Leading system messages become `instructions`, later ones stay in their place."""
        declarations = exported_tools(export, self.name)
        forced = forced_tool(export, tools)
        first = 0
        while first < len(items) and isinstance(item := items[first], Message) and item.role == "system":
            first += 1
        request: Json = {"input": self.history(items[first:], exported_names(export, self.name_rule))}
        if first:
            request["instructions"] = "\n\n".join(item.text for item in items[:first] if isinstance(item, Message))
        if declarations and tools != "none":
            request["tools"] = declarations
        if forced is not None:
            request["tool_choice"] = function_choice(forced)
        return request

    def read(self, items: Sequence[HistoryItem], names: NameTable) -> list[HistoryItem | ProviderAnswer]:
        history: list[HistoryItem | ProviderAnswer] = []
        output: list[Json] = []  # items of one answer, which programs append to their input one by one
        for item in items:
            if isinstance(item, Mapping) and _is_output(item):
                output.append(dict(item))
                continue
            history += _own_turn(output, names)
            output = []
            if isinstance(item, Mapping) and item.get("type") == "function_call_output":
                history.append(ProviderAnswer(str(item.get("call_id") or ""), item))
            else:
                history.append(item)
        return history + _own_turn(output, names)

    def write_message(self, message: Message) -> Json:
        return {"type": "message", "role": message.role, "content": message.text}

    def echo(self, turn: Turn) -> list[Json] | None:
        # The API refuses null values, which its answers hold, and calls without a name.
        items = [
            {key: copy.deepcopy(value) for key, value in item.items() if value is not None}
            for item in turn.raw
            if item.get("type") != "function_call" or item.get("name")
        ]
        calls = [item for item in items if item.get("type") == "function_call"]
        if len(calls) != len(turn.calls):
            return None
        for item, call in zip(calls, turn.calls, strict=True):
            item |= {"call_id": call.id, "arguments": valid_arguments_text(arguments_text(item.get("arguments")))}
        while items and items[-1].get("type") == "reasoning":
            items.pop()  # the API refuses reasoning without the item that follows it
        return items

    def rebuild(self, turn: Turn, wires: Sequence[str]) -> list[Json]:
        items: list[Json] = []
        if turn.text or not turn.calls:
            items.append({"type": "message", "role": "assistant", "content": turn.text})
        items += [
            {
                "type": "function_call",
                "call_id": call.id,
                "name": wire,
                "arguments": valid_arguments_text(call.arguments_json),
            }
            for call, wire in zip(turn.calls, wires, strict=True)
        ]
        return items

    def write_result(self, call_id: str, wire: str, result: Result) -> Json:
        return {"type": "function_call_output", "call_id": call_id, "output": self._output(result)}

    def _output(self, result: Result) -> str | list[Json]:
        images = self.images.images_of(result)
        if not images:
            return answer_text(result)
        text = self.images.text_beside_images(result)
        texts: list[Json] = [{"type": "input_text", "text": text}] if text else []
        return texts + [{"type": "input_image", "image_url": data_url(image)} for image in images]

    def with_call_id(self, answer: ProviderAnswer, call_id: str) -> Json:
        return {**answer.message, "call_id": call_id}


def _is_output(item: Mapping[str, Any]) -> bool:
    """Tells whether an item is output of a model, to which a call may belong."""
    return item.get("type") in ("function_call", "reasoning") or (
        item.get("role") == "assistant" and item.get("type", "message") == "message"
    )


def _own_turn(output: Sequence[Json], names: NameTable) -> list[HistoryItem | ProviderAnswer]:
    """Returns output items as a turn, so that their calls are paired; without calls there is nothing to pair."""
    if not any(item.get("type") == "function_call" for item in output):
        return list(output)
    return [turn_of(output, names, "")]
