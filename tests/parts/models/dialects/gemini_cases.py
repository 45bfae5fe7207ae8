from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tests.parts.models.dialects.sample_tools import SAMPLES
from tests.support.providers import genai_types
from toolbus.parts.models.dialects.conversation import Answered, Answers, Json, Message, ModelCall, Turn
from toolbus.parts.models.dialects.gemini import Gemini
from toolbus.parts.models.dialects.wire_names import GEMINI_NAMES, NameTable
from toolbus.protocol.tool import Result

DIALECT = Gemini()


NAMES = NameTable.build([tool.name for tool in SAMPLES], GEMINI_NAMES)


HELLO = Message("user", "hello")


SIGNED = b"\x00\xff\xfe signed"


SIGNATURE = base64.b64encode(SIGNED).decode()


def check_contents(contents: Iterable[Json]) -> None:
    """Holds contents against the official types, and the rules that those do not know."""
    open_calls: list[tuple[str, str | None]] = []
    role = "model"
    for content in contents:
        read = genai_types.Content.model_validate(content)
        assert {read.role, role} == {"user", "model"}, "roles alternate, the user begins"
        role = str(read.role)
        assert read.parts
        for part in read.parts:
            assert part.model_dump(exclude_none=True)
            assert part.text != "" or part.thought_signature
        answered = [part.function_response for part in read.parts if part.function_response]
        assert [(each.name, each.id) for each in answered] == open_calls, "each call has one response, in their order"
        assert all(isinstance(each.response, dict) for each in answered)
        kinds = [part.function_response is not None for part in read.parts]
        assert kinds == sorted(kinds, reverse=True), "responses stand before text"
        open_calls = [
            (str(part.function_call.name), part.function_call.id) for part in read.parts if part.function_call
        ]
        assert all(GEMINI_NAMES.accepts(name) for name, _ in open_calls)
    assert not open_calls
    json.dumps(contents)


def whole(*parts: Json, stop: str = "STOP") -> Json:
    return {"candidates": [{"content": {"role": "model", "parts": list(parts)}, "finishReason": stop}]}


def call_part(name: str = "get_weather", args: Json | None = None, **more: Any) -> Json:
    return {"functionCall": {"name": name, "args": {} if args is None else args, **more}}


def forms(answer: Json) -> list[Any]:
    """Returns an answer as REST gives it, and as an object of the SDK."""
    return [answer, genai_types.GenerateContentResponse.model_validate(answer)]


def parsed(answer: Json) -> Turn:
    """Returns the turn of an answer, and holds that the SDK's object makes the same but for ids that we make."""
    plain, of_sdk = (DIALECT.parse(form, NAMES) for form in forms(answer))
    ids = [call.id for call in plain.calls]
    same = tuple(replace(call, id=call_id) for call, call_id in zip(of_sdk.calls, ids, strict=True))
    assert replace(of_sdk, calls=same) == plain
    return plain


def call(name: str = "get_weather", call_id: str = "call_1", arguments_json: str = "{}", **extra: Any) -> ModelCall:
    return ModelCall(call_id, name, arguments_json, wire_name=NAMES.wire(name), extra=extra)


def answers(*pairs: tuple[ModelCall, Any]) -> Answers:
    return Answers(tuple(Answered(model_call, Result(output_json=json.dumps(output))) for model_call, output in pairs))
