"""Reads the tokens of a request and its answer from each provider's fields.

Providers count differently: Anthropic's input does not include cached tokens, Gemini's output does not include
reasoning. `Usage` always includes both.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from toolbus.parts.models.dialects.conversation import Usage, add_counts
from toolbus.parts.models.dialects.export import Export


def chat_usage(usage: Any) -> Usage | None:
    """Reads usage of chat completions; None if it is missing."""
    if not isinstance(usage, Mapping):
        return None
    # `details`; before them DeepSeek's key, and Moonshot's
    cached = (_detail(usage, "prompt_tokens_details", "cached_tokens"), usage.get("prompt_cache_hit_tokens"))
    return _usage(
        usage.get("prompt_tokens"),
        usage.get("completion_tokens"),
        _first(*cached, usage.get("cached_tokens")),
        _detail(usage, "completion_tokens_details", "reasoning_tokens"),
    )


def responses_usage(usage: Any) -> Usage | None:
    """Reads usage of Responses and of realtime sessions; None if it is missing."""
    if not isinstance(usage, Mapping):
        return None
    cached = (_detail(usage, f"input_{each}_details", "cached_tokens") for each in ("tokens", "token"))
    return _usage(
        usage.get("input_tokens"),
        usage.get("output_tokens"),
        _first(*cached),
        _detail(usage, "output_tokens_details", "reasoning_tokens"),
    )


def anthropic_usage(usage: Any) -> Usage | None:
    """Reads usage of Messages; None if it is missing."""
    if not isinstance(usage, Mapping):
        return None
    counts = [_count(usage.get(key)) for key in ("input_tokens", "cache_creation_input_tokens")]
    cached = _count(usage.get("cache_read_input_tokens"))
    given = [count for count in (*counts, cached) if count is not None]
    return _usage(
        sum(given) if given else None,
        usage.get("output_tokens"),
        cached,
        _detail(usage, "output_tokens_details", "thinking_tokens"),
    )


def gemini_usage(usage: Any) -> Usage | None:
    """Reads the usage metadata of Gemini, with the SDK's keys; None if it is missing."""
    if not isinstance(usage, Mapping):
        return None
    thoughts = _count(usage.get("thoughts_token_count"))
    output = _count(_first(usage.get("candidates_token_count"), usage.get("response_token_count")))
    prompt = add_counts(_count(usage.get("prompt_token_count")), _count(usage.get("tool_use_prompt_token_count")))
    return _usage(prompt, add_counts(output, thoughts), usage.get("cached_content_token_count"), thoughts)


def ollama_usage(answer: Mapping[str, Any]) -> Usage | None:
    """Reads the counts of Ollama's last chunk; None if they are missing."""
    return _usage(
        answer.get("prompt_eval_count"), answer.get("eval_count"), answer.get("prompt_eval_cached_count"), None
    )


def _usage(input_tokens: Any, output_tokens: Any, cached: Any, reasoning: Any) -> Usage | None:
    given, written = _count(input_tokens), _count(output_tokens)
    if given is None and written is None:
        return None
    return Usage(given or 0, written or 0, _count(cached), _count(reasoning))


def _count(value: Any) -> int | None:
    """Returns a count; None for any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _detail(usage: Mapping[str, Any], key: str, name: str) -> Any:
    details = usage.get(key)
    return details.get(name) if isinstance(details, Mapping) else None


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


# Every provider has its own tokenizer, and most of them have to be downloaded. An estimate serves to compare tools
# and to keep within a budget, not to check a bill.

# Ideographs, kana, hangul and their full-width punctuation.
_CJK = re.compile(
    r"[\u1100-\u11ff\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]"
)
_OTHER = re.compile(r"[^\x00-\x7f]")
_ASCII_PER_TOKEN = 4.0
_TOKENS_PER_CJK = 0.9
_TOKENS_PER_OTHER = 0.6


def estimate_tokens(value: Export | Any) -> int:
    """Estimates the tokens of an export's tools, of any JSON value, or of a text.

    A token for 4 ASCII characters of compact JSON, 0.9 tokens for a CJK character, 0.6 for any other. These are rules
    of thumb: expect an error of a third in either direction, since tokenizers differ among themselves by that much, and
    a provider may rewrite tools before its model sees them.
    """
    if isinstance(value, Export):
        return sum(costs(value).values())
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if text.isascii():  # as most are: the two searches would take as long as serializing it took
        return math.ceil(len(text) / _ASCII_PER_TOKEN)
    cjk = len(_CJK.findall(text))
    other = len(_OTHER.findall(text)) - cjk
    tokens = (len(text) - cjk - other) / _ASCII_PER_TOKEN + cjk * _TOKENS_PER_CJK + other * _TOKENS_PER_OTHER
    return math.ceil(tokens)


def costs(export: Export) -> dict[str, int]:
    """Returns the tokens of each exported tool, by its name on the bus, in the order of the export."""
    return {name: estimate_tokens(tool) for name, tool in zip(export.names.to_wire, export.tools, strict=True)}
