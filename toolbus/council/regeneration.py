"""Runs that are made again: the earlier outcome, if settings, model and context are still the same."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from toolbus.council.council_result import Deliberation
from toolbus.tool import MIB

CHATS_KEPT = 1000
MAX_CHARACTERS = 32 * MIB  # of all of them; the newest is kept whatever it has


def fingerprint(*parts: object) -> str:
    """Names whatever an outcome depends on: records, mappings, lists and plain values, by their content."""
    canonical = json.dumps([_plain(part) for part in parts], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class RetainedRuns:
    """The last run of each chat that can be used again."""

    def __init__(self, most_chats: int = CHATS_KEPT) -> None:
        self._max_chats = most_chats
        self._runs: OrderedDict[str, tuple[str, Deliberation | None]] = OrderedDict()  # by chat, with a fingerprint

    def __repr__(self) -> str:
        return f"<RetainedRuns chats={len(self._runs)}>"

    def keep(self, chat_id: str, mark: str, outcome: Deliberation | None) -> None:
        """Keeps a run, one without members too: it would else be rolled again. One that failed is not kept."""
        self._runs.pop(chat_id, None)
        if outcome is not None and (outcome.failed or not outcome.outcomes):
            return
        self._runs[chat_id] = mark, outcome
        characters = sum(_characters(kept) for _, kept in self._runs.values())
        while len(self._runs) > 1 and (len(self._runs) > self._max_chats or characters > MAX_CHARACTERS):
            _, (_, oldest) = self._runs.popitem(last=False)
            characters -= _characters(oldest)

    def find(self, chat_id: str, mark: str) -> tuple[Deliberation | None] | None:
        """Returns the run of a chat, as a tuple of one; None where there is none with this fingerprint."""
        kept = self._runs.get(chat_id)
        return (kept[1],) if kept is not None and kept[0] == mark else None


def _characters(outcome: Deliberation | None) -> int:
    return outcome.characters if outcome is not None else 0


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, str | int | float) else repr(value)
