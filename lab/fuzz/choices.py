"""Reads an input as decisions, so that a changed byte is another decision and not just another refusal.

Written out here rather than taken from a fuzzer: seeds and findings are replayed where none is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Decisions from bytes, front to back. Where no bytes are left, each is the first of its options."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0  # the next byte

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def byte(self) -> int:
        """Returns the next byte, 0 after the end."""
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def flag(self) -> bool:
        return bool(self.byte() & 1)

    def pick(self, options: Sequence[T]) -> T:
        return options[self.byte() % len(options)]

    def some(self, options: Sequence[T], at_most: int = 3) -> list[T]:
        """Returns a few of the options, in any order and perhaps the same again."""
        return [self.pick(options) for _ in range(self.byte() % (at_most + 1))]

    def block(self) -> bytes:
        """Returns a piece with its own length, see `block_of`."""
        size = self.byte() << 8 | self.byte()
        piece = self._data[self._at : self._at + size]
        self._at += size
        return piece

    def text(self) -> str:
        return self.block().decode("utf-8", "replace")


def block_of(piece: bytes) -> bytes:
    """Writes what `Choices.block` reads."""
    if len(piece) > 0xFFFF:
        raise ValueError(f"a piece of {len(piece)} bytes is more than two bytes can count: leave it out")
    return len(piece).to_bytes(2, "big") + piece
