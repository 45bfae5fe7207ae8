"""OpenAI's chat completions, and what the many servers that speak it make of them.

The format is written strictly and read leniently: servers leave out `index` or `id`, send a whole call in one piece,
arguments as an object, chunks without choices. What a model thought goes back to it, since thinking models refuse
a turn without it, and only where it came, since others refuse it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolbus.dialects.conversation import (
    OwnAnswer,
    PairedDialect,
    arguments_text,
    declared,
    unique_calls,
    written_arguments,
)
from toolbus.dialects.names import PLAIN_NAMES, NameTable
from toolbus.dialects.shape import (
    Delta,
    EndpointError,
    Export,
    HistoryItem,
    Json,
    Message,
    ModelCall,
    ToolChoice,
    Turn,
    TurnStream,
    as_mapping,
    model_call,
)
from toolbus.dialects.subset import OPENAI_SCHEMAS
from toolbus.dialects.text import text_of
from toolbus.tool import Result, Tool

# DeepSeek's word, and that of OpenRouter and newer vLLM. What came under a key goes back under it.
_REASONING = ("reasoning_content", "reasoning")
# What we know of a call. Others have to be echoed: Gemini's endpoint of this format hides its thought signature there.
_CALL_KEYS = frozenset(("id", "type", "function", "index"))


class OpenAIChat(PairedDialect):
    """`/v1/chat/completions`."""

    name = "openai"
    name_rule = PLAIN_NAMES
    schema_rules = OPENAI_SCHEMAS

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        return nested_tool(wire_name, tool, schema)

    def parse(self, answer: Any, names: NameTable) -> Turn:
        answer = as_mapping(answer)
        if answer.get("error"):
            raise EndpointError.of(answer)
        choices = _objects(answer.get("choices"))
        if not choices:
            raise EndpointError("it answered without choices", answer)
        return _turn(_object(choices[0].get("message")), names, choices[0].get("finish_reason"))

    def stream(self, names: NameTable) -> TurnStream:
        return _Stream(names)

    def request(self, items: Sequence[HistoryItem], export: Export | None, tools: ToolChoice = "auto") -> Json:
        """As in `Dialect`. ``none`` writes no tools at all: llama.cpp and others call in spite of tool_choice none."""
        return chat_request(self, items, export, tools)

    def read(self, items: Sequence[HistoryItem], names: NameTable) -> list[HistoryItem | OwnAnswer]:
        return [_read(item, names) if isinstance(item, Mapping) else item for item in items]

    def write_message(self, message: Message) -> Json:
        return {"role": message.role, "content": message.text}

    def echo(self, turn: Turn) -> list[Json] | None:
        message = copy.deepcopy(dict(turn.raw[0]))
        entries = _named(message.get("tool_calls"))
        if len(entries) != len(turn.calls):
            return None
        message["role"] = "assistant"
        message.pop("tool_calls", None)  # an empty list is refused
        for entry, call in zip(entries, turn.calls, strict=True):
            arguments = arguments_text(written_arguments(entry["function"].get("arguments")))
            entry |= {"id": call.id, "type": "function", "function": entry["function"] | {"arguments": arguments}}
            entry.pop("index", None)
        if entries:
            message["tool_calls"] = entries
        message.setdefault("content", None)
        if message["content"] is None and not entries and not message.get("refusal"):
            message["content"] = ""
        return [message]

    def rebuild(self, turn: Turn, wires: Sequence[str]) -> list[Json]:
        message: Json = {"role": "assistant", "content": turn.text or (None if turn.calls else "")}
        own = turn.dialect == self.name
        if turn.reasoning and own:
            key, _ = _reasoning(turn.raw[0] if turn.raw else {})
            message[key] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = [
                {
                    **(call.extra if own else {}),
                    "id": call.id,
                    "type": "function",
                    "function": {"name": wire, "arguments": arguments_text(call.arguments_json)},
                }
                for call, wire in zip(turn.calls, wires, strict=True)
            ]
        return [message]

    def write_result(self, call_id: str, wire: str, result: Result) -> Json:
        return {"role": "tool", "tool_call_id": call_id, "name": wire, "content": text_of(result)}

    def renamed(self, answer: OwnAnswer, call_id: str) -> Json:
        return {**answer.written, "tool_call_id": call_id}


def nested_tool(wire_name: str, tool: Tool, schema: Json) -> Json:
    """Returns a tool as chat completions and those who followed them declare it."""
    function: Json = {"name": wire_name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": function}


def chat_request(
    dialect: PairedDialect, items: Iterable[HistoryItem], export: Export | None, tools: ToolChoice
) -> Json:
    """Returns messages, and tools unless words are asked for."""
    offered = declared(export, dialect.name)
    names = NameTable.empty() if export is None else export.names
    request: Json = {"messages": dialect.history(items, names)}
    if offered and tools == "auto":
        request["tools"] = offered
    return request


def _turn(message: Mapping[str, Any], names: NameTable, stop: Any) -> Turn:
    text, thought = _parts(message.get("content"))
    _, reasoning = _reasoning(message)
    calls = (_call(entry, place, names) for place, entry in enumerate(_objects(message.get("tool_calls"))))
    return Turn(
        text=text or _string(message.get("refusal")),
        calls=unique_calls(call for call in calls if call.wire_name),
        reasoning=reasoning or thought,
        dialect=OpenAIChat.name,
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
        written_arguments(function.get("arguments")),
    )
    return replace(call, extra={key: value for key, value in entry.items() if key not in _CALL_KEYS})


def _read(item: Mapping[str, Any], names: NameTable) -> HistoryItem | OwnAnswer:
    """Tells what a message in the provider's form is, so that its calls and answers are paired as all others."""
    if item.get("role") == "tool" and item.get("tool_call_id"):
        return OwnAnswer(_string(item["tool_call_id"]), item)
    if item.get("role") == "assistant" and isinstance(item.get("tool_calls"), list):
        return _turn(item, names, "")
    return item


