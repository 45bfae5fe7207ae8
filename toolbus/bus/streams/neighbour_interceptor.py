"""Refuses RPCs of users who may not use the bus: the service's own, health of sources, and reflection.

Asked for each RPC, since grpcio says which connection one came by, but not when a connection begins; a stream is asked
for once. Open to everyone is what tells nothing: the health of the bus itself, for probes of another user.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import grpc

from toolbus.bus.access.neighbours import Neighbours
from toolbus.local_users import Address

_HEALTH = "/grpc.health.v1.Health/"
_FOR_PROBES = (_HEALTH + "Check", _HEALTH + "Watch")

Context = grpc.aio.ServicerContext[Any, Any]


class NeighbourInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """The check of one server, which listens on one port.

    Attributes:
        port: the one that it listens on; set before it serves.
    """

    def __init__(self, neighbours: Neighbours, host: str) -> None:
        self._neighbours = neighbours
        self._host = host.strip("[]")
        self.port = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Returns the handler of an RPC, with the check before it."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or self._neighbours.everyone:
            return handler  # type: ignore[no-any-return]
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        guarded = self._guarded(getattr(handler, kind), handler_call_details.method in _FOR_PROBES)
        return handler._replace(**{kind: guarded})  # type: ignore[no-any-return]

    def _guarded(self, serve: Callable[[Any, Context], Any], for_probes: bool) -> Callable[[Any, Context], Any]:
        async def check(request: Any, context: Context) -> None:
            if for_probes and not request.service:
                return
            refusal = self._refusal(context.peer())
            if refusal:
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal)

        if inspect.isasyncgenfunction(serve):

            async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
                await check(request, context)
                async for message in serve(request, context):
                    yield message

            return generate

        async def respond(request: Any, context: Context) -> Any:
            await check(request, context)
            return await serve(request, context)

        return respond

    def _refusal(self, peer: str) -> str:
        """Returns why the peer of an RPC is refused; empty where it is not."""
        host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
        peer_address = host.strip("[]"), int(port)
        return self._neighbours.refusal(self._neighbours.uid_of(peer_address, self._listener(peer_address)))

    def _listener(self, peer: Address) -> Address:
        if self._host.lower() == "localhost":  # both of its addresses have the same port
            return ("::1" if ":" in peer[0] else "127.0.0.1"), self.port
        return self._host, self.port


_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
