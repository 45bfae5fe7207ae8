"""What the streams and the gateway ask before they work for a peer that is trusted less than the bus's own programs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from toolbus.bus.access.identity import Principal
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

Answer = TypeVar("Answer")
Registered: TypeAlias = wire.RegisterResponse
Receive = Callable[[wire.InvokeRequest], None]
Register = Callable[[wire.RegisterRequest], Registered]
OWN = ""  # the account of the bus's own programs, without bounds
REFUSED = "refused"  # the account of all whom the bus does not let in
MANY_TOOLS = 40  # of one message; more hold up the loop for longer than a millisecond, so others have turns meanwhile
LONG_BYTES = 8 * 1024  # of texts that may take more than 20 ms to be searched for secrets: beside the loop then
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

    async def take(
        self,
        sender: Principal | None,
        calls: Mapping[str, Any],
        frame: wire.InvokeRequest,
        receive: Receive,
        reads: Callable[[wire.InvokeRequest], bool] = lambda frame: True,
    ) -> None:
        """Handles a message when it is the turn of its account.

        Args:
            sender: whose it is; None: an own program's.
            calls: that it may answer, by their ids.
            reads: tells whether its tools need be read: not those of a peer that may not attach.

        Raises:
            LimitExceeded: too many of the account's messages wait.
        """
        receive(frame)

    async def answer(self, account: str, request: Any, work: Callable[[Any], Answer]) -> Answer:
        """Answers a request of an account; raises as `take`."""
        return work(request)

    async def register(self, declaring: Declaring, request: wire.RegisterRequest, work: Register) -> Registered:
        """Does the same for a request with tools, which may be done in several that have some of its tools each."""
        return work(request)

    async def beside(self, account: str, work: Callable[[], Answer]) -> Answer:
        """Does long work for an account that needs nothing of the loop."""
        return work()

    async def compile(self, account: str, work: Callable[[], Answer]) -> Answer:
        """Reads tools of an account, which takes long, beside the loop."""
        return await asyncio.to_thread(work)

    async def spend(self, account: str, seconds: float) -> None:
        """Waits for the turn of an account, for work that takes about so long."""
