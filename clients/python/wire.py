"""Opens connections to a bus and streams on them, with grpcio: the only file of the client that knows gRPC.

Addresses are `HOST:PORT` and `unix:PATH` without TLS, `tls:HOST:PORT` and `mtls:HOST:PORT` with it. A credential file
is read again for each connection, since it may have been renewed.
"""

from __future__ import annotations

import asyncio
import os
import stat
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from outbox import Outbox

from toolbus.v1 import tool_bus_service_pb2 as messages
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc

OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # else gRPC shares a backoff of its own, up to minutes, between channels
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 30_000),  # pings notice a dead machine
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
]


class Refused(Exception):
    """The bus refuses this peer, and another attempt would not change that; the text is the bus's."""


class StatusError(Exception):
    """An RPC ended with a status; `code` is its name, for example UNAVAILABLE."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Stream:
    """One Invoke stream. One task reads, one task writes."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._given_up = ""  # why this side cancelled the stream; empty while it has not

    async def read(self) -> messages.InvokeResponse | None:
        """Returns the next message; None once the bus has ended the stream with OK.

        Raises:
            StatusError: the stream has ended with another status.
        """
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _status_error(error) from None
        except asyncio.CancelledError:  # of the stream, or of the task that reads it
            if self._given_up and not _cancelling():
                raise StatusError("UNAVAILABLE", self._given_up) from None
            raise
        return None if message is grpc.aio.EOF else message  # type: ignore[attr-defined]

    async def write_all(self, outbox: Outbox) -> None:
        """Writes messages until the outbox is closed and empty, and half-closes; the stream's one writer.

        Cancel it only after `give_up`: a cancelled write breaks every later one.
        """
        with suppress(Exception, asyncio.CancelledError):  # the stream is over: its reader gets the status
            while (message := await outbox.take()) is not None:
                await self._call.write(message)
            await self._call.done_writing()

    def give_up(self, reason: str) -> None:
        """Cancels the stream; without effect on one that has ended."""
        self._given_up = self._given_up or reason
        self._call.cancel()


class Connection:
    """One connection to a bus."""

    def __init__(self, channel: grpc.aio.Channel, metadata: list[tuple[str, str]]) -> None:
        self._stub: Any = rpc.ToolBusServiceStub(channel)  # grpc's type hints know only its blocking API
        self._metadata = metadata  # of every RPC

    def invoke(self) -> Stream:
        """Opens a stream, without a deadline and without waiting for the bus."""
        return Stream(self._stub.Invoke(metadata=self._metadata))

    async def list_tools(self, request: messages.ListRequest) -> messages.ListResponse:
        """Returns one page of the tools.

        Raises:
            StatusError: the bus did not answer with OK.
        """
        try:
            page: messages.ListResponse = await self._stub.List(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise _status_error(error) from None
        return page


@asynccontextmanager
async def connect(address: str, credential_path: str) -> AsyncIterator[Connection]:
    """Opens a new connection, and closes it at the end.

    Raises:
        Refused: the credential may not be used.
    """
    credential = read_credential(credential_path)
    prefix, _, target = address.partition(":")
    tls = prefix in ("tls", "mtls")
    token = credential.get("token")
    host = address.rpartition(":")[0]
    if token and not tls and prefix != "unix" and host not in ("127.0.0.1", "localhost", "[::1]"):
        raise Refused(f"a token is not sent to {address} in plain text: write tls:{address}")
    if tls:
        pem = [credential[name].encode() if name in credential else None for name in ("ca", "key", "certificate")]
        channel = grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(*pem), options=OPTIONS)
    else:
        channel = grpc.aio.insecure_channel(address, options=OPTIONS)
    async with channel:
        yield Connection(channel, [("authorization", f"Bearer {token}")] if token else [])


def read_credential(path: str) -> dict[str, Any]:
    """Returns the values of a credential file; {} without a path.

    Raises:
        Refused: other users can read the file.
    """
    if not path:
        return {}
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(status.st_mode) & 0o077:
            raise Refused(f"{path} must belong to this user, who alone may read it: chmod 600 {path}")
        return tomllib.load(file)


def _status_error(error: grpc.aio.AioRpcError) -> StatusError:
    return StatusError(error.code().name, error.details() or "")


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
