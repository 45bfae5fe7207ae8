"""Writes OpenAI's Responses: a conversation is a list of items, of which a call and its answer are two.

The model's output items are echoed unchanged, reasoning included: a reasoning model continues where it was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolbus.parts.models.dialects.call_arguments import (
    ANNOUNCED,
    has_arguments,
    joined_pieces,
    refused,
    resolved,
    unique_calls,
)
from toolbus.parts.models.dialects.conversation import Delta, HistoryItem, Json, Message, Turn, Usage, model_call
from toolbus.parts.models.dialects.dialect import (
    EndpointError,
    ToolChoice,
    TurnStream,
    as_mapping,
    mapping,
    objects,
    string,
)
from toolbus.parts.models.dialects.endings import RESPONSES_ENDINGS, ended_turn
from toolbus.parts.models.dialects.export import MAX_CACHED_SCHEMAS, Export
from toolbus.parts.models.dialects.history import (
    PairedDialect,
    ProviderAnswer,
    arguments_text,
    offered,
    valid_arguments_text,
)
from toolbus.parts.models.dialects.openai_chat import flat_tool
from toolbus.parts.models.dialects.provider_results import OPENAI_IMAGES, answer_text, data_url
from toolbus.parts.models.dialects.schemas.schema_rules import GRAMMAR_SCHEMAS, OPENAI_SCHEMAS
from toolbus.parts.models.dialects.token_usage import responses_usage
from toolbus.parts.models.dialects.tool_choice import forced_tool, function_choice
from toolbus.parts.models.dialects.wire_names import PLAIN_NAMES, NameTable
from toolbus.protocol.tool import Result, Tool

NAME = "openai-responses"


def _whole_turn(
    answer: Mapping[str, Any], output: Sequence[Json], names: NameTable, faults: Sequence[str] = ()
) -> Turn:
    stop = mapping(answer, "incomplete_details").get("reason") or answer.get("status") or ""
    return turn_of(output, names, str(stop), responses_usage(answer.get("usage")), faults)


def turn_of(
    output: Sequence[Json], names: NameTable, stop: str, usage: Usage | None = None, faults: Sequence[str] = ()
) -> Turn:
    """Returns the turn of a response's output items.

    Args:
        faults: of each item, why its call must not be made; "" if it may be. Empty without faults.
    """
    entries = [item for item in output if item.get("type") == "function_call"]
    calls = [
        refused(
            model_call(
                names,
                str(item.get("call_id") or item.get("id") or f"call_{place}"),
                item["name"],
                joined_pieces([arguments_text(item.get("arguments"))]),
            ),
            faults[place] if faults else "",
        )
        for place, item in enumerate(output)
        if item.get("type") == "function_call" and string(item, "name")
    ]
    contents = [item.get("content") for item in output if item.get("type") == "message"]
    text = "".join(map(_text, contents))
    refusal = "".join(str(part.get("refusal") or "") for content in contents for part in objects(content))
    reasoning = [item for item in output if item.get("type") == "reasoning"]
    return ended_turn(
        RESPONSES_ENDINGS,
        stop,
        dialect=NAME,
        raw=tuple(output),
        text=text,
        reasoning="\n\n".join(filter(None, (_text(item.get("content") or item.get("summary")) for item in reasoning))),
        calls=unique_calls(calls),
        usage=usage,
        refusal=refusal,
        nameless=len(entries) > len(calls),
        other=len(output) > len(contents) + len(entries) + len(reasoning),
    )


def _text(content: Any) -> str:
    """Returns the text of content, which is a text or a list of parts, refusals among them."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in objects(content))


