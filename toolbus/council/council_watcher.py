"""Delivers the events of councils to one watcher, which may read slowly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from toolbus.mailbox import Mailbox

MAX_WAITING = 100  # events that one watcher has not read yet
LOST = "COUNCIL_EVENTS_LOST"


class Watcher(Mailbox[Mapping[str, Any]]):
    """The events of all chats or of one, as they happen, in JSON's form. Iterate over it, and close it at the end.

    A watcher that is too slow loses the oldest events. It gets an event `LOST` with their count before the next event.
    """

    def __init__(self, chat_id: str, on_close: Callable[[Watcher], object]) -> None:
        """Creates a watcher.

        Args:
            chat_id: of the events; "" means all chats.
            on_close: called when it is closed.
        """
        super().__init__(
            MAX_WAITING,
            on_close=lambda: on_close(self),
            on_lost=lambda count: {"event": LOST, "chatId": chat_id, "count": count},
        )
        self._chat_id = chat_id

    def put(self, item: Mapping[str, Any]) -> int:
        """Adds an event of the watcher's chat; others are ignored."""
        return super().put(item) if self._chat_id in ("", item["chatId"]) else 0
