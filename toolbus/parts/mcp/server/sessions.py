"""Holds the sessions of legacy clients: their streams, log level and questions.

The id of a session is sealed and contains the result of the handshake, so a restart of the bus ends no session. What
its client has changed since (its subscriptions, and the level of its log) is in the store. Its other parts are created
again at the client's next request after a restart or a long silence.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from toolbus.bus.access.identity import Identity
from toolbus.bus.keys.seal import BrokenSeal, Sealer
from toolbus.bus.storage.store import Kind, Store, WriteFailed
from toolbus.common.newest import NewestCache
from toolbus.errors import LimitExceeded, SetupError
from toolbus.parts.mcp.messages import jsonrpc
from toolbus.parts.mcp.messages.eras import LIST_CHANGES, SAMPLING_TOOLS
from toolbus.parts.mcp.messages.jsonrpc import JsonId, JsonRpcMessage, McpCode, RpcError
from toolbus.parts.mcp.server.message_stream import MessageStream
from toolbus.parts.mcp.settings import Profile
from toolbus.protocol.limits import MIB

log = logging.getLogger("toolbus.mcp")

LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")  # of logging, RFC 5424


def reaches(level: str, lowest: str | None) -> bool:
    """Tells whether a client that gets messages from a level on gets one of another; None: it gets none."""
    return lowest in LEVELS and LEVELS.index(level) >= LEVELS.index(lowest)


@dataclass(frozen=True, slots=True)
class ClientCapabilities:
    """The capabilities that a client declares.

    Attributes:
        accepts: the questions that it accepts, in words of `ToolCall.accepts`, and `SAMPLING_TOOLS`.
        extensions: the names of extensions of the protocol.
    """

    accepts: frozenset[str] = frozenset()
    extensions: frozenset[str] = frozenset()

    @classmethod
    def of(cls, capabilities: Mapping[str, Any]) -> ClientCapabilities:
        """Reads the capabilities that a client declares."""
        accepts = {name for name in ("sampling", "roots") if isinstance(capabilities.get(name), Mapping)}
        if "sampling" in accepts and isinstance(capabilities["sampling"].get("tools"), Mapping):
            accepts.add(SAMPLING_TOOLS)
        elicitation = capabilities.get("elicitation")
        if isinstance(elicitation, Mapping):
            kinds = {kind for kind in ("form", "url") if isinstance(elicitation.get(kind), Mapping)}
            accepts |= {f"elicitation.{kind}" for kind in kinds or {"form"}}
        extensions = capabilities.get("extensions")
        return cls(frozenset(accepts), frozenset(extensions if isinstance(extensions, Mapping) else ()))


class Channel(Protocol):
    """Sends messages to the client of a request, before its response."""

    @property
    def takes_messages(self) -> bool:
        """Whether messages reach the client; over HTTP it must accept streams."""

    def send(self, message: bytes) -> None:
        """Sends a message, at once or when the client reads; never waits."""


class RunningRequests(dict[JsonId, set[asyncio.Task[Any]]]):
    """The tasks that answer requests, by id: ids may repeat."""

    def add(self, id: JsonId, task: asyncio.Task[Any]) -> None:
        self.setdefault(id, set()).add(task)

    def discard(self, id: JsonId, task: asyncio.Task[Any]) -> None:
        tasks = self.get(id, set())
        tasks.discard(task)
        if not tasks:
            self.pop(id, None)

    def cancel(self, id: JsonId) -> None:
        """Cancels the requests of an id for their client."""
        for task in tuple(self.get(id, ())):
            task.cancel(CANCELLED)

    def cancel_all(self) -> None:
        for id in tuple(self):
            self.cancel(id)


MAX_SESSIONS = 1_000
MAX_STREAMS = 64  # of one session
MAX_STORED_BYTES = 4 * MIB  # of closed streams of one session, for clients that resume them
MAX_ENDED = 10_000  # stored ids of sessions that clients have ended
CHANGED = Kind(  # by the digest of a session's id: its level, and the URIs that it subscribes to
    "mcp_sessions", needed=False, without="start without the subscriptions of MCP clients", shared="results"
)
MAX_CHANGED = 1_000  # stored sessions, of all buses that share a store; the one that was changed first makes room
IDLE_SECONDS = 1_800.0
ASK_SECONDS = 300.0  # how long a client and its user may take for an answer
PURPOSE = "session"  # of a sealed id
DEFAULT_LEVEL = "info"
UPDATED = "notifications/resources/updated"
STANDING = "s"  # prefix of the ids of standing streams, which belong to no request

FollowChanges = Callable[["McpSession"], Callable[[], None]]


class UnknownSession(Exception):
    """No session has this id: the bus did not issue it for this client, or the client has ended the session."""


class McpSession:
    """One legacy client.

    Attributes:
        id: towards the client; "" over a pipe.
        version: of the protocol, from the handshake.
        client: its capabilities.
        log_level: the lowest level of log messages that it gets.
        running: the tasks that answer its requests.
        is_restored: whether the client needs a notification of all lists, after a restart or a long silence.
        subscriptions: functions that end its subscriptions to resources, by URI; None where no mount has listed the
            resource since a restart of the bus.
        is_stored: whether the store may have its level and subscriptions.
    """

    def __init__(self, id: str, version: str, client: ClientCapabilities, profile: Profile, identity: Identity) -> None:
        self.id = id
        self.version = version
        self.client = client
        self.profile = profile
        self.identity = identity
        self.log_level: str = DEFAULT_LEVEL
        self.running = RunningRequests()
        self.subscriptions: dict[str, Callable[[], None] | None] = {}
        self.is_restored = self.is_stored = False
        self.used_at = time.monotonic()
        self._streams: OrderedDict[str, MessageStream] = OrderedDict()
        self._standing: Channel | None = None  # for messages that belong to no request; None until the client opens it
        self._end_following: Callable[[], None] | None = None  # ends the notifications; None while there are none
        self._pending: dict[str, asyncio.Future[JsonRpcMessage]] = {}  # questions to the client, by their id
        self._numbers = itertools.count(1)

    def __repr__(self) -> str:
        return f"<McpSession {self.version} streams={len(self._streams)} pending={len(self._pending)}>"

    @property
    def is_idle(self) -> bool:
        """Whether no request runs and no stream is open."""
        return not self.running and not self._pending and not any(stream.writing for stream in self._streams.values())

    @property
    def changes(self) -> dict[str, Any]:
        """What its client has changed since the handshake; empty if nothing."""
        if not self.subscriptions and self.log_level == DEFAULT_LEVEL:
            return {}
        return {"level": self.log_level, "subscriptions": list(self.subscriptions)}

    def set_level(self, level: str) -> None:
        """Sets the lowest level of log messages.

        Raises:
            RpcError: the level is unknown.
        """
        if level not in LEVELS:
            raise RpcError(McpCode.INVALID_PARAMS, f"level is {level!r:.40}: use one of {', '.join(LEVELS)}")
        self.log_level = level

    def new_stream(self, of: str = STANDING) -> MessageStream:
        """Returns a new stream that can be resumed; the oldest closed one is removed if there are too many.

        Args:
            of: the prefix of its id, which identifies its request to a later bus.

        Raises:
            LimitExceeded: the session has too many.
        """
        stored = sum(stream.size for stream in self._streams.values() if stream.closed)
        while len(self._streams) >= MAX_STREAMS or stored > MAX_STORED_BYTES:
            ended = next((id for id, stream in self._streams.items() if stream.closed and not stream.writing), None)
            if ended is not None:
                stored -= self._streams.pop(ended).size
            elif len(self._streams) < MAX_STREAMS:
                break
            else:
                raise LimitExceeded("mcp_streams", MAX_STREAMS, "the session has as many streams as it may: end one")
        stream = MessageStream(f"{of}.{secrets.token_hex(4)}")
        self._streams[stream.id] = stream
        return stream

    def stream_of(self, event_id: str) -> tuple[MessageStream, int] | None:
        """Returns the stream of an event and the event's number; None if the session does not have the stream."""
        id, _, number = event_id.rpartition("-")
        stream = self._streams.get(id)
        return (stream, int(number)) if stream is not None and number.isdecimal() and len(number) < 10 else None

    def stand(self, channel: Channel, follow: FollowChanges) -> None:
        """Takes the channel for messages that belong to no request: changes of lists and updates of resources."""
        self.end_standing()
        self._end_following = follow(self)
        self._standing = channel
        self.catch_up(channel)

    def end_standing(self) -> None:
        """Ends the standing stream, and the notifications of changes."""
        if self._end_following is not None:
            self._end_following()
            self._end_following = None
        if isinstance(self._standing, MessageStream):
            self._standing.close()

    def catch_up(self, channel: Channel) -> None:
        """Notifies a client that comes back after an outage once of changes that it may have missed.

        Few clients open their standing stream again when the bus was away for long, so the stream of any request does.
        """
        if self.is_restored and channel.takes_messages:
            self.is_restored = False
            for kind in LIST_CHANGES:
                channel.send(jsonrpc.notification(f"notifications/{kind}/list_changed"))
            for uri in self.subscriptions:
                channel.send(jsonrpc.notification(UPDATED, {"uri": uri}))

    def notify(self, method: str, params: Mapping[str, Any] | None = None) -> None:
        """Sends a notification on the standing stream; drops it if the client has opened none."""
        if self._standing is not None:
            self._standing.send(jsonrpc.notification(method, params))

    async def ask(self, method: str, params: Mapping[str, Any], channel: Channel) -> dict[str, Any]:
        """Sends a question to the client, on the channel of its request.

        Raises:
            RpcError: the client answered with an error or not in time, or its channel is not a stream.
        """
        if not channel.takes_messages:
            raise RpcError(
                McpCode.INVALID_REQUEST, f"{method} needs a stream: send Accept: application/json, text/event-stream"
            )
        id = f"ask-{next(self._numbers)}"
        future: asyncio.Future[JsonRpcMessage] = asyncio.get_running_loop().create_future()
        self._pending[id] = future
        try:
            channel.send(jsonrpc.request(id, method, params))
            async with asyncio.timeout(ASK_SECONDS):
                answer = await future
        except TimeoutError:
            raise RpcError(McpCode.INTERNAL, f"{method} was not answered within {ASK_SECONDS:g} s") from None
        finally:
            del self._pending[id]
        if (error := answer.rpc_error) is not None:
            raise error
        return jsonrpc.read(answer.result, dict, "result")

    def answered(self, message: JsonRpcMessage) -> None:
        """Takes a response to a question; others are ignored."""
        future = self._pending.get(message.id) if isinstance(message.id, str) else None
        if future is not None and not future.done():
            future.set_result(message)

    def end(self) -> None:
        """Ends its requests, streams and subscriptions."""
        self.end_standing()
        for end in filter(None, self.subscriptions.values()):
            end()
        self.subscriptions.clear()
        for stream in self._streams.values():
            stream.close()
        self.running.cancel_all()