class ResponseStream(TurnStream):
    """Assembles output items. Each is announced, filled by deltas and sent whole; the last event repeats them all."""

    end_mark = "response.completed or response.incomplete"

    def __init__(self, names: NameTable) -> None:
        super().__init__(names)
        self._items: list[_ArrivingItem] = []
        self._reasoning: list[str] = []
        self._response: Mapping[str, Any] | None = None  # the response in the last event; None until then
        self._take: dict[str, Callable[[Mapping[str, Any]], list[Delta]]] = {
            "response.output_item.added": self._item,
            "response.output_item.done": self._item,
            "response.output_text.delta": self._text_delta,
            "response.refusal.delta": self._text_delta,
            "response.reasoning_text.delta": self._reasoning_delta,
            "response.reasoning_summary_text.delta": self._reasoning_delta,
            "response.function_call_arguments.delta": self._arguments,
            "response.function_call_arguments.done": self._arguments,
            "response.completed": self._ended,
            "response.incomplete": self._ended,
            "response.cancelled": self._ended,
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
        return self._response is not None

    def finish(self) -> Turn:
        response = self._response or {}  # some servers end with an empty response
        if response.get("error"):
            raise EndpointError.of(response)
        final = [self._final(place, item) for place, item in enumerate(objects(response.get("output")))]
        # The response has all items, but for calls that a server left out of it.
        rest = [each for each in self._items if each not in final and (not final or each.is_call)]
        whole = [each.whole() for each in [*final, *rest]]
        turn = _whole_turn(response, [item for item, _ in whole], self._names, [fault for _, fault in whole])
        return turn if turn.reasoning else replace(turn, reasoning="".join(self._reasoning))

    def _final(self, place: int, item: Json) -> _ArrivingItem:
        """Returns an item of the last event with all that came of it before."""
        known = self._find(item, place) if item.get("type") == "function_call" else None
        final = known or _ArrivingItem(item, place)
        final.take(item, ended=item.get("status") != "in_progress")
        return final

    def _find(self, item: Json, place: Hashable) -> _ArrivingItem | None:
        """Returns what came of an item before: by its ids, else by its place; None if nothing did."""
        for key in ("id", "call_id"):
            for each in self._items:
                if item.get(key) and each.item.get(key) == item[key]:
                    return each
        there = [each for each in self._items if each.place == place and each.may_be(item)]
        return there[-1] if there else None

    def _item_of(self, event: Mapping[str, Any], default: Json) -> _ArrivingItem:
        """Returns the item that an event is about, created from the default if the server did not announce it."""
        item_id = event.get("item_id")
        place = event.get("output_index", item_id)
        ids = {"id": item_id} if item_id else {}
        known = self._find(ids, place) or self._new(default | ids, place)
        known.own_events = known.own_events or known.item.get("id") == item_id
        return known

    def _new(self, item: Json, place: Hashable) -> _ArrivingItem:
        self._items.append(_ArrivingItem(item, place))
        return self._items[-1]

    def _item(self, event: Mapping[str, Any]) -> list[Delta]:
        item = dict(mapping(event, "item"))
        place = event.get("output_index", item.get("id", len(self._items)))
        known = self._find(item, place) or self._new(item, place)
        known.take(item, ended=event.get("type") == "response.output_item.done")
        return []

    def _text_delta(self, event: Mapping[str, Any]) -> list[Delta]:
        delta = string(event, "delta")
        item = self._item_of(event, {"type": "message", "role": "assistant", "status": "incomplete"}).item
        kind, key = ("refusal", "refusal") if event.get("type") == "response.refusal.delta" else ("output_text", "text")
        content = item["content"] = objects(item.get("content"))
        if not content or content[-1].get("type") != kind:
            content.append({"type": kind, key: ""} | ({"annotations": []} if kind == "output_text" else {}))
        content[-1][key] = string(content[-1], key) + delta
        return [Delta("text", delta)]

    def _reasoning_delta(self, event: Mapping[str, Any]) -> list[Delta]:
        delta = string(event, "delta")
        self._reasoning.append(delta)
        return [Delta("reasoning", delta)]

    def _arguments(self, event: Mapping[str, Any]) -> list[Delta]:
        arriving = self._item_of(event, {"type": "function_call"})
        arriving.item["name"] = arriving.item.get("name") or event.get("name")
        if "delta" in event:
            arriving.pieces.append(arguments_text(event["delta"]))
        else:
            arriving.sources.append(arguments_text(event.get("arguments")))
            arriving.ended = True
        return []

    def _ended(self, event: Mapping[str, Any]) -> list[Delta]:
        self._response = mapping(event, "response")
        return []

    def _failed(self, event: Mapping[str, Any]) -> list[Delta]:
        response = event.get("response")
        if isinstance(response, Mapping) and not response.get("error"):
            return self._ended(event)
        raise EndpointError.of(response or event)


class _ArrivingItem:
    """One output item that may still be arriving."""

    def __init__(self, item: Json, place: Hashable) -> None:
        self.item = item
        self.place = place  # in the answer, or its id
        self.pieces: list[str] = []  # of a call's arguments
        self.sources: list[str] = []  # a call's arguments as each other event states them
        self.ended = False  # whether an event says that no more of it comes
        self.own_events = False  # whether an event besides its announcement named it by its id

    @property
    def is_call(self) -> bool:
        return self.item.get("type") == "function_call"

    def may_be(self, item: Json) -> bool:
        """Tells whether another event in the same place is about this item, although the ids do not say so.

        A server may leave out an id or make one up for each event, but a call that has both ids, or events of its own,
        is told apart by them.
        """
        if not self.is_call:
            return item.get("type") in (None, self.item.get("type"))
        if item.get("type") not in (None, "function_call"):
            return False
        ids = [(self.item.get(key), item.get(key)) for key in ("call_id", "id")]
        if ids[0][0] and ids[0][1]:
            return bool(ids[0][0] == ids[0][1])
        return not (ids[1][0] and ids[1][1] and (self.own_events or "type" in item))

    def take(self, item: Json, *, ended: bool) -> None:
        """Takes the item as an event states it: what it leaves out stays as it was."""
        if item.get("type") == "function_call":
            self.sources.append(arguments_text(item.get("arguments")))
            item = {**self.item, **{key: value for key, value in item.items() if value not in (None, "")}}
        elif item.get("type") == "message" and not item.get("content") and self.item.get("content"):
            item = {**item, "content": self.item["content"]}
        self.item = item
        self.ended = self.ended or ended

    def whole(self) -> tuple[Json, str]:
        """Returns the item, and why the call in it must not be made; "" if it may be."""
        if not self.is_call:
            return self.item, ""
        arguments, fault = resolved(
            (joined_pieces(self.pieces), *map(joined_pieces, ([each] for each in self.sources)))
        )
        if not self.ended and not has_arguments(arguments):
            fault = ANNOUNCED
        return {**self.item, "arguments": arguments}, fault


class OpenAIResponses(PairedDialect):
    """`/v1/responses`.

    Args:
        strict: as in `OpenAIChat`; every server of this API knows the key.
    """

    name = NAME
    name_rule = PLAIN_NAMES
    schema_rules = OPENAI_SCHEMAS
    plain_rules = GRAMMAR_SCHEMAS
    accepted_images = OPENAI_IMAGES
    max_tools = 128  # as in chat completions

    def __init__(
        self, max_cached_schemas: int = MAX_CACHED_SCHEMAS, *, images: bool = True, strict: bool | None = None
    ) -> None:
        super().__init__(max_cached_schemas, images=images)
        self.strict = strict

    def write_strict_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        return {**flat_tool(wire_name, tool, schema), "strict": True}

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        # Strict is the default of this API, and refuses every schema with an optional property.
        return {**flat_tool(wire_name, tool, schema), "strict": False}

    def parse(self, answer: Any, names: NameTable) -> Turn:
        answer = as_mapping(answer)
        if answer.get("error"):
            raise EndpointError.of(answer)
        return _whole_turn(answer, objects(answer.get("output")), names)

    def stream(self, names: NameTable) -> TurnStream:
        return ResponseStream(names)

    def request(self, items: Sequence[HistoryItem], export: Export | None, tools: ToolChoice = "auto") -> Json:
        """As in `Dialect`. Leading system messages become `instructions`, later ones stay in their place."""
        declarations, names = offered(export, self)
        forced = forced_tool(export, tools)
        first = 0
        while first < len(items) and isinstance(item := items[first], Message) and item.role == "system":
            first += 1
        request: Json = {"input": self.history(items[first:], names)}
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
            if item.get("type") != "function_call" or string(item, "name")
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
