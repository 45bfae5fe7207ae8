"""Answers of Gemini, whole or in chunks, and the parts that they and requests consist of.

Parts are kept with the keys of Google's Python SDK (`function_call`), which REST reads as well as its own
(`functionCall`), and signatures as base64 text, which both take; so a turn can be stored as JSON.
"""

from __future__ import annotations

import base64
import re
import uuid
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from toolbus.dialects.conversation import Delta, Json, ModelCall, Turn, model_call
from toolbus.dialects.dialect import EndpointError, TurnStream, as_mapping
from toolbus.dialects.history import arguments_text
from toolbus.dialects.wire_names import NameTable

NAME = "gemini"
CALL = "function_call"
RESPONSE = "function_response"
SIGNATURE = "thought_signature"
_CAPITAL = re.compile(r"(?<!^)[A-Z]")


class PartStream(TurnStream):
    """Chunks, each an answer with some more parts."""

    end_mark = "a finish_reason"

    def __init__(self, names: NameTable) -> None:
        super().__init__()
        self._names = names
        self._parts: list[Json] = []
        self._calls: list[ModelCall] = []
        self._said: list[Delta] = []
        self._stop = ""  # until the model said why it ended

    def read(self, event: Any) -> list[Delta]:
        told = _snake(as_mapping(event))
        _check(told)
        candidates = told.get("candidates") or ()
        if not candidates:
            return []  # usage alone
        candidate = _snake(as_mapping(candidates[0]))
        self._stop = _plain(candidate.get("finish_reason")) or self._stop
        said: list[Delta] = []
        for place, given in enumerate(as_mapping(candidate.get("content") or {}).get("parts") or ()):
            part = part_of(given)
            if CALL in part:
                if not part[CALL].get("name"):
                    continue
                self._calls.append(call_of(part, self._names))
            elif part.get("text"):
                said.append(Delta("reasoning" if part.get("thought") else "text", part["text"]))
            self._keep(part, goes_on=place == 0)
        self._said += said
        return said

    def _keep(self, part: Json, goes_on: bool) -> None:
        """Keeps a part for the echo. Text that goes on in the next chunk is one part, unless one is signed."""
        last = self._parts[-1] if self._parts else {}
        if goes_on and _is_plain(part) and _is_plain(last) and part.get("thought") == last.get("thought"):
            self._parts[-1] = {**last, "text": last["text"] + part["text"]}
        else:
            self._parts.append(part)

    @property
    def complete(self) -> bool:
        return bool(self._stop)

    def finish(self) -> Turn:
        parts = parts_of(self._parts)
        return Turn(
            text="".join(delta.text for delta in self._said if delta.kind == "text"),
            calls=tuple(self._calls),
            reasoning="".join(delta.text for delta in self._said if delta.kind == "reasoning"),
            dialect=NAME,
            raw=(content_of("model", parts),) if parts else (),
            stop=self._stop,
        )


def _check(answer: Mapping[str, Any]) -> None:
    """Raises what the endpoint reports instead of an answer."""
    if answer.get("error"):
        raise EndpointError.of(answer)
    feedback = _snake(as_mapping(answer.get("prompt_feedback") or {}))
    reason = _plain(feedback.get("block_reason"))
    if reason:
        said = feedback.get("block_reason_message")
        raise EndpointError(f"the prompt was blocked: {reason}" + (f", {said}" if said else ""), _plain(answer))


def call_of(part: Json, names: NameTable) -> ModelCall:
    """Reads a call; what has to be echoed with it is its signature, and its id if the model gave one."""
    asked = part[CALL]
    extra = {"id": asked["id"]} if asked.get("id") else {}
    if part.get(SIGNATURE):
        extra[SIGNATURE] = part[SIGNATURE]
    made = f"call_{uuid.uuid4().hex[:16]}"  # unique in every conversation, which this stream does not see
    return model_call(names, asked.get("id") or made, asked["name"], arguments_text(asked.get("args")), **extra)


def content_of(role: str, parts: Sequence[Json]) -> Json:
    """Returns a content of these parts."""
    return {"role": role, "parts": list(parts)}


def parts_of(parts: Any) -> list[Json]:
    """Returns parts, responses first, without those that hold nothing: the API refuses them."""
    read = [part_of(part) for part in parts or ()]
    kept = [part for part in read if part.get(SIGNATURE) or part.keys() - {"text", "thought"} or part.get("text")]
    return sorted(kept, key=lambda part: RESPONSE not in part)


def part_of(part: Any) -> Json:
    """Returns a part as it is kept: keys of the SDK, nothing but JSON."""
    read: Json = {key: _plain(value) for key, value in _snake(as_mapping(part)).items() if value is not None}
    return read


def _is_plain(part: Mapping[str, Any]) -> bool:
    """Tells whether a part is text and nothing else."""
    return "text" in part and not part.keys() - {"text", "thought"}


def _snake(given: Mapping[str, Any]) -> Json:
    """Returns a mapping with the SDK's keys for REST's; those of the values in it are left alone."""
    return {_CAPITAL.sub(lambda found: f"_{found[0].lower()}", key): value for key, value in given.items()}


def _plain(value: Any) -> Any:
    """Returns a value of the SDK as JSON: enums as their words, bytes in base64."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
