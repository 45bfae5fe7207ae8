"""The parts of the bus that the HTTP application reaches, handed to it by whoever wires the rooms."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from toolbus.entry import Changes
from toolbus.gateway.registrations import Registrations
from toolbus.loopback import CallbackUrl
from toolbus.registry import Registry
from toolbus.tool import Limits, Progress, Result
from toolbus.v1 import tool_pb2 as pb
from toolbus.withdrawal import Withdrawal


class Asker(Protocol):
    """Makes calls for one request; cancelling the wait cancels the call."""

    async def call(self, call: pb.ToolCall, on_progress: Callable[[Progress], object] | None = None) -> Result: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What the application asks of the bus.

    Attributes:
        registrations: where tools with a callback URL are registered.
        withdrawal: where tools are unregistered and cleared.
        own: where the application is served: a callback there would call itself.
        asker: makes an asker for one request, with or without the right to call the bus's own tools.
        watch: yields the changes of the catalogue since a revision.
        is_running: whether a source is attached, or has tools that are online.
        ready: whether the bus takes calls.
    """

    registry: Registry
    registrations: Registrations
    withdrawal: Withdrawal
    limits: Limits
    own: CallbackUrl
    asker: Callable[[bool], Asker]
    watch: Callable[[int], AsyncIterator[Changes]]
    is_running: Callable[[str], bool]
    ready: Callable[[], bool]
