"""Reads and writes OpenAI's chat completions: leniently and strictly, since the many compatible servers differ.

Servers leave out `index` or `id`, number every call 0, send a whole call in one piece or arguments as an object, and
send reasoning under one of several keys. It is sent back only if the model wrote some: thinking models refuse a turn
without it, other models refuse a turn with it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolbus.common.text import is_json_object
from toolbus.parts.models.dialects.call_arguments import joined_pieces, unique_calls
from toolbus.parts.models.dialects.conversation import (
    Delta,
    HistoryItem,
    Json,
    Message,
    ModelCall,
    Turn,
    Usage,
    model_call,
)
from toolbus.parts.models.dialects.dialect import EndpointError, ToolChoice, TurnStream, as_mapping, mapping, objects
from toolbus.parts.models.dialects.endings import OPENAI_CHAT_ENDINGS, ended_turn, list_parts
from toolbus.parts.models.dialects.export import MAX_CACHED_SCHEMAS, Export
from toolbus.parts.models.dialects.history import (
    PairedDialect,
    ProviderAnswer,
    arguments_text,
    offered,
    valid_arguments_text,
)
from toolbus.parts.models.dialects.provider_results import OPENAI_IMAGES, answer_text, data_url, image_label
from toolbus.parts.models.dialects.schemas.schema_rules import GRAMMAR_SCHEMAS, OPENAI_SCHEMAS
from toolbus.parts.models.dialects.token_usage import chat_usage
from toolbus.parts.models.dialects.tool_choice import forced_tool
from toolbus.parts.models.dialects.wire_names import PLAIN_NAMES, NameTable
from toolbus.protocol.tool import Result, Tool

NAME = "openai"
# DeepSeek's key, and that of OpenRouter and newer vLLM. Reasoning goes back under the key that it came under.
_REASONING_KEYS = ("reasoning_content", "reasoning")
# The standard keys of a call. Others must be echoed: Gemini's endpoint of this format puts its thought signature there.
_CALL_KEYS = frozenset(("id", "type", "function", "index"))
_OTHER_KEYS = ("audio", "images")  # of a message, besides text, reasoning and calls


def _filters(choice: Mapping[str, Any]) -> str:
    """Returns which of Azure's filters stopped an answer."""
    results = mapping(choice, "content_filter_results")
    return list_parts(*(name for name in results if mapping(results, name).get("filtered") is True))


def read_message(
    message: Mapping[str, Any], names: NameTable, stop: Any, usage: Usage | None = None, reason: str = ""
) -> Turn:
    """Reads a message of the model.

    Args:
        reason: the server's details in addition to the stop reason.
    """
    text, thinking = _text_and_thinking(message.get("content"))
    refusal = _refusal(message)
    _, reasoning = reasoning_of(message)
    entries = objects(message.get("tool_calls"))
    calls = unique_calls(call for place, entry in enumerate(entries) if (call := _call(entry, place, names)).wire_name)
    return ended_turn(
        OPENAI_CHAT_ENDINGS,
        _string(stop),
        dialect=NAME,
        raw=({"role": "assistant", **message},),
        text=text or refusal,
        reasoning=reasoning or thinking,
        calls=calls,
        usage=usage,
        reason=reason,
        refusal=refusal,
        nameless=len(entries) > len(calls),
        other=any(message.get(key) for key in _OTHER_KEYS),
    )


def _refusal(message: Mapping[str, Any]) -> str:
    """Returns the text with which the model refuses to answer: of the message, or of a part of its content."""
    parts = (_string(part.get("refusal")) for part in objects(message.get("content")))
    return _string(message.get("refusal")) or "".join(parts)


def _call(entry: Mapping[str, Any], place: int, names: NameTable) -> ModelCall:
    function = mapping(entry, "function")
    index = entry.get("index")
    call = model_call(
        names,
        _string(entry.get("id")) or f"call_{place if index is None else index}",
        _string(function.get("name")),
        joined_pieces([arguments_text(function.get("arguments"))]),
    )
    return replace(call, extra={key: value for key, value in entry.items() if key not in _CALL_KEYS})


def _string(value: Any) -> str:
    return "" if value is None else str(value)


