"""Estimates from their text how many tokens tools cost a model.

Every provider has its own tokenizer, and most of them have to be downloaded. An estimate serves to compare tools and to
keep within a budget, not to check a bill.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from toolbus.dialects.export import Export
from toolbus.tool import Tool

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


class CostCache:
    """Estimates the tools of successive exports, each tool once: serializing a whole catalog takes milliseconds."""

    def __init__(self) -> None:
        self._costs: dict[tuple[str, Tool], int] = {}  # of the newest export, by name on the wire and tool

    def of(self, export: Export) -> dict[str, int]:
        """Returns the same as `costs`. All exports must be of one dialect."""
        keys = [(wire, export.kept[name]) for name, wire in export.names.to_wire.items()]
        cached = [self._costs.get(key) for key in keys]
        counts = [
            estimate_tokens(tool) if count is None else count for count, tool in zip(cached, export.tools, strict=True)
        ]
        self._costs = dict(zip(keys, counts, strict=True))
        return dict(zip(export.names.to_wire, counts, strict=True))
