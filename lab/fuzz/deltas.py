"""Puts answers together from any events that providers stream: each is a turn that can be sent and called from.

Events are valid ones of a provider in any order, cut and changed. An answer may break off or be refused in a sentence;
it may not break the program otherwise, show half of a character, or call what was never offered.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from lab.fuzz.choices import Choices
from lab.fuzz.target import Target, hold
from toolbus.dialects import Dialect, EndpointError, find_dialect
from toolbus.dialects.wire_names import NameTable

_FUNCTION = {"name": "echo", "arguments": '{"a":'}
EVENTS: dict[str, tuple[dict[str, Any], ...]] = {
    "openai": (
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hel"}}]},
        {"choices": [{"index": 0, "delta": {"content": "lo \ud83d"}}]},
        {"choices": [{"index": 0, "delta": {"content": "\ude00"}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": _FUNCTION}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}}]},
        {"choices": [{"delta": {"reasoning_content": "hm"}}]},
        {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}},
        {"error": {"message": "overloaded"}},
    ),
    "openai-responses": (
        {"type": "response.output_text.delta", "item_id": "m", "output_index": 0, "delta": "Hello"},
        {
            "type": "response.output_item.added",
            "output_index": 1,
            "item": {"type": "function_call", "id": "f", **_FUNCTION},
        },
        {"type": "response.function_call_arguments.delta", "item_id": "f", "output_index": 1, "delta": "1}"},
        {
            "type": "response.output_item.done",
            "output_index": 1,
            "item": {"type": "function_call", "call_id": "c", **_FUNCTION},
        },
        {
            "type": "response.completed",
            "response": {"status": "completed", "output": [{"type": "message", "content": []}]},
        },
        {"type": "response.failed", "response": {"error": {"message": "no"}}},
        {"type": "error", "message": "no"},
    ),
    "anthropic": (
        {"type": "message_start", "message": {"content": [], "usage": {"input_tokens": 3}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
        {
            "type": "content_block_start",
            "index": 1,
            "content_block": {"type": "tool_use", "id": "c", "name": "echo", "input": {}},
        },
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"a":1}'}},
        {"type": "content_block_stop", "index": 1},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 4}},
        {"type": "message_stop"},
        {"type": "error", "error": {"message": "overloaded"}},
    ),
    "gemini": (
        {"candidates": [{"content": {"role": "model", "parts": [{"text": "Hello"}]}}]},
        {"candidates": [{"content": {"parts": [{"functionCall": {"name": "echo", "args": {"a": 1}}}]}}]},
        {"candidates": [{"content": {"parts": [{"text": "hm", "thought": True}]}, "finishReason": "STOP"}]},
        {"promptFeedback": {"blockReason": "SAFETY"}},
        {"usageMetadata": {"promptTokenCount": 3}},
    ),
    "ollama": (
        {"message": {"role": "assistant", "content": "Hello"}, "done": False},
        {"message": {"content": "", "tool_calls": [{"function": {"name": "echo", "arguments": {"a": 1}}}]}},
        {"message": {"content": ""}, "done": True, "done_reason": "stop", "eval_count": 4},
        {"error": "model not found"},
    ),
}
NAMES = tuple(EVENTS)
ODD: dict[type, tuple[Any, ...]] = {  # what may stand where something of that type stood
    str: ("", "x", "\ud800", "echo", '{"a":', "no such word"),
    int: (0, 1, -1, 2**70),
    bool: (True, False),
    list: ([], None),
    dict: ({}, None),
}


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Returns every place in an event at which something else may stand: (container, key)."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [each for key in keys for each in ((value, key), *_places(value[key]))]


def _event(choose: Choices, events: tuple[dict[str, Any], ...]) -> Any:
    event = copy.deepcopy(choose.pick(events))
    change = choose.byte()
    if change % 4 == 3:
        container, key = choose.pick(_places(event))
        if change & 4:
            del container[key]
        else:
            container[key] = choose.pick(ODD[type(container[key])])
    return event


def run(data: bytes) -> None:
    """Puts an answer together."""
    choose = Choices(data)
    name = choose.pick(NAMES)
    dialect = find_dialect(name)
    hold(isinstance(dialect, Dialect), f"{name} has no answers")
    assert isinstance(dialect, Dialect)
    names = NameTable.build(["echo"], dialect.name_rule)
    stream = dialect.stream(names)
    try:
        while choose:
            for delta in stream.feed(_event(choose, EVENTS[name])):
                hold(_is_whole(delta.text), f"half of a character was shown: {delta.text!r}")
        turn = stream.finish()
    except EndpointError:
        return
    except TypeError as refusal:
        hold("is not an answer of a model" in str(refusal), f"a refusal without a sentence: {refusal!r}")
        return
    for call in turn.calls:
        texts: list[Any] = [call.id, call.name, call.arguments_json]
        hold(all(isinstance(each, str) for each in texts), f"{call!r} cannot be made")
        hold(call.known == (call.wire_name == "echo"), f"{call!r} was never offered")


def _is_whole(text: str) -> bool:
    return not any("\ud800" <= each <= "\udfff" for each in text)


def seeds() -> Iterator[bytes]:
    """Each provider's events in order, and each with something odd in it."""
    for number, events in enumerate(EVENTS.values()):
        yield bytes([number, *(value for event in range(len(events)) for value in (event, 0))])
        for event in range(len(events)):
            yield bytes([number, event, 3, 1, event, event, 7, 2])


TARGET = Target(
    "deltas",
    "any events of a provider become a turn or are refused, and only what was offered is called",
    run,
    seeds,
    256,
)
