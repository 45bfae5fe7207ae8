"""Splits frames into items, and compares them with the items that a scenario expects.

A sender may put its items into frames as it likes, so both players compare items, never frames.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from toolbus.conformance.match import Bindings, Mismatch, check, matches

Item = tuple[str, Any]

# The order in which the fields of a frame are read, on either side.
FIELDS = ("attach", "attached", "events", "calls", "progress", "results", "cancels", "heartbeat", "drain")
SHOWN_ITEMS = 5
REPEATED = frozenset({"events", "calls", "progress", "results", "cancels"})


def items_of(frame: Message) -> list[Item]:
    """Returns the items of a frame, in reading order, in the JSON mapping with all defaults."""
    shown = json_format.MessageToDict(
        frame, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return [
        (field, item)
        for field in FIELDS
        if field in shown
        for item in (shown[field] if field in REPEATED else [shown[field]])
    ]


class Expectation:
    """Items that must come, and items that may come meanwhile.

    Args:
        in_order: whether those that must come have to come in this order.

    Attributes:
        missing: those that must come and have not come yet.
    """

    def __init__(self, frame: dict[str, Any], *, in_order: bool = False) -> None:
        self.missing = _listed(frame)
        self._in_order = in_order
        self._optional = _listed(frame.get("optional", {}))

    def __repr__(self) -> str:
        shown = [f"{field} {item}" for field, item in self.missing[:SHOWN_ITEMS]]
        more = len(self.missing) - len(shown)
        return "; ".join((*shown, f"and {more} more") if more else shown)

    def take(self, field: str, item: Any, bindings: Bindings) -> None:
        """Takes an item that came.

        Raises:
            Mismatch: it is not an expected one.
        """
        for expected in (self.missing, self._optional):
            reach = 1 if self._in_order and expected is self.missing else len(expected)
            for index, (kind, pattern) in enumerate(expected[:reach]):
                if kind == field and matches(pattern, item, bindings):
                    del expected[index]
                    return
        near = [pattern for kind, pattern in self.missing if kind == field]
        if len(near) == 1:
            check(near[0], item, dict(bindings), field)
        raise Mismatch(f"came: {field} {item}; expected: {self}")


def _listed(frame: dict[str, Any]) -> list[Item]:
    return [
        (field, item)
        for field, value in frame.items()
        if field in FIELDS
        for item in (value if isinstance(value, list) else [value])
    ]
