"""Retains the last run of each chat, to be reused for a regenerated reply if nothing it depends on has changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from toolbus.council.deliberation import Deliberation
from toolbus.newest import NewestCacheBySize
from toolbus.tool import MIB

MAX_CHATS = 1000
MAX_CHARACTERS = 32 * MIB  # of all runs; the newest stays even if it has more


def fingerprint(*parts: object) -> str:
    """Returns a digest of everything that a run depends on: records, mappings, lists and plain values, by content."""
    canonical = json.dumps([_plain(part) for part in parts], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class RetainedRuns:
    """The last run of each chat that can be reused."""

    def __init__(self, max_chats: int = MAX_CHATS, max_characters: int = MAX_CHARACTERS) -> None:
        # by chat, with a fingerprint
        self._runs = NewestCacheBySize[str, tuple[str, Deliberation | None]](max_chats, max_characters, _characters)

    def __repr__(self) -> str:
        return f"<RetainedRuns chats={len(self._runs)}>"

    def store(self, chat_id: str, fingerprint: str, deliberation: Deliberation | None) -> None:
        """Stores a run, also one without participants: its dice are not rolled again. Not one that failed."""
        if deliberation is not None and (deliberation.failed or not deliberation.outcomes):
            self._runs.pop(chat_id, None)
        else:
            self._runs[chat_id] = fingerprint, deliberation

    def find(self, chat_id: str, fingerprint: str) -> tuple[Deliberation | None] | None:
        """Returns the run of a chat, as a tuple of one; None if no run has this fingerprint."""
        stored = self._runs.get(chat_id)
        return (stored[1],) if stored is not None and stored[0] == fingerprint else None


def _characters(run: tuple[str, Deliberation | None]) -> int:
    return run[1].characters if run[1] is not None else 0


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, str | int | float) else repr(value)
