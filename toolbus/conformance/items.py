"""Takes frames apart into items, and waits for the items that a scenario expects.

How items are spread over frames is the sender's choice, so both players compare items, never frames.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from toolbus.conformance.match import Bindings, Mismatch, check, matches

Item = tuple[str, Any]

# The order in which the arms of a frame are read, on either side.
ARMS = ("attach", "attached", "events", "calls", "progress", "results", "cancels", "heartbeat", "drain")
SHOWN_ITEMS = 5
REPEATED = frozenset({"events", "calls", "progress", "results", "cancels"})


def items_of(frame: Message) -> list[Item]:
    """Returns what came in a frame, in reading order, in the JSON mapping with every default written out."""
    shown = json_format.MessageToDict(
        frame, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return [(arm, item) for arm in ARMS if arm in shown for item in (shown[arm] if arm in REPEATED else [shown[arm]])]


class Expectation:
    """Items that must come, and items that may come meanwhile.

    Args:
        in_order: whether those that must come have to come in the order in which they stand.
    """

    def __init__(self, frame: dict[str, Any], *, in_order: bool = False) -> None:
        self.wanted = _listed(frame)
        self._in_order = in_order
        self._optional = _listed(frame.get("optional", {}))

    def __repr__(self) -> str:
        shown = [f"{arm} {item}" for arm, item in self.wanted[:SHOWN_ITEMS]]
        more = len(self.wanted) - len(shown)
        return "; ".join((*shown, f"and {more} more") if more else shown)

    def take(self, arm: str, item: Any, bindings: Bindings) -> None:
        """Takes an item that came.

        Raises:
            Mismatch: it is not one of those that were expected.
        """
        for expected in (self.wanted, self._optional):
            reach = 1 if self._in_order and expected is self.wanted else len(expected)
            for index, (kind, pattern) in enumerate(expected[:reach]):
                if kind == arm and matches(pattern, item, bindings):
                    del expected[index]
                    return
        near = [pattern for kind, pattern in self.wanted if kind == arm]
        if len(near) == 1:
            check(near[0], item, dict(bindings), arm)
        raise Mismatch(f"came: {arm} {item}; expected: {self}")


def _listed(frame: dict[str, Any]) -> list[Item]:
    return [
        (arm, item)
        for arm, value in frame.items()
        if arm in ARMS
        for item in (value if isinstance(value, list) else [value])
    ]
