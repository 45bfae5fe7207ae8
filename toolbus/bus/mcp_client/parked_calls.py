"""Keeps the calls at a mounted server whose bus call has ended with questions, until the answers come.

A server of the legacy era asks in the middle of a call and waits; a task may ask too. Inside the bus a call ends with
its questions and is made again with the answers. Between the two the server's side of it waits here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

MAX_PARKED = 100  # of one mount
PARKED_SECONDS = 300.0  # people answer slowly
_PREFIX = "mount-"

Held = TypeVar("Held")


@dataclass(slots=True)
class Parked(Generic[Held]):
    """One parked call.

    Attributes:
        held: the server's side of the call.
        owner: who may go on with it: the tool, the caller's account and the user.
        questions: as the caller was asked, by key.
    """

    held: Held
    owner: tuple[str, ...]
    questions: Mapping[str, Any]
    timer: asyncio.TimerHandle


class ParkedCalls(Generic[Held]):
    """The parked calls of one mount.

    Args:
        on_expired: called with the server's side of a call that nobody went on with in time.
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
        """Whether none can be parked any more."""
        return len(self._parked) >= MAX_PARKED

    def park(self, held: Held, owner: tuple[str, ...], questions: Mapping[str, Any]) -> str:
        """Parks a call. Returns the state that names it; nobody can guess it."""
        state = _PREFIX + secrets.token_urlsafe(24)
        timer = asyncio.get_running_loop().call_later(self._seconds, self._expire, state)
        self._parked[state] = Parked(held, owner, questions, timer)
        return state

    @staticmethod
    def is_state(text: str) -> bool:
        """Tells whether a state may be of here; others are the server's own."""
        return text.startswith(_PREFIX)

    def take(self, state: str, owner: tuple[str, ...]) -> Parked[Held] | None:
        """Returns a parked call, which is not parked any more; None where there is none of this owner."""
        parked = self._parked.get(state)
        if parked is None or parked.owner != owner:
            return None
        del self._parked[state]
        parked.timer.cancel()
        return parked

    def clear(self) -> None:
        """Forgets all of them: the server is gone."""
        for parked in self._parked.values():
            parked.timer.cancel()
        self._parked.clear()

    def _expire(self, state: str) -> None:
        parked = self._parked.pop(state, None)
        if parked is not None:
            self._on_expired(parked.held)
