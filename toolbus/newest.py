"""Keeps the newest entries of a mapping, and forgets the oldest: caches and histories that must not grow."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class NewestCache(dict[Key, Value]):
    """A dict of at most ``limit`` entries; setting a key makes it the newest, and the oldest go."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit  # entries, at least 1

    def __setitem__(self, key: Key, value: Value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self.limit:
            del self[next(iter(self))]
