"""Lists answers of providers as they may arrive: what is read of each, how it ended, and what goes back.

They were written down after what providers document, their SDKs declare and users of compatible servers report, with
ids of our own; none was captured from a provider.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolbus.parts.models.dialects.conversation import Usage

Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """An answer, and what is expected of it.

    Attributes:
        name: a sentence.
        events: of a stream, or the one whole answer.
        calls: names on the bus and arguments; a call that must not be made has "…" behind its arguments.
        stop, reason: as in `Turn`; of the reason only a part.
        back: keys of the assistant's message that goes back; None where this is not of interest.
    """

    dialect: str
    name: str
    events: Sequence[Json]
    ending: str
    stop: str = ""
    text: str = ""
    calls: Sequence[tuple[str, str]] = ()
    reason: str = ""
    retry: bool = False
    usage: Usage | None = None
    back: Json | None = None
    streamed: bool = True


# -- OpenAI's chat completions ---------------------------------------------------------------------------------------


def delta(stop: str | None = None, **fields: Any) -> Json:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": stop}]}


def piece(name: str | None = None, arguments: str | None = None, index: int | None = 0, call_id: str = "") -> Json:
    """Returns a piece of a call."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    place = {} if index is None else {"index": index}
    return {**place, **({"id": call_id} if call_id else {}), "function": function}


def calling(*pieces: Json, stop: str = "tool_calls") -> list[Json]:
    """Returns a stream that holds one piece of a call in each chunk."""
    return [*(delta(tool_calls=[each]) for each in pieces), delta(stop)]


