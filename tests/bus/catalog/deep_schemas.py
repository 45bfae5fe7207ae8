"""Schemas and arguments of many levels; imports nothing heavy, for a test that runs in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SELF = {"properties": {"c": {"$ref": "#"}}}


def chain(length: int, link: Callable[[str], dict[str, Any]], end: dict[str, Any] | None = None) -> dict[str, Any]:
    """Definitions that each refer to the next one."""
    links = {str(i): link(f"#/$defs/{i + 1}") for i in range(length)}
    return {"$ref": "#/$defs/0", "$defs": {**links, str(length): end or {"type": "object"}}}


def nested(depth: int, leaf: str = "{}") -> str:
    return '{"c":' * depth + leaf + "}" * depth
