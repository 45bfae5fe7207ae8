"""Answers of Anthropic Messages, whole or in pieces, and the blocks that they and requests consist of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolbus.dialects.conversation import Delta, Json, ModelCall, Turn, model_call
from toolbus.dialects.dialect import EndpointError, TurnStream, as_mapping
from toolbus.dialects.history import arguments_text
from toolbus.dialects.result_text import arguments_object
from toolbus.dialects.wire_names import NameTable

NAME = "anthropic"
_NOT_ECHOED = ("parsed_output",)  # the SDK's own, which the API refuses


class BlockStream(TurnStream):
    """Blocks that arrive piece by piece, by their index."""

    end_mark = "message_stop"

    def __init__(self, names: NameTable) -> None:
        super().__init__()
        self._names = names
        self._blocks: dict[int, Json] = {}
        self._inputs: dict[int, str] = {}  # arguments as the model wrote them so far
        self._ended: set[int] = set()
        self._stop = ""  # until the model said why it ended
        self._stopped = False  # until nothing more comes

    def read(self, event: Any) -> list[Delta]:
        told = as_mapping(event)
        kind, index = told.get("type"), told.get("index", 0)
        if kind == "content_block_start":
            block = self._blocks[index] = dict(as_mapping(told.get("content_block") or {}))
            return _shown(block)
        if kind == "content_block_delta" and index in self._blocks:
            return self._add(index, as_mapping(told.get("delta") or {}))
        if kind == "content_block_stop":
            self._ended.add(index)
        elif kind == "message_delta":
            self._stop = as_mapping(told.get("delta") or {}).get("stop_reason") or self._stop
        elif kind == "message_stop":
            self._stopped = True
        elif kind == "error":
            raise EndpointError.of(told)
        return []  # message_start, ping, and what is new

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
            return _shown(delta)
        return []

    def finish(self) -> Turn:
        blocks = []
        for index, block in sorted(self._blocks.items()):
            # Where a stream was cut, half a thought has no signature and half a call must not be made.
            if index not in self._ended and block.get("type") != "text":
                continue
            written = self._inputs.get(index)
            # Kept as text while it is read: the model may have written what is no JSON.
            blocks.append({**block, "input": written} if written else block)
        return turn_of(blocks, self._names, self._stop)


def _shown(piece: Mapping[str, Any]) -> list[Delta]:
    """Returns what a block or a delta holds for people."""
    text, thinking = piece.get("text"), piece.get("thinking")
    shown = [Delta("reasoning", thinking)] if isinstance(thinking, str) and thinking else []
    return [*shown, Delta("text", text)] if isinstance(text, str) and text else shown


def turn_of(blocks: Sequence[Json], names: NameTable, stop: str) -> Turn:
    """Returns the turn that a message's blocks make. The `input` of a call may still be text."""
    calls: list[ModelCall] = []
    kept: list[Json] = []
    for block in blocks:
        if block.get("type") == "tool_use":
            if not block.get("name"):
                continue
            arguments_json = arguments_text(block.get("input"))
            call = model_call(names, block.get("id") or f"call_{len(calls)}", block["name"], arguments_json)
            calls.append(call)
            block = {**block, "id": call.id}
            if not isinstance(block.get("input"), Mapping):
                block["input"] = arguments_object(arguments_json)
        kept.append({key: value for key, value in block.items() if key not in _NOT_ECHOED})
    said = [delta for block in blocks if block.get("type") in ("text", "thinking") for delta in _shown(block)]
    echoed = blocks_of(kept)
    return Turn(
        text="".join(delta.text for delta in said if delta.kind == "text"),
        calls=tuple(calls),
        reasoning="".join(delta.text for delta in said if delta.kind == "reasoning"),
        dialect=NAME,
        raw=(message_of("assistant", echoed),) if echoed else (),
        stop=stop,
    )


def message_of(role: str, blocks: Sequence[Json]) -> Json:
    """Returns a message of these blocks."""
    return {"role": role, "content": list(blocks)}


def text_block(text: str) -> Json:
    """Returns the block that a text is."""
    return {"type": "text", "text": text}


def blocks_of(content: Any) -> list[Json]:
    """Returns content as blocks, results first, without the blank texts that the API refuses."""
    given = [text_block(content)] if isinstance(content, str) else [dict(as_mapping(block)) for block in content or ()]
    kept = [block for block in given if block.get("type") != "text" or (block.get("text") or "").strip()]
    return sorted(kept, key=lambda block: block.get("type") != "tool_result")
