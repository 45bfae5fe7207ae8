"""Writes and reads Gemini's generateContent: calls and results are parts of contents, echoed part by part.

`Export.tools` holds the function declarations themselves; `request` wraps them, as the API requires them all in one
tool. `export.py` converts each tool's schema by `Gemini.schema_rules` (`schemas/`).
"""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar

from toolbus.common.newest import NewestCache
from toolbus.parts.models.dialects.conversation import (
    Answered,
    Delta,
    HistoryItem,
    Json,
    Message,
    ModelCall,
    Turn,
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
from toolbus.parts.models.dialects.endings import GEMINI_ENDINGS, ended_turn, list_parts
from toolbus.parts.models.dialects.export import MAX_CACHED_SCHEMAS, Export
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
from toolbus.parts.models.dialects.provider_results import (
    GEMINI_IMAGES,
    ImageRule,
    arguments_object,
    base64_of,
    image_label,
    object_of,
)
from toolbus.parts.models.dialects.schemas.schema_rules import (
    GEMINI_JSON_SCHEMAS,
    GEMINI_SCHEMAS,
    Inexpressible,
    SchemaRules,
    convert,
)
from toolbus.parts.models.dialects.token_usage import gemini_usage
from toolbus.parts.models.dialects.tool_choice import forced_tool
from toolbus.parts.models.dialects.wire_names import GEMINI_NAMES, NameRule, NameTable
from toolbus.protocol.tool import Result, Tool

# Parts have the keys of Google's Python SDK (`function_call`), which REST accepts in addition to its own
# (`functionCall`), and signatures as base64 text, which both accept; so a turn can be stored as JSON.

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
        super().__init__(names)
        self._parts: list[Json] = []
        self._calls: list[ModelCall] = []
        self._deltas: list[Delta] = []
        self._stop = ""  # the finish reason; "" until it came
        self._message = ""  # the provider's details; "" until they arrive
        self._blocked = ""  # why the prompt was blocked; "" if it was not
        self._nameless = False  # whether a call came without a name
        self._usage: Json = {}  # the newest counts

    def read(self, event: Any) -> list[Delta]:
        chunk = snake_case(as_mapping(event))
        if chunk.get("error"):
            raise EndpointError.of(chunk)
        if usage := mapping(chunk, "usage_metadata"):
            self._usage |= {key: value for key, value in snake_case(usage).items() if value is not None}
        feedback = snake_case(mapping(chunk, "prompt_feedback"))
        if reason := feedback.get("block_reason"):
            self._stop = str(_as_json(reason))
            self._blocked = list_parts("the prompt was blocked", feedback.get("block_reason_message"))
        candidates = objects(chunk.get("candidates"))
        if not candidates:
            return []  # usage alone
        candidate = snake_case(candidates[0])
        if stop := candidate.get("finish_reason"):
            self._stop = str(_as_json(stop))
            ratings = map(_as_json, objects(candidate.get("safety_ratings")))
            blocked = (rating.get("category") for rating in ratings if rating.get("blocked"))
            self._message = list_parts(candidate.get("finish_message"), *blocked)
        deltas: list[Delta] = []
        for place, raw in enumerate(objects(mapping(candidate, "content").get("parts"))):
            part = part_of(raw)
            if CALL in part:
                if not string(mapping(part, CALL), "name"):
                    self._nameless = True
                    continue
                self._calls.append(call_of(part, self._names))
            elif "text" in part:
                part["text"] = string(part, "text")
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
        return ended_turn(
            GEMINI_ENDINGS,
            self._stop,
            dialect=NAME,
            raw=(content_of("model", parts),) if parts else (),
            text=text_of_kind(self._deltas, "text"),
            reasoning=text_of_kind(self._deltas, "reasoning"),
            calls=tuple(self._calls),
            usage=gemini_usage(self._usage),
            reason=self._message,
            refusal=self._blocked,
            nameless=self._nameless,
            other=any(part.keys() - _KNOWN_KEYS for part in parts),
        )


def call_of(part: Json, names: NameTable) -> ModelCall:
    """Reads a call; the echo needs its signature, and its id if the model gave one."""
    function_call = part[CALL]
    given = function_call.get("id")
    extra = {"id": given} if given else {}
    if part.get(SIGNATURE):
        extra[SIGNATURE] = part[SIGNATURE]
    # A generated id is random, since it must be unique in a conversation that this stream does not see.
    call_id = str(given or f"call_{uuid.uuid4().hex[:16]}")
    return model_call(names, call_id, function_call["name"], arguments_text(function_call.get("args")), **extra)


def content_of(role: str, parts: Sequence[Json]) -> Json:
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


_ROLES = {"user": "user", "assistant": "model"}

# "At most 512 function declarations can be specified."
MAX_DECLARATIONS = 512


class Gemini(Dialect):
    """Gemini's generateContent.

    Args:
        json_schema: False for a server that reads `parameters` only, the older form in OpenAPI's keywords, which has no
            references, tuples and maps.
        output_schemas: True to send the tools' output schemas too, as `response_json_schema`. They cost tokens in every
            request, and few models need them to read a result.
    """

    name: ClassVar[str] = NAME
    name_rule: ClassVar[NameRule] = GEMINI_NAMES
    schema_rules: SchemaRules = GEMINI_JSON_SCHEMAS
    accepted_images: ClassVar[ImageRule] = GEMINI_IMAGES
    max_tools: ClassVar[int | None] = MAX_DECLARATIONS

    def __init__(
        self,
        max_cached_schemas: int = MAX_CACHED_SCHEMAS,
        *,
        images: bool = True,
        json_schema: bool = True,
        output_schemas: bool = False,
    ) -> None:
        super().__init__(max_cached_schemas, images=images)
        self.json_schema = json_schema
        self.output_schemas = output_schemas
        self._outputs = NewestCache[str, Json | None](max_cached_schemas)  # converted output schemas by their text
        if not json_schema:
            self.schema_rules = GEMINI_SCHEMAS

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        key = "parameters_json_schema" if self.json_schema else "parameters"
        declared = declaration(wire_name, tool, schema, key)
        if self.output_schemas and tool.output_schema_json and (output := self._output(tool)):
            declared["response_json_schema"] = output
        return declared

    def _output(self, tool: Tool) -> Json | None:
        text = tool.output_schema_json
        output = self._outputs[text] if text in self._outputs else _response_schema(tool)
        self._outputs[text] = output
        return output

    def stream(self, names: NameTable) -> TurnStream:
        return PartStream(names)

    def results(self, answered: Sequence[Answered], names: NameTable) -> list[Json]:
        wires = [self._called_name(each.call, names) for each in answered]
        parts = [_answer(each.call, wire, each.result) for wire, each in zip(wires, answered, strict=True)]
        parts += self._image_parts(zip(wires, (each.result for each in answered), strict=True))
        return [content_of("user", parts)] if parts else []

    def history(self, items: Iterable[HistoryItem], names: NameTable) -> list[Json]:
        contents: list[Json] = []
        for step in pair_calls(_read(items, names), self.name):
            if isinstance(step, Message):
                if step.role != "system":  # `request` writes it
                    contents.append(content_of(_ROLES[step.role], [{"text": step.text}]))
            elif isinstance(step, AnsweredTurn):
                contents += self._write_turn(step, names)
            else:
                contents.append(_without_responses(step))
        return alternating(contents, "parts", parts_of, content_of("user", [{"text": OPENING}]))

    def _write_turn(self, step: AnsweredTurn, names: NameTable) -> list[Json]:
        turn = step.turn
        parts = self._echo(turn, names) if turn.dialect == self.name and turn.raw else None
        if parts is None:
            parts = [{"text": turn.text}, *(self._call_part(call, names) for call in turn.calls)]
        wires = [part["function_call"]["name"] for part in parts if CALL in part]
        answers = [_answer(*each) for each in zip(turn.calls, wires, step.answers, strict=True)]
        images = self._image_parts(zip(wires, step.answers, strict=True))
        return [content_of("model", parts), content_of("user", answers + images)]

    def _image_parts(self, named_results: Iterable[tuple[str, Result | ProviderAnswer]]) -> list[Json]:
        """Returns the images of results; they follow all responses, since older models do not take them inside one."""
        parts: list[Json] = []
        for wire, result in named_results:
            images = self.images.images_of(result) if isinstance(result, Result) else []
            if images:
                parts.append({"text": image_label(wire)})
                parts += [{"inline_data": {"mime_type": each.mime_type, "data": base64_of(each)}} for each in images]
        return parts

    def _echo(self, turn: Turn, names: NameTable) -> list[Json] | None:
        """Returns a turn's own parts with the calls' current ids; None if its calls differ."""
        parts = [part_of(part) for content in turn.raw for part in content.get("parts") or ()]
        places = [place for place, part in enumerate(parts) if CALL in part]
        if len(places) != len(turn.calls):
            return None
        for place, call in zip(places, turn.calls, strict=True):
            function_call = {key: value for key, value in parts[place][CALL].items() if key != "id"}
            name = self._called_name(call, names)
            parts[place] = {**parts[place], CALL: {**function_call, **_id(call), "name": name}}
        return parts

    def _called_name(self, call: ModelCall, names: NameTable) -> str:
        """Returns the name that the model called, even if the tool's name has changed since."""
        return call.wire_name if self.name_rule.accepts(call.wire_name) else call_wire_name(call, names, self.name_rule)

    def _call_part(self, call: ModelCall, names: NameTable) -> Json:
        wire = call_wire_name(call, names, self.name_rule)
        part: Json = {CALL: {**_id(call), "name": wire, "args": arguments_object(call.arguments_json)}}
        signature = call.extra.get(SIGNATURE)
        return {**part, SIGNATURE: signature} if signature else part

    def request(self, items: Sequence[HistoryItem], export: Export | None, tools: ToolChoice = "auto") -> Json:
        """Returns `contents` and `config`, as `client.models.generate_content` of Google's SDK takes them."""
        declarations, names = offered(export, self)
        forced = forced_tool(export, tools)
        contents = self.history(items, names)
        holds_calls = any(part.keys() & {CALL, RESPONSE} for content in contents for part in parts_of(content["parts"]))
        config: Json = {}
        if system := system_text(items):
            config["system_instruction"] = system
        if declarations and (tools != "none" or holds_calls):
            config["tools"] = [{"function_declarations": declarations}]
            # Without this the SDK may call Python functions by itself.
            config["automatic_function_calling"] = {"disable": True}
            if tools == "none":
                config["tool_config"] = {"function_calling_config": {"mode": "NONE"}}
        if forced is not None:
            allowed = {"allowed_function_names": [forced]} if forced else {}
            config["tool_config"] = {"function_calling_config": {"mode": "ANY", **allowed}}
        return {"contents": contents, "config": config}


def declaration(wire_name: str, tool: Tool, schema: Json, key: str = "parameters") -> Json:
    """Returns a tool as a function declaration, with its schema under the key for its form."""
    function: Json = {"name": wire_name}
    if tool.description:
        function["description"] = tool.description
    # The API refuses an object schema without properties under `parameters`.
    if schema.get("properties") or (key != "parameters" and schema.keys() - {"type", "properties"}):
        function[key] = schema
    return function


def _response_schema(tool: Tool) -> Json | None:
    """Returns the schema of a tool's results as `object_of` writes them; None if it cannot be written."""
    schema = tool.output_schema or {}
    if schema.get("type", "object") != "object":
        if '"$ref"' in tool.output_schema_json:
            return None  # references would point to other places
        schema = {"type": "object", "properties": {"result": schema}, "required": ["result"]}
    try:
        return convert(schema, GEMINI_JSON_SCHEMAS, tool.name)[0]
    except Inexpressible:
        return None


def _id(call: ModelCall) -> Json:
    """Returns a call's id if Gemini gave it; a generated id is not sent."""
    return {"id": call.id} if call.extra.get("id") else {}


def response_object(result: Result) -> Json:
    """Returns a result as the object of a function response.

    One with a key `$ref` goes as text: the API reads that key as the name of a part and refuses the whole request
    (vercel/ai issue 14369).
    """
    response = object_of(result)
    if '"$ref"' in result.output_json:
        return {"result": json.dumps(response, ensure_ascii=False, separators=(",", ":"))}
    return response


def _answer(call: ModelCall, wire: str, answer: Result | ProviderAnswer) -> Json:
    if isinstance(answer, ProviderAnswer):
        part: Json = answer.message["parts"][0]
        return {**part, RESPONSE: {**part[RESPONSE], **_id(call), "name": wire}}
    return {RESPONSE: {**_id(call), "name": wire, "response": response_object(answer)}}


def _read(items: Iterable[HistoryItem], names: NameTable) -> Iterator[HistoryItem | ProviderAnswer]:
    """Yields a conversation in which calls and responses in the provider's own format are recognized."""
    pending: list[ModelCall] = []  # of the newest turn, for responses without an id
    for item in items:
        if isinstance(item, Turn):
            pending = list(item.calls)
        if not isinstance(item, Mapping):
            yield item
            continue
        parts = parts_of(item.get("parts"))
        named = [part for part in parts if CALL not in part or part[CALL].get("name")]
        calls = [call_of(part, names) for part in named if CALL in part]
        if calls:
            pending = calls
            yield Turn(calls=tuple(calls), dialect=Gemini.name, raw=(content_of("model", named),))
            continue
        for part in parts:
            if RESPONSE in part:
                yield ProviderAnswer(_answered_id(part[RESPONSE], pending, names), content_of("user", [part]))
        yield _without_responses(item)


def _answered_id(response: Mapping[str, Any], pending: list[ModelCall], names: NameTable) -> str:
    """Returns the id of the call that a response answers: its own id, else that of the first call with its name."""
    if response.get("id"):
        return str(response["id"])
    for call in pending:
        if response.get("name") in (call.wire_name, names.wire(call.name)):
            pending.remove(call)
            return call.id
    return "no such call"


def _without_responses(content: Mapping[str, Any]) -> Json:
    """Returns a content without responses: those that belong to a call are written behind it already."""
    parts = parts_of(content.get("parts"))
    others = [part for part in parts if RESPONSE not in part]
    return {"role": "user", **content} if len(others) == len(parts) else {"role": "user", **content, "parts": others}
