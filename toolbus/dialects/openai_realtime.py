"""OpenAI Realtime: flat tools set by `session.update`, calls by `call_id`, answers as items of the conversation.

Grok, GLM, Qwen Omni and StepFun speak the same events with differences of their own, which stand in their files. What
they share stands here: `RealtimeEvents`, which a provider's dialect extends, and the parser.

A call is announced by `response.output_item.added`, arrives in pieces, and is complete with
`response.function_call_arguments.done`. Not every version says the name there: it then comes from the announcement, or
from `response.output_item.done` or `response.done`. Whatever says a call first wins, and it is said once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from toolbus.dialects.conversation import Answered, Delta, Json, ModelCall, SurrogateJoiner, model_call
from toolbus.dialects.dialect import as_mapping
from toolbus.dialects.export import Export
from toolbus.dialects.history import arguments_text
from toolbus.dialects.openai_chat import nested_tool
from toolbus.dialects.realtime_dialect import (
    CallsCancelled,
    RealtimeDialect,
    RealtimeEvent,
    RealtimeParser,
    ResponseBegan,
    ResponseEnded,
    ResponseRefused,
    SpeechBegan,
    SpeechEnded,
)
from toolbus.dialects.result_text import text_of
from toolbus.dialects.schemas.schema_rules import OPENAI_SCHEMAS, SchemaRules
from toolbus.dialects.wire_names import PLAIN_NAMES, NameRule, NameTable
from toolbus.tool import Tool

TEXT_DELTAS = frozenset(
    {
        "response.output_text.delta",
        "response.text.delta",  # what it was called before
        "response.output_audio_transcript.delta",
        "response.audio_transcript.delta",
    }
)
SPEECH_ENDS = frozenset(
    {
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",  # by a client that does not wait for the provider to hear the end
        "input_audio_buffer.cleared",
    }
)
BUSY = "conversation_already_has_active_response"  # the code of the error that answers a request too many
# Marks of calls that are remembered. They are forgotten with their response; this is for a provider that ends none.
MAX_MARKS = 3_000


class RealtimeEvents(RealtimeDialect):
    """What the providers that speak OpenAI's realtime events have in common."""

    name_rule: ClassVar[NameRule] = PLAIN_NAMES
    schema_rules: ClassVar[SchemaRules] = OPENAI_SCHEMAS

    def session_update(self, export: Export) -> Json:
        return {"type": "session.update", "session": self.session(export)}

    def session(self, export: Export) -> Json:
        """Returns the part of the session's settings that concerns tools."""
        return {"tools": list(export.tools)}

    def parser(self, names: NameTable) -> RealtimeParser:
        return EventParser(names)

    def answers(self, answered: Sequence[Answered], names: NameTable, *, go_on: bool = True) -> list[Json]:
        events: list[Json] = [
            {"type": "conversation.item.create", "item": self.output_item(each.call.id, text_of(each.result))}
            for each in answered
        ]
        return events + self.request() if events and go_on else events

    def request(self) -> list[Json]:
        return [{"type": "response.create"}]

    def output_item(self, call_id: str, output: str) -> Json:
        """Returns the item of the conversation that answers a call."""
        return {"type": "function_call_output", "call_id": call_id, "output": output}


class FlatTools(RealtimeEvents):
    """Providers that want a tool's name beside its type."""

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        return {"type": "function", "name": wire_name, "description": tool.description, "parameters": schema}


class NestedTools(RealtimeEvents):
    """Providers that want a tool's name under `function`, as in chat completions."""

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        return nested_tool(wire_name, tool, schema)


class OpenAIRealtime(FlatTools):
    """OpenAI's own sessions."""

    name: ClassVar[str] = "openai-realtime"

    def session(self, export: Export) -> Json:
        return {"type": "realtime", **with_choice(super().session(export))}


def with_choice(session: Json) -> Json:
    """Returns a session's settings in which the model chooses among the tools, where there are any."""
    return {**session, "tool_choice": "auto"} if session["tools"] else session


# -- events in -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Arriving:
    """A call of which something is known."""

    response: str
    id: str = ""
    name: str = ""
    arguments: str = ""
    said: bool = False  # whether it was handed on


