"""Parses OpenAI's realtime events, which Grok, GLM, Qwen Omni and StepFun use too.

A call is announced by `response.output_item.added`, arrives in pieces, and is complete with
`response.function_call_arguments.done`. Not every version gives the name there: it then comes from the announcement, or
from `response.output_item.done` or `response.done`. So does whether a call without arguments is whole, since the event
also comes where a response was cut. The first event that completes a call reports it; later events do not report it
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from toolbus.common.newest import NewestCache
from toolbus.parts.models.dialects.call_arguments import joined_pieces, refused, resolved
from toolbus.parts.models.dialects.conversation import Delta, Ending, ModelCall, SurrogateJoiner, model_call
from toolbus.parts.models.dialects.dialect import (
    CallsCancelled,
    RealtimeEvent,
    RealtimeParser,
    ResponseBegan,
    ResponseEnded,
    ResponseRefused,
    SpeechBegan,
    SpeechEnded,
    as_mapping,
    mapping,
    objects,
    string,
)
from toolbus.parts.models.dialects.endings import NAMELESS, REALTIME_ENDINGS
from toolbus.parts.models.dialects.history import arguments_text
from toolbus.parts.models.dialects.token_usage import responses_usage
from toolbus.parts.models.dialects.wire_names import NameTable

TEXT_DELTAS = frozenset(
    {
        "response.output_text.delta",
        "response.text.delta",  # its former name
        "response.output_audio_transcript.delta",
        "response.audio_transcript.delta",
    }
)
SPEECH_ENDS = frozenset(
    {
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",  # by a client that detects the end of speech itself
        "input_audio_buffer.cleared",
    }
)
BUSY = "conversation_already_has_active_response"  # error code of a request for a second response at a time
# Keys of calls that are arriving. A response that ends removes its own; the limit is for a provider that ends none.
MAX_CALL_KEYS = 3_000

_CallKey = tuple[str | int, ...]


@dataclass(slots=True)
class _ArrivingCall:
    """A call of which a part has arrived."""

    response: str
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)  # of its arguments
    sources: list[str] = field(default_factory=list)  # its arguments as each other event states them
    ended: bool = False  # whether no more of its arguments will come
    reported: bool = False


class OpenAIEventParser(RealtimeParser):
    """Reads OpenAI's realtime events."""

    def __init__(self, names: NameTable) -> None:
        super().__init__(names)
        self._arriving: NewestCache[_CallKey, _ArrivingCall] = NewestCache(MAX_CALL_KEYS)  # by each key of an event
        self._reported: NewestCache[tuple[str, str], None] = NewestCache(MAX_CALL_KEYS)  # calls, by response and id
        self._names_by_response: dict[str, NameTable] = {}  # of the responses that are open, oldest first
        self._readers: dict[str, Callable[[Mapping[str, Any]], list[RealtimeEvent]]] = {
            **dict.fromkeys(TEXT_DELTAS, self._text),
            "response.created": self._response_began,
            "response.output_item.added": self._call_announced,
            "response.function_call_arguments.delta": self._arguments_delta,
            "response.function_call_arguments.done": self._arguments_complete,
            "response.output_item.done": self._item_complete,
            "response.done": self._response_ended,
            "response.cancelled": self._response_ended,
            "input_audio_buffer.speech_started": lambda _: [SpeechBegan()],
            **dict.fromkeys(SPEECH_ENDS, lambda _: [SpeechEnded()]),
            "error": _error,
        }

    def feed(self, event: Any) -> list[RealtimeEvent]:
        try:
            event = as_mapping(event)
        except TypeError:
            return []
        read = self._readers.get(string(event, "type"))
        return [] if read is None else read(event)

    def call_id(self, response: str, place: int | None, source: Mapping[str, Any]) -> str:
        """Returns a call's id, "" if it is not known yet.

        Args:
            place: the call's output_index in the response; None if the event has none.
            source: the event, or the item in it, that describes the call.
        """
        return string(source, "call_id")

    def _response_began(self, event: Mapping[str, Any]) -> list[RealtimeEvent]:
        response = string(mapping(event, "response"), "id")
        self._names_by_response[response] = self.names
        self.joiner = SurrogateJoiner()  # a cancelled response may have ended in half of a surrogate pair
        return [ResponseBegan(response)]

    def _text(self, event: Mapping[str, Any]) -> list[RealtimeEvent]:
        return [*self.joiner.join([Delta("text", string(event, "delta"))])]

    def _call_announced(self, event: Mapping[str, Any]) -> list[RealtimeEvent]:
        item = mapping(event, "item")
        if item.get("type") == "function_call":
            self._find(event, item).name = string(item, "name")
        return []

    def _arguments_delta(self, event: Mapping[str, Any]) -> list[RealtimeEvent]:
        self._find(event, event).pieces.append(string(event, "delta"))
        return []

    def _arguments_complete(self, event: Mapping[str, Any]) -> list[RealtimeEvent]:
        arriving = self._find(event, event)
        arriving.ended, arriving.name = True, string(event, "name") or arriving.name
        # It also comes if the response was cut: without arguments, only later events show whether it was.
        return self._report(arriving, event) if arguments(event, "arguments") or any(arriving.pieces) else []

    def _item_complete(self, event: Mapping[str, Any]) -> list[RealtimeEvent]:
        item = mapping(event, "item")
        if item.get("type") != "function_call" or item.get("status") == "incomplete":
            return []
        return self._report(self._find(event, item), item)

    def _response_ended(self, event: Mapping[str, Any]) -> list[RealtimeEvent]:
        response = mapping(event, "response")
        response_id = string(response, "id") or self._response_of(event)
        cancelled = event["type"] == "response.cancelled" or response.get("status") == "cancelled"
        calls: list[RealtimeEvent] = []
        for item in [] if cancelled else objects(response.get("output")):
            # Found by its ids alone: its place in this list may differ from its output_index.
            calls += self._item_complete({"response_id": response_id, "item": item})
        if response.get("status") in (None, "completed") and not cancelled:
            for call in self._calls_of(response_id):
                calls += self._report(call, {}) if call.ended else []
        ids, nameless = self._forget(response_id)
        self._names_by_response.pop(response_id, None)
        ending, reason = _ending(response, cancelled, nameless)
        ended = ResponseEnded(response_id, ending, reason, responses_usage(response.get("usage")))
        return [*calls, *([CallsCancelled(ids)] if cancelled and ids else ()), ended]

    def _response_of(self, event: Mapping[str, Any]) -> str:
        """Returns the response that an event belongs to: its response_id, else the response that began last."""
        return string(event, "response_id") or next(reversed(self._names_by_response), "")

    def _find(self, event: Mapping[str, Any], source: Mapping[str, Any]) -> _ArrivingCall:
        """Returns the call of an event, found by the event's keys; a new one if none is known."""
        response = self._response_of(event)
        index = event.get("output_index")
        place = index if isinstance(index, int) else None
        call_id = self.call_id(response, place, source)
        item_id = string(event, "item_id") or (string(source, "id") if source is not event else "")
        keys: list[_CallKey] = []
        if call_id:
            keys.append(("call", call_id))
        if item_id:
            keys.append(("item", item_id))
        if place is not None:
            keys.append(("place", response, place))
        candidates = (self._arriving.get(key) for key in keys)
        arriving = next((call for call in candidates if call and (not call_id or call.id in ("", call_id))), None)
        if arriving is None:
            arriving = _ArrivingCall(response)
        arriving.id = arriving.id or call_id
        for key in keys:
            self._arriving[key] = arriving
        return arriving

    def _report(self, arriving: _ArrivingCall, source: Mapping[str, Any]) -> list[RealtimeEvent]:
        """Returns a call that is complete, once; a call without name or id waits for an event that has it."""
        arriving.name = string(source, "name") or arriving.name
        arriving.sources.append(joined_pieces([arguments(source, "arguments")]))
        if arriving.reported or not arriving.name or not arriving.id:
            return []
        arriving.reported = True
        key = (arriving.response, arriving.id)
        if arriving.response and key in self._reported:
            return []  # an event that comes once more after the end of its response
        self._reported[key] = None
        names = self._names_by_response.get(arriving.response, self.names)
        arguments_json, fault = resolved((joined_pieces(arriving.pieces), *arriving.sources))
        call: ModelCall = model_call(names, arriving.id, arriving.name, arguments_json)
        return [refused(replace(call, response=arriving.response), fault)]

    def _calls_of(self, response: str) -> list[_ArrivingCall]:
        """Returns the calls of a response of which a part has arrived; one may stand under several keys."""
        return [call for call in self._arriving.values() if call.response == response]

    def _forget(self, response: str) -> tuple[tuple[str, ...], bool]:
        """Forgets the calls of a response. Returns the ids of those that were reported, and whether one had no name."""
        keys = [key for key, call in self._arriving.items() if call.response == response]
        calls = [self._arriving.pop(key) for key in keys]
        ids = dict.fromkeys(call.id for call in calls if call.reported)
        return tuple(ids), any(not call.name for call in calls)


def _ending(response: Mapping[str, Any], cancelled: bool, nameless: bool) -> tuple[Ending, str]:
    """Returns how a response ended, and why if it is not whole."""
    details = mapping(response, "status_details")
    status, error = string(response, "status") or ("cancelled" if cancelled else ""), mapping(details, "error")
    reason = string(details, "reason")
    ending = REALTIME_ENDINGS.get(reason.lower()) or REALTIME_ENDINGS.get(status.lower(), "complete")
    if ending == "complete":
        return ("failed", NAMELESS) if nameless else ("complete", "")
    words = (status, reason, string(error, "code") or string(error, "type"), string(error, "message"))
    return ending, ": ".join(filter(None, words))


def _error(event: Mapping[str, Any]) -> list[RealtimeEvent]:
    return [ResponseRefused()] if string(mapping(event, "error"), "code") == BUSY else []


def arguments(message: Mapping[str, Any], key: str) -> str:
    """Returns a call's arguments as text, whether they came as text or as an object; "" if missing."""
    try:
        return arguments_text(message.get(key))
    except (TypeError, ValueError, RecursionError):  # an object that is not JSON
        return ""