def _object(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[Json]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, (list, tuple)) else []


def _named(calls: Any) -> list[Json]:
    return [entry for entry in _objects(calls) if _object(entry.get("function")).get("name")]


def _string(value: Any) -> str:
    return "" if value is None else str(value)


def _reasoning(message: Mapping[str, Any]) -> tuple[str, str]:
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


class _Stream(TurnStream):
    """Puts the chunks of a streamed answer together into the message that a whole answer would have."""

    def __init__(self, names: NameTable) -> None:
        self._names = names
        self._said: list[str] = []
        self._refused: list[str] = []
        self._thought: list[str] = []
        self._reasoning_key = ""  # the key under which it thinks; "" until it does
        self._calls: list[_PartialCall] = []
        self._stop = ""

    def feed(self, event: Any) -> list[Delta]:
        event = as_mapping(event)
        if event.get("error"):
            raise EndpointError.of(event)
        shown: list[Delta] = []
        for choice in _objects(event.get("choices")):
            if choice.get("index"):
                continue  # a second answer beside the first, which nobody asked for
            if choice.get("error"):
                raise EndpointError.of(choice)
            shown += self._take(_object(choice.get("delta")))
            self._stop = _string(choice.get("finish_reason")) or self._stop
        return [delta for delta in shown if delta.text]

    def _take(self, delta: Mapping[str, Any]) -> list[Delta]:
        key, reasoning = _reasoning(delta)
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
        return _turn(message, self._names, self._stop)


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
        self._arguments += written_arguments(function.get("arguments"))
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
        return _is_object(self._arguments) and written_arguments(function.get("arguments")).lstrip().startswith("{")

    def written(self) -> Json:
        function = {"name": self.name, "arguments": self._arguments}
        return {**self._extra, "id": self.id or f"call_{self.index}", "type": "function", "function": function}


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
