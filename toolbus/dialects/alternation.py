"""Messages in turns, for providers that want user and assistant to alternate and keep the system's words apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from toolbus.dialects.conversation import HistoryItem, Json, Message

# What stands before a conversation that the model begins (a greeting, or a history that was cut): such providers want
# the first word to be the user's, and no empty one.
OPENING = "."


def alternating(messages: Iterable[Json], key: str, parts_of: Callable[[Any], list[Json]], opening: Json) -> list[Json]:
    """Returns messages with neighbours of one role joined, and those left out that say nothing.

    Args:
        key: where a message keeps its parts.
        parts_of: returns what stands there as parts, without those that the provider refuses.
        opening: the message to begin with where the first one is not the user's.
    """
    joined: list[Json] = []
    for message in messages:
        parts = parts_of(message.get(key))
        if not parts:
            continue
        if joined and joined[-1].get("role") == message.get("role"):
            joined[-1] = {**joined[-1], key: parts_of([*parts_of(joined[-1].get(key)), *parts])}
        else:
            joined.append(message if isinstance(message.get(key), str) else {**message, key: parts})
    if joined and joined[0].get("role") in ("assistant", "model"):
        joined.insert(0, opening)
    return joined


def system_text(items: Iterable[HistoryItem]) -> str:
    """Returns all that the system says in a conversation; "" where it says nothing."""
    said = (item.text for item in items if isinstance(item, Message) and item.role == "system")
    return "\n\n".join(text for text in said if text.strip())