def chat(stop: str, content: str | None = None, usage: Json | None = None, **message: Any) -> list[Json]:
    """Returns a whole answer."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": stop}
    return [{"choices": [choice], **({"usage": usage} if usage else {})}]


def chat_call(name: str, arguments: str, call_id: str = "c1") -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


BERN = '{"city": "Bern"}'
WEATHER = ("get_weather", BERN)

OPENAI: list[Case] = [
    Case("openai", "text", [delta(content="Hi"), delta("stop")], "complete", "stop", "Hi"),
    Case("openai", "no stop reason", [delta(content="Hi")], "complete", "", "Hi"),
    Case("openai", "unknown word and text", [delta(content="Hi"), delta("done_ok")], "complete", "done_ok", "Hi"),
    Case("openai", "unknown word, no text", [delta("strange")], "failed", "strange"),
    Case("openai", "empty", [delta(content=""), delta("stop")], "complete", "stop", reason="empty", retry=True),
    Case("openai", "reasoning only", [delta(reasoning="Hm"), delta("stop")], "complete", "stop", retry=True),
    Case("openai", "cut text", [delta(content="Hi"), delta("length")], "cut", "length", "Hi"),
    Case("openai", "cut before any text", [delta(reasoning="Hm"), delta("length")], "cut", "length"),
    Case(
        "openai", "Mistral's context is full", [delta(content="Hi"), delta("model_length")], "cut", "model_length", "Hi"
    ),
    Case("openai", "filter", [delta(content=""), delta("content_filter")], "refused", "content_filter"),
    Case(
        "openai",
        "filter behind text",
        [delta(content="Hi"), delta("content_filter")],
        "refused",
        "content_filter",
        "Hi",
    ),
    Case(
        *("openai", "filter of Azure"),
        [
            {
                "choices": [
                    {
                        "delta": {},
                        "finish_reason": "content_filter",
                        "content_filter_results": {"hate": {"filtered": False}, "violence": {"filtered": True}},
                    }
                ]
            }
        ],
        *("refused", "content_filter"),
        reason="violence",
    ),
    Case(
        "openai", "blanks", [delta(content=" \n"), delta("stop")], "complete", "stop", " \n", reason="empty", retry=True
    ),
    Case("openai", "GLM's filter", [delta("sensitive")], "refused", "sensitive"),
    Case(
        *("openai", "refusal", [delta(refusal="I can"), delta(refusal="not"), delta("stop")], "refused", "stop"),
        text="I cannot",
        reason="I cannot",
        back={"refusal": "I cannot", "content": None},
    ),
    Case("openai", "error of OpenRouter", [delta(content="Hi"), delta("error")], "failed", "error", "Hi"),
    Case("openai", "vLLM aborted", [delta("abort")], "failed", "abort"),
    Case(
        "openai", "vLLM saw repetition", [delta(content="la la"), delta("repetition")], "failed", "repetition", "la la"
    ),
    Case("openai", "MiMo saw repetition", [delta("repetition_truncation")], "failed", "repetition_truncation"),
    Case(
        "openai", "DeepSeek is full", [delta("insufficient_system_resource")], "failed", "insufficient_system_resource"
    ),
    Case("openai", "GLM lost its network", [delta("network_error")], "failed", "network_error"),
    Case(
        *("openai", "Gemini could not read a call", [delta("function_call_filter: MALFORMED_FUNCTION_CALL")], "failed"),
        stop="function_call_filter: MALFORMED_FUNCTION_CALL",
        retry=True,
    ),
    Case(
        *("openai", "filter cuts a call", calling(piece("get_weather", '{"ci', 0, "c1"), stop="content_filter")),
        "refused",
        "content_filter",
        calls=[("get_weather", '{"ci')],
    ),
    Case(
        *(
            "openai",
            "cut in the arguments",
            calling(piece("get_weather", '{"ci', 0, "c1"), stop="length"),
            "cut",
            "length",
        ),
        calls=[("get_weather", '{"ci…')],
    ),
    Case(
        *(
            "openai",
            "cut before the arguments",
            calling(piece("get_weather", "", 0, "c1"), stop="length"),
            "cut",
            "length",
        ),
        calls=[("get_weather", "…")],
    ),
    Case(
        *("openai", "cut in the second call"),
        calling(piece("now", "{}", 0, "c1"), piece("get_weather", '{"', 1, "c2"), stop="length"),
        "cut",
        "length",
        calls=[("now", "{}"), ("get_weather", '{"…')],
    ),
    Case(
        *(
            "openai",
            "cut behind a whole call",
            calling(piece("get_weather", BERN, 0, "c1"), stop="length"),
            "cut",
            "length",
        ),
        calls=[WEATHER],
    ),
    Case(
        *("openai", "nameless", calling(piece(None, BERN, 0, "c1")), "failed", "tool_calls"),
        reason="without the name",
        retry=True,
    ),
    Case(
        *(
            "openai",
            "nameless behind text",
            [delta(content="Let me see"), *calling(piece("", BERN, 0, "c1"))],
            "failed",
        ),
        stop="tool_calls",
        text="Let me see",
        reason="without the name",
        retry=True,
    ),
    Case(
        *(
            "openai",
            "nameless beside another",
            calling(piece("get_weather", BERN, 0, "c1"), piece(None, "{}", 1, "c2")),
        ),
        "complete",
        "tool_calls",
        calls=[WEATHER],
        reason="without the name",
        back={"content": "", "tool_calls": [chat_call("get_weather", BERN)]},
    ),
    Case(
        *("openai", "whole nameless", chat("tool_calls", tool_calls=[chat_call("", "{}")]), "failed", "tool_calls"),
        reason="without the name",
        retry=True,
        streamed=False,
    ),
    Case(
        *(
            "openai",
            "null beside calls",
            chat("tool_calls", tool_calls=[chat_call(*WEATHER)]),
            "complete",
            "tool_calls",
        ),
        calls=[WEATHER],
        back={"content": "", "tool_calls": [chat_call("get_weather", BERN)]},
        streamed=False,
    ),
    Case(
        *("openai", "whole refusal", chat("stop", refusal="No."), "refused", "stop", "No."),
        reason="No.",
        back={"content": None, "refusal": "No."},
        streamed=False,
    ),
    Case(
        *("openai", "spoken answer", chat("stop", audio={"id": "a1", "transcript": "Hi"}), "complete", "stop"),
        streamed=False,
    ),
    Case(
        *("openai", "usage, whole"),
        chat(
            "stop",
            "Hi",
            {
                "prompt_tokens": 12,
                "completion_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 8},
                "completion_tokens_details": {"reasoning_tokens": 5},
            },
        ),
        *("complete", "stop", "Hi"),
        usage=Usage(12, 7, 8, 5),
        streamed=False,
    ),
    Case(
        *("openai", "usage behind the end, without choices"),
        [delta(content="Hi"), delta("stop"), {"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 1}}],
        *("complete", "stop", "Hi"),
        usage=Usage(12, 1),
    ),
    Case(
        *("openai", "usage in every chunk, the last counts"),
        [
            {**delta(content="Hi"), "usage": {"prompt_tokens": 12, "completion_tokens": 1}},
            {**delta("stop"), "usage": {"prompt_tokens": 12, "completion_tokens": 2, "prompt_cache_hit_tokens": 4}},
        ],
        *("complete", "stop", "Hi"),
        usage=Usage(12, 2, 4),
    ),
    Case(
        *("openai", "usage in the choice"),
        [
            delta(content="Hi"),
            {"choices": [{"finish_reason": "stop", "usage": {"prompt_tokens": 3, "cached_tokens": 2}}]},
        ],
        *("complete", "stop", "Hi"),
        usage=Usage(3, 0, 2),
    ),
    Case("openai", "usage is null", [{**delta("stop", content="Hi"), "usage": None}], "complete", "stop", "Hi"),
]


# How servers stream a name: the pieces, and the calls that they are.
NAMES: dict[str, tuple[list[Json], list[tuple[str, str]]]] = {
    "once": ([piece("get_weather", "", 0, "c1"), piece(None, BERN)], [WEATHER]),
    "in every chunk": ([piece("get_weather", '{"city":', 0, "c1"), piece("get_weather", ' "Bern"}')], [WEATHER]),
    "in every chunk, invented": (
        [piece("find_it", '{"a":', 0, "c1"), piece("find_it", "1}")],
        [("find_it", '{"a":1}')],
    ),
    "in pieces": ([piece("get_", "", 0, "c1"), piece("weather"), piece(None, BERN)], [WEATHER]),
    "in letters": ([*(piece(letter, None, 0, "c1") for letter in "get_weather"), piece(None, BERN)], [WEATHER]),
    "in pieces, invented": ([piece("find_", "", 0, "c1"), piece("it"), piece(None, "{}")], [("find_it", "{}")]),
    "in equal pieces": ([piece("get_", "", 0, "c1"), piece("get_"), piece("x", "{}")], [("get_get_x", "{}")]),
    "all of it so far": ([piece("get_", "", 0, "c1"), piece("get_weather"), piece(None, BERN)], [WEATHER]),
    "its end again": ([piece("get_weather", "", 0, "c1"), piece("weather", BERN)], [WEATHER]),
    "empty later": ([piece("get_weather", "", 0, "c1"), piece("", BERN)], [WEATHER]),
    "in pieces without numbers": (
        [piece("get_", "", None), piece("weather", "", None), piece(None, BERN, None)],
        [WEATHER],
    ),
    "two calls without numbers": (
        [piece("now", "{}", None), piece("get_weather", BERN, None)],
        [("now", "{}"), WEATHER],
    ),
    "two calls without arguments": ([piece("now", "", None), piece("get_weather", BERN, None)], [("now", ""), WEATHER]),
    "two calls, all numbered 0": (
        [piece("now", "", 0, "c1"), piece("get_weather", BERN, 0, "c2")],
        [("now", ""), WEATHER],
    ),
    "another id in every chunk": (
        [piece("get_weather", '{"city":', 0, "c1"), piece("get_weather", ' "Bern"}', 0, "c2")],
        [WEATHER],
    ),
}
OPENAI += [
    Case("openai", f"name {how}", calling(*pieces), "complete", "tool_calls", calls=calls)
    for how, (pieces, calls) in NAMES.items()
]


# -- OpenAI's Responses ----------------------------------------------------------------------------------------------


def says(text: str) -> Json:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def response(status: str, *output: Json, event: str = "response.completed", **fields: Any) -> list[Json]:
    return [{"type": event, "response": {"status": status, "output": list(output), **fields}}]


def incomplete(reason: str | None, *output: Json) -> list[Json]:
    return response("incomplete", *output, event="response.incomplete", incomplete_details={"reason": reason})


def function_call(name: str | None, arguments: str) -> Json:
    return {"type": "function_call", "call_id": "c1", "name": name, "arguments": arguments}


RESPONSES: list[Case] = [
    Case("openai-responses", "text", response("completed", says("Hi")), "complete", "completed", "Hi"),
    Case("openai-responses", "empty", response("completed"), "complete", "completed", reason="empty", retry=True),
    Case("openai-responses", "cut", incomplete("max_output_tokens", says("Hi")), "cut", "max_output_tokens", "Hi"),
    Case("openai-responses", "filter", incomplete("content_filter"), "refused", "content_filter"),
    Case("openai-responses", "incomplete without a reason", incomplete(None, says("Hi")), "cut", "incomplete", "Hi"),
    Case("openai-responses", "new reason, no text", incomplete("tired"), "failed", "tired"),
    Case("openai-responses", "cancelled", response("cancelled", event="response.cancelled"), "failed", "cancelled"),
    Case("openai-responses", "failed", response("failed", event="response.failed"), "failed", "failed"),
    Case("openai-responses", "failed, whole", response("failed"), "failed", "failed", streamed=False),
    Case("openai-responses", "in the background", response("queued"), "failed", "queued", streamed=False),
    Case(
        *("openai-responses", "refusal"),
        response(
            "completed",
            {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
        ),
        *("refused", "completed", "I cannot."),
        reason="I cannot.",
    ),
    Case(
        *("openai-responses", "cut in a call", incomplete("max_output_tokens", function_call("get_weather", '{"ci'))),
        *("cut", "max_output_tokens"),
        calls=[("get_weather", '{"ci…')],
    ),
    Case(
        *("openai-responses", "nameless", response("completed", function_call(None, "{}")), "failed", "completed"),
        reason="without the name",
        retry=True,
    ),
    Case(
        *("openai-responses", "image", response("completed", {"type": "image_generation_call", "id": "i1"})),
        *("complete", "completed"),
    ),
    Case(
        *("openai-responses", "usage"),
        response(
            "completed",
            says("Hi"),
            usage={
                "input_tokens": 30,
                "output_tokens": 9,
                "input_tokens_details": {"cached_tokens": 20},
                "output_tokens_details": {"reasoning_tokens": 6},
            },
        ),
        *("complete", "completed", "Hi"),
        usage=Usage(30, 9, 20, 6),
    ),
]


# -- Anthropic -------------------------------------------------------------------------------------------------------


def blocks(stop: str, *content: Json, usage: Json | None = None, **ends: Any) -> list[Json]:
    """Returns a stream of blocks, each given with all its text or its input as text."""
    events: list[Json] = [{"type": "message_start", "message": {"usage": usage or {}}}]
    for index, block in enumerate(content):
        start = {**block, "input": {}} if "input" in block else {**block, "text": ""}
        kind = {"type": "input_json_delta", "partial_json": block["input"]} if "input" in block else None
        piece_ = kind or {"type": "text_delta", "text": block["text"]}
        events += [
            {"type": "content_block_start", "index": index, "content_block": start},
            {"type": "content_block_delta", "index": index, "delta": piece_},
            {"type": "content_block_stop", "index": index},
        ]
    ended = {"type": "message_delta", "delta": {"stop_reason": stop, **ends}, "usage": {"output_tokens": 9}}
    return [*events, ended, {"type": "message_stop"}]


def message(stop: str, *content: Json) -> list[Json]:
    return [{"type": "message", "role": "assistant", "content": list(content), "stop_reason": stop}]


def use(name: str, given: Any) -> Json:
    return {"type": "tool_use", "id": "c1", "name": name, "input": given}


HI = {"type": "text", "text": "Hi"}
SEARCH = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": '{"query": "Bern"}'}
NO_TOKENS = Usage(0, 9)

ANTHROPIC: list[Case] = [
    Case("anthropic", "text", blocks("end_turn", HI), "complete", "end_turn", "Hi", usage=NO_TOKENS),
    Case("anthropic", "stop sequence", blocks("stop_sequence", HI), "complete", "stop_sequence", "Hi", usage=NO_TOKENS),
    Case("anthropic", "empty comes again", blocks("end_turn"), "complete", "end_turn", reason="empty", usage=NO_TOKENS),
    Case("anthropic", "cut", blocks("max_tokens", HI), "cut", "max_tokens", "Hi", usage=NO_TOKENS),
    Case(
        *("anthropic", "full context", blocks("model_context_window_exceeded", HI), "cut"),
        *("model_context_window_exceeded", "Hi"),
        usage=NO_TOKENS,
    ),
    Case(
        *("anthropic", "refusal"),
        blocks("refusal", stop_details={"type": "refusal", "category": "bio", "explanation": "Not this."}),
        *("refused", "refusal"),
        reason="bio, Not this.",
        usage=NO_TOKENS,
    ),
    Case("anthropic", "refusal without details", message("refusal", HI), "refused", "refusal", "Hi", streamed=False),
    Case(
        *("anthropic", "pause", blocks("pause_turn", HI, SEARCH), "paused", "pause_turn", "Hi"),
        usage=NO_TOKENS,
        back={"content": [HI, {**SEARCH, "input": {"query": "Bern"}}]},
    ),
    Case(
        *(
            "anthropic",
            "cut in a call",
            blocks("max_tokens", HI, use("get_weather", '{"city": "B')),
            "cut",
            "max_tokens",
        ),
        text="Hi",
        calls=[("get_weather", '{"city": "B…')],
        usage=NO_TOKENS,
    ),
    Case(
        *("anthropic", "whole, cut in a call", message("max_tokens", use("get_weather", {})), "cut", "max_tokens"),
        calls=[("get_weather", "{}…")],
        streamed=False,
    ),
    Case(
        *("anthropic", "nameless", blocks("tool_use", use("", "{}")), "failed", "tool_use"),
        reason="without the name",
        retry=True,
        usage=NO_TOKENS,
    ),
    Case(
        *("anthropic", "usage with a cache"),
        blocks(
            "end_turn", HI, usage={"input_tokens": 5, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 3}
        ),
        *("complete", "end_turn", "Hi"),
        usage=Usage(98, 9, 90),
    ),
]


# -- Gemini ----------------------------------------------------------------------------------------------------------


def candidate(stop: str, *parts: Json, usage: Json | None = None, **fields: Any) -> list[Json]:
    content = {"content": {"role": "model", "parts": list(parts)}} if parts else {}
    answer: Json = {"candidates": [{**content, "finishReason": stop, **fields}]}
    return [{**answer, "usageMetadata": usage} if usage else answer]


GEMINI: list[Case] = [
    Case("gemini", "text", candidate("STOP", {"text": "Hi"}), "complete", "STOP", "Hi"),
    Case("gemini", "empty", candidate("STOP"), "complete", "STOP", reason="empty", retry=True),
    Case("gemini", "cut", candidate("MAX_TOKENS", {"text": "Hi"}), "cut", "MAX_TOKENS", "Hi"),
    Case("gemini", "new word, no text", candidate("BORED"), "failed", "BORED"),
    Case("gemini", "other", candidate("OTHER"), "failed", "OTHER"),
    Case(
        *("gemini", "safety"),
        candidate(
            "SAFETY",
            safetyRatings=[
                {"category": "HARM_CATEGORY_HARASSMENT", "probability": "HIGH", "blocked": True},
                {"category": "HARM_CATEGORY_HATE_SPEECH", "probability": "LOW"},
            ],
        ),
        *("refused", "SAFETY"),
        reason="HARM_CATEGORY_HARASSMENT",
    ),
    *(
        Case("gemini", stop.lower(), candidate(stop), "refused", stop)
        for stop in ("RECITATION", "LANGUAGE", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "IMAGE_SAFETY", "MODEL_ARMOR")
    ),
    *(
        Case("gemini", stop.lower(), candidate(stop), "failed", stop, retry=True)
        for stop in ("UNEXPECTED_TOOL_CALL", "MALFORMED_RESPONSE")
    ),
    *(
        Case("gemini", stop.lower(), candidate(stop), "failed", stop)
        for stop in ("TOO_MANY_TOOL_CALLS", "MISSING_THOUGHT_SIGNATURE", "NO_IMAGE")
    ),
    Case(
        *("gemini", "call that could not be read"),
        candidate("MALFORMED_FUNCTION_CALL", finishMessage="Malformed function call: print(x)"),
        *("failed", "MALFORMED_FUNCTION_CALL"),
        reason="print(x)",
        retry=True,
    ),
    Case(
        *("gemini", "blocked prompt", [{"promptFeedback": {"blockReason": "OTHER"}}], "refused", "OTHER"),
        reason="the prompt was blocked",
    ),
    Case(
        *("gemini", "nameless", candidate("STOP", {"functionCall": {"args": {}}}), "failed", "STOP"),
        reason="without the name",
        retry=True,
    ),
    Case(
        *("gemini", "picture", candidate("STOP", {"inlineData": {"mimeType": "image/png", "data": "eA=="}})),
        *("complete", "STOP"),
    ),
    Case(
        *("gemini", "usage over two chunks"),
        [
            {"candidates": [{"content": {"parts": [{"text": "H"}]}}], "usageMetadata": {"promptTokenCount": 10}},
            *candidate(
                "STOP",
                {"text": "i"},
                usage={
                    "promptTokenCount": 10,
                    "candidatesTokenCount": 4,
                    "thoughtsTokenCount": 6,
                    "cachedContentTokenCount": 7,
                    "toolUsePromptTokenCount": 2,
                },
            ),
        ],
        *("complete", "STOP", "Hi"),
        usage=Usage(12, 10, 7, 6),
    ),
]


# -- Ollama ----------------------------------------------------------------------------------------------------------


def done(reason: str | None, content: str = "", calls: Sequence[Json] = (), **counts: int) -> list[Json]:
    message_ = {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}
    return [{"message": message_, "done": True, "done_reason": reason, **counts}]


OLLAMA: list[Case] = [
    Case("ollama", "text", done("stop", "Hi"), "complete", "stop", "Hi"),
    Case("ollama", "no reason", done(None, "Hi"), "complete", "", "Hi"),
    Case("ollama", "empty", done("stop"), "complete", "stop", reason="empty", retry=True),
    Case("ollama", "cut", done("length", "Hi"), "cut", "length", "Hi"),
    Case("ollama", "only loaded", done("load"), "failed", "load"),
    Case("ollama", "only unloaded", done("unload"), "failed", "unload"),
    Case(
        *("ollama", "nameless", done("stop", calls=[{"function": {"name": "", "arguments": {}}}]), "failed", "stop"),
        reason="without the name",
        retry=True,
    ),
    Case(
        *("ollama", "usage", done("stop", "Hi", prompt_eval_count=20, eval_count=3, prompt_eval_cached_count=15)),
        *("complete", "stop", "Hi"),
        usage=Usage(20, 3, 15),
    ),
]

CASES = [*OPENAI, *RESPONSES, *ANTHROPIC, *GEMINI, *OLLAMA]
