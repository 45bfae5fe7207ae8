"""OpenAI's Responses: a conversation is a list of items, of which a call and its answer are two.

What the model put out goes back item by item as it came, reasoning included: a reasoning model continues where it was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolbus.dialects.call_ids import unique_calls
from toolbus.dialects.conversation import Delta, HistoryItem, Json, Message, Turn, model_call
from toolbus.dialects.dialect import EndpointError, ToolChoice, TurnStream, as_mapping
from toolbus.dialects.export import Export
from toolbus.dialects.history import (
    PairedDialect,
    ProviderAnswer,
    arguments_text,
    exported_names,
    exported_tools,
    valid_arguments_text,
)
from toolbus.dialects.result_text import text_of
from toolbus.dialects.schemas.schema_rules import OPENAI_SCHEMAS
from toolbus.dialects.wire_names import PLAIN_NAMES, NameTable
from toolbus.tool import Result, Tool


class OpenAIResponses(PairedDialect):
    """`/v1/responses`."""

    name = "openai-responses"
    name_rule = PLAIN_NAMES
    schema_rules = OPENAI_SCHEMAS

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        # Strict is the default here, and refuses every schema with an optional property.
        return {
            "type": "function",
            "name": wire_name,
            "description": tool.description,
            "parameters": schema,
            "strict": False,
        }

    def parse(self, answer: Any, names: NameTable) -> Turn:
        answer = as_mapping(answer)
        if answer.get("error") or answer.get("status") == "failed":
            raise EndpointError.of(answer)
        stop = (answer.get("incomplete_details") or {}).get("reason") or answer.get("status") or ""
        return _turn(_objects(answer.get("output")), names, stop)

    def stream(self, names: NameTable) -> TurnStream:
        return _ResponsesStream(self, names)

    def request(self, items: Sequence[HistoryItem], export: Export | None, tools: ToolChoice = "auto") -> Json:
        """As in `Dialect`. What the system says first becomes `instructions`, what it says later stays in its place."""
        offered = exported_tools(export, self.name)
        first = 0
        while first < len(items) and isinstance(item := items[first], Message) and item.role == "system":
            first += 1
        request: Json = {"input": self.history(items[first:], exported_names(export, self.name_rule))}
        if first:
            request["instructions"] = "\n\n".join(item.text for item in items[:first] if isinstance(item, Message))
        if offered and tools == "auto":
            request["tools"] = offered
        return request

    def read(self, items: Sequence[HistoryItem], names: NameTable) -> list[HistoryItem | ProviderAnswer]:
        read: list[HistoryItem | ProviderAnswer] = []
        output: list[Json] = []  # items of one answer, as a program keeps them that extends its input with them
        for item in items:
            if isinstance(item, Mapping) and _is_output(item):
                output.append(dict(item))
                continue
            read += _own_turn(output, names)
            output = []
            if isinstance(item, Mapping) and item.get("type") == "function_call_output":
                read.append(ProviderAnswer(str(item.get("call_id") or ""), item))
            else:
                read.append(item)
        return read + _own_turn(output, names)

    def write_message(self, message: Message) -> Json:
        return {"type": "message", "role": message.role, "content": message.text}

    def echo(self, turn: Turn) -> list[Json] | None:
        # What is null in an answer is refused in a request, and so are calls that name nothing.
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
            items.pop()  # what it led to never came, and without that it is refused
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
        return {"type": "function_call_output", "call_id": call_id, "output": text_of(result)}

    def with_call_id(self, answer: ProviderAnswer, call_id: str) -> Json:
        return {**answer.message, "call_id": call_id}


def _objects(value: Any) -> list[Json]:
    return [dict(entry) for entry in value or () if isinstance(entry, Mapping)]


def _is_output(item: Mapping[str, Any]) -> bool:
    """Tells whether an item is something that a model put out, to which a call may belong."""
    return item.get("type") in ("function_call", "reasoning") or (
        item.get("role") == "assistant" and item.get("type", "message") == "message"
    )


def _own_turn(output: Sequence[Json], names: NameTable) -> list[HistoryItem | ProviderAnswer]:
    """Returns output items as a turn, so that their calls are paired; without calls there is nothing to pair."""
    if not any(item.get("type") == "function_call" for item in output):
        return list(output)
    return [_turn(output, names, "")]


def _turn(output: Sequence[Json], names: NameTable, stop: str) -> Turn:
    calls = [
        model_call(
            names,
            str(item.get("call_id") or item.get("id") or f"call_{place}"),
            str(item["name"]),
            arguments_text(item.get("arguments")),
        )
        for place, item in enumerate(output)
        if item.get("type") == "function_call" and item.get("name")
    ]
    messages = [item for item in output if item.get("type") == "message"]
    thoughts = [item for item in output if item.get("type") == "reasoning"]
    return Turn(
        text="".join(_text(item.get("content")) for item in messages),
        calls=unique_calls(calls),
        reasoning="\n\n".join(filter(None, (_text(item.get("content") or item.get("summary")) for item in thoughts))),
        dialect=OpenAIResponses.name,
        raw=tuple(output),
        stop=stop,
    )


def _text(content: Any) -> str:
    """Returns the text of content, which is a text or a list of parts; one may be a refusal."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in _objects(content))


