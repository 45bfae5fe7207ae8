"""Attaches a peer to the bus: declares its tools in the handshake of each attempt, and after each change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from toolbus.functions.threads import ChangeSignal
from toolbus.limits import Limits
from toolbus.sdk.attempt import FATAL, Attempt, error_of
from toolbus.sdk.connection_settings import MESSAGE_BYTES, ConnectionSettings
from toolbus.sdk.peer_delegate import Delegate
from toolbus.session import State
from toolbus.text import clean_line
from toolbus.tool import PROTOCOL_VERSIONS
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.sdk.connection")  # one logger for all of a connection

DEFAULTS = Limits()  # of a bus that leaves some of its limits unset


class ClientHandshake:
    """The handshakes of one connection. Everything runs on its loop.

    Attributes:
        refusals: why the bus refused the last attach, or with all_or_none its tools; empty if it accepted them.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        delegate: Delegate,
        loop: asyncio.AbstractEventLoop,
        changes: ChangeSignal,
    ) -> None:
        self.refusals: tuple[str, ...] = ()
        self._settings = settings
        self._delegate = delegate
        self._loop = loop
        self._changes = changes
        self._outdated = False  # whether the tools changed since the last attach
        self._registering: asyncio.Task[None] | None = None  # the newest `_register_remaining`; None before the first

    def confirmed(self, attempt: Attempt | None) -> bool:
        """Tells whether the bus has answered for all tools that this peer has now."""
        return attempt is not None and attempt.attached is not None and not attempt.attaching and not self._outdated

    def tools_changed(self, attempt: Attempt | None) -> None:
        """Declares the tools again: now, or as soon as the bus has answered the current attach."""
        self._outdated = True
        if attempt is not None:
            self._attach_if_outdated(attempt)

    def attach(self, attempt: Attempt) -> None:
        """Puts an attach with all tools that this peer has now into a frame of its own."""
        self._outdated = False
        self.refusals = ()
        first, *attempt.remaining_tools = portions(self._delegate.tools(), self._settings.timings.attach_bytes)
        attach = attach_of(self._settings, first, self._delegate.subscriptions())
        attach.notifications_after = self._delegate.notifications_after()
        attempt.attaching = True
        outbox = attempt.session.outbox
        outbox.seal()
        outbox.room(attach.ByteSize()).attach.CopyFrom(attach)
        outbox.seal()

    def attached(self, attempt: Attempt, attached: wire.Attached) -> None:
        """Takes the bus's answer to an attach; the first one opens the session."""
        first = attempt.attached is None
        attempt.attached = answer = wire.Attached()
        answer.CopyFrom(attached)
        set_defaults(answer.limits, self._settings.max_in_flight)
        if first:
            attempt.opened(answer)
            attempt.session.open(answer.limits.calls_in_flight, answer.limits.message_bytes)
        address, source = self._settings.address, self._settings.source
        itself = bool(answer.refused) and not answer.refused_total
        if itself or self._settings.all_or_none:
            self.refusals = tuple(dict.fromkeys(each.error for each in answer.refused))  # often one reason for all
        if itself:
            reason = "; ".join(self.refusals)
            log.error("the bus at %s refused the tools of %s: %s", address, source, clean_line(reason))
            self._delegate.refused([], reason)
        else:
            self._delegate.attached(answer)
        if first:
            count = len(answer.registered) + sum(map(len, attempt.remaining_tools))
            log.info("attached to the bus at %s as %s with %d tools", address, source, count)
        if attempt.remaining_tools and not self.refusals:
            self._registering = self._loop.create_task(self._register_remaining(attempt))
        else:
            self._finish(attempt)

    async def _register_remaining(self, attempt: Attempt) -> None:
        """Offers the tools that did not fit into the attach."""
        assert attempt.attached is not None  # its answer led here
        try:
            for tools in attempt.remaining_tools:
                request = wire.RegisterRequest(
                    session_id=attempt.attached.session_id, tools=tools, all_or_none=self._settings.all_or_none
                )
                self._delegate.registered(await attempt.stub.Register(request, metadata=attempt.metadata))
        except grpc.aio.AioRpcError as error:
            if attempt.over:
                return
            text = error.details() or error.code().name
            source, shown = self._settings.source, clean_line(text)
            log.error("the bus at %s refused tools of %s: %s", self._settings.address, source, shown)
            self._delegate.refused([tool.name for tools in attempt.remaining_tools for tool in tools], text)
            if error.code() in FATAL:
                attempt.fatal_error = error_of(error.code(), text)
            attempt.stream.cancel()
            return
        if not attempt.over:
            self._finish(attempt)

    def _finish(self, attempt: Attempt) -> None:
        attempt.attaching = False
        self._attach_if_outdated(attempt)
        self._changes.notify()

    def _attach_if_outdated(self, attempt: Attempt) -> None:
        """Attaches again, unless an attach waits for its answer, which leads here too."""
        session = attempt.session
        if self._outdated and not attempt.attaching and not session.drain_sent and session.state is State.LIVE:
            self.attach(attempt)


def attach_of(settings: ConnectionSettings, tools: Sequence[pb.Tool], subscriptions: Sequence[Any]) -> wire.Attach:
    """Returns an attach with these tools."""
    return wire.Attach(
        protocol_version=PROTOCOL_VERSIONS[-1],
        source=settings.source,
        instance=settings.instance,
        tools=tools,
        max_in_flight=settings.max_in_flight,
        max_message_bytes=MESSAGE_BYTES,
        qualified=settings.qualified,
        subscribe=subscriptions,
        token=settings.token,
        notices=settings.notices,
        all_or_none=settings.all_or_none,
    )


def set_defaults(limits: wire.Limits, max_in_flight: int) -> None:
    """Fills in the limits that the bus left unset.

    Args:
        max_in_flight: what the attach asked for.
    """
    limits.message_bytes = limits.message_bytes or DEFAULTS.message_bytes
    limits.calls_in_flight = limits.calls_in_flight or max_in_flight or DEFAULTS.calls_in_flight
    limits.arguments_bytes = limits.arguments_bytes or DEFAULTS.arguments_bytes
    limits.result_bytes = limits.result_bytes or DEFAULTS.result_bytes


def portions(tools: Sequence[pb.Tool], max_bytes: int) -> list[list[pb.Tool]]:
    """Cuts tools into portions of at most so many bytes; at least one, which may be empty."""
    portions: list[list[pb.Tool]] = [[]]
    filled = 0
    for tool in tools:
        size = tool.ByteSize() + 8
        if filled + size > max_bytes and portions[-1]:
            portions.append([])
            filled = 0
        portions[-1].append(tool)
        filled += size
    return portions