CANCELLED = "the client cancelled the request"


class Sessions:
    """The sessions of a bus over HTTP.

    Args:
        store: has what clients change.
        on_restore: gets a session that is made anew, with its subscriptions.
    """

    def __init__(
        self,
        sealer: Sealer,
        clock: Callable[[], float] = time.monotonic,
        store: Store | None = None,
        on_restore: Callable[[McpSession], object] = lambda session: None,
    ) -> None:
        self._sealer = sealer
        self._clock = clock
        self._store = store or Store.of(None)
        self._on_restore = on_restore
        self._stored: list[str] | None = None  # keys of rows, the oldest first; None before the first change
        self._saving = asyncio.Lock()  # changes are written in their order
        self._open: OrderedDict[str, McpSession] = OrderedDict()  # by id, the one used last at the end
        self._ended: NewestCache[str, None] = NewestCache(MAX_ENDED)  # ids that clients have ended

    def __repr__(self) -> str:
        return f"<Sessions {len(self._open)}>"

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, version: str, client: ClientCapabilities, profile: Profile, identity: Identity) -> McpSession:
        """Begins a session.

        Raises:
            LimitExceeded: the limit of sessions is reached, and none is idle.
        """
        content = [version, sorted(client.accepts), sorted(client.extensions)[:8], secrets.token_hex(8)]
        id = self._sealer.seal(msgspec.json.encode(content), PURPOSE, profile.name, identity.name)
        return self._add(McpSession(id, version, client, profile, identity))

    async def find(self, id: str, profile: Profile, identity: Identity) -> McpSession:
        """Returns the session of an id, which an earlier run of the bus may have issued.

        Raises:
            UnknownSession: no session has that id.
            LimitExceeded: as for `begin`.
        """
        session = self._open.get(id)
        if session is None or session.profile is not profile or session.identity.name != identity.name:
            session = await self._restore(id, profile, identity)
        session.identity = identity  # its scopes may have changed
        session.used_at = self._clock()
        self._open.move_to_end(id)
        return session

    def end(self, session: McpSession) -> None:
        """Ends a session for its client: its id becomes unknown."""
        self._ended[session.id] = None
        self._open.pop(session.id, None)
        session.end()

    async def save(self, session: McpSession) -> None:
        """Persists what the client of a session has changed; of an ended session nothing is left."""
        async with self._saving:
            changes = {} if session.id in self._ended else session.changes
            if not session.id or not (changes or session.is_stored):
                return
            session.is_stored = True  # or may be, until a write that deletes it has succeeded
            try:
                await asyncio.to_thread(self._write, _key(session.id), changes)
                session.is_stored = bool(changes)
            except (WriteFailed, SetupError) as error:
                log.warning("changes of an MCP session end with this bus, since they could not be stored: %s", error)

    def end_standing(self) -> None:
        for session in self._open.values():
            session.end_standing()

    def close(self) -> None:
        """Ends the requests, streams and subscriptions of all sessions; their ids stay valid."""
        for session in self._open.values():
            session.end()
        self._open.clear()

    async def _restore(self, id: str, profile: Profile, identity: Identity) -> McpSession:
        try:
            content = self._sealer.open(id, PURPOSE, profile.name, identity.name)
        except BrokenSeal as broken:
            raise UnknownSession(f"Mcp-Session-Id: {broken}; initialize again") from None
        version, accepts, extensions, _ = msgspec.json.decode(content)
        client = ClientCapabilities(frozenset(accepts), frozenset(extensions))
        try:
            changes = await asyncio.to_thread(self._store.get, CHANGED, _key(id))
        except SetupError as error:
            changes = None
            log.warning("the subscriptions of an MCP session are lost: %s", error)
        if id in self._ended:
            raise UnknownSession("this session has ended: initialize again")
        if (restored := self._open.get(id)) is not None:  # by another request meanwhile
            return restored
        session = self._add(McpSession(id, version, client, profile, identity))
        session.is_restored = True
        if changes:
            session.is_stored, session.log_level = True, changes["level"]
            session.subscriptions = dict.fromkeys(changes["subscriptions"])
            self._on_restore(session)
        return session

    def _write(self, key: str, changes: Mapping[str, Any]) -> None:
        stored = self._stored if self._stored is not None else list(self._store.load(CHANGED))
        others = [each for each in stored if each != key]
        oldest = others[: max(0, len(others) + 1 - MAX_CHANGED)]
        self._store.write(CHANGED, {key: changes} if changes else {}, [key, *oldest])
        self._stored = [*others[len(oldest) :], *([key] if changes else ())]

    def _add(self, session: McpSession) -> McpSession:
        now = self._clock()
        for each in list(self._open.values()):  # the longest silent one is first
            if len(self._open) < MAX_SESSIONS and now - each.used_at < IDLE_SECONDS:
                break
            if each.is_idle:
                del self._open[each.id]
                each.end()
        if len(self._open) >= MAX_SESSIONS:
            raise LimitExceeded("mcp_sessions", MAX_SESSIONS, "the bus has as many MCP sessions as it may: try later")
        session.used_at = now
        self._open[session.id] = session
        return session


def _key(id: str) -> str:
    return hashlib.sha256(id.encode()).hexdigest()[:32]  # who reads the store learns no id
