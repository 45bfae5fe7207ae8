"""Reads responses of Gemini, whole or in chunks, and the content parts that requests share with them.

Parts have the keys of Google's Python SDK (`function_call`), which REST accepts beside its own (`functionCall`), and
signatures as base64 text, which both accept; so a turn can be stored as JSON.
"""

from __future__ import annotations

import base64
import re
import uuid
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from toolbus.dialects.conversation import Delta, Json, ModelCall, Turn, model_call, text_of_kind
from toolbus.dialects.dialect import EndpointError, TurnStream, as_mapping
from toolbus.dialects.history import arguments_text
from toolbus.dialects.wire_names import NameTable

NAME = "gemini"
CALL = "function_call"
RESPONSE = "function_response"
SIGNATURE = "thought_signature"
_CAPITAL = re.compile(r"(?<!^)[A-Z]")


class PartStream(TurnStream):
    """Assembles chunks, each a response with some more parts."""

    end_mark = "a finish_reason"

    def __init__(self, names: NameTable) -> None:
        super().__init__()
        self._names = names
        self._parts: list[Json] = []
        self._calls: list[ModelCall] = []
        self._deltas: list[Delta] = []
        self._stop = ""  # the finish reason; "" until it came

    def read(self, event: Any) -> list[Delta]:
        chunk = _snake_case(as_mapping(event))
        _check(chunk)
        candidates = chunk.get("candidates") or ()
        if not candidates:
            return []  # usage alone
        candidate = _snake_case(as_mapping(candidates[0]))
        self._stop = _as_json(candidate.get("finish_reason")) or self._stop
        deltas: list[Delta] = []
        for place, raw in enumerate(as_mapping(candidate.get("content") or {}).get("parts") or ()):
            part = part_of(raw)
            if CALL in part:
                if not part[CALL].get("name"):
                    continue
                self._calls.append(call_of(part, self._names))
            elif part.get("text"):
                deltas.append(Delta("reasoning" if part.get("thought") else "text", part["text"]))
            self._append(part, continues=place == 0)
        self._deltas += deltas
        return deltas

    def _append(self, part: Json, continues: bool) -> None:
        """Stores a part for the echo. Text that continues in the next chunk is one part, unless one is signed."""
        last = self._parts[-1] if self._parts else {}
        if continues and _is_plain(part) and _is_plain(last) and part.get("thought") == last.get("thought"):
            self._parts[-1] = {**last, "text": last["text"] + part["text"]}
        else:
            self._parts.append(part)

    @property
    def complete(self) -> bool:
        return bool(self._stop)

    def finish(self) -> Turn:
        parts = parts_of(self._parts)
        return Turn(
            text=text_of_kind(self._deltas, "text"),
            calls=tuple(self._calls),
            reasoning=text_of_kind(self._deltas, "reasoning"),
            dialect=NAME,
            raw=(content_of("model", parts),) if parts else (),
            stop=self._stop,
        )


def _check(answer: Mapping[str, Any]) -> None:
    """Raises the error that the endpoint reports instead of an answer."""
    if answer.get("error"):
        raise EndpointError.of(answer)
    feedback = _snake_case(as_mapping(answer.get("prompt_feedback") or {}))
    reason = _as_json(feedback.get("block_reason"))
    if reason:
        message = feedback.get("block_reason_message")
        raise EndpointError(f"the prompt was blocked: {reason}" + (f", {message}" if message else ""), _as_json(answer))


def call_of(part: Json, names: NameTable) -> ModelCall:
    """Reads a call; the echo needs its signature, and its id if the model gave one."""
    function_call = part[CALL]
    extra = {"id": function_call["id"]} if function_call.get("id") else {}
    if part.get(SIGNATURE):
        extra[SIGNATURE] = part[SIGNATURE]
    # A generated id is random, since it must be unique in a conversation that this stream does not see.
    call_id = function_call.get("id") or f"call_{uuid.uuid4().hex[:16]}"
    return model_call(names, call_id, function_call["name"], arguments_text(function_call.get("args")), **extra)


def content_of(role: str, parts: Sequence[Json]) -> Json:
    """Returns a content with these parts."""
    return {"role": role, "parts": list(parts)}


def parts_of(parts: Any) -> list[Json]:
    """Returns parts, function responses first, without empty parts, which the API refuses."""
    every = [part_of(part) for part in parts or ()]
    valid = [part for part in every if part.get(SIGNATURE) or part.keys() - {"text", "thought"} or part.get("text")]
    return sorted(valid, key=lambda part: RESPONSE not in part)


def part_of(part: Any) -> Json:
    """Returns a part as JSON with the keys of the SDK."""
    plain: Json = {key: _as_json(value) for key, value in _snake_case(as_mapping(part)).items() if value is not None}
    return plain


def _is_plain(part: Mapping[str, Any]) -> bool:
    """Tells whether a part is only text."""
    return "text" in part and not part.keys() - {"text", "thought"}


def _snake_case(mapping: Mapping[str, Any]) -> Json:
    """Returns a mapping with the SDK's keys instead of REST's; keys of the values in it are unchanged."""
    return {_CAPITAL.sub(lambda capital: f"_{capital[0].lower()}", key): value for key, value in mapping.items()}


def _as_json(value: Any) -> Any:
    """Returns a value of the SDK as JSON: enums as their values, bytes in base64."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {key: _as_json(inner) for key, inner in value.items()}
    return [_as_json(inner) for inner in value] if isinstance(value, list | tuple) else value
