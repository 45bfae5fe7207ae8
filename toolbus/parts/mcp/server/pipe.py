"""Serves MCP to one bridge (`toolbus mcp`) over a pipe: messages as lines, both eras interleaved.

The first line is the bridge's own request ``toolbus/attach``, which names the profile; the answer identifies the bus.
Each later line is a message of the bridge's client.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os

from toolbus.bus.access.identity import LOCAL
from toolbus.common.text import quote
from toolbus.common.version import VERSION
from toolbus.errors import LimitExceeded, ToolBusError
from toolbus.parts.mcp.bridge.bridge_socket import ATTACH
from toolbus.parts.mcp.messages import jsonrpc
from toolbus.parts.mcp.messages.jsonrpc import JsonId, JsonRpcMessage, McpCode, RpcError
from toolbus.parts.mcp.server import methods
from toolbus.parts.mcp.server.pipe_listener import LINE_BYTES, PipeRefused
from toolbus.parts.mcp.server.server import McpServer
from toolbus.parts.mcp.server.sessions import McpSession, RunningRequests
from toolbus.parts.mcp.settings import DEFAULT_PROFILE, Profile

log = logging.getLogger("toolbus.parts.mcp.messages")

MAX_REQUESTS = 1_000  # of one bridge at once
MAX_UNREAD_BYTES = 4 * LINE_BYTES  # beyond it, the connection of a bridge that does not read ends


class Pipe:
    """The connection to one bridge, and the channel of its requests."""

    takes_messages = True

    def __init__(self, server: McpServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server = server
        self._reader = reader
        self._writer = writer
        self._profile: Profile  # set by the first line
        self._session: McpSession | None = None  # of a legacy client; None before `initialize`
        self._running = RunningRequests()

    def send(self, message: bytes) -> None:
        """Sends a message; ends the connection of a bridge that does not read."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        self._writer.write(message + b"\n")
        if transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            log.warning("a bridge does not read: %d bytes wait for it, its connection ends", MAX_UNREAD_BYTES)
            transport.abort()

    async def run(self) -> None:
        """Serves until the bridge disconnects."""
        try:
            await self._attach()
            while line := await self._line():
                self._take(line)
        finally:
            self._running.cancel_all()
            if self._session is not None:
                self._session.end()

    async def _line(self) -> bytes:
        """Returns the next line; b"" at the end.

        Raises:
            PipeRefused: it is too long.
        """
        try:
            return await self._reader.readline()
        except ValueError:
            raise PipeRefused(f"a message is longer than {LINE_BYTES} bytes, the limit of a line") from None

    async def _attach(self) -> None:
        try:
            message = jsonrpc.decode(await self._line())
            if message.method != ATTACH or not message.is_request:
                raise PipeRefused(f"the first line must be a request of {ATTACH}: connect with toolbus mcp")
            name = jsonrpc.read(message.params, dict).get("profile") or DEFAULT_PROFILE
        except RpcError as error:
            raise PipeRefused(error.message) from None
        profile = self._server.settings.profiles.get(name) if isinstance(name, str) else None
        if profile is None:
            raise PipeRefused(f"there is no profile {quote(str(name))}: the configuration has them at mcp.profiles")
        try:
            LOCAL.check_claims(profile.user, profile.level)
        except ToolBusError as error:
            raise PipeRefused(str(error)) from None
        self._profile = profile
        bus = {"version": VERSION, "pid": os.getpid()}
        self.send(jsonrpc.answer(message.id, {"bus": bus}))  # type: ignore[arg-type]  # a request has an id

    def _take(self, line: bytes) -> None:
        try:
            message = jsonrpc.decode(line)
        except RpcError as error:
            self.send(jsonrpc.refusal(None, error))
            return
        if not message.is_request:
            self._notice(message)
            return
        id: JsonId = message.id  # type: ignore[assignment]  # a request has one
        if sum(map(len, self._running.values())) >= MAX_REQUESTS:
            full = f"{MAX_REQUESTS} requests are being answered, the limit of a pipe: wait for some"
            self.send(jsonrpc.refusal(id, RpcError(McpCode.INTERNAL, full)))
            return
        task = asyncio.create_task(self._answer(message, id))
        self._running.add(id, task)
        task.add_done_callback(functools.partial(self._running.discard, id))  # also of one that never began

    async def _answer(self, message: JsonRpcMessage, id: JsonId) -> None:
        try:
            request = self._server.read(message, self._profile, LOCAL, self, session=self._session)
        except RpcError as error:
            self.send(jsonrpc.refusal(id, error))
            return
        _, answer = await methods.answer(self._server, request)
        if message.method == "initialize" and request.session is not None:
            try:
                self._begin(request.session)
            except LimitExceeded as error:  # of listeners
                answer = jsonrpc.refusal(id, RpcError(McpCode.INTERNAL, str(error)))
        self.send(answer)

    def _begin(self, begun: McpSession) -> None:
        """Replaces the session of `initialize` by one without an id, which ends with the pipe."""
        self._server.sessions.end(begun)
        if self._session is not None:
            self._session.end()
        self._session = McpSession("", begun.version, begun.client, self._profile, LOCAL)
        self._session.stand(self, self._server.subscriptions.follow)

    def _notice(self, message: JsonRpcMessage) -> None:
        if message.method == "notifications/cancelled":
            try:
                id = jsonrpc.read(message.params, dict).get("requestId")
            except RpcError:
                return  # a notification has no response that could carry the error
            if isinstance(id, int | str):
                self._running.cancel(id)
            return
        self._server.notice(message, self._session)
