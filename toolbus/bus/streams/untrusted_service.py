"""Serves untrusted programs, such as drop-in tools in their sandbox, on a port of their own.

A program that can reach the bus's main address may administer the bus, and a sandbox can allow a port but cannot choose
the requests that are sent to it. So this port takes only sessions of untrusted sources: they offer tools and answer
calls, and their own calls have no context, therefore no user and no level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from toolbus.bus.access.identity import Identity
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.streams.grpc_server import ToolBusService
from toolbus.bus.streams.peer import Peer
from toolbus.bus.streams.presence import Presence
from toolbus.errors import NotPermitted
from toolbus.limits import Timings
from toolbus.stall import StallWatch
from toolbus.text import quote
from toolbus.tool import Limits
from toolbus.v1 import tool_bus_service_pb2 as wire

DROPIN = "dropin"  # this source and those that begin with it and a colon may attach here, whatever the policy is
SHARE = 10  # one in so many of the bus's sessions may be attached here


class UntrustedService(ToolBusService):
    """The RPCs of the bus that untrusted sources may use.

    Args:
        is_untrusted: tells whether the policy counts a source as untrusted.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        presence: Presence,
        limits: Limits,
        timings: Timings,
        is_untrusted: Callable[[str], bool],
        stalls: StallWatch,
    ) -> None:
        limits = replace(limits, sessions=max(1, limits.sessions // SHARE))
        super().__init__(dispatcher, presence, limits, timings, _refuse, stalls)
        self._is_untrusted = is_untrusted

    def _attach(self, peer: Peer, attach: wire.Attach, now: float) -> None:
        source = attach.source
        if not (source == DROPIN or source.startswith(f"{DROPIN}:") or self._is_untrusted(source)):
            raise NotPermitted(
                f"source {quote(source)} is not guarded, and this port of the bus takes guarded sources only: attach "
                "at the address that `toolbus serve` prints, or add the source to `guarded` in the configuration"
            )
        if not attach.token:
            raise NotPermitted(f"the attach of {quote(source)} carries no token, but this port of the bus requires one")
        peer.untrusted, peer.principal = True, replace(peer.principal, is_admin=False)
        super()._attach(peer, attach, now)

    def _register(self, request: wire.RegisterRequest, identity: Identity) -> wire.RegisterResponse:
        self._check_session(request.session_id)
        return super()._register(request, identity)

    def _unregister(self, request: wire.UnregisterRequest, identity: Identity) -> wire.UnregisterResponse:
        self._check_session(request.session_id)
        return super()._unregister(request, identity)

    def _clear(self, request: wire.ClearRequest, identity: Identity) -> NoReturn:
        _refuse(request)

    def _list(self, request: wire.ListRequest, identity: Identity) -> NoReturn:
        _refuse(request)

    def _check_session(self, session_id: str) -> None:
        if not session_id or not self._presence.session(session_id).untrusted:
            raise NotPermitted(
                "this port of the bus takes Register and Unregister only for a session of a guarded source: pass "
                "Attached.session_id"
            )


def _refuse(request: object) -> NoReturn:
    name = type(request).__name__.removesuffix("Request")
    raise NotPermitted(
        f"this port of the bus takes no {name}, it is for the tools of guarded sources: use the address that "
        "`toolbus serve` prints"
    )
