"""Gemini's generateContent: calls and results are parts of contents; what the model said is echoed part by part.

`Export.tools` holds the function declarations themselves; `request` wraps them, as the API wants them all in one tool.
Parts are kept with the keys of Google's Python SDK (`function_call`), which REST reads as well as its own
(`functionCall`), and signatures as base64 text, which both take; so a turn can be stored as JSON.
"""

from __future__ import annotations

import base64
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar

from toolbus.dialects.alternation import OPENING, alternating, system_text
from toolbus.dialects.conversation import OwnAnswer, Step, declared, steps, wire_name, written_arguments
from toolbus.dialects.names import GEMINI_NAMES, NameRule, NameTable
from toolbus.dialects.shape import (
    Answered,
    Delta,
    Dialect,
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
from toolbus.dialects.subset import GEMINI_SCHEMAS, SchemaRules
from toolbus.dialects.text import arguments_of, object_of
from toolbus.tool import Result, Tool

_CALL = "function_call"
_RESPONSE = "function_response"
_SIGNATURE = "thought_signature"
_ROLES = {"user": "user", "assistant": "model"}
_CAPITAL = re.compile(r"(?<!^)[A-Z]")


class Gemini(Dialect):
    """Gemini's generateContent."""

    name: ClassVar[str] = "gemini"
    name_rule: ClassVar[NameRule] = GEMINI_NAMES
    schema_rules: ClassVar[SchemaRules] = GEMINI_SCHEMAS

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        return declaration(wire_name, tool, schema)

    def parse(self, answer: Any, names: NameTable) -> Turn:
        stream = _Stream(names)
        stream.feed(answer)
        return stream.finish()

    def stream(self, names: NameTable) -> TurnStream:
        return _Stream(names)

    def results(self, answered: Sequence[Answered], names: NameTable) -> list[Json]:
        parts = [_response(each.call, self._asked_name(each.call, names), each.result) for each in answered]
        return [_content("user", parts)] if parts else []

    def history(self, items: Iterable[HistoryItem], names: NameTable) -> list[Json]:
        written: list[Json] = []
        for step in steps(_read(items, names), self.name):
            if isinstance(step, Message):
                if step.role != "system":  # `request` writes it
                    written.append(_content(_ROLES[step.role], [{"text": step.text}]))
            elif isinstance(step, Step):
                written += self._write_step(step, names)
            else:
                written.append(_without_responses(step))
        return alternating(written, "parts", _parts, _content("user", [{"text": OPENING}]))

    def _write_step(self, step: Step, names: NameTable) -> list[Json]:
        turn = step.turn
        parts = self._echo(turn, names) if turn.dialect == self.name and turn.raw else None
        if parts is None:
            parts = [{"text": turn.text}, *(self._call_part(call, names) for call in turn.calls)]
        wires = [part["function_call"]["name"] for part in parts if _CALL in part]
        answers = [
            _answer(call, wire, answer) for call, wire, answer in zip(turn.calls, wires, step.answers, strict=True)
        ]
        return [_content("model", parts), _content("user", answers)]

    def _echo(self, turn: Turn, names: NameTable) -> list[Json] | None:
        """Returns a turn's own parts under the calls' ids; None where they hold other calls."""
        parts = [_part(part) for content in turn.raw for part in content.get("parts") or ()]
        places = [place for place, part in enumerate(parts) if _CALL in part]
        if len(places) != len(turn.calls):
            return None
        for place, call in zip(places, turn.calls, strict=True):
            asked = {key: value for key, value in parts[place][_CALL].items() if key != "id"}
            parts[place] = {**parts[place], _CALL: {**asked, **_id(call), "name": self._asked_name(call, names)}}
        return parts

    def _asked_name(self, call: ModelCall, names: NameTable) -> str:
        """Returns the name that the model called, whatever the tool is called by now."""
        return call.wire_name if self.name_rule.accepts(call.wire_name) else wire_name(call, names, self.name_rule)

    def _call_part(self, call: ModelCall, names: NameTable) -> Json:
        wire = wire_name(call, names, self.name_rule)
        part: Json = {_CALL: {**_id(call), "name": wire, "args": arguments_of(call.arguments_json)}}
        signature = call.extra.get(_SIGNATURE)
        return {**part, _SIGNATURE: signature} if signature else part

    def request(self, items: Sequence[HistoryItem], export: Export | None, tools: ToolChoice = "auto") -> Json:
        """Returns `contents` and `config`, as `client.models.generate_content` of Google's SDK takes them."""
        offered = declared(export, self.name)
        contents = self.history(items, export.names if export else NameTable.empty(self.name_rule))
        holds_calls = any(part.keys() & {_CALL, _RESPONSE} for content in contents for part in _parts(content["parts"]))
        config: Json = {}
        if system := system_text(items):
            config["system_instruction"] = system
        if offered and (tools == "auto" or holds_calls):
            config["tools"] = [{"function_declarations": offered}]
            # The SDK would call what it finds callable in this config by itself.
            config["automatic_function_calling"] = {"disable": True}
            if tools == "none":
                config["tool_config"] = {"function_calling_config": {"mode": "NONE"}}
        return {"contents": contents, "config": config}


def declaration(wire_name: str, tool: Tool, schema: Json) -> Json:
    """Returns a tool as Gemini declares functions, in a request as in a live session."""
    written: Json = {"name": wire_name}
    if tool.description:
        written["description"] = tool.description
    if schema.get("properties"):  # an object without any is refused
        written["parameters"] = schema
    return written


class _Stream(TurnStream):
    """Chunks, each an answer with some more parts."""

    def __init__(self, names: NameTable) -> None:
        self._names = names
        self._parts: list[Json] = []
        self._calls: list[ModelCall] = []
        self._said: list[Delta] = []
        self._stop = ""  # until the model said why it ended

    def feed(self, event: Any) -> list[Delta]:
        told = _snake(as_mapping(event))
        _check(told)
        candidates = told.get("candidates") or ()
        if not candidates:
            return []  # usage alone
        candidate = _snake(as_mapping(candidates[0]))
        self._stop = _plain(candidate.get("finish_reason")) or self._stop
        said: list[Delta] = []
        for place, given in enumerate(as_mapping(candidate.get("content") or {}).get("parts") or ()):
            part = _part(given)
            if _CALL in part:
                if not part[_CALL].get("name"):
                    continue
                self._calls.append(_call(part, self._names))
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

    def finish(self) -> Turn:
        parts = _parts(self._parts)
        return Turn(
            text="".join(delta.text for delta in self._said if delta.kind == "text"),
            calls=tuple(self._calls),
            reasoning="".join(delta.text for delta in self._said if delta.kind == "reasoning"),
            dialect=Gemini.name,
            raw=(_content("model", parts),) if parts else (),
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


def _call(part: Json, names: NameTable) -> ModelCall:
    """Reads a call; what has to be echoed with it is its signature, and its id if the model gave one."""
    asked = part[_CALL]
    extra = {"id": asked["id"]} if asked.get("id") else {}
    if part.get(_SIGNATURE):
        extra[_SIGNATURE] = part[_SIGNATURE]
    made = f"call_{uuid.uuid4().hex[:16]}"  # unique in every conversation, which this stream does not see
    return model_call(names, asked.get("id") or made, asked["name"], written_arguments(asked.get("args")), **extra)


def _id(call: ModelCall) -> Json:
    """Returns a call's id if Gemini gave it; one that we made is not sent."""
    return {"id": call.id} if call.extra.get("id") else {}


def _response(call: ModelCall, wire: str, result: Result) -> Json:
    return {_RESPONSE: {**_id(call), "name": wire, "response": object_of(result)}}


def _answer(call: ModelCall, wire: str, answer: Result | OwnAnswer) -> Json:
    if isinstance(answer, OwnAnswer):
        part: Json = answer.written["parts"][0]
        return {**part, _RESPONSE: {**part[_RESPONSE], **_id(call), "name": wire}}
    return _response(call, wire, answer)


def _read(items: Iterable[HistoryItem], names: NameTable) -> Iterator[HistoryItem | OwnAnswer]:
    """Yields a conversation in which calls and responses in the provider's own form are recognised."""
    waiting: list[ModelCall] = []  # of the newest turn, for responses without an id
    for item in items:
        if isinstance(item, Turn):
            waiting = list(item.calls)
        if not isinstance(item, Mapping):
            yield item
            continue
        parts = _parts(item.get("parts"))
        kept = [part for part in parts if _CALL not in part or part[_CALL].get("name")]
        calls = [_call(part, names) for part in kept if _CALL in part]
        if calls:
            waiting = calls
            yield Turn(calls=tuple(calls), dialect=Gemini.name, raw=(_content("model", kept),))
            continue
        for part in parts:
            if _RESPONSE in part:
                yield OwnAnswer(_answered_id(part[_RESPONSE], waiting, names), _content("user", [part]))
        yield _without_responses(item)


def _answered_id(response: Mapping[str, Any], waiting: list[ModelCall], names: NameTable) -> str:
    """Returns the id of the call that a response answers: the one it says, else that of the first call of its name."""
    if response.get("id"):
        return str(response["id"])
    for call in waiting:
        if response.get("name") in (call.wire_name, names.wire(call.name)):
            waiting.remove(call)
            return call.id
    return "no such call"


def _without_responses(content: Mapping[str, Any]) -> Json:
    """Returns a content without responses: those that belong to a call stand behind it already."""
    parts = _parts(content.get("parts"))
    kept = [part for part in parts if _RESPONSE not in part]
    return {"role": "user", **content} if len(kept) == len(parts) else {"role": "user", **content, "parts": kept}


def _content(role: str, parts: Sequence[Json]) -> Json:
    return {"role": role, "parts": list(parts)}


def _parts(parts: Any) -> list[Json]:
    """Returns parts, responses first, without those that hold nothing: the API refuses them."""
    read = [_part(part) for part in parts or ()]
    kept = [part for part in read if part.get(_SIGNATURE) or part.keys() - {"text", "thought"} or part.get("text")]
    return sorted(kept, key=lambda part: _RESPONSE not in part)


def _part(part: Any) -> Json:
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
