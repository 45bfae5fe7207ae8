"""Tells how an answer ended: one table for each dialect, from the provider's stop reason to an `Ending`.

Stop reasons are compared in lower case. One that is in no table counts as complete if the answer has text or calls, and
as failed if it has neither: a new word of a provider is never a silent, empty answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from toolbus.common.text import is_json_object
from toolbus.parts.models.dialects.conversation import Ending, Json, ModelCall, Turn, Usage

Endings = Mapping[str, Ending]

# OpenAI's reference, and words of other servers with the same API, which the comments name.
OPENAI_CHAT_ENDINGS: Endings = {
    "stop": "complete",
    "tool_calls": "complete",
    "function_call": "complete",
    "end_turn": "complete",  # xAI, gateways to Anthropic
    "tool_use": "complete",  # gateways to Anthropic
    "stop_sequence": "complete",  # text-generation-inference, gateways to Anthropic
    "eos": "complete",  # Together
    "eos_token": "complete",  # text-generation-inference
    "length": "cut",
    "max_tokens": "cut",  # gateways
    "model_length": "cut",  # Mistral
    "model_context_window_exceeded": "cut",  # GLM, gateways to Anthropic
    "content_filter": "refused",
    "refusal": "refused",  # gateways to Anthropic
    "sensitive": "refused",  # GLM
    "safety": "refused",  # gateways to Gemini, with the next three
    "recitation": "refused",
    "prohibited_content": "refused",
    "blocklist": "refused",
    "malformed_function_call": "failed",  # Gemini, as "function_call_filter: MALFORMED_FUNCTION_CALL"
    "unexpected_tool_call": "failed",  # Gemini
    "malformed_response": "failed",  # Gemini
    "error": "failed",  # Mistral, OpenRouter, vLLM
    "abort": "failed",  # vLLM, SGLang
    "aborted": "failed",  # DeepSeek
    "insufficient_system_resource": "failed",  # DeepSeek
    "network_error": "failed",  # GLM
    "repetition": "failed",  # vLLM: the model repeated itself without end
    "repetition_truncation": "failed",  # MiMo: the same
    "pause_turn": "paused",  # gateways to Anthropic
}

# The `status` of a response, and the reason in its `incomplete_details`.
RESPONSES_ENDINGS: Endings = {
    "completed": "complete",
    "incomplete": "cut",
    "max_output_tokens": "cut",
    "max_tokens": "cut",  # servers other than OpenAI
    "max_messages": "cut",
    "steered": "cut",
    "content_filter": "refused",
    "failed": "failed",
    "cancelled": "failed",
    "queued": "failed",  # background=True: the answer does not exist yet
    "in_progress": "failed",
}

# anthropic.types.StopReason, and one more of its beta.
ANTHROPIC_ENDINGS: Endings = {
    "end_turn": "complete",
    "stop_sequence": "complete",
    "tool_use": "complete",
    "max_tokens": "cut",
    "model_context_window_exceeded": "cut",
    "refusal": "refused",
    "pause_turn": "paused",
    "compaction": "paused",
}

# google.genai.types.FinishReason.
GEMINI_ENDINGS: Endings = {
    "stop": "complete",
    "max_tokens": "cut",
    "continuation": "cut",
    "safety": "refused",
    "recitation": "refused",
    "language": "refused",
    "blocklist": "refused",
    "prohibited_content": "refused",
    "spii": "refused",
    "image_safety": "refused",
    "image_prohibited_content": "refused",
    "image_recitation": "refused",
    "escalation": "refused",
    "pup_limited_disabled": "refused",
    "model_armor": "refused",
    "other": "failed",
    "image_other": "failed",
    "no_image": "failed",
    "malformed_function_call": "failed",
    "unexpected_tool_call": "failed",
    "malformed_response": "failed",
    "too_many_tool_calls": "failed",
    "missing_thought_signature": "failed",
}

# `done_reason`; load and unload answer a request without messages.
OLLAMA_ENDINGS: Endings = {"stop": "complete", "length": "cut", "load": "failed", "unload": "failed"}

# Realtime sessions: the status of a response, and the reason in its `status_details`.
REALTIME_ENDINGS: Endings = {
    "completed": "complete",
    "incomplete": "cut",
    "max_output_tokens": "cut",
    "cancelled": "cut",
    "turn_detected": "cut",  # the user interrupted
    "client_cancelled": "cut",
    "content_filter": "refused",
    "failed": "failed",
}

# Gemini Live: google.genai.types.TurnCompleteReason; every other word of it is a refusal.
LIVE_ENDINGS: Endings = {
    "": "complete",
    "turn_complete_reason_unspecified": "complete",
    "need_more_input": "complete",
    "interrupted": "cut",
    "malformed_function_call": "failed",
    "max_regeneration_reached": "failed",
}

# The model wrote something that its provider could not read. The same request usually succeeds the second time.
_PASSING = frozenset(("malformed_function_call", "unexpected_tool_call", "malformed_response"))

NAMELESS = "the model wrote a call without the name of a tool"
EMPTY = "the answer is empty"


def ended_turn(
    endings: Endings,
    stop: str,
    *,
    dialect: str,
    raw: tuple[Json, ...],
    text: str,
    reasoning: str = "",
    calls: tuple[ModelCall, ...] = (),
    usage: Usage | None = None,
    reason: str = "",
    refusal: str = "",
    nameless: bool = False,
    other: bool = False,
    retry_empty: bool = True,
) -> Turn:
    """Returns a turn, with how it ended.

    Args:
        reason: the provider's details in addition to the stop reason.
        refusal: why the provider or the model refused to answer, whatever the stop reason says; "" if they did not.
        nameless: whether the answer had calls without a name, which are not in `calls`.
        other: whether the answer has other parts than text, calls and reasoning: an image, a search of the provider.
        retry_empty: whether an empty answer without a reason is worth a second request.
    """
    word = stop.lower()
    ending = endings.get(word)
    if ending is None and ": " in word:  # Gemini's endpoint for OpenAI's format writes "filter: REASON"
        word = word.rpartition(": ")[2]
        ending = endings.get(word)
    is_empty = not text.strip() and not calls and not other
    if ending is None:
        ending = "failed" if stop and is_empty else "complete"
    retry = word in _PASSING
    if nameless:
        reason = list_parts(reason, NAMELESS)
        if not calls and ending == "complete":
            ending, retry = "failed", True
    elif is_empty and ending == "complete":
        reason, retry = reason or EMPTY, retry_empty
    if ending == "cut" and calls:
        last = calls[-1]
        calls = (*calls[:-1], replace(last, whole=last.whole and is_json_object(last.arguments_json)))
    if refusal:
        ending, reason, retry = "refused", refusal, False
    return Turn(text, calls, reasoning, dialect, raw, stop, ending, reason, usage, retry)


def end_text(turn: Turn) -> str:
    """Returns why a turn ended, for people: the stop reason and the provider's details."""
    return ": ".join(filter(None, (turn.stop, turn.reason)))


def list_parts(*parts: object) -> str:
    """Returns the parts of an explanation that are not empty, as one text."""
    return ", ".join(str(part) for part in parts if part)
