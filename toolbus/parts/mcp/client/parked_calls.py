"""Stores calls of a mounted server whose bus call has ended with questions, until the answers arrive.

A legacy server asks in the middle of a call and waits; a task may ask too. Inside the bus a call ends with its
questions and is made again with the answers. Between the two, the server's side of the call is parked here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_PARKED = 100  # of one mount
PARKED_SECONDS = 300.0  # people answer slowly
_PREFIX = "mount-"

Held = TypeVar("Held")


@dataclass(slots=True)
class Parked(Generic[Held]):
    """One parked call.

    Attributes:
        held: the server's side of the call.
        owner: who may resume it: the tool, the caller's account and the user.
    """

    held: Held
    owner: tuple[str, ...]
    timer: asyncio.TimerHandle


class ParkedCalls(Generic[Held]):
    """The parked calls of one mount.

    Args:
        on_expired: called with the server's side of a call that was not resumed in time.
    """

    def __init__(self, on_expired: Callable[[Held], None], seconds: float = PARKED_SECONDS) -> None:
        self._on_expired = on_expired
        self._seconds = seconds
        self._parked: dict[str, Parked[Held]] = {}  # by the state that the caller got

    def __len__(self) -> int:
        return len(self._parked)

    def __iter__(self) -> Iterator[Parked[Held]]:
        return iter(self._parked.values())

    def __repr__(self) -> str:
        return f"<ParkedCalls {len(self)}>"

    @property
    def is_full(self) -> bool:
        """Whether the limit of parked calls is reached."""
        return len(self._parked) >= MAX_PARKED

    def park(self, held: Held, owner: tuple[str, ...]) -> str:
        """Parks a call. Returns the state that names it, which cannot be guessed."""
        state = _PREFIX + secrets.token_urlsafe(24)
        timer = asyncio.get_running_loop().call_later(self._seconds, self._expire, state)
        self._parked[state] = Parked(held, owner, timer)
        return state

    @staticmethod
    def is_state(text: str) -> bool:
        """Tells whether a state has the form of a parked call's; other states are the server's own."""
        return text.startswith(_PREFIX)

    def take(self, state: str, owner: tuple[str, ...]) -> Parked[Held] | None:
        """Removes and returns a parked call; None if its owner has no call of that state."""
        parked = self._parked.get(state)
        if parked is None or parked.owner != owner:
            return None
        del self._parked[state]
        parked.timer.cancel()
        return parked

    def clear(self) -> None:
        """Forgets all parked calls, since the server has disconnected."""
        for parked in self._parked.values():
            parked.timer.cancel()
        self._parked.clear()

    def _expire(self, state: str) -> None:
        parked = self._parked.pop(state, None)
        if parked is not None:
            self._on_expired(parked.held)
