"""Breaks on inputs of four bytes: a fuzz target as another package writes it, to see that a finding is reported."""

from collections.abc import Iterator

from lab.fuzz.target import Target, hold


def _never_four(data: bytes) -> None:
    hold(len(data) != 4, "four bytes")


def _near() -> Iterator[bytes]:
    yield b"abc"


TARGET = Target("broken", "breaks on purpose", _never_four, _near, max_bytes=8)
