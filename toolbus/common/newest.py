"""Stores the newest entries of a mapping and evicts the oldest: for caches and histories that must not grow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class NewestCache(dict[Key, Value]):
    """A dict of at most ``limit`` entries; setting a key makes it the newest, and the oldest are evicted.

    Threads may share one; who shares one by size needs a lock.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit  # entries, at least 1

    def __setitem__(self, key: Key, value: Value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        while len(self) > self.limit:
            with suppress(KeyError, RuntimeError, StopIteration):  # another thread has evicted or set one meanwhile
                del self[next(iter(self))]


class NewestCacheBySize(NewestCache[Key, Value]):
    """A cache of the newest entries whose sizes also add up to at most ``max_size``; the newest entry always stays."""

    def __init__(self, limit: int, max_size: int, size_of: Callable[[Value], int]) -> None:
        """Makes an empty cache.

        Args:
            limit: entries, at least 1.
            max_size: of all entries.
            size_of: the size of a value when it is set; a value that changes later is set again.
        """
        super().__init__(limit)
        self.max_size = max_size
        self.size = 0  # of all entries
        self._size_of = size_of
        self._sizes: dict[Key, int] = {}  # by key, as they were when the values were set

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self._sizes[key] = size = self._size_of(value)
        self.size += size
        while self.size > self.max_size and len(self) > 1:
            del self[next(iter(self))]

    def __delitem__(self, key: Key) -> None:
        super().__delitem__(key)
        self.size -= self._sizes.pop(key, 0)

    def pop(self, key: Key, *default: Any) -> Any:
        """Removes a key; see `dict.pop`."""
        self.size -= self._sizes.pop(key, 0)
        return super().pop(key, *default)
