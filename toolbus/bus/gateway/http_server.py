"""Binds the HTTP address and serves an ASGI application in the process of the bus, on its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import sys
import tempfile
from collections.abc import Iterator, Mapping

import uvicorn
from starlette.types import ASGIApp

from toolbus.bus.access.neighbours import Neighbours
from toolbus.bus.gateway.http_connection import BoundedConfig, BoundedProtocol
from toolbus.bus.keys.keyring import Keyring
from toolbus.common.descriptors import share_of_descriptors
from toolbus.errors import SetupError

log = logging.getLogger("toolbus.http")

MAX_ACCEPTS = 8  # handles of the listening socket: uvloop accepts one connection of each in a pass of the loop
STOP_SECONDS = 1.0  # how long open requests get when the bus stops, before their connections are cut


class HttpServer:
    """Serves an ASGI application.

    Args:
        connections: how many may be open.
        head_seconds: as in `Timings`.
        neighbours: looks up the user of a connection.
    """

    def __init__(self, connections: int, head_seconds: float, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self._connections = connections
        self._head_seconds = head_seconds
        self._listening: socket.socket | None = None  # bound and not yet served
        self._server: _QuietServer | None = None  # None until started
        self._serving: asyncio.Task[None] | None = None  # None until started
        self.address = ""  # HOST:PORT, once bound

    def bind(self, address: str) -> None:
        """Binds an address.

        Raises:
            SetupError: it is in use or cannot be bound.
        """
        self._listening = _bind(address)
        host, port = self._listening.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def start(
        self, application: ASGIApp, page_policies: Mapping[str, str], tls: ssl.SSLContext | None = None
    ) -> None:
        """Serves an application at the address that was bound.

        Args:
            page_policies, tls: as in `BoundedConfig`.
        """
        assert self._listening is not None
        config = BoundedConfig(
            application,
            connections=min(self._connections, share_of_descriptors(0.25)),
            head_seconds=self._head_seconds,
            page_policies=page_policies,
            uid_of=self._neighbours.uid_of,
            tls=tls,
        )
        self._server = _QuietServer(config)
        # Windows has no uvloop, and waits for a socket in one place only.
        copies = 0 if sys.platform == "win32" else MAX_ACCEPTS - 1
        sockets = [self._listening, *(self._listening.dup() for _ in range(copies))]
        self._serving = asyncio.create_task(self._server.serve(sockets=sockets), name="toolbus http")
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.001)
        if self._serving.done():
            self._serving.result()

    async def stop(self) -> None:
        """Stops listening and ends open connections."""
        if self._server is None or self._serving is None:
            if self._listening is not None:
                self._listening.close()
            return
        self._server.should_exit = True
        self._server.ending.set()
        await asyncio.wait((self._serving,), timeout=STOP_SECONDS)
        for connection in list(self._server.server_state.connections):  # of clients that do not read their response
            connection.transport.abort()
        await asyncio.wait((self._serving,), timeout=STOP_SECONDS)
        self._server.force_exit = True
        await self._serving


class _QuietServer(uvicorn.Server):
    """Leaves signals to the bus, and stops without uvicorn's pauses of 0.1 s, which would delay a restart.

    Attributes:
        ending: set when `should_exit` is.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ending = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens; a TLS handshake has as much time as a head, where uvicorn would give it a minute."""
        config = self.config
        if config.ssl is None:
            await super().startup(sockets)
            return
        assert isinstance(config, BoundedConfig)
        await super().startup([])

        def protocol() -> asyncio.Protocol:
            return BoundedProtocol(config, self.server_state, self.lifespan.state)

        loop = asyncio.get_running_loop()
        for each in sockets or ():
            self.servers.append(
                await loop.create_server(
                    protocol,
                    sock=each,
                    ssl=config.ssl,
                    ssl_handshake_timeout=config.head_seconds,
                    backlog=config.backlog,
                )
            )

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # sets the Date header
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ending.wait(), 1.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for server in self.servers:
            server.close()
        for each in sockets or ():
            each.close()


def _bind(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named since asyncio sets TCP_NODELAY only then, without which every answer takes 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # A port in TIME_WAIT may be bound again at once, one with another listener may not.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, int(port)))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise SetupError(
            f"{address} is in use or cannot be bound ({error.strerror}): stop the program that uses it, choose another "
            f"port with --http {host}:PORT (port 0 picks a free one), or serve no HTTP with --http off"
        ) from None
    listening.setblocking(False)
    return listening


class TlsContext:
    """The TLS of one listener, with the server's certificate as it is now.

    Attributes:
        context: for the server; a renewed certificate is used from the next connection on.
    """

    def __init__(self, keys: Keyring) -> None:
        self._keys = keys
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.verify_mode = ssl.CERT_OPTIONAL
        self.refresh()

    def refresh(self) -> None:
        """Loads a renewed certificate. A dropped root stays until the bus restarts.

        This is safe: a certificate must be in the list of keys as well.
        """
        key, chain, roots = self._keys.server_certificate()
        with _file_of(key + chain) as path:
            self.context.load_cert_chain(path)
        self.context.load_verify_locations(cadata=roots.decode("ascii"))


@contextlib.contextmanager
def _file_of(content: bytes) -> Iterator[str]:
    """Puts a secret into a file, since the library reads files only: in memory where the system can, else on disk.

    A file on disk is of this user alone, and stays if the process is killed while it is read.
    """
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("toolbus"), "wb") as file:
            file.write(content)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
        return
    handle, path = tempfile.mkstemp(suffix=".pem")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        yield path
    finally:
        os.unlink(path)
