"""What the streams and the gateway ask before they work for a peer that is trusted less than the bus's own programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from toolbus.v1 import tool_pb2 as pb

Answer = TypeVar("Answer")
REFUSED = "refused"  # the account of all whom the bus does not let in
REFUSAL_SECONDS, REQUEST_SECONDS = 0.0005, 0.001  # of the loop that a refusal and an HTTP request take, about


@dataclass(frozen=True, slots=True)
class Declaring:
    """Tools that a session declares: of which account and source, and whether they are listed as `source:name`."""

    account: str
    source: str
    qualified: bool
    tools: Sequence[pb.Tool]


class Budgets:
    """Lets each peer use what it wants; the part `budgets` bounds it."""

    async def run(self, account: str, work: Callable[[], Answer]) -> Answer:
        """Works for an account when it is its turn."""
        return work()

    async def declare(self, declaring: Declaring, work: Callable[[], Answer]) -> Answer:
        """Does the same where the work reads declared tools; they are read before."""
        return work()

    async def spend(self, account: str, seconds: float) -> None:
        """Waits for the turn of an account, for work that takes about so long."""
