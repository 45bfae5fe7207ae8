"""Reads responses of Anthropic Messages, whole or streamed, and the content blocks that requests share with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolbus.dialects.conversation import Delta, Json, ModelCall, Turn, Usage, model_call, text_of_kind
from toolbus.dialects.dialect import EndpointError, TurnStream, as_mapping
from toolbus.dialects.endings import ANTHROPIC_ENDINGS, list_parts, read_end
from toolbus.dialects.history import arguments_text
from toolbus.dialects.provider_results import arguments_object
from toolbus.dialects.token_usage import anthropic_usage
from toolbus.dialects.wire_names import NameTable

NAME = "anthropic"
_KNOWN_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use")
_NOT_ECHOED = ("parsed_output",)  # a field of the SDK, which the API refuses


class BlockStream(TurnStream):
    """Assembles blocks that arrive in pieces, by their index."""

    end_mark = "message_stop"

    def __init__(self, names: NameTable) -> None:
        super().__init__()
        self._names = names
        self._blocks: dict[int, Json] = {}
        self._inputs: dict[int, str] = {}  # received parts of arguments, by the index of their block
        self._ended: set[int] = set()  # indexes of complete blocks
        self._stop = ""  # the stop reason; "" until it came
        self._details: Any = None  # the details of the stop; None until they came
        self._usage: Json = {}  # the newest counts; those of the start hold until others come
        self._stopped = False  # whether the last event came

    def read(self, event: Any) -> list[Delta]:
        event = as_mapping(event)
        kind, index = event.get("type"), event.get("index", 0)
        if kind == "content_block_start":
            block = self._blocks[index] = dict(as_mapping(event.get("content_block") or {}))
            return _deltas(block)
        if kind == "content_block_delta" and index in self._blocks:
            return self._add(index, as_mapping(event.get("delta") or {}))
        if kind == "content_block_stop":
            self._ended.add(index)
        elif kind == "message_start":
            self._count(as_mapping(event.get("message") or {}).get("usage"))
        elif kind == "message_delta":
            delta = as_mapping(event.get("delta") or {})
            self._stop = delta.get("stop_reason") or self._stop
            self._details = delta.get("stop_details") or self._details
            self._count(event.get("usage"))
        elif kind == "message_stop":
            self._stopped = True
        elif kind == "error":
            raise EndpointError.of(event)
        return []  # ping, and kinds of a newer API

    def _count(self, usage: Any) -> None:
        self._usage |= {key: value for key, value in as_mapping(usage or {}).items() if value is not None}

    @property
    def complete(self) -> bool:
        return self._stopped

    def _add(self, index: int, delta: Mapping[str, Any]) -> list[Delta]:
        block = self._blocks[index]
        kind = delta.get("type")
        if kind == "input_json_delta":
            self._inputs[index] = self._inputs.get(index, "") + delta.get("partial_json", "")
        elif kind == "signature_delta":
            block["signature"] = delta.get("signature", "")
        elif kind == "citations_delta":
            block["citations"] = [*(block.get("citations") or ()), delta["citation"]]
        elif kind in ("text_delta", "thinking_delta"):
            key = kind.removesuffix("_delta")
            block[key] = (block.get(key) or "") + delta.get(key, "")
            return _deltas(delta)
        return []

    def finish(self) -> Turn:
        blocks = []
        for index, block in sorted(self._blocks.items()):
            # Where a stream broke off, incomplete thinking has no signature and an incomplete call must not be made.
            # A stream that has ended has all of its calls, also those whose end a server left out.
            is_complete = index in self._ended or (self._stopped and block.get("type") == "tool_use")
            if not is_complete and block.get("type") != "text":
                continue
            arguments = self._inputs.get(index)
            # Stays text until `turn_of` reads it: the model may have written invalid JSON.
            blocks.append({**block, "input": arguments} if arguments else block)
        return turn_of(blocks, self._names, self._stop, self._details, anthropic_usage(self._usage))


def _deltas(piece: Mapping[str, Any]) -> list[Delta]:
    """Returns the text and the reasoning of a block or a delta."""
    text, thinking = piece.get("text"), piece.get("thinking")
    deltas = [Delta("reasoning", thinking)] if isinstance(thinking, str) and thinking else []
    return [*deltas, Delta("text", text)] if isinstance(text, str) and text else deltas


def turn_of(
    blocks: Sequence[Json], names: NameTable, stop: str, details: Any = None, usage: Usage | None = None
) -> Turn:
    """Returns the turn of a message's blocks. The `input` of a call may still be text."""
    calls: list[ModelCall] = []
    raw: list[Json] = []
    nameless = False
    for block in blocks:
        given = block.get("input")
        if block.get("type") == "tool_use":
            if not block.get("name"):
                nameless = True
                continue
            arguments_json = arguments_text(given)
            call = model_call(names, block.get("id") or f"call_{len(calls)}", block["name"], arguments_json)
            # In a whole answer, a block that the token limit cut has an input that looks complete.
            is_cut = block is blocks[-1] and not isinstance(given, str) and ANTHROPIC_ENDINGS.get(stop) == "cut"
            calls.append(replace(call, whole=not is_cut))
            block = {**block, "id": call.id}
        if "input" in block and not isinstance(given, Mapping):  # also of a search that the provider made
            block = {**block, "input": arguments_object(arguments_text(given))}
        raw.append({key: value for key, value in block.items() if key not in _NOT_ECHOED})
    deltas = [delta for block in blocks if block.get("type") in ("text", "thinking") for delta in _deltas(block)]
    echoed = blocks_of(raw)
    text = text_of_kind(deltas, "text")
    end = read_end(
        ANTHROPIC_ENDINGS,
        stop,
        text=text,
        calls=tuple(calls),
        reason=_explanation(details),
        nameless=nameless,
        other=any(block.get("type") not in _KNOWN_BLOCKS for block in blocks),
        # Anthropic's documentation: an empty answer after results is the model's decision, and comes again.
        retry_empty=False,
    )
    return Turn(
        text=text,
        calls=end.calls,
        reasoning=text_of_kind(deltas, "reasoning"),
        dialect=NAME,
        raw=(message_of("assistant", echoed),) if echoed else (),
        stop=stop,
        ending=end.ending,
        reason=end.reason,
        usage=usage,
        retry=end.retry,
    )


def _explanation(details: Any) -> str:
    """Returns the provider's explanation of a refusal."""
    given = as_mapping(details or {})
    return list_parts(given.get("category"), given.get("explanation"))


def message_of(role: str, blocks: Sequence[Json]) -> Json:
    """Returns a message with these blocks."""
    return {"role": role, "content": list(blocks)}


def text_block(text: str) -> Json:
    """Returns a text as a block."""
    return {"type": "text", "text": text}


def blocks_of(content: Any) -> list[Json]:
    """Returns content as blocks, results first, without the blank texts that the API refuses."""
    blocks = [text_block(content)] if isinstance(content, str) else [dict(as_mapping(block)) for block in content or ()]
    valid = [block for block in blocks if block.get("type") != "text" or (block.get("text") or "").strip()]
    return sorted(valid, key=lambda block: block.get("type") != "tool_result")
