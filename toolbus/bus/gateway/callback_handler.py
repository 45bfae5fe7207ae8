"""Holds the registrations by callback URL: a `CallbackHandler` for each, and the `Origin` that some of them share.

An origin is scheme, host and port of one source's callbacks. It counts connect failures in a row, and its tools go
offline and come back together (REST-43). A restored registration is *unconfirmed* until the bus knows that its plugin
listens: see `CallbackHandler.recognizes`. Nothing here sends requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolbus.bus.callback_url import CallbackUrl
from toolbus.bus.calls.call import Call
from toolbus.bus.catalog.entry import CompiledTool, Slots, Trust
from toolbus.bus.gateway.callback_context import wants_context
from toolbus.common.local_users import listener_id
from toolbus.errors import Stage
from toolbus.v1 import tool_bus_service_pb2 as wire

if TYPE_CHECKING:
    from toolbus.bus.gateway.callback_request import CallbackRequest


class Origin:
    """Scheme, host and port of one source's callbacks.

    Attributes:
        handlers: the registrations with a URL of this origin.
        online: whether it accepts connections, as far as the bus knows; its confirmed tools are then offered.
        failures: connect failures in a row.
        answered_at: when it last accepted a connection or answered, in seconds of `RunClock`.
    """

    def __init__(
        self, source: str, address: tuple[str, str, int], answered_at: float, now: Callable[[], float]
    ) -> None:
        self._now = now
        self.source = source
        self.address = address
        self.handlers: dict[CallbackHandler, None] = {}
        self.online = True
        self.failures = 0
        self.answered_at = answered_at
        self.last_failure = ""  # why the last connection was not accepted; empty before the first failure
        self.probing: asyncio.Task[None] | None = None  # None while no tool waits for an answer

    def __repr__(self) -> str:
        state = "online" if self.online else "offline"
        return f"<Origin {self} of {self.source!r} {state} failures={self.failures} tools={len(self.handlers)}>"

    def __str__(self) -> str:
        scheme, host, port = self.address
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def is_serving(self) -> bool:
        """Whether any of its tools is offered."""
        return self.online and any(handler.is_confirmed for handler in self.handlers)

    def listener(self) -> str | None:
        """Returns the id of the socket that listens there now.

        Empty where no program listens or the system does not say; None where this process has no file descriptor left.
        """
        _, host, port = self.address
        hosts = ("127.0.0.1", "::1") if host == "localhost" else (host,)
        try:
            return next(filter(None, (listener_id((each, port)) for each in hosts)), "")
        except OSError:
            return None

    def waits(self) -> bool:
        """Tells whether a probe could bring any of its tools back."""
        listener = self.listener()
        return any(handler.waits(listener) for handler in self.handlers)

    def reset_failures(self) -> None:
        """Begins the count of failures anew, since it accepted a connection or answered in any way (REST-43)."""
        self.failures = 0
        self.answered_at = self._now()


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The functions that post calls: `start` begins the exchange of one, `cancel` ends it."""

    start: Callable[[CallbackHandler, Call], None]
    cancel: Callable[[Call], None]


class CallbackHandler:
    """One registration: a tool with the URL that runs it.

    Attributes:
        key: identifies the registration in the store.
        secret: with which its plugin and the bus authenticate each other; empty where the plugin set none.
        listener: the id of the socket that its plugin listens with; empty where it is not known.
        is_restored: whether it is from before this run of the bus, and its plugin has not registered it since.
        is_confirmed: whether its plugin is known to listen. Else it is not offered, and nothing is posted.
        proven_by: the id of the socket whose program proved that it knows the secret; empty before that.
        doubt: why the program there may not be the plugin; empty without a doubt.
        has_answered: whether the tool gave a result since it was registered, restored, or its server started again.
        server_restarted: whether another socket listens there than when the tool was registered.
        not_found: answers in a row that are as of a server without the tool.
        wants_context: whether its plugin wants the context of calls, in headers.
        request: the common part of its requests; None before the first.
    """

    trust = Trust.OWN
    kind = "callback"
    instance = ""
    shares = False
    awaits_roles = False
    remote = True
    persisted = True
    max_item_bytes = 1 << 62
    takes_calls = True

    def __init__(
        self, key: str, offered: CompiledTool, target: CallbackUrl, origin: Origin, exchanges: Exchanges, in_flight: int
    ) -> None:
        self.key = key
        self.source = origin.source
        self.offered = offered
        self.target = target
        self.headers = target.headers
        self.wants_context = wants_context(offered.tool)
        self.origin = origin
        self.secret = ""
        self.listener = ""
        self.proven_by = ""
        self.is_restored = False
        self.is_confirmed = True
        self.doubt = ""
        self.has_answered = False
        self.server_restarted = False
        self.not_found = 0
        self.request: CallbackRequest | None = None
        self.max_in_flight = in_flight
        self.pending: dict[str, Any] = {}
        self.slots = Slots()
        self.stuck = 0
        self._exchanges = exchanges
        origin.handlers[self] = None

    def __repr__(self) -> str:
        return f"<CallbackHandler {self.offered.tool.name} of {self.source!r} at {self.target.shown}>"

    @property
    def session_state(self) -> int:
        """Live; offline while the origin accepts no connection; unconfirmed until the plugin is known to listen."""
        if not self.is_confirmed:
            return wire.SESSION_STATE_UNCONFIRMED
        return wire.SESSION_STATE_LIVE if self.origin.online else wire.SESSION_STATE_OFFLINE

    def recognizes(self, listener: str | None) -> bool:
        """Tells whether the program behind a listening socket may get calls without another proof.

        A tool that was registered in this run of the bus trusts every program at its URL (REST-43). A restored tool
        trusts the socket of its registration: while that is open, its program has not ended. With a secret only a
        proof counts.
        """
        if self.secret:
            return bool(listener) and listener == self.proven_by
        return not self.is_restored or (bool(listener) and listener == self.listener)

    def move_to(self, listener: str) -> None:
        """Notes the socket that its plugin's server listens with now."""
        if self.listener:
            self.server_restarted, self.has_answered = True, False
        self.listener = listener

    def waits(self, listener: str | None) -> bool:
        """Tells whether a probe could bring the tool back; `listener` is as of `Origin.listener`."""
        if self.is_confirmed and self.origin.online:
            return False
        return listener is None or bool(self.secret) or self.recognizes(listener)

    def send(self, calls: Sequence[Call], now: float) -> None:
        """Starts an exchange for each call, in a task of its own."""
        for call in calls:
            if call.trace is not None:
                call.trace.sent = now
            self._exchanges.start(self, call)

    def cancel(self, call: Call, reason: str) -> bool:
        """Cancels the exchange; the slot is free as soon as that is done."""
        self._exchanges.cancel(call)
        return False

    def stage(self, call: Call) -> Stage:
        """Returns DISPATCHED: a request may have reached the plugin as soon as it is sent."""
        return Stage.DISPATCHED
