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
from toolbus.dialects.endings import GEMINI_ENDINGS, list_parts, read_end
from toolbus.dialects.history import arguments_text
from toolbus.dialects.token_usage import gemini_usage
from toolbus.dialects.wire_names import NameTable

NAME = "gemini"
CALL = "function_call"
RESPONSE = "function_response"
SIGNATURE = "thought_signature"
_KNOWN_KEYS = {"text", "thought", CALL, SIGNATURE}
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
        self._message = ""  # the provider's details; "" until they arrive
        self._blocked = False  # whether the prompt was blocked
        self._nameless = False  # whether a call came without a name
        self._usage: Json = {}  # the newest counts

    def read(self, event: Any) -> list[Delta]:
        chunk = snake_case(as_mapping(event))
        if chunk.get("error"):
            raise EndpointError.of(chunk)
        if usage := chunk.get("usage_metadata"):
            self._usage |= {key: value for key, value in snake_case(as_mapping(usage)).items() if value is not None}
        if feedback := chunk.get("prompt_feedback"):
            self._read_feedback(snake_case(as_mapping(feedback)))
        candidates = chunk.get("candidates") or ()
        if not candidates:
            return []  # usage alone
        candidate = snake_case(as_mapping(candidates[0]))
        if stop := candidate.get("finish_reason"):
            self._stop = str(_as_json(stop))
            self._message = _explanation(candidate)
        deltas: list[Delta] = []
        for place, raw in enumerate(as_mapping(candidate.get("content") or {}).get("parts") or ()):
            part = part_of(raw)
            if CALL in part:
                if not part[CALL].get("name"):
                    self._nameless = True
                    continue
                self._calls.append(call_of(part, self._names))
            elif part.get("text"):
                deltas.append(Delta("reasoning" if part.get("thought") else "text", part["text"]))
            self._append(part, continues=place == 0)
        self._deltas += deltas
        return deltas

    def _read_feedback(self, feedback: Mapping[str, Any]) -> None:
        if reason := feedback.get("block_reason"):
            self._blocked = True
            self._stop = str(_as_json(reason))
            self._message = list_parts("the prompt was blocked", feedback.get("block_reason_message"))

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
        text = text_of_kind(self._deltas, "text")
        end = read_end(
            GEMINI_ENDINGS,
            self._stop,
            text=text,
            calls=tuple(self._calls),
            reason=self._message,
            nameless=self._nameless,
            other=any(part.keys() - _KNOWN_KEYS for part in parts),
        )
        return Turn(
            text=text,
            calls=end.calls,
            reasoning=text_of_kind(self._deltas, "reasoning"),
            dialect=NAME,
            raw=(content_of("model", parts),) if parts else (),
            stop=self._stop,
            ending="refused" if self._blocked else end.ending,
            reason=end.reason,
            usage=gemini_usage(self._usage),
            retry=end.retry,
        )


def _explanation(candidate: Mapping[str, Any]) -> str:
    """Returns the provider's details of a finish reason: its message, and the blocked categories."""
    ratings = [_as_json(as_mapping(rating)) for rating in candidate.get("safety_ratings") or ()]
    blocked = (rating.get("category") for rating in ratings if rating.get("blocked"))
    return list_parts(candidate.get("finish_message"), *blocked)


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
    plain: Json = {key: _as_json(value) for key, value in snake_case(as_mapping(part)).items() if value is not None}
    return plain


def _is_plain(part: Mapping[str, Any]) -> bool:
    """Tells whether a part is only text."""
    return "text" in part and not part.keys() - {"text", "thought"}


def snake_case(mapping: Mapping[str, Any]) -> Json:
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
