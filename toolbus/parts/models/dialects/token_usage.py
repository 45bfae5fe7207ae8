"""Reads the tokens of a request and its answer from each provider's fields.

Providers count differently: Anthropic's input does not include cached tokens, Gemini's output does not include
reasoning. `Usage` always includes both.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from toolbus.parts.models.dialects.conversation import Usage, add_counts
from toolbus.parts.models.dialects.export import Export


class _UsageReader:
    """Reads the usage of one provider; None if it is missing.

    Args:
        fields: of the input, the output, cached tokens and reasoning. ``+`` adds fields, ``|`` takes the first that has
            a count, ``.`` looks into an object.
    """

    def __init__(self, *fields: str) -> None:
        self._fields = [[each.split("|") for each in field.replace(" ", "").split("+")] for field in fields]

    def __call__(self, usage: Any) -> Usage | None:
        if not isinstance(usage, Mapping):
            return None
        given, written, cached, reasoning = (self._sum(usage, field) for field in self._fields)
        if given is None and written is None:
            return None
        return Usage(given or 0, written or 0, cached, reasoning)

    @staticmethod
    def _sum(usage: Mapping[str, Any], field: list[list[str]]) -> int | None:
        counts = [next((count for path in each if (count := _count(usage, path)) is not None), None) for each in field]
        return functools.reduce(add_counts, counts)


def _count(usage: Any, path: str) -> int | None:
    """Returns a count; None for any other value."""
    for key in path.split("."):
        usage = usage.get(key) if isinstance(usage, Mapping) else None
    return usage if isinstance(usage, int) and not isinstance(usage, bool) and usage >= 0 else None


chat_usage = _UsageReader(
    "prompt_tokens",
    "completion_tokens",
    # DeepSeek's key, and Moonshot's, are of before there were details
    "prompt_tokens_details.cached_tokens | prompt_cache_hit_tokens | cached_tokens",
    "completion_tokens_details.reasoning_tokens",
)
responses_usage = _UsageReader(  # of realtime sessions too
    "input_tokens",
    "output_tokens",
    "input_tokens_details.cached_tokens | input_token_details.cached_tokens",
    "output_tokens_details.reasoning_tokens",
)
anthropic_usage = _UsageReader(
    "input_tokens + cache_creation_input_tokens + cache_read_input_tokens",
    "output_tokens",
    "cache_read_input_tokens",
    "output_tokens_details.thinking_tokens",
)
gemini_usage = _UsageReader(  # with the keys of its SDK
    "prompt_token_count + tool_use_prompt_token_count",
    "candidates_token_count | response_token_count + thoughts_token_count",
    "cached_content_token_count",
    "thoughts_token_count",
)
ollama_usage = _UsageReader("prompt_eval_count", "eval_count", "prompt_eval_cached_count", "")


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
