"""Answers of OpenAI's chat completions, whole or in chunks, read as leniently as the many servers need it.

They leave out `index` or `id`, number every call 0, send a whole call in one piece or arguments as an object, and think
under one of several keys. What `openai_chat` writes is strict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolbus.dialects.call_ids import unique_calls
from toolbus.dialects.conversation import Delta, Json, ModelCall, Turn, model_call
from toolbus.dialects.dialect import EndpointError, TurnStream, as_mapping
from toolbus.dialects.history import arguments_text
from toolbus.dialects.wire_names import NameTable

NAME = "openai"
# DeepSeek's word, and that of OpenRouter and newer vLLM. What came under a key goes back under it.
_REASONING = ("reasoning_content", "reasoning")
# What we know of a call. Others have to be echoed: Gemini's endpoint of this format hides its thought signature there.
_CALL_KEYS = frozenset(("id", "type", "function", "index"))


def read_answer(answer: Any, names: NameTable) -> Turn:
    """Reads a whole answer: its first choice.

    Raises:
        EndpointError: it is an error, or holds no choice.
    """
    answer = as_mapping(answer)
    if answer.get("error"):
        raise EndpointError.of(answer)
    choices = _objects(answer.get("choices"))
    if not choices:
        raise EndpointError("it answered without choices", answer)
    return read_message(_object(choices[0].get("message")), names, choices[0].get("finish_reason"))


def read_message(message: Mapping[str, Any], names: NameTable, stop: Any) -> Turn:
    """Reads a message of the model."""
    text, thought = _parts(message.get("content"))
    _, reasoning = reasoning_of(message)
    calls = (_call(entry, place, names) for place, entry in enumerate(_objects(message.get("tool_calls"))))
    return Turn(
        text=text or _string(message.get("refusal")),
        calls=unique_calls(call for call in calls if call.wire_name),
        reasoning=reasoning or thought,
        dialect=NAME,
        raw=({"role": "assistant", **message},),
        stop=_string(stop),
    )


def _call(entry: Mapping[str, Any], place: int, names: NameTable) -> ModelCall:
    function = _object(entry.get("function"))
    index = entry.get("index")
    call = model_call(
        names,
        _string(entry.get("id")) or f"call_{place if index is None else index}",
        _string(function.get("name")),
        arguments_text(function.get("arguments")),
    )
    return replace(call, extra={key: value for key, value in entry.items() if key not in _CALL_KEYS})


def _object(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[Json]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, (list, tuple)) else []


def named_calls(calls: Any) -> list[Json]:
    """Returns the calls that name a function; others are neither made nor echoed."""
    return [entry for entry in _objects(calls) if _object(entry.get("function")).get("name")]


def _string(value: Any) -> str:
    return "" if value is None else str(value)


def reasoning_of(message: Mapping[str, Any]) -> tuple[str, str]:
    """Returns what was thought, and under which key: some servers send it under both."""
    for key in _REASONING:
        if isinstance(message.get(key), str) and message[key]:
            return key, message[key]
    return _REASONING[0], ""


def _parts(content: Any) -> tuple[str, str]:
    """Returns what was said and what was thought. Content is a text, or (Mistral) a list of parts of either kind."""
    if not isinstance(content, list):
        return _string(content), ""
    said, thought = "", ""
    for part in content:
        if isinstance(part, Mapping):
            said += _string(part.get("text") or part.get("refusal"))
            thought += _parts(part.get("thinking"))[0]
    return said, thought


class ChatStream(TurnStream):
    """Puts the chunks of a streamed answer together into the message that a whole answer would have."""

    end_mark = "a finish_reason"

    def __init__(self, names: NameTable) -> None:
        super().__init__()
        self._names = names
        self._began = False  # whether any of the answer came
        self._said: list[str] = []
        self._refused: list[str] = []
        self._thought: list[str] = []
        self._reasoning_key = ""  # the key under which it thinks; "" until it does
        self._calls: list[_PartialCall] = []
        self._stop = ""

    def read(self, event: Any) -> list[Delta]:
        event = as_mapping(event)
        if event.get("error"):
            raise EndpointError.of(event)
        shown: list[Delta] = []
        for choice in _objects(event.get("choices")):
            if choice.get("index"):
                continue  # a second answer beside the first, which nobody asked for
            if choice.get("error"):
                raise EndpointError.of(choice)
            self._began = True
            shown += self._take(_object(choice.get("delta")))
            self._stop = _string(choice.get("finish_reason")) or self._stop
        return shown

    @property
    def complete(self) -> bool:
        """As in `TurnStream`. Some servers never give a reason: there only a call that is cut tells of a broken end."""
        return bool(self._stop) or (self._began and all(call.whole for call in self._calls))

    def _take(self, delta: Mapping[str, Any]) -> list[Delta]:
        key, reasoning = reasoning_of(delta)
        if reasoning:
            self._reasoning_key = self._reasoning_key or key
        text, thought = _parts(delta.get("content"))
        refusal = _string(delta.get("refusal"))
        self._thought.append(reasoning or thought)
        self._said.append(text)
        self._refused.append(refusal)
        for entry in _objects(delta.get("tool_calls")):
            self._partial(entry).take(entry)
        return [Delta("reasoning", reasoning or thought), Delta("text", text), Delta("text", refusal)]

    def _partial(self, entry: Json) -> _PartialCall:
        """Returns the call that an entry continues, or begins: by index, else by id, else the one that is arriving."""
        index, call_id = entry.get("index"), _string(entry.get("id"))
        numbered = isinstance(index, int)
        same = [call for call in self._calls if (call.index == index if numbered else call_id in ("", call.id))]
        if same and (same[-1].id == call_id != "" or not same[-1].followed_by(entry, numbered)):
            return same[-1]
        self._calls.append(_PartialCall(index if isinstance(index, int) else len(self._calls)))
        return self._calls[-1]

    def finish(self) -> Turn:
        message: Json = {"role": "assistant", "content": "".join(self._said) or None}
        if thought := "".join(self._thought):
            message[self._reasoning_key or _REASONING[0]] = thought
        if refused := "".join(self._refused):
            message["refusal"] = refused
        calls = sorted(self._calls, key=lambda call: call.index)
        if written := [call.written() for call in calls if call.name]:
            message["tool_calls"] = written
        return read_message(message, self._names, self._stop)


class _PartialCall:
    """One call of which more may come."""

    def __init__(self, index: int) -> None:
        self.index = index  # its place among the calls, by the server or by arrival
        self.id = ""  # the last that was sent; "" until then
        self.name = ""  # likewise
        self._arguments = ""  # what came so far
        self._extra: Json = {}  # everything else, which goes back as it came

    def take(self, entry: Json) -> None:
        function = _object(entry.get("function"))
        self.id = _string(entry.get("id")) or self.id
        self.name = _string(function.get("name")) or self.name
        self._arguments += arguments_text(function.get("arguments"))
        self._extra |= {key: value for key, value in entry.items() if key not in _CALL_KEYS and value}

    def followed_by(self, entry: Json, numbered: bool) -> bool:
        """Tells whether an entry is the next call, not more of this one.

        Without numbers a name begins a call, unless it is this one's and its arguments are still arriving. Servers that
        give every call the number 0 are known by a second whole call behind one that is complete.
        """
        function = _object(entry.get("function"))
        name = _string(function.get("name"))
        if not name or not self.name:
            return False
        if not numbered and name != self.name:
            return True
        return self.whole and arguments_text(function.get("arguments")).lstrip().startswith("{")

    @property
    def whole(self) -> bool:
        """Whether its arguments are all there, as far as they themselves can tell."""
        return _is_object(self._arguments)

    def written(self) -> Json:
        function = {"name": self.name, "arguments": self._arguments}
        return {**self._extra, "id": self.id or f"call_{self.index}", "type": "function", "function": function}


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
