"""The way in for programs that are trusted less: drop-in tools in their sandbox.

Whoever can reach the bus's own address may administer it, and a sandbox can allow a port but not what is said there. So
such programs get a port of their own, with the same service on it, which takes nothing but sessions of guarded sources:
they offer tools and answer calls, and what they ask for themselves has no context and therefore no user and no level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.streams.grpc_server import ToolBusService
from toolbus.bus.streams.peer import Peer
from toolbus.bus.streams.presence import Presence
from toolbus.errors import NotPermitted
from toolbus.tool import Limits
from toolbus.v1 import tool_bus_service_pb2 as wire

DROPIN = "dropin"  # and what begins so, with a colon: sources that may come this way, whatever is guarded
SHARE = 10  # one in so many of the bus's sessions may come this way


class UntrustedService(ToolBusService):
    """The five RPCs, as far as they are for guarded sources.

    Args:
        guards: whether a source is one.
    """

    def __init__(
        self, dispatcher: Dispatcher, presence: Presence, limits: Limits, guards: Callable[[str], bool]
    ) -> None:
        super().__init__(dispatcher, presence, replace(limits, sessions=max(1, limits.sessions // SHARE)), _refuse)
        self._guards = guards

    def _attach(self, peer: Peer, attach: wire.Attach, now: float) -> None:
        source = attach.source
        if not (source == DROPIN or source.startswith(f"{DROPIN}:") or self._guards(source)):
            raise NotPermitted(
                f"source {source[:80]!r} is not guarded, and this port of the bus is for those that are: attach at the "
                "address that `toolbus serve` prints"
            )
        if not attach.token:
            raise NotPermitted(f"the attach of {source[:80]!r} carries no token: this port of the bus asks for one")
        peer.untrusted, peer.is_admin = True, False
        super()._attach(peer, attach, now)

    def _register(self, request: wire.RegisterRequest) -> wire.RegisterResponse:
        self._check_session(request.session_id)
        return super()._register(request)

    def _unregister(self, request: wire.UnregisterRequest) -> wire.UnregisterResponse:
        self._check_session(request.session_id)
        return super()._unregister(request)

    def _clear(self, request: wire.ClearRequest) -> NoReturn:
        _refuse(request)

    def _list(self, request: wire.ListRequest) -> NoReturn:
        _refuse(request)

    def _check_session(self, session_id: str) -> None:
        if not session_id or not self._presence.session(session_id).untrusted:
            raise NotPermitted(
                "this port of the bus takes Register and Unregister for a session of a guarded source only: pass the "
                "session_id of your Attached"
            )


def _refuse(request: object) -> NoReturn:
    what = type(request).__name__.removesuffix("Request")
    raise NotPermitted(f"this port of the bus takes no {what}: it is for tools that are trusted less, to be called")
