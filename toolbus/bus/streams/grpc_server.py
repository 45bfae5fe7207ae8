"""Serves the RPCs of the bus over gRPC: the shell around the sessions.

`GrpcCarrier` carries one stream; unary RPCs change and read the catalog. ``_abort`` is the one place where an error
becomes a gRPC status.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import stat
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from toolbus.bus.access.budgets import MANY_TOOLS, OWN, REFUSED, Declaring
from toolbus.bus.access.identity import Identity, Principal
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.entry import Trust
from toolbus.bus.keys.doorman import split_secure
from toolbus.bus.streams import catalog_messages
from toolbus.bus.streams.doors import Door, DoorInterceptor, Doors, NeighbourDoor, OpenDoor, end_rpc, rpc_identity
from toolbus.bus.streams.health import SERVICE, Health
from toolbus.bus.streams.invoke_stream import Carrier, HeldBudget, HeldOutboxes, InvokeStream, SharedParts
from toolbus.bus.streams.peer import Peer
from toolbus.bus.streams.presence import Presence
from toolbus.bus.streams.refused_tools import to_listing
from toolbus.bus.streams.server_handshake import own_sessions
from toolbus.common.descriptors import share_of_descriptors
from toolbus.common.local_users import socket_taken
from toolbus.common.path_ownership import make_directory
from toolbus.common.stall import StallWatch
from toolbus.errors import InvalidRequest, LimitExceeded, NotPermitted, SetupError, grpc_status
from toolbus.protocol.limits import Timings
from toolbus.protocol.session import Pool
from toolbus.protocol.tool import Limits, level_of
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as wire_grpc

log = logging.getLogger("toolbus.grpc")

STREAMS_PER_SESSION = 2  # that an identity may have open: one may be replacing another
CONNECTION_STREAMS = 256  # of other machines and sandboxes at once: further ones wait in the client
READ_AHEAD_BYTES = 1 << 19
CONNECTION_LOST_SECONDS = 0.05  # until grpcio says that the connection of a stream whose input ended broke
REFUSED_READ_SECONDS = 1.0  # for the first message of a stream that is one too many
MAX_WAITING_RPCS = 1 << 15
HANDSHAKE_SECONDS = 10.0  # from the connect until a connection speaks HTTP/2
IDLE_SECONDS = 60.0  # of a connection without an RPC; clients connect again by themselves
# so_reuseport: two buses would otherwise share a port without an error. Plugins may ping to keep connections alive.
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    # Backpressure: how much a peer may send before the bus reads it. By default HTTP/2 estimates this from the speed of
    # the connection; megabytes of calls then wait unseen for seconds in front of a bus that cannot keep up.
    ("grpc.http2.lookahead_bytes", READ_AHEAD_BYTES),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # How many RPCs may wait for this process. By default grpcio cancels RPCs beyond 1,000 at random, without a word in
    # any log: after a restart of a bus with thousands of peers they all come at once.
    ("grpc.server.max_pending_requests", MAX_WAITING_RPCS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_WAITING_RPCS),
    # Who connects and says nothing, or asks nothing any more, is not kept: each takes one of the bus's descriptors.
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1000)),
    ("grpc.max_connection_idle_ms", int(IDLE_SECONDS * 1000)),
)

Context = grpc.aio.ServicerContext[Any, Any]


class GrpcCarrier:
    """Carries one Invoke RPC: one read loop and one write loop around its stream."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._idle: asyncio.Future[None] | None = None  # what the writer waits for while nothing is to be written

    def wake(self) -> None:
        """Lets the writer look again."""
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def run(self, stream: InvokeStream) -> None:
        """Runs both loops until the stream has ended, then ends the RPC.

        Not a TaskGroup: it would cancel a blocked write, which poisons every later one, and wait for it. A writer that
        is stuck on a peer that never reads is left behind; the RPC ends with the connection.
        """
        reading = self._loop.create_task(self._read(stream))
        writing = self._loop.create_task(self._write(stream))
        try:
            # Until the stream has ended. A status sent beside a pending write fails (TOO_MANY_OPERATIONS), and the RPC
            # would never end.
            await asyncio.shield(writing)
            reading.cancel()
            if stream.ended is not None and stream.ended[0] != "OK":
                await end_rpc(self._context, *stream.ended)
        except asyncio.CancelledError:
            stream.disconnected()
            raise
        finally:
            reading.cancel()
            stream.drop()
            self.wake()

    async def _read(self, stream: InvokeStream) -> None:
        read, receive = self._context.read, stream.receive
        try:
            while stream.ended is None and (frame := await read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the published stubs lag
                if stream.waits(frame):
                    await stream.take(frame)
                else:
                    receive(frame)
                del frame  # the next one may take long to come
            # grpcio reports the end of input for a broken connection too, and cancels this task a moment later.
            await asyncio.sleep(CONNECTION_LOST_SECONDS)
            stream.half_close()
        except DecodeError as error:
            stream.undecodable(error)
        except Exception:  # of grpcio
            stream.disconnected()

    async def _write(self, stream: InvokeStream) -> None:
        write, next_frame = self._context.write, stream.next_frame
        try:
            await self._context.send_initial_metadata(())  # clients such as tonic's wait for it before they write
            while True:
                if (frame := next_frame()) is not None:
                    await write(frame)
                elif stream.ended is not None:
                    return
                else:
                    self._idle = self._loop.create_future()
                    await self._idle
        except Exception:  # whatever a write raises means that the peer has disconnected
            stream.disconnected()


class ToolBusService:
    """The five RPCs over one bus."""

    is_guarded = False  # whether only guarded sources are served

    def __init__(
        self,
        dispatcher: Dispatcher,
        presence: Presence,
        limits: Limits,
        timings: Timings,
        register_callbacks: Callable[[wire.RegisterRequest], wire.RegisterResponse],
        stalls: StallWatch,
    ) -> None:
        self._register_callbacks = register_callbacks  # registers tools that have a callback_url
        self._dispatcher = dispatcher
        self._presence = presence
        self._limits = limits
        self._timings = timings
        self._stalls = stalls
        self._open: dict[InvokeStream, str] = {}  # the streams that are served now, zombies included, by identity
        self._holding: set[InvokeStream] = set()  # those among them that hold calls since the newest stall
        stalls.listen(self._stalled, self._settled)
        outboxes = HeldOutboxes(lambda after, do: asyncio.get_running_loop().call_later(after, do))
        budget = HeldBudget(limits.held_bytes)
        self._shared = SharedParts(presence, dispatcher, self._check, stalls, budget, outboxes)
        self._pool = Pool(limits.held_bytes)  # bounds what waits for all peers together
        self._streams_of: Counter[str] = Counter()  # how many of them each identity has

        # The unary RPCs by name, each with the message that it takes.
        self.unary: dict[str, tuple[Any, Callable[[Any, Identity], Any]]] = {
            "Register": (wire.RegisterRequest, self._register),
            "Unregister": (wire.UnregisterRequest, presence.unregister),
            "Clear": (wire.ClearRequest, presence.clear),
            "List": (wire.ListRequest, self._list),
        }
        for name in self.unary:  # the methods that grpcio calls
            setattr(self, name, partial(self._respond, name))

    def _register(self, request: wire.RegisterRequest, identity: Identity) -> wire.RegisterResponse:
        if request.session_id:
            return self._presence.register(request, identity)
        if identity.scopes is not None:
            raise NotPermitted(
                "callback URLs are of the bus's own machine, so only its programs may register tools with them: "
                "attach, and pass Attached.session_id"
            )
        if request.tools and all(tool.callback_url for tool in request.tools):
            return self._register_callbacks(request)
        raise InvalidRequest(
            "session_id is empty, so every tool needs a callback_url: give each tool one, or attach first and pass "
            "Attached.session_id"
        )

    async def answer(self, method: str, request: bytes, identity: Identity) -> bytes:
        """Runs a unary RPC; returns the response as it is sent.

        Raises:
            DecodeError: the request is not a message.
            ToolBusError: it is refused.
        """
        answer = await self._answer_in_turn(method, self.unary[method][0].FromString(request), identity)
        return answer.SerializeToString()  # type: ignore[no-any-return]

    async def _respond(self, method: str, request: Any, context: Context) -> Any:
        try:
            return await self._answer_in_turn(method, request, rpc_identity())
        except Exception as error:
            await _abort(context, error)

    async def _answer_in_turn(self, method: str, request: Any, identity: Identity) -> Any:
        budgets, work = self._dispatcher.seams.budgets, partial(self._answer, method, identity=identity)
        tools = request.tools if isinstance(request, wire.RegisterRequest) else ()
        peer = self._presence.sessions.get(request.session_id) if tools else None
        is_own = identity.scopes is None and not self.is_guarded
        if peer is not None and (not is_own or peer.trust is not Trust.OWN or len(tools) > MANY_TOOLS):
            account = OWN if is_own and peer.trust is Trust.OWN else peer.principal.account
            return await budgets.register(Declaring(account, peer.source, peer.qualified, tools), request, work)
        if not is_own:
            return await budgets.answer(Principal(identity=identity).account or REFUSED, request, work)
        return work(request)

    def _answer(self, method: str, request: Any, identity: Identity) -> Any:
        try:
            return self.unary[method][1](request, identity)
        except NotPermitted as error:
            principal = Principal(identity=identity)
            self._presence.audit.record("denied", principal, target=method, outcome="refused", why=str(error))
            raise

    def _list(self, request: wire.ListRequest, identity: Identity) -> wire.ListResponse:
        principal, level = Principal(identity=identity), level_of(request.context.attributes)
        identity.check_claims(request.context.user_id, level)
        response = catalog_messages.list_tools(request, self._dispatcher.view, principal)
        if not request.page_token:
            hides = self._dispatcher.view.hides_source
            response.notices.extend(
                wire.SourceNotice(source=source, text=text)
                for source, text in self._presence.notices(request.source)
                if not hides(source, level, principal)
            )
            if request.include_refused:
                refused = self._presence.review.refused.listed(request, identity)
                response.refused.extend(to_listing(refused))
                response.refused_total = len(refused)
        return response

    # The coroutine form, which writes instead of yielding.
    async def Invoke(self, request_iterator: AsyncIterator[wire.InvokeRequest], context: Context) -> None:
        """Carries one peer's session."""
        carrier = GrpcCarrier(context)
        try:
            stream = self.open_stream(carrier, rpc_identity(), context.peer())
        except LimitExceeded as error:
            # First its attach: a client that is still writing may see a reset of the stream in place of the status.
            opening = asyncio.ensure_future(context.read())
            await asyncio.wait((opening,), timeout=REFUSED_READ_SECONDS)
            opening.add_done_callback(lambda read: read.cancelled() or read.exception())  # its outcome does not matter
            await _abort(context, error)
        try:
            await carrier.run(stream)
        finally:
            self.close_stream(stream)

    def open_stream(self, carrier: Carrier, identity: Identity, address: str) -> InvokeStream:
        """Opens the stream of one peer; whoever does so closes it with `close_stream`.

        Args:
            address: of the other end, for operators.

        Raises:
            LimitExceeded: the bus, or the identity, has too many.
        """
        if len(self._open) >= self._limits.sessions:
            limit = self._limits.sessions
            raise LimitExceeded("sessions", limit, f"the bus has {limit} streams and accepts no more")
        own, most = self._streams_of[identity.name], own_sessions(identity, self._limits)
        if most is not None and own >= most * STREAMS_PER_SESSION:
            what = f"{identity.shown} has {own} streams, all that its scope sessions allows"
            raise LimitExceeded("sessions", most, what)
        peer = Peer(self._limits, time.monotonic(), self._timings, identity)
        peer.address, peer.untrusted = address, self.is_guarded
        peer.outbox.pool = self._pool
        if self.is_guarded:
            peer.principal = replace(peer.principal, is_admin=False)
        stream = InvokeStream(self._shared, peer, carrier)
        self._streams_of[identity.name] += 1
        self._open[stream] = identity.name
        if self._stalls.unsettled:
            self._hold(stream)
        return stream

    def close_stream(self, stream: InvokeStream) -> None:
        """Forgets a stream that has ended."""
        name = self._open.pop(stream)
        self._holding.discard(stream)
        self._streams_of[name] -= 1
        if not self._streams_of[name]:
            del self._streams_of[name]

    def _check(self, attach: wire.Attach) -> None:
        """Checks what the address allows to an attach; raises NotPermitted."""

    def _stalled(self) -> None:
        """Holds the calls of every stream, since the next ones that it reads may be old."""
        for stream in self._open:
            self._hold(stream)

    def _hold(self, stream: InvokeStream) -> None:
        if stream.hold(self._stalls.since):
            self._holding.add(stream)

    def _settled(self) -> None:
        for stream in self._holding:
            stream.settle()
        self._holding.clear()  # the others wait for an echo


class GrpcServer:
    """Serves at several addresses: the service, and with it health and reflection, neither without ``health``.

    Each address has a server of its own, since who may connect, and by which proof, depends on the address.

    Args:
        doors: identify who connects, at each address.
    """

    def __init__(
        self,
        service: ToolBusService,
        limits: Limits,
        doors: Doors,
        *,
        health: Health | None = None,
        reflection: bool = False,
    ) -> None:
        self._service = service
        self._limits = limits
        self._doors = doors
        self._health = health
        self._reflection = reflection
        self._servers: list[grpc.aio.Server] = []  # one for each address that was bound
        self._locks: list[IO[str]] = []  # held as long as their unix sockets
        self.addresses: tuple[str, ...] = ()  # where it listens, with the real ports

    async def start(
        self, addresses: tuple[str, ...], bound: Callable[[tuple[str, ...]], Awaitable[None]] | None = None
    ) -> None:
        """Binds every address and starts to serve.

        Args:
            bound: awaited with the addresses, ports filled in, before anybody is served.

        Raises:
            SetupError: an address is taken or cannot be bound; none is served then.
        """
        try:
            self.addresses = tuple(self._bind(address) for address in addresses)
        except SetupError:
            for server in self._servers:
                await server.start()  # grpcio releases ports that it has bound only after it has served
            await self.stop()
            raise
        if bound is not None:
            await bound(self.addresses)
        for server in self._servers:
            await server.start()

    def _bind(self, address: str) -> str:
        if address.startswith("unix:"):
            self._locks.append(_claim_socket(Path(address[5:])))
            if not self._serve_at(address, OpenDoor()):
                raise SetupError(f"cannot listen on {address}: choose another path with --grpc unix:PATH")
            return address
        secure, plain = split_secure(address)
        host, _, _ = plain.rpartition(":")
        if secure:
            port = self._serve_at(plain, self._doors.remote, self._doors.credentials(secure))
        else:
            door = NeighbourDoor(self._doors.neighbours, host)
            door.port = port = self._serve_at(plain, door)
        if not port:
            raise SetupError(
                f"{address} is taken, perhaps by another toolbus: stop that one, or choose another address with "
                f"--grpc {host}:PORT (port 0 picks a free one)"
            )
        return f"{secure}:{host}:{port}" if secure else f"{host}:{port}"

    def _serve_at(self, address: str, door: Door, credentials: grpc.ServerCredentials | None = None) -> int:
        """Adds a server for an address; returns its port, 1 for a unix socket, 0 where it cannot be bound."""
        is_guarded = self._service.is_guarded
        server = grpc.aio.server(
            options=(
                *_OPTIONS,
                ("grpc.max_receive_message_length", self._limits.message_bytes),
                ("grpc.max_allowed_incoming_connections", share_of_descriptors(0.5)),
                *((("grpc.max_concurrent_streams", CONNECTION_STREAMS),) if credentials or is_guarded else ()),
            ),
            interceptors=[DoorInterceptor(door, self._doors)],
        )
        self._servers.append(server)
        wire_grpc.add_ToolBusServiceServicer_to_server(self._service, server)  # type: ignore[arg-type]  # it sets methods
        if self._health is not None:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._health is not None and self._reflection:
            from toolbus.bus.streams.reflection import add_reflection

            add_reflection(server, (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name))
        try:
            if credentials is not None:
                return server.add_secure_port(address, credentials)
            return server.add_insecure_port(address)
        except RuntimeError:
            return 0

    async def stop(self) -> None:
        """Stops at once; during grpcio's own grace period it would refuse unary calls."""
        for server in self._servers:
            await server.stop(0)
        for lock in self._locks:
            lock.close()
        self._locks.clear()


_LOCK_TEXT = re.compile(r"\d*\n?")  # the process that holds it, and nothing before the first


def _claim_socket(path: Path) -> IO[str]:
    """Locks a unix socket's path for this process; gRPC itself would replace a socket that is in use.

    Raises:
        SetupError: another process holds it, others may enter its directory or replace it, or something that is not the
            bus's own has its path.
    """
    directory = path.parent
    try:
        make_directory(directory, f"the directory {directory} of the socket")
    except OSError as error:
        raise SetupError(
            f"the directory {directory} of the socket cannot be used: {error.strerror}: choose another path with "
            "--grpc unix:PATH"
        ) from error
    if stat.S_IMODE(directory.stat().st_mode) & 0o077:
        raise SetupError(
            f"the directory {directory} of the socket is open to other users: chmod 0700 it, or use another directory"
        )
    lock_path = f"{path}.lock"
    try:
        opened = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SetupError(
            f"the lock {lock_path} cannot be opened: {error.strerror}: choose another path with --grpc unix:PATH"
        ) from error
    lock = os.fdopen(opened, "r+", encoding="ascii", errors="replace")  # its text is still that of its owner
    try:
        if not _LOCK_TEXT.fullmatch(lock.read(64)):
            raise SetupError(
                f"{lock_path} is not a lock of toolbus, and is left as it is: choose another path with --grpc unix:PATH"
            )
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if taken := socket_taken(path):
            raise SetupError(f"unix:{path} {taken}, and is left as it is: choose another path with --grpc unix:PATH")
    except SetupError:
        lock.close()
        raise
    except OSError:
        lock.close()
        raise SetupError(
            f"unix:{path} is taken by another toolbus: stop that one, or choose another path with --grpc unix:PATH"
        ) from None
    lock.truncate(0)  # only now: until it is locked, the file names its owner
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


async def _abort(context: Context, error: BaseException) -> NoReturn:
    """Ends an RPC with the status of an error; this is where exceptions become the wire."""
    status, text = grpc_status(error)
    if status == "INTERNAL":
        log.error("a fault of the bus", exc_info=error)
    await end_rpc(context, status, text)
