"""Writes and reads Ollama's own API, `/api/chat`.

It gives calls no ids and takes their arguments as objects; results are identified by their order and the tool's name.
The ids generated here are for the program in between.

A tool's declaration holds only what the official client sends, so that a host that uses it, one that writes HTTP by
itself, and the server itself have the same tool: see `schemas.flat_properties`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from toolbus.errors import InvalidRequest
from toolbus.parts.models.dialects.call_arguments import unique_calls
from toolbus.parts.models.dialects.conversation import Delta, HistoryItem, Json, Message, Turn, model_call
from toolbus.parts.models.dialects.dialect import (
    EndpointError,
    ToolChoice,
    TurnStream,
    as_mapping,
    mapping,
    objects,
    string,
)
from toolbus.parts.models.dialects.endings import OLLAMA_ENDINGS, ended_turn
from toolbus.parts.models.dialects.export import MAX_CACHED_SCHEMAS, Export
from toolbus.parts.models.dialects.history import PairedDialect, ProviderAnswer, arguments_text
from toolbus.parts.models.dialects.openai_chat import chat_request
from toolbus.parts.models.dialects.provider_results import (
    OLLAMA_IMAGES,
    answer_text,
    arguments_object,
    base64_of,
    image_label,
)
from toolbus.parts.models.dialects.schemas.schema_rules import OLLAMA_SCHEMAS
from toolbus.parts.models.dialects.token_usage import ollama_usage
from toolbus.parts.models.dialects.tool_choice import ANY_TOOL, forced_tool
from toolbus.parts.models.dialects.wire_names import PLAIN_NAMES, NameTable
from toolbus.protocol.tool import Result, Tool


class Ollama(PairedDialect):
    """`/api/chat`.

    Args:
        images: True for a model that takes images. The server refuses a whole request with images for any other model,
            and most are such.
    """

    name = "ollama"
    name_rule = PLAIN_NAMES
    schema_rules = OLLAMA_SCHEMAS
    accepted_images = OLLAMA_IMAGES

    def __init__(self, max_cached_schemas: int = MAX_CACHED_SCHEMAS, *, images: bool = False) -> None:
        super().__init__(max_cached_schemas, images=images)
        # For the ids of calls that come without one. One counter for all conversations keeps ids unique in each; next()
        # is atomic.
        self.numbers = itertools.count()

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        parameters = dict(schema)
        notes = parameters.pop("description", "")  # of the parameters as a whole, whose own field no client sends
        repeated = notes in tool.description
        description = tool.description if repeated else f"{tool.description}\n{notes}".strip()
        function: Json = {"name": wire_name, "description": description, "parameters": parameters}
        return {"type": "function", "function": function}

    def stream(self, names: NameTable) -> TurnStream:
        return _OllamaStream(self, names)

    def request(self, items: Sequence[HistoryItem], export: Export | None, tools: ToolChoice = "auto") -> Json:
        """As in `Dialect`. The API has no tool_choice: ``none`` writes no tools, the name of a tool that tool alone.

        So a model may still answer in text although a tool was chosen. ``required`` cannot be written.
        """
        forced = forced_tool(export, tools)
        if forced == ANY_TOOL:
            raise InvalidRequest(
                "tool_choice is 'required', which Ollama's API does not have: name one tool, so that the model is "
                "offered it alone, or use a server's /v1/chat/completions with the dialect openai"
            )
        request = chat_request(self, items, export, tools)
        if forced is not None:
            request["tools"] = [each for each in request["tools"] if each["function"]["name"] == forced]
        return request

    def turn(
        self,
        message: Mapping[str, Any],
        names: NameTable,
        ids: Sequence[str] = (),
        last: Mapping[str, Any] = MappingProxyType({}),
        nameless: bool = False,
    ) -> Turn:
        """Reads a whole message of the model.

        Args:
            ids: of its calls; empty: the calls are numbered.
            last: the last chunk, which holds the stop reason and the counts.
            nameless: whether there were calls without a name, which the message does not hold.
        """
        functions = [entry["function"] for entry in _named(message)]
        calls = unique_calls(
            model_call(names, call_id, function["name"], arguments_text(function.get("arguments")))
            for function, call_id in zip(functions, ids or [""] * len(functions), strict=True)
        )
        return ended_turn(
            OLLAMA_ENDINGS,
            str(last.get("done_reason") or ""),
            dialect=self.name,
            raw=({"role": "assistant", **message},),
            text=string(message, "content"),
            reasoning=string(message, "thinking"),
            calls=calls,
            usage=ollama_usage(last),
            nameless=nameless,
        )

    def read(self, items: Sequence[HistoryItem], names: NameTable) -> list[HistoryItem | ProviderAnswer]:
        return [self._read(item, names) if isinstance(item, Mapping) else item for item in items]

    def _read(self, item: Mapping[str, Any], names: NameTable) -> HistoryItem | ProviderAnswer:
        if item.get("role") == "tool":
            return ProviderAnswer("", item)
        has_calls = item.get("role") == "assistant" and isinstance(item.get("tool_calls"), list)
        return self.turn(item, names) if has_calls else item

    def write_message(self, message: Message) -> Json:
        return {"role": message.role, "content": message.text}

    def echo(self, turn: Turn) -> list[Json] | None:
        message = copy.deepcopy(dict(turn.raw[0]))
        entries = _named(message)
        if len(entries) != len(turn.calls):
            return None
        message.setdefault("content", "")
        message.pop("tool_calls", None)
        for entry in entries:  # some models write the arguments as text, which the server refuses in a history
            entry["function"]["arguments"] = arguments_object(arguments_text(entry["function"].get("arguments")))
        if entries:
            message["tool_calls"] = entries
        return [message]

    def rebuild(self, turn: Turn, wires: Sequence[str]) -> list[Json]:
        message: Json = {"role": "assistant", "content": turn.text}
        if turn.reasoning and turn.dialect == self.name:
            message["thinking"] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = [
                {"function": {"name": wire, "arguments": arguments_object(call.arguments_json)}}
                for call, wire in zip(turn.calls, wires, strict=True)
            ]
        return [message]

    def write_result(self, call_id: str, wire: str, result: Result) -> Json:
        return {"role": "tool", "tool_name": wire, "content": answer_text(result)}

    def write_images(self, named_results: Sequence[tuple[str, Result]]) -> list[Json]:
        # Not every template of a model shows the images of a message that answers a call: they follow as the user's.
        labels: list[str] = []
        images: list[str] = []
        for wire, result in named_results:
            if of_result := self.images.images_of(result):
                labels.append(image_label(wire))
                images += map(base64_of, of_result)
        return [{"role": "user", "content": "\n".join(labels), "images": images}] if images else []

    def with_call_id(self, answer: ProviderAnswer, call_id: str) -> Json:
        return dict(answer.message)


def _named(message: Mapping[str, Any]) -> list[Json]:
    """Returns the calls of a message that name a tool."""
    entries = objects(message.get("tool_calls"))
    return [each for each in entries if string(mapping(each, "function"), "name")]


class _OllamaStream(TurnStream):
    """Assembles the chunks of an answer: text in pieces, calls whole."""

    end_mark = "a chunk that is done"

    def __init__(self, dialect: Ollama, names: NameTable) -> None:
        super().__init__(names)
        self._dialect = dialect
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._calls: list[Json] = []
        self._ids: list[str] = []  # of the calls, by place
        self._nameless = False  # whether a call came without a name
        self._last: Json = {}  # the stop reason and the counts received so far
        self._done = False  # whether the last chunk came

    def read(self, event: Any) -> list[Delta]:
        event = as_mapping(event)
        if event.get("error"):
            raise EndpointError.of(event)
        message = mapping(event, "message")
        thinking, text = string(message, "thinking"), string(message, "content")
        self._thinking.append(thinking)
        self._text.append(text)
        named = _named(message)
        given = message.get("tool_calls")
        self._nameless = self._nameless or (isinstance(given, list) and len(named) < len(given))
        for entry in named:
            self._calls.append(entry)
            self._ids.append(str(entry.get("id") or f"call_{next(self._dialect.numbers)}"))
        if event.get("done") is True or event.get("done_reason"):
            self._last |= {key: value for key, value in event.items() if value is not None}
            self._done = self._done or event.get("done") is True
        return [Delta("reasoning", thinking), Delta("text", text)]

    @property
    def complete(self) -> bool:
        return self._done

    def finish(self) -> Turn:
        message: Json = {"content": "".join(self._text)}
        if thinking := "".join(self._thinking):
            message["thinking"] = thinking
        if self._calls:
            message["tool_calls"] = self._calls
        return self._dialect.turn(message, self._names, self._ids, self._last, self._nameless)