def reasoning_of(message: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the key of the reasoning and its text: some servers send it under both keys."""
    for key in _REASONING_KEYS:
        if isinstance(message.get(key), str) and message[key]:
            return key, message[key]
    return _REASONING_KEYS[0], ""


def _text_and_thinking(content: Any) -> tuple[str, str]:
    """Returns the text and the thinking of content, which is a text, or (Mistral) a list of parts of either kind."""
    if not isinstance(content, list):
        return _string(content), ""
    text, thinking = "", ""
    for part in content:
        if isinstance(part, Mapping):
            text += _string(part.get("text") or part.get("refusal"))
            thinking += _text_and_thinking(part.get("thinking"))[0]
    return text, thinking


class ChatStream(TurnStream):
    """Assembles the chunks of a streamed answer into the message that a whole answer would have."""

    end_mark = "a finish_reason"

    def __init__(self, names: NameTable) -> None:
        super().__init__(names)
        self._began = False  # whether any part of the answer came
        self._text: list[str] = []
        self._refusal: list[str] = []
        self._reasoning: list[str] = []
        self._reasoning_key = ""  # the key of the first reasoning; "" until it came
        self._calls: list[_PartialCall] = []
        self._stop = ""  # the finish reason; "" until it came
        self._reason = ""  # its details
        self._usage: Any = None  # the last that came: mostly in a chunk without choices, behind the finish reason

    def read(self, event: Any) -> list[Delta]:
        event = as_mapping(event)
        if event.get("error"):
            raise EndpointError.of(event)
        if usage := event.get("usage"):
            self._usage = usage
        deltas: list[Delta] = []
        for choice in objects(event.get("choices")):
            if choice.get("index"):
                continue  # an alternative answer, which was not requested
            if choice.get("error"):
                raise EndpointError.of(choice)
            self._began = True
            deltas += self._take(mapping(choice, "delta"))
            if stop := choice.get("finish_reason"):
                self._stop, self._reason = _string(stop), _filters(choice)
            self._usage = choice.get("usage") or self._usage  # Moonshot
        return deltas

    @property
    def complete(self) -> bool:
        """As in `TurnStream`. Some servers never give a finish reason; there only an incomplete call shows a break."""
        return bool(self._stop) or (self._began and all(call.complete for call in self._calls))

    def _take(self, delta: Mapping[str, Any]) -> list[Delta]:
        key, reasoning = reasoning_of(delta)
        if reasoning:
            self._reasoning_key = self._reasoning_key or key
        text, thinking = _text_and_thinking(delta.get("content"))
        refusal = _string(delta.get("refusal"))
        self._reasoning.append(reasoning or thinking)
        self._text.append(text)
        self._refusal.append(refusal)
        for entry in objects(delta.get("tool_calls")):
            self._partial(entry).take(entry, self._names)
        return [Delta("reasoning", reasoning or thinking), Delta("text", text), Delta("text", refusal)]

    def _partial(self, entry: Json) -> _PartialCall:
        """Returns the call that an entry continues, or a new one: by index, else by id, else the newest call."""
        index, call_id = entry.get("index"), _string(entry.get("id"))
        numbered = isinstance(index, int)
        same = [call for call in self._calls if (call.index == index if numbered else call_id in ("", call.id))]
        if same and (same[-1].id == call_id != "" or not same[-1].followed_by(entry, numbered, self._names)):
            return same[-1]
        self._calls.append(_PartialCall(index if isinstance(index, int) else len(self._calls)))
        return self._calls[-1]

    def finish(self) -> Turn:
        message: Json = {"role": "assistant", "content": "".join(self._text) or None}
        if reasoning := "".join(self._reasoning):
            message[self._reasoning_key or _REASONING_KEYS[0]] = reasoning
        if refusal := "".join(self._refusal):
            message["refusal"] = refusal
        calls = sorted(self._calls, key=lambda call: call.index)
        if calls:
            message["tool_calls"] = [call.entry() for call in calls]
        return read_message(message, self._names, self._stop, chat_usage(self._usage), self._reason)


class _PartialCall:
    """One call that may still be arriving."""

    def __init__(self, index: int) -> None:
        self.index = index  # its place among the calls, by the server or by arrival
        self.id = ""  # the last that came; "" until then
        self.name = ""  # so far
        self._pieces: list[str] = []  # of its arguments
        self._extra: Json = {}  # all other keys, to be echoed

    def take(self, entry: Json, names: NameTable) -> None:
        function = mapping(entry, "function")
        self.id = _string(entry.get("id")) or self.id
        if piece := _string(function.get("name")):
            self.name = join_name(self.name, piece, names)
        if piece := arguments_text(function.get("arguments")):
            self._pieces.append(piece)
        self._extra |= {key: value for key, value in entry.items() if key not in _CALL_KEYS and value}

    def followed_by(self, entry: Json, numbered: bool, names: NameTable) -> bool:
        """Tells whether an entry begins the next call, instead of continuing this one.

        Without numbers a name begins a call, unless it continues or repeats this call's name and its arguments are
        still arriving. Servers that give every call the number 0 are recognized by arguments that begin again behind a
        complete call, and by the name of another tool with another id.
        """
        function = mapping(entry, "function")
        piece = _string(function.get("name"))
        if not piece or not self.name:
            return False
        # Whether it is complete is asked last: that reads all pieces, and some servers repeat the name in each.
        if (again := arguments_text(function.get("arguments"))).lstrip().startswith("{") and self.complete:
            is_resent = self.id and not entry.get("id") and is_json_object(joined_pieces([*self._pieces, again]))
            return not is_resent
        is_other = piece != self.name and piece in names.to_bus and self.name in names.to_bus
        if numbered:
            return is_other and _string(entry.get("id")) not in ("", self.id)
        if self._pieces or is_other:
            return piece != self.name
        return join_name(self.name, piece, names) == self.name + piece and not _begins(self.name + piece, names)

    @property
    def complete(self) -> bool:
        """Whether its arguments are a whole JSON object."""
        return is_json_object(joined_pieces(self._pieces))

    def entry(self) -> Json:
        """Returns the call as a whole answer would hold it."""
        function = {"name": self.name, "arguments": joined_pieces(self._pieces)}
        return {**self._extra, "id": self.id or f"call_{self.index}", "type": "function", "function": function}


def join_name(name: str, piece: str, names: NameTable) -> str:
    """Returns a call's name when one more piece of it has come.

    Most servers send a name once. Some repeat it in every chunk, some send all of it so far, and some send it in
    pieces. The names that were offered tell them apart, also where two pieces are the same ("get_", "get_").
    """
    if not name or (piece == name and name in names.to_bus):
        return piece
    if _begins(name + piece, names):
        return name + piece
    if piece.startswith(name):
        return piece
    if name in names.to_bus and name.endswith(piece):
        return name
    return name + piece


def _begins(text: str, names: NameTable) -> bool:
    """Tells whether a text is the beginning of an offered name."""
    return any(name.startswith(text) for name in names.to_bus)


# The content of a message that has calls and no text. OpenAI allows null too, and answers with it; llama-cpp-python,
# SGLang, mistral-common and earlier llama.cpp refuse null, while other widely used clients send "" to every server.
_NO_TEXT = ""
# The content of a message that has neither. OpenAI allows "" here too; Mistral, Moonshot and vLLM refuse it, and so
# every later request of the conversation. Without it, others would refuse a user's message behind a tool's answer.
_NO_ANSWER = "(empty answer)"


class OpenAIChat(PairedDialect):
    """`/v1/chat/completions`.

    Args:
        strict: whether the server enforces schemas (`strict: true`). False: never, since many servers with this format
            refuse a key that they do not know. None: for schemas that qualify unchanged. True: also with optional
            properties as nullable ones; `Export.without_added_nulls` then restores the meaning of a call.
        short_ids: whether calls in a conversation have ids of nine letters and digits: Mistral refuses all others, and
            another server of this format may have given them.
    """

    name = NAME
    name_rule = PLAIN_NAMES
    schema_rules = OPENAI_SCHEMAS
    plain_rules = GRAMMAR_SCHEMAS
    accepted_images = OPENAI_IMAGES
    # "array too long. Expected an array with maximum length 128"; Groq has the same number. Servers that only speak the
    # format may have another one, or none: `LoopSettings.max_tools`.
    max_tools = 128

    def __init__(
        self,
        max_cached_schemas: int = MAX_CACHED_SCHEMAS,
        *,
        images: bool = True,
        strict: bool | None = False,
        short_ids: bool = False,
    ) -> None:
        super().__init__(max_cached_schemas, images=images)
        self.strict = strict
        self.short_ids = short_ids

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        return nested_tool(wire_name, tool, schema)

    def write_strict_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        declaration = nested_tool(wire_name, tool, schema)
        declaration["function"]["strict"] = True
        return declaration

    def parse(self, answer: Any, names: NameTable) -> Turn:
        """As in `Dialect`: reads the first choice."""
        answer = as_mapping(answer)
        if answer.get("error"):
            raise EndpointError.of(answer)
        choices = objects(answer.get("choices"))
        if not choices:
            raise EndpointError("it answered without choices", answer)
        choice = choices[0]
        if choice.get("error"):
            raise EndpointError.of(choice)
        message, stop = mapping(choice, "message"), choice.get("finish_reason")
        return read_message(message, names, stop, chat_usage(answer.get("usage")), _filters(choice))

    def stream(self, names: NameTable) -> TurnStream:
        return ChatStream(names)

    def request(self, items: Sequence[HistoryItem], export: Export | None, tools: ToolChoice = "auto") -> Json:
        """As in `Dialect`. ``none`` writes no tools: llama.cpp and others call although tool_choice is none."""
        forced = forced_tool(export, tools)
        request = chat_request(self, items, export, tools)
        if forced is not None:
            request["tool_choice"] = {"type": "function", "function": {"name": forced}} if forced else "required"
        return request

    def read(self, items: Sequence[HistoryItem], names: NameTable) -> list[HistoryItem | ProviderAnswer]:
        return [_read(item, names) if isinstance(item, Mapping) else item for item in items]

    def write_message(self, message: Message) -> Json:
        return {
            "role": message.role,
            "content": _content(message.text) if message.role == "assistant" else message.text,
        }

    def echo(self, turn: Turn) -> list[Json] | None:
        message = copy.deepcopy(dict(turn.raw[0]))
        # Calls without a name are neither made nor echoed.
        entries = [each for each in objects(message.get("tool_calls")) if mapping(each, "function").get("name")]
        if len(entries) != len(turn.calls):
            return None
        message["role"] = "assistant"
        message.pop("tool_calls", None)  # an empty list is refused
        for entry, call in zip(entries, turn.calls, strict=True):
            arguments = valid_arguments_text(arguments_text(entry["function"].get("arguments")))
            entry |= {"id": call.id, "type": "function", "function": entry["function"] | {"arguments": arguments}}
            entry.pop("index", None)
        if entries:
            message["tool_calls"] = entries
        if message.get("content") is None:
            message["content"] = _NO_TEXT if entries or not message.get("refusal") else None
        if not entries and not message.get("audio"):
            message["content"] = _content(message["content"])
        return [message]

    def rebuild(self, turn: Turn, wires: Sequence[str]) -> list[Json]:
        message: Json = {"role": "assistant", "content": turn.text if turn.calls else _content(turn.text)}
        is_own = turn.dialect == self.name
        if turn.reasoning and is_own:
            key, _ = reasoning_of(turn.raw[0] if turn.raw else {})
            message[key] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = [
                {
                    **(call.extra if is_own else {}),
                    "id": call.id,
                    "type": "function",
                    "function": {"name": wire, "arguments": valid_arguments_text(call.arguments_json)},
                }
                for call, wire in zip(turn.calls, wires, strict=True)
            ]
        return [message]

    def write_result(self, call_id: str, wire: str, result: Result) -> Json:
        return {"role": "tool", "tool_call_id": call_id, "name": wire, "content": answer_text(result)}

    def write_images(self, named_results: Sequence[tuple[str, Result]]) -> list[Json]:
        # The API takes nothing but text as the answer to a call, so the images follow as the user's.
        parts: list[Json] = []
        for wire, result in named_results:
            if images := self.images.images_of(result):
                parts.append({"type": "text", "text": image_label(wire)})
                parts += [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
        return [{"role": "user", "content": parts}] if parts else []

    def with_call_id(self, answer: ProviderAnswer, call_id: str) -> Json:
        return {**answer.message, "tool_call_id": call_id}


class OpenAIGrammar(OpenAIChat):
    """Chat completions of servers that turn schemas into grammars, as vLLM does: in keywords that all engines take."""

    schema_rules = GRAMMAR_SCHEMAS


def _content(content: Any) -> Any:
    """Returns the content of an assistant's message without calls, never an empty text."""
    return _NO_ANSWER if isinstance(content, str) and not content.strip() else content


def nested_tool(wire_name: str, tool: Tool, schema: Json) -> Json:
    """Returns a tool as chat completions, and providers that followed them, declare it."""
    function: Json = {"name": wire_name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": function}


def flat_tool(wire_name: str, tool: Tool, schema: Json) -> Json:
    """Returns a tool as Responses and realtime sessions declare it: its name is beside its type."""
    return {"type": "function", "name": wire_name, "description": tool.description, "parameters": schema}


def chat_request(
    dialect: PairedDialect, items: Iterable[HistoryItem], export: Export | None, tools: ToolChoice
) -> Json:
    """Returns messages, and tools unless ``tools`` is ``none``."""
    declarations, names = offered(export, dialect)
    request: Json = {"messages": dialect.history(items, names)}
    if declarations and tools != "none":
        request["tools"] = declarations
    return request


def _read(item: Mapping[str, Any], names: NameTable) -> HistoryItem | ProviderAnswer:
    """Recognizes calls and answers in a message in the provider's format, so that they are paired like all others."""
    if item.get("role") == "tool" and item.get("tool_call_id"):
        return ProviderAnswer(str(item["tool_call_id"]), item)
    if item.get("role") == "assistant" and isinstance(item.get("tool_calls"), list):
        return read_message(item, names, "")
    return item