class EventParser(RealtimeParser):
    """Reads OpenAI's realtime events."""

    def __init__(self, names: NameTable) -> None:
        super().__init__(names)
        self._arriving: dict[tuple[str | int, ...], _Arriving] = {}  # by each mark that it was seen with
        self._began_with: dict[str, NameTable] = {}  # of the responses that are open, oldest first
        self._readers: dict[str, Callable[[Mapping[str, Any]], list[RealtimeEvent]]] = {
            **dict.fromkeys(TEXT_DELTAS, self._said),
            "response.created": self._began,
            "response.output_item.added": self._announced,
            "response.function_call_arguments.delta": self._piece,
            "response.function_call_arguments.done": self._complete,
            "response.output_item.done": self._item_complete,
            "response.done": self._ended,
            "response.cancelled": self._ended,
            "input_audio_buffer.speech_started": lambda _: [SpeechBegan()],
            **dict.fromkeys(SPEECH_ENDS, lambda _: [SpeechEnded()]),
            "error": _refused,
        }

    def feed(self, event: Any) -> list[RealtimeEvent]:
        try:
            told = as_mapping(event)
        except TypeError:
            return []
        read = self._readers.get(string(told, "type"))
        return [] if read is None else read(told)

    def call_id(self, response: str, place: int | None, told: Mapping[str, Any]) -> str:
        """Returns a call's id, "" where it is not known yet.

        Args:
            place: which output of the response it is; None where that was not said.
            told: the event, or the item in it, that speaks of the call.
        """
        return string(told, "call_id")

    def _began(self, event: Mapping[str, Any]) -> list[RealtimeEvent]:
        response = string(mapping(event, "response"), "id")
        self._began_with[response] = self.names
        self.joiner = SurrogateJoiner()  # one that was cancelled may have ended in half of a character
        return [ResponseBegan(response)]

    def _said(self, event: Mapping[str, Any]) -> list[RealtimeEvent]:
        return [*self.joiner.join([Delta("text", string(event, "delta"))])]

    def _announced(self, event: Mapping[str, Any]) -> list[RealtimeEvent]:
        item = mapping(event, "item")
        if item.get("type") == "function_call":
            self._find(event, item).name = string(item, "name")
        return []

    def _piece(self, event: Mapping[str, Any]) -> list[RealtimeEvent]:
        self._find(event, event).arguments += string(event, "delta")
        return []

    def _complete(self, event: Mapping[str, Any]) -> list[RealtimeEvent]:
        return self._say(self._find(event, event), event)

    def _item_complete(self, event: Mapping[str, Any]) -> list[RealtimeEvent]:
        item = mapping(event, "item")
        if item.get("type") != "function_call" or item.get("status") == "incomplete":
            return []
        return self._say(self._find(event, item), item)

    def _ended(self, event: Mapping[str, Any]) -> list[RealtimeEvent]:
        response = mapping(event, "response")
        ended = string(response, "id") or self._response(event)
        cancelled = event["type"] == "response.cancelled" or response.get("status") == "cancelled"
        said: list[RealtimeEvent] = []
        outputs = response.get("output")
        if isinstance(outputs, list | tuple) and not cancelled:
            for item in outputs:  # by its ids alone: its place in this list need not be its output_index
                if isinstance(item, Mapping):
                    said += self._item_complete({"response_id": ended, "item": item})
        ids = self._forget(ended)
        self._began_with.pop(ended, None)
        return [*said, *([CallsCancelled(ids)] if cancelled and ids else ()), ResponseEnded(ended)]

    def _response(self, event: Mapping[str, Any]) -> str:
        """Returns which response an event belongs to: where it does not say, the one that began last."""
        return string(event, "response_id") or next(reversed(self._began_with), "")

    def _find(self, event: Mapping[str, Any], told: Mapping[str, Any]) -> _Arriving:
        """Returns the call that an event speaks of, by the marks that it carries; a new one where none is known."""
        response = self._response(event)
        index = event.get("output_index")
        place = index if isinstance(index, int) else None
        call_id = self.call_id(response, place, told)
        item_id = string(event, "item_id") or (string(told, "id") if told is not event else "")
        marks: list[tuple[str | int, ...]] = []
        if call_id:
            marks.append(("call", call_id))
        if item_id:
            marks.append(("item", item_id))
        if place is not None:
            marks.append(("place", response, place))
        known = (self._arriving.get(mark) for mark in marks)
        found = next((call for call in known if call and (not call_id or call.id in ("", call_id))), None)
        if found is None:
            found = _Arriving(response)
        found.id = found.id or call_id
        self._arriving.update(dict.fromkeys(marks, found))
        while len(self._arriving) > MAX_MARKS:
            del self._arriving[next(iter(self._arriving))]
        return found

    def _say(self, arriving: _Arriving, told: Mapping[str, Any]) -> list[RealtimeEvent]:
        """Returns a call that is complete, once; one that lacks its name or id waits for an event that has it."""
        arriving.name = string(told, "name") or arriving.name
        arriving.arguments = arguments(told, "arguments") or arriving.arguments
        if arriving.said or not arriving.name or not arriving.id:
            return []
        arriving.said = True
        names = self._began_with.get(arriving.response, self.names)
        call: ModelCall = model_call(names, arriving.id, arriving.name, arriving.arguments)
        return [replace(call, response=arriving.response)]

    def _forget(self, response: str) -> tuple[str, ...]:
        """Forgets the calls of a response. Returns the ids of those that were handed on."""
        gone = [mark for mark, call in self._arriving.items() if call.response == response]
        said = [call.id for call in map(self._arriving.pop, gone) if call.said]
        return tuple(dict.fromkeys(said))


def _refused(event: Mapping[str, Any]) -> list[RealtimeEvent]:
    return [ResponseRefused()] if string(mapping(event, "error"), "code") == BUSY else []


def string(told: Mapping[str, Any], key: str) -> str:
    """Returns a text of an event, "" where there is none."""
    value = told.get(key)
    return value if isinstance(value, str) else ""


def arguments(told: Mapping[str, Any], key: str) -> str:
    """Returns a call's arguments as text, whether they came as text or as an object; "" where there are none."""
    try:
        return arguments_text(told.get(key))
    except (TypeError, ValueError, RecursionError):  # an object that JSON cannot hold
        return ""


def mapping(told: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns an object of an event, an empty one where there is none."""
    value = told.get(key)
    return value if isinstance(value, Mapping) else {}
