from __future__ import annotations


def add(a: int = 0, b: int = 0) -> int:
    return a + b
