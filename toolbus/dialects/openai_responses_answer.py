"""Reads responses of OpenAI's Responses, whole or as a stream of events: output items, of which a call is one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolbus.dialects.call_ids import unique_calls
from toolbus.dialects.conversation import Delta, Json, Turn, Usage, model_call
from toolbus.dialects.dialect import EndpointError, TurnStream, as_mapping
from toolbus.dialects.endings import RESPONSES_ENDINGS, read_end
from toolbus.dialects.history import arguments_text
from toolbus.dialects.token_usage import responses_usage
from toolbus.dialects.wire_names import NameTable

NAME = "openai-responses"


def read_answer(answer: Any, names: NameTable) -> Turn:
    """Reads a whole response.

    Raises:
        EndpointError: it is an error.
    """
    answer = as_mapping(answer)
    if answer.get("error"):
        raise EndpointError.of(answer)
    stop = (answer.get("incomplete_details") or {}).get("reason") or answer.get("status") or ""
    return turn_of(_objects(answer.get("output")), names, str(stop), responses_usage(answer.get("usage")))


def _objects(value: Any) -> list[Json]:
    return [dict(entry) for entry in value or () if isinstance(entry, Mapping)]


def turn_of(output: Sequence[Json], names: NameTable, stop: str, usage: Usage | None = None) -> Turn:
    """Returns the turn of a response's output items."""
    entries = [item for item in output if item.get("type") == "function_call"]
    calls = [
        model_call(
            names,
            str(item.get("call_id") or item.get("id") or f"call_{place}"),
            str(item["name"]),
            arguments_text(item.get("arguments")),
        )
        for place, item in enumerate(output)
        if item.get("type") == "function_call" and item.get("name")
    ]
    contents = [item.get("content") for item in output if item.get("type") == "message"]
    text, refusal = "".join(map(_text, contents)), "".join(map(_refusal, contents))
    reasoning = [item for item in output if item.get("type") == "reasoning"]
    end = read_end(
        RESPONSES_ENDINGS,
        stop,
        text=text,
        calls=unique_calls(calls),
        nameless=len(entries) > len(calls),
        other=len(output) > len(contents) + len(entries) + len(reasoning),
    )
    return Turn(
        text=text,
        calls=end.calls,
        reasoning="\n\n".join(filter(None, (_text(item.get("content") or item.get("summary")) for item in reasoning))),
        dialect=NAME,
        raw=tuple(output),
        stop=stop,
        ending="refused" if refusal else end.ending,
        reason=refusal or end.reason,
        usage=usage,
        retry=end.retry and not refusal,
    )


def _text(content: Any) -> str:
    """Returns the text of content, which is a text or a list of parts, refusals among them."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in _objects(content))


def _refusal(content: Any) -> str:
    """Returns the text with which the model refuses to answer; "" if it does not."""
    return "" if isinstance(content, str) else "".join(str(part.get("refusal") or "") for part in _objects(content))


class ResponseStream(TurnStream):
    """Assembles output items. Each is announced, filled by deltas and sent whole; the last event repeats them all."""

    end_mark = "response.completed or response.incomplete"

    def __init__(self, names: NameTable) -> None:
        super().__init__()
        self._names = names
        self._items: dict[Hashable, Json] = {}  # received parts of output items, by their place in the answer
        self._reasoning: list[str] = []
        self._response: Mapping[str, Any] | None = None  # the response in the last event; None until then
        self._take: dict[str, Callable[[Mapping[str, Any]], list[Delta]]] = {
            "response.output_item.added": self._item,
            "response.output_item.done": self._item,
            "response.output_text.delta": self._text_delta,
            "response.refusal.delta": self._text_delta,
            "response.reasoning_text.delta": self._reasoning_delta,
            "response.reasoning_summary_text.delta": self._reasoning_delta,
            "response.function_call_arguments.delta": self._arguments,
            "response.function_call_arguments.done": self._arguments,
            "response.completed": self._ended,
            "response.incomplete": self._ended,
            "response.cancelled": self._ended,
            "response.failed": self._failed,
            "error": self._failed,
        }

    def read(self, event: Any) -> list[Delta]:
        event = as_mapping(event)
        if event.get("error"):
            return self._failed(event)
        take = self._take.get(str(event.get("type")))
        return [] if take is None else take(event)

    @property
    def complete(self) -> bool:
        return self._response is not None

    def finish(self) -> Turn:
        response = self._response or {}  # some servers end with an empty response
        output = response.get("output") or list(self._items.values())
        turn = read_answer({**response, "output": output}, self._names)
        return turn if turn.reasoning else replace(turn, reasoning="".join(self._reasoning))

    def _item_of(self, event: Mapping[str, Any], default: Json) -> Json:
        """Returns the item that an event is about, created from the default if the server did not announce it."""
        place = event.get("output_index", event.get("item_id"))
        if place not in self._items:
            item_id = {"id": event["item_id"]} if event.get("item_id") else {}
            self._items[place] = default | item_id
        return self._items[place]

    def _item(self, event: Mapping[str, Any]) -> list[Delta]:
        item = dict(event.get("item") or {})
        self._items[event.get("output_index", item.get("id", len(self._items)))] = item
        return []

    def _text_delta(self, event: Mapping[str, Any]) -> list[Delta]:
        delta = str(event.get("delta") or "")
        item = self._item_of(event, {"type": "message", "role": "assistant", "status": "incomplete"})
        kind, key = ("refusal", "refusal") if event.get("type") == "response.refusal.delta" else ("output_text", "text")
        content = item["content"] = _objects(item.get("content"))
        if not content or content[-1].get("type") != kind:
            content.append({"type": kind, key: ""} | ({"annotations": []} if kind == "output_text" else {}))
        content[-1][key] += delta
        return [Delta("text", delta)]

    def _reasoning_delta(self, event: Mapping[str, Any]) -> list[Delta]:
        delta = str(event.get("delta") or "")
        self._reasoning.append(delta)
        return [Delta("reasoning", delta)]

    def _arguments(self, event: Mapping[str, Any]) -> list[Delta]:
        item = self._item_of(event, {"type": "function_call"})
        item["name"] = item.get("name") or event.get("name")
        if "delta" in event:
            item["arguments"] = arguments_text(item.get("arguments")) + arguments_text(event["delta"])
        else:
            item["arguments"] = event.get("arguments")
        return []

    def _ended(self, event: Mapping[str, Any]) -> list[Delta]:
        self._response = event.get("response") or {}
        return []

    def _failed(self, event: Mapping[str, Any]) -> list[Delta]:
        response = event.get("response")
        if isinstance(response, Mapping) and not response.get("error"):
            return self._ended(event)
        raise EndpointError.of(response or event)
