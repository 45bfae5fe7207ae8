"""Writes and reads Anthropic Messages: calls are blocks of the assistant's message, results of the user's next one.

The model's blocks are echoed unchanged, since thinking is signed and the API checks it. Everything for which the API
refuses a whole request is repaired: blank texts, roles that do not alternate, results that do not come first, ids of
other providers, images in a failed result, and calls without declared tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from toolbus.dialects.alternation import OPENING, alternating, system_text
from toolbus.dialects.anthropic_response import NAME, BlockStream, blocks_of, message_of, text_block, turn_of
from toolbus.dialects.call_ids import portable_id
from toolbus.dialects.conversation import Answered, HistoryItem, Json, Message, ModelCall, Turn
from toolbus.dialects.dialect import Dialect, EndpointError, ToolChoice, TurnStream, as_mapping
from toolbus.dialects.export import Export
from toolbus.dialects.history import (
    AnsweredTurn,
    ProviderAnswer,
    call_wire_name,
    exported_names,
    exported_tools,
    pair_calls,
)
from toolbus.dialects.provider_results import arguments_object
from toolbus.dialects.result_images import ANTHROPIC_IMAGES, ImageRule, base64_of
from toolbus.dialects.schemas.schema_rules import ANTHROPIC_SCHEMAS, SchemaRules
from toolbus.dialects.token_usage import anthropic_usage
from toolbus.dialects.tool_choice import forced_tool
from toolbus.dialects.wire_names import PLAIN_NAMES, NameRule, NameTable
from toolbus.tool import Result, Tool
from toolbus.v1 import tool_pb2 as pb

# For `pair_calls`: makes all ids portable, those of this dialect too, as another server of it may give ids that the API
# refuses.
_NO_DIALECT = "-"
_CALL_BLOCKS = ("tool_use", "tool_result")


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
        usage = anthropic_usage(as_mapping(message.get("usage") or {}))
        blocks, stop = blocks_of(message.get("content")), message.get("stop_reason") or ""
        return turn_of(blocks, names, stop, message.get("stop_details"), usage)

    def stream(self, names: NameTable) -> TurnStream:
        return BlockStream(names)

    def results(self, answered: Sequence[Answered], names: NameTable) -> list[Json]:
        blocks = [self._tool_result(portable_id(each.call.id), each.result) for each in answered]
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
            blocks = [text_block(turn.text), *(self._tool_use(call, names) for call in turn.calls)]
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

    def _tool_use(self, call: ModelCall, names: NameTable) -> Json:
        return {
            "type": "tool_use",
            "id": call.id,
            "name": call_wire_name(call, names, self.name_rule),
            "input": arguments_object(call.arguments_json),
        }

    def _answer(self, call_id: str, answer: Result | ProviderAnswer) -> Json:
        if isinstance(answer, ProviderAnswer):
            return {**answer.message["content"][0], "tool_use_id": call_id}
        return self._tool_result(call_id, answer)

    def _tool_result(self, call_id: str, result: Result) -> Json:
        head: Json = {"type": "tool_result", "tool_use_id": call_id}
        if result.is_error or result.error is not None or result.asks:
            return {**head, "content": result.text, "is_error": True}  # the API refuses images in a failed result
        images = self.images.images_of(result)
        if not images:
            text = result.text
            return {**head, "content": text} if text.strip() else head
        texts = blocks_of(self.images.text_beside_images(result))
        return {**head, "content": [*texts, *map(_image_block, images)]}

    def request(self, items: Sequence[HistoryItem], export: Export | None, tools: ToolChoice = "auto") -> Json:
        """Returns `messages`, and, if not empty, `system`, `tools` and `tool_choice`.

        The API refuses calls in a conversation without declared tools, so without tools calls are written as text. A
        model that thinks refuses to be forced to call.
        """
        declarations = exported_tools(export, self.name)
        forced = forced_tool(export, tools)
        messages = self.history(items, exported_names(export, self.name_rule))
        holds_calls = any(_is_call(block) for message in messages for block in blocks_of(message["content"]))
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


def _is_call(block: Mapping[str, Any]) -> bool:
    return block.get("type") in _CALL_BLOCKS


def _image_block(image: pb.ImageContent) -> Json:
    source = {"type": "base64", "media_type": image.mime_type, "data": base64_of(image)}
    return {"type": "image", "source": source}


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