class _ResponsesStream(TurnStream):
    """Collects output items. Each is announced, filled by deltas and sent whole; the last event repeats them all."""

    end_mark = "response.completed or response.incomplete"

    def __init__(self, dialect: OpenAIResponses, names: NameTable) -> None:
        super().__init__()
        self._dialect = dialect
        self._names = names
        self._items: dict[Hashable, Json] = {}  # output items as far as they came, by their place in the answer
        self._thought: list[str] = []
        self._closing: Mapping[str, Any] | None = None  # the response that the last event carries; None until then
        self._take: dict[str, Callable[[Mapping[str, Any]], list[Delta]]] = {
            "response.output_item.added": self._item,
            "response.output_item.done": self._item,
            "response.output_text.delta": self._said,
            "response.refusal.delta": self._said,
            "response.reasoning_text.delta": self._reasoned,
            "response.reasoning_summary_text.delta": self._reasoned,
            "response.function_call_arguments.delta": self._arguments,
            "response.function_call_arguments.done": self._arguments,
            "response.completed": self._closed,
            "response.incomplete": self._closed,
            "response.failed": self._failed,
            "error": self._failed,
        }

    def read(self, event: Any) -> list[Delta]:
        event = as_mapping(event)
        if event.get("error"):
            return self._failed(event)
        take = self._take.get(str(event.get("type")))
        return [] if take is None else take(event)

    @property
    def complete(self) -> bool:
        return self._closing is not None

    def finish(self) -> Turn:
        closing = self._closing or {}  # some servers close with an empty response
        output = closing.get("output") or list(self._items.values())
        turn = self._dialect.parse({**closing, "output": output}, self._names)
        return turn if turn.reasoning else replace(turn, reasoning="".join(self._thought))

    def _at(self, event: Mapping[str, Any], otherwise: Json) -> Json:
        """Returns the item that an event is about; a server may not have announced it."""
        place = event.get("output_index", event.get("item_id"))
        if place not in self._items:
            named = {"id": event["item_id"]} if event.get("item_id") else {}
            self._items[place] = otherwise | named
        return self._items[place]

    def _item(self, event: Mapping[str, Any]) -> list[Delta]:
        item = dict(event.get("item") or {})
        self._items[event.get("output_index", item.get("id", len(self._items)))] = item
        return []

    def _said(self, event: Mapping[str, Any]) -> list[Delta]:
        delta = str(event.get("delta") or "")
        item = self._at(event, {"type": "message", "role": "assistant", "status": "incomplete"})
        kind, key = ("refusal", "refusal") if event.get("type") == "response.refusal.delta" else ("output_text", "text")
        content = item["content"] = _objects(item.get("content"))
        if not content or content[-1].get("type") != kind:
            content.append({"type": kind, key: ""} | ({"annotations": []} if kind == "output_text" else {}))
        content[-1][key] += delta
        return [Delta("text", delta)]

    def _reasoned(self, event: Mapping[str, Any]) -> list[Delta]:
        delta = str(event.get("delta") or "")
        self._thought.append(delta)
        return [Delta("reasoning", delta)]

    def _arguments(self, event: Mapping[str, Any]) -> list[Delta]:
        item = self._at(event, {"type": "function_call"})
        item["name"] = item.get("name") or event.get("name")
        if "delta" in event:
            item["arguments"] = arguments_text(item.get("arguments")) + arguments_text(event["delta"])
        else:
            item["arguments"] = event.get("arguments")
        return []

    def _closed(self, event: Mapping[str, Any]) -> list[Delta]:
        self._closing = event.get("response") or {}
        return []

    def _failed(self, event: Mapping[str, Any]) -> list[Delta]:
        raise EndpointError.of(event.get("response") or event)
