"""Joins messages so that user and assistant alternate, for providers that require it and take system texts apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from toolbus.dialects.conversation import HistoryItem, Json, Message

# The user's message before a conversation that the model begins (a greeting, or a history that was cut): such providers
# require the first message to be the user's, with some text.
OPENING = "."


def alternating(messages: Iterable[Json], key: str, parts_of: Callable[[Any], list[Json]], opening: Json) -> list[Json]:
    """Returns messages with neighbors of one role joined, without empty messages.

    Args:
        key: the key of a message's parts.
        parts_of: returns the value of that key as parts, without those that the provider refuses.
        opening: the first message if the conversation does not begin with the user.
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
    """Returns the text of all system messages of a conversation; may be ""."""
    texts = (item.text for item in items if isinstance(item, Message) and item.role == "system")
    return "\n\n".join(text for text in texts if text.strip())
