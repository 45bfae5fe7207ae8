from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.parts.models.dialects.sample_tools import SAMPLES
from tests.support.providers import OfficialType
from toolbus.parts.models.dialects.conversation import Answered, Answers, Delta, Json, Turn
from toolbus.parts.models.dialects.openai_chat import OpenAIChat
from toolbus.parts.models.dialects.wire_names import NameTable
from toolbus.protocol.tool import Result

CHAT = OpenAIChat()


EXPORT = CHAT.export(SAMPLES)


NAMES = EXPORT.names


PARIS = '{"city":"Paris"}'


REASONING = ("reasoning", "reasoning_content")


SUNNY = Result(output_json='"sunny"')


def sdk_type(name: str, **options: bool) -> OfficialType:
    return OfficialType("openai.types.chat", name, **options)


ASSISTANT = sdk_type("ChatCompletionAssistantMessageParam", closed=True)


CALLS = sdk_type("ChatCompletionMessageFunctionToolCallParam", many=True)


MESSAGES = sdk_type("ChatCompletionMessageParam", many=True)


def entry(index: int | None = None, call_id: str | None = None, name: str | None = None, arguments: Any = None) -> Json:
    """Returns an element of tool_calls; what is None is left out."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    outer = {key: value for key, value in (("index", index), ("id", call_id)) if value is not None}
    return outer | ({"function": function} if function else {})


def chunk(finish_reason: str | None = None, **delta: Any) -> Json:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }


def streamed(*events: Any, names: NameTable = NAMES) -> tuple[Turn, list[Delta]]:
    stream = CHAT.stream(names)
    deltas = [delta for event in events for delta in stream.feed(event)]
    return stream.finish(), deltas


def answer(message: Json, finish_reason: str = "stop") -> Json:
    return {"choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}]}


def official(message: Json) -> Json:
    """Returns a message without what only other servers know."""
    unknown = (*REASONING, "name") if message["role"] == "tool" else REASONING
    return {key: value for key, value in message.items() if key not in unknown}


def paired(messages: Sequence[Json]) -> list[tuple[str, str]]:
    """Checks that each assistant message is followed by one answer for each of its calls, in their order.

    Returns id and text of the answers.
    """
    MESSAGES.validate_python([official(message) for message in messages])
    pairs, pending, seen = [], list[str](), set[str]()
    for message in messages:
        if message["role"] == "tool":
            assert message["tool_call_id"] == pending.pop(0)
            pairs.append((message["tool_call_id"], message["content"]))
            continue
        assert not pending
        pending = [call["id"] for call in CALLS.validate_python(message.get("tool_calls", []))]
        assert not seen.intersection(pending)
        assert len(set(pending)) == len(pending)
        seen.update(pending)
    assert not pending
    return pairs


def turn_of(*calls: Json, **message: Any) -> Turn:
    return CHAT.parse(answer({"content": None, "tool_calls": list(calls), **message}, "tool_calls"), NAMES)


def answered(turn: Turn, *results: Result) -> Answers:
    return Answers(tuple(Answered(call, result) for call, result in zip(turn.calls, results, strict=True)))
