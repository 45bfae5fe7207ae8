"""Writes and reads Anthropic Messages: calls are blocks of the assistant's message, results of the user's next one.

The model's blocks are echoed unchanged, since thinking is signed and the API checks it. Everything for which the API
refuses a whole request is repaired: blank texts, roles that do not alternate, results that do not come first, ids of
other providers, images in a failed result, and calls without declared tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from toolbus.parts.models.dialects.call_arguments import ANNOUNCED, joined_pieces, portable_id, refused, resolved
from toolbus.parts.models.dialects.conversation import (
    Answered,
    Delta,
    HistoryItem,
    Json,
    Message,
    ModelCall,
    Turn,
    Usage,
    model_call,
    text_of_kind,
)
from toolbus.parts.models.dialects.dialect import (
    Dialect,
    EndpointError,
    ToolChoice,
    TurnStream,
    as_mapping,
    mapping,
    objects,
    string,
)
from toolbus.parts.models.dialects.endings import ANTHROPIC_ENDINGS, ended_turn, list_parts
from toolbus.parts.models.dialects.export import Export
from toolbus.parts.models.dialects.history import (
    OPENING,
    AnsweredTurn,
    ProviderAnswer,
    alternating,
    arguments_text,
    call_wire_name,
    offered,
    pair_calls,
    system_text,
)
from toolbus.parts.models.dialects.provider_results import ANTHROPIC_IMAGES, ImageRule, arguments_object, base64_of
from toolbus.parts.models.dialects.schemas.schema_rules import ANTHROPIC_SCHEMAS, SchemaRules
from toolbus.parts.models.dialects.token_usage import anthropic_usage
from toolbus.parts.models.dialects.tool_choice import forced_tool
from toolbus.parts.models.dialects.wire_names import PLAIN_NAMES, NameRule, NameTable
from toolbus.protocol.tool import Result, Tool

NAME = "anthropic"
_KNOWN_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use")
_NOT_ECHOED = ("parsed_output",)  # a field of the SDK, which the API refuses


class BlockStream(TurnStream):
    """Assembles blocks that arrive in pieces, by their index."""

    end_mark = "message_stop"

    def __init__(self, names: NameTable) -> None:
        super().__init__(names)
        self._blocks: list[_ArrivingBlock] = []
        self._newest: dict[int, _ArrivingBlock] = {}  # by index: a server may give two calls the same
        self._latest = 0  # the index of the block that began last
        self._stop = ""  # the stop reason; "" until it came
        self._details: Mapping[str, Any] = {}  # the details of the stop; empty until they came
        self._usage: Json = {}  # the newest counts; those of the start hold until others come
        self._stopped = False  # whether the last event came

    def read(self, event: Any) -> list[Delta]:
        event = as_mapping(event)
        kind, index = event.get("type"), event.get("index", 0)
        if not isinstance(index, int):
            index = max(self._newest, default=-1) + 1 if kind == "content_block_start" else self._latest
        if kind == "content_block_start":
            self._latest = index
            return self._start(index, dict(mapping(event, "content_block")))
        if kind == "content_block_delta" and index in self._newest:
            return self._newest[index].add(mapping(event, "delta"))
        if kind == "content_block_stop":
            if index in self._newest:
                self._newest[index].ended = True
        elif kind == "message_start":
            self._count(mapping(event, "message"))
        elif kind == "message_delta":
            delta = mapping(event, "delta")
            self._stop = string(delta, "stop_reason") or self._stop
            self._details = mapping(delta, "stop_details") or self._details
            self._count(event)
        elif kind == "message_stop":
            self._stopped = True
        elif kind == "error":
            raise EndpointError.of(event)
        return []  # ping, and kinds of a newer API

    def _count(self, message: Mapping[str, Any]) -> None:
        self._usage |= {key: value for key, value in mapping(message, "usage").items() if value is not None}

    @property
    def complete(self) -> bool:
        return self._stopped

    def _start(self, index: int, block: Json) -> list[Delta]:
        earlier = self._newest.get(index)
        if earlier is not None and earlier.repeated_by(block):
            return []
        self._newest[index] = _ArrivingBlock(index, block)
        if earlier is not None and earlier.content.get("type") != "tool_use":
            self._blocks.remove(earlier)
        self._blocks.append(self._newest[index])
        return _deltas(block)

    def finish(self) -> Turn:
        blocks: list[Json] = []
        faults: dict[int, str] = {}  # of calls that must not be made, by their place in `blocks`
        for block in sorted(self._blocks, key=lambda block: block.index):
            # Where a stream broke off, incomplete thinking has no signature and an incomplete call must not be made.
            # A stream that has ended has all of its calls, also those whose end a server left out.
            is_call = block.content.get("type") == "tool_use"
            if not block.ended and not (self._stopped and is_call) and block.content.get("type") != "text":
                continue
            content, fault = block.whole()
            if fault:
                faults[len(blocks)] = fault
            blocks.append(content)
        return turn_of(blocks, self._names, self._stop, self._details, anthropic_usage(self._usage), faults)


class _ArrivingBlock:
    """One block that may still be arriving."""

    def __init__(self, index: int, content: Json) -> None:
        self.index = index
        self.content = content
        self.pieces: list[str] = []  # of its arguments
        self.ended = False

    def repeated_by(self, block: Mapping[str, Any]) -> bool:
        """Tells whether a server announces this call once more; its arguments then count as another source."""
        is_same = block.get("type") == "tool_use" and block.get("id") == self.content.get("id")
        if is_same and block.get("input"):
            self.pieces.append(arguments_text(block["input"]))
        return is_same and bool(block.get("id"))

    def add(self, delta: Mapping[str, Any]) -> list[Delta]:
        block, kind = self.content, delta.get("type")
        if kind == "input_json_delta":
            self.pieces.append(arguments_text(delta.get("partial_json")))
        elif kind == "signature_delta":
            block["signature"] = delta.get("signature", "")
        elif kind == "citations_delta":
            block["citations"] = [*objects(block.get("citations")), *objects([delta.get("citation")])]
        elif kind in ("text_delta", "thinking_delta"):
            key = kind.removesuffix("_delta")
            block[key] = string(block, key) + string(delta, key)
            return _deltas(delta)
        return []

    def whole(self) -> tuple[Json, str]:
        """Returns the block, and why the call in it must not be made; "" if it may be.

        The input stays text until `turn_of` reads it: the model may have written invalid JSON.
        """
        given = self.content.get("input")
        pieces = joined_pieces(self.pieces)
        arguments, fault = resolved((arguments_text(given), pieces))
        if self.content.get("type") == "tool_use" and not self.ended and not self.pieces and not given:
            fault = ANNOUNCED
        is_whole = not pieces.strip() or arguments == arguments_text(given)
        return (self.content if is_whole else {**self.content, "input": arguments}), fault


def _deltas(piece: Mapping[str, Any]) -> list[Delta]:
    """Returns the text and the reasoning of a block or a delta."""
    text, thinking = piece.get("text"), piece.get("thinking")
    deltas = [Delta("reasoning", thinking)] if isinstance(thinking, str) and thinking else []
    return [*deltas, Delta("text", text)] if isinstance(text, str) and text else deltas


def turn_of(
    blocks: Sequence[Json],
    names: NameTable,
    stop: str,
    details: Mapping[str, Any] = MappingProxyType({}),
    usage: Usage | None = None,
    faults: Mapping[int, str] = MappingProxyType({}),
) -> Turn:
    """Returns the turn of a message's blocks. The `input` of a call may still be text.

    Args:
        faults: why calls must not be made, by the place of their block.
    """
    calls: list[ModelCall] = []
    raw: list[Json] = []
    nameless = False
    for place, block in enumerate(blocks):
        given = block.get("input")
        if block.get("type") == "tool_use":
            if not string(block, "name"):
                nameless = True
                continue
            arguments_json = joined_pieces([arguments_text(given)])
            call = model_call(names, str(block.get("id") or f"call_{len(calls)}"), block["name"], arguments_json)
            # In a whole answer, a block that the token limit cut has an input that looks complete.
            is_cut = block is blocks[-1] and not isinstance(given, str) and ANTHROPIC_ENDINGS.get(stop) == "cut"
            calls.append(refused(replace(call, whole=not is_cut), faults.get(place, "")))
            block = {**block, "id": call.id}
        if "input" in block and not isinstance(given, Mapping):  # also of a search that the provider made
            block = {**block, "input": arguments_object(joined_pieces([arguments_text(given)]))}
        raw.append({key: value for key, value in block.items() if key not in _NOT_ECHOED})
    deltas = [delta for block in blocks if block.get("type") in ("text", "thinking") for delta in _deltas(block)]
    echoed = blocks_of(raw)
    return ended_turn(
        ANTHROPIC_ENDINGS,
        stop,
        dialect=NAME,
        raw=(message_of("assistant", echoed),) if echoed else (),
        text=text_of_kind(deltas, "text"),
        reasoning=text_of_kind(deltas, "reasoning"),
        calls=tuple(calls),
        usage=usage,
        reason=list_parts(details.get("category"), details.get("explanation")),  # of a refusal
        nameless=nameless,
        other=any(block.get("type") not in _KNOWN_BLOCKS for block in blocks),
        # Anthropic's documentation: an empty answer after results is the model's decision, and comes again.
        retry_empty=False,
    )


def message_of(role: str, blocks: Sequence[Json]) -> Json:
    return {"role": role, "content": list(blocks)}


def text_block(text: str) -> Json:
    return {"type": "text", "text": text}


def blocks_of(content: Any) -> list[Json]:
    """Returns content as blocks, results first, without the blank texts that the API refuses."""
    blocks = [text_block(content)] if isinstance(content, str) else objects(content)
    valid = [block for block in blocks if block.get("type") != "text" or string(block, "text").strip()]
    return sorted(valid, key=lambda block: block.get("type") != "tool_result")


# For `pair_calls`: makes all ids portable, those of this dialect too, as another server of it may give ids that the API
# refuses.
_NO_DIALECT = "-"


class Anthropic(Dialect):
    """Anthropic Messages, and servers that speak it."""

    name: ClassVar[str] = NAME
    name_rule: ClassVar[NameRule] = PLAIN_NAMES
    schema_rules: SchemaRules = ANTHROPIC_SCHEMAS
    accepted_images: ClassVar[ImageRule] = ANTHROPIC_IMAGES

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        described = {"description": tool.description} if tool.description else {}
        return {"name": wire_name, **described, "input_schema": schema}

    def parse(self, answer: Any, names: NameTable) -> Turn:
        message = as_mapping(answer)
        if message.get("type") == "error" or message.get("error"):
            raise EndpointError.of(message)
        usage = anthropic_usage(mapping(message, "usage"))
        blocks, stop = blocks_of(message.get("content")), string(message, "stop_reason")
        return turn_of(blocks, names, stop, mapping(message, "stop_details"), usage)

    def stream(self, names: NameTable) -> TurnStream:
        return BlockStream(names)

    def results(self, answered: Sequence[Answered], names: NameTable) -> list[Json]:
        blocks = [self._answer(portable_id(each.call.id), each.result) for each in answered]
        return [message_of("user", blocks)] if blocks else []

    def history(self, items: Iterable[HistoryItem], names: NameTable) -> list[Json]:
        messages: list[Json] = []
        for step in pair_calls(_read(items, names), _NO_DIALECT):
            if isinstance(step, Message):
                if step.role != "system":  # `request` writes it
                    messages.append(message_of(step.role, [text_block(step.text)]))
            elif isinstance(step, AnsweredTurn):
                messages += self._write_turn(step, names)
            else:
                messages.append(_without_results(step))
        return alternating(messages, "content", blocks_of, message_of("user", [text_block(OPENING)]))

    def _write_turn(self, step: AnsweredTurn, names: NameTable) -> list[Json]:
        turn = step.turn
        blocks = self._echo(turn, names) if turn.dialect == self.name and turn.raw else None
        if blocks is None:
            blocks = [text_block(turn.text)]
            for call in turn.calls:
                called = {"id": call.id, "name": call_wire_name(call, names, self.name_rule)}
                blocks.append({"type": "tool_use", **called, "input": arguments_object(call.arguments_json)})
        answers = [self._answer(call.id, answer) for call, answer in zip(turn.calls, step.answers, strict=True)]
        return [message_of("assistant", blocks), message_of("user", answers)]

    def _echo(self, turn: Turn, names: NameTable) -> list[Json] | None:
        """Returns a turn's own blocks with the calls' current ids; None if its calls differ."""
        blocks = [dict(block) for message in turn.raw for block in blocks_of(message.get("content"))]
        uses = [block for block in blocks if block.get("type") == "tool_use"]
        if len(uses) != len(turn.calls):
            return None
        for use, call in zip(uses, turn.calls, strict=True):
            use["id"] = call.id
            if not self.name_rule.accepts(use["name"]):
                use["name"] = call_wire_name(call, names, self.name_rule)
        return blocks

    def _answer(self, call_id: str, answer: Result | ProviderAnswer) -> Json:
        if isinstance(answer, ProviderAnswer):
            return {**answer.message["content"][0], "tool_use_id": call_id}
        head: Json = {"type": "tool_result", "tool_use_id": call_id}
        if answer.is_error or answer.error is not None or answer.asks:
            return {**head, "content": answer.text, "is_error": True}  # the API refuses images in a failed result
        images = self.images.images_of(answer)
        if not images:
            text = answer.text
            return {**head, "content": text} if text.strip() else head
        sources = ({"type": "base64", "media_type": each.mime_type, "data": base64_of(each)} for each in images)
        texts = blocks_of(self.images.text_beside_images(answer))
        return {**head, "content": [*texts, *({"type": "image", "source": source} for source in sources)]}

    def request(self, items: Sequence[HistoryItem], export: Export | None, tools: ToolChoice = "auto") -> Json:
        """Returns `messages`, and, if not empty, `system`, `tools` and `tool_choice`.

        The API refuses calls in a conversation without declared tools, so without tools calls are written as text. A
        model that thinks refuses to be forced to call.
        """
        declarations, names = offered(export, self)
        forced = forced_tool(export, tools)
        messages = self.history(items, names)
        blocks = (block for message in messages for block in blocks_of(message["content"]))
        holds_calls = any(block.get("type") in ("tool_use", "tool_result") for block in blocks)
        if holds_calls and not declarations:
            messages = _calls_as_text(messages)
        request: Json = {"messages": messages}
        if system := system_text(items):
            request["system"] = system
        if declarations and (tools != "none" or holds_calls):
            request["tools"] = declarations
            if tools == "none":
                request["tool_choice"] = {"type": "none"}
        if forced is not None:
            request["tool_choice"] = {"type": "tool", "name": forced} if forced else {"type": "any"}
        return request


def _read(items: Iterable[HistoryItem], names: NameTable) -> Iterator[HistoryItem | ProviderAnswer]:
    """Yields a conversation in which calls and results in the provider's own format are recognized."""
    ids: dict[str, str] = {}  # the original id by the portable id that `results` wrote
    for item in items:
        if isinstance(item, Turn):
            ids |= {portable_id(call.id): call.id for call in item.calls}
        if not isinstance(item, Mapping):
            yield item
            continue
        blocks = blocks_of(item.get("content"))
        if any(block.get("type") == "tool_use" for block in blocks):
            yield turn_of(blocks, names, "")
            continue
        for block in blocks:
            if block.get("type") == "tool_result":
                call_id: str = block.get("tool_use_id") or ""
                yield ProviderAnswer(ids.get(call_id, call_id), message_of("user", [block]))
        yield _without_results(item)


def _without_results(message: Mapping[str, Any]) -> Json:
    """Returns a message without results: they are written after their calls."""
    blocks = blocks_of(message.get("content"))
    others = [block for block in blocks if block.get("type") != "tool_result"]
    return dict(message) if len(others) == len(blocks) else {**message, "content": others}


def _calls_as_text(messages: Sequence[Json]) -> list[Json]:
    """Returns messages with calls and results as text, for a request that declares no tools."""
    tool_names: dict[str, str] = {}  # by the calls' ids
    rewritten = []
    for message in messages:
        blocks: list[Json] = []
        for block in blocks_of(message["content"]):
            if block.get("type") == "tool_use":
                tool_names[block["id"]] = block["name"]
                arguments = json.dumps(block["input"], ensure_ascii=False)
                blocks.append(text_block(f"[called {block['name']} with {arguments}]"))
            elif block.get("type") == "tool_result":
                blocks.append(text_block(f"[{tool_names.get(block['tool_use_id'], 'a tool')} answered]"))
                blocks += blocks_of(block.get("content"))
            else:
                blocks.append(block)
        rewritten.append({**message, "content": blocks})
    return rewritten
