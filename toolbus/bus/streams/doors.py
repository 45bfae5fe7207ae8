"""Identifies who makes an RPC before it is served, by the door of the address; the RPC reads it with `rpc_identity`.

A door identifies each RPC: a connection outlives the revocation of its key, and grpcio does not say when one begins. A
stream is one RPC. The health of the bus itself is open to everyone, because it shows nothing else: probes often have no
key and run as another user.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, Protocol
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from toolbus.bus.access.budgets import REFUSAL_SECONDS, REFUSED
from toolbus.bus.access.identity import LOCAL, Identity
from toolbus.bus.access.neighbours import Neighbours
from toolbus.bus.access.quota import Quota
from toolbus.bus.audit import Audit
from toolbus.bus.calls.call import Seams
from toolbus.bus.keys.doorman import Doorman, der_of
from toolbus.common.local_users import Address
from toolbus.errors import NotPermitted, SetupError, ToolBusError, grpc_status, status_text

# Without a default: an RPC that no check came before ends in an error instead of passing for a trusted one.
_IDENTITY: ContextVar[Identity] = ContextVar("toolbus.rpc_identity")


def rpc_identity() -> Identity:
    """Returns who made the RPC that the current task serves.

    Raises:
        LookupError: nothing has checked it.
    """
    return _IDENTITY.get()


Context = grpc.aio.ServicerContext[Any, Any]
_HEALTH = "/grpc.health.v1.Health/"
# Checks of the bus itself that every client is answered at once. More wait for the turn of the host that they come
# from, so that one that floods the bus delays no probe of another, but not those of peers that may use the bus.
PROBES_PER_SECOND = 100.0
_FOR_PROBES = (_HEALTH + "Check", _HEALTH + "Watch")
_REFLECTION = "/grpc.reflection."
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Door(Protocol):
    """Says who makes the RPCs that arrive at one address."""

    async def identity(self, context: Context) -> Identity:
        """Returns who makes an RPC.

        Raises:
            NotPermitted: it may not use the bus.
        """


class OpenDoor:
    """The door of a unix socket: any user who can open its directory may do everything."""

    async def identity(self, context: Context) -> Identity:
        """Returns a trusted program of this machine."""
        return LOCAL


class NeighbourDoor:
    """The door of an address on loopback: the kernel says which user asks.

    Args:
        host: of the address, as it was configured.

    Attributes:
        port: of the address; set before it serves.
    """

    def __init__(self, neighbours: Neighbours, host: str) -> None:
        self._neighbours = neighbours
        self._host = host.strip("[]")
        self.port = 0

    async def identity(self, context: Context) -> Identity:
        """Returns a trusted program of this machine.

        Raises:
            NotPermitted: it runs as another user.
        """
        if not self._neighbours.everyone:
            host, _, port = unquote(context.peer().partition(":")[2]).rpartition(":")
            peer = host.strip("[]"), int(port)
            refusal = self._neighbours.refusal(self._neighbours.uid_of(peer, self._listener(peer)))
            if refusal:
                raise NotPermitted(refusal)
        return LOCAL

    def _listener(self, peer: Address) -> Address:
        if self._host.lower() == "localhost":  # both of its addresses have the same port
            return ("::1" if ":" in peer[0] else "127.0.0.1"), self.port
        return self._host, self.port


class KeyDoor:
    """The door of an address beyond this machine: a token, a certificate, or both say who asks."""

    def __init__(self, doorman: Doorman) -> None:
        self._doorman = doorman

    async def identity(self, context: Context) -> Identity:
        """Returns the identity that the key of an RPC proves.

        Raises:
            Unauthenticated: it proves no identity.
        """
        pem: Sequence[bytes] = tuple(context.auth_context().get("x509_pem_cert") or ())
        metadata = context.invocation_metadata() or ()
        authorization = next((value for name, value in metadata if name == "authorization"), None)
        if isinstance(authorization, bytes):
            authorization = authorization.decode("latin-1")
        return await self._doorman.identify(authorization, der_of(pem[0]) if pem else None, context.peer())


class Doors:
    """The doors of one bus.

    Args:
        neighbours: which users may come in on loopback.
        doorman: knows the keys of everyone else.
        audit: records who was refused.
        seams: of the bus, for the budgets of who is refused.
        is_watched: tells whether as many streams watch the bus as may do so without passing a door.
    """

    def __init__(
        self, neighbours: Neighbours, doorman: Doorman, audit: Audit, seams: Seams, is_watched: Callable[[], bool]
    ) -> None:
        self.neighbours, self.audit, self.seams, self.is_watched = neighbours, audit, seams, is_watched
        self.remote = KeyDoor(doorman)
        self._keys = doorman.keys

    def credentials(self, kind: str) -> grpc.ServerCredentials:
        """Returns the certificate that proves the bus to its clients; connections use a renewed one from then on.

        Args:
            kind: ``tls``, or ``mtls`` where each client needs a certificate.

        Raises:
            SetupError: the bus has no keys.
        """
        if self._keys is None:
            raise SetupError("this bus has no keys: make them with `toolbus keys init`")
        keys = self._keys
        used = keys.server_certificate()

        def configuration(server: tuple[bytes, bytes, bytes]) -> grpc.ServerCertificateConfiguration:
            key, chain, roots = server
            return grpc.ssl_server_certificate_configuration([(key, chain)], roots if kind == "mtls" else None)

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            # Called at each handshake, on a thread of grpcio: it opens no file.
            nonlocal used
            server = keys.server_certificate()
            if server is used:
                return None
            used = server
            return configuration(server)

        # None, for no change, is missing from the published types.
        return grpc.dynamic_ssl_server_credentials(configuration(used), renewed, kind == "mtls")  # type: ignore[arg-type]


class DoorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # it is not generic at run time
    """Puts a door before every RPC of one server, whatever its service."""

    def __init__(self, door: Door, doors: Doors) -> None:
        self._door, self._doors = door, doors
        self._probes = Quota(PROBES_PER_SECOND)
        self._behind: dict[str, tuple[Any, Any]] = {}  # by method, its handler without and with the door

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Returns the handler of an RPC, with the door before it."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None  # type: ignore[return-value]
        method = handler_call_details.method
        known, behind = self._behind.get(method, (None, None))
        if known is not handler:
            behind = self._put_behind_door(handler, method)
            self._behind[method] = handler, behind
        return behind  # type: ignore[no-any-return]

    def _put_behind_door(self, handler: Any, method: str) -> Any:
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        serve, is_probe = getattr(handler, kind), method in _FOR_PROBES

        async def enter(request: Any, context: Context) -> Any:
            """Returns the request. It is read once its sender is known, since it may take many times its bytes.

            So grpcio serves each RPC as one with a stream of requests: of any other it reads the request first.
            """
            request = await read_only_request(context) if is_probe else request
            await pass_door(is_probe and not request.service, context)
            return request if is_probe or handler.request_streaming else await read_only_request(context)

        async def pass_door(is_open: bool, context: Context) -> None:
            watches = handler.response_streaming
            if is_open and (not self._doors.is_watched() if watches else self._probes.take(1, time.monotonic())[0]):
                return
            try:
                identity = await self._door.identity(context)
                if method.startswith(_REFLECTION):
                    identity.check_verb("reflect", "reflection")
            except ToolBusError as error:
                if is_open and not watches:
                    host = context.peer().rpartition(":")[0]  # each connection has another port
                    await self._doors.seams.budgets.spend(f"probes {host}", REFUSAL_SECONDS)
                    return
                status, text = grpc_status(error)
                self._doors.audit.refuse(context.peer(), method, text)
                await self._doors.seams.budgets.spend(REFUSED, REFUSAL_SECONDS)
                await end_rpc(context, status, text)
            _IDENTITY.set(identity)

        # A generator also where the RPC writes by itself and yields nothing: interceptors that programs around the bus
        # add, such as those of OpenTelemetry, iterate over what answers with a stream.
        async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                request = await enter(request, context)
                if inspect.isasyncgenfunction(serve):
                    async for message in serve(request, context):
                        yield message
                else:
                    await serve(request, context)
            except DecodeError as error:
                await end_rpc(context, "INVALID_ARGUMENT", f"the request cannot be decoded: {error}")
            except grpc.aio.AbortError as ended:
                del request, context
                raise _without_frames(ended) from None

        async def respond(request: Any, context: Context) -> Any:
            try:
                return await serve(await enter(request, context), context)
            except grpc.aio.AbortError as ended:
                del request, context
                raise _without_frames(ended) from None

        changed: dict[str, Any] = {**dict.fromkeys(_KINDS), "request_streaming": True}
        changed |= {"stream_stream": generate} if handler.response_streaming else {"stream_unary": respond}
        return handler._replace(**changed)


async def read_only_request(context: Context) -> Any:
    """Returns the request of an RPC that has one; ends an RPC without one that can be decoded."""
    try:
        request = await context.read()
    except DecodeError as error:
        await end_rpc(context, "INVALID_ARGUMENT", f"the request cannot be decoded: {error}")
    if request is grpc.aio.EOF:  # type: ignore[attr-defined]  # the published stubs lag
        await end_rpc(context, "INVALID_ARGUMENT", "the RPC has no request: send one message")
    return request


def _without_frames(ended: grpc.aio.AbortError) -> grpc.aio.AbortError:
    """Returns what ended an RPC, to be raised where nothing refers to its context.

    The context has it, and frames of its traceback the context: thousands of refused RPCs would be left to one pass of
    the garbage collection, which holds the loop.
    """
    ended.__context__ = None
    return ended.with_traceback(None)


async def end_rpc(context: Context, status: str, text: str) -> NoReturn:
    """Ends an RPC with a status by its name; raises what ends its handler."""
    await context.abort(grpc.StatusCode[status], status_text(text))
