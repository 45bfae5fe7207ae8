"""Listens on the unix socket for `toolbus mcp`: a file in the data directory, for its owner only.

It imports nothing of MCP, so a bus without bridges needs no memory for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

from toolbus.common.local_users import show_user, socket_taken
from toolbus.parts.mcp.bridge.bridge_socket import SOCKET_FILE, foreign_uid, short_path

LINE_BYTES = 16 * 1024 * 1024  # of one message
MAX_PIPES = 256  # connections at once

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class PipeRefused(Exception):
    """A connection is not served; the text says why."""


class PipeListener:
    """The socket, from `open` to `close`.

    Args:
        directory: the data directory, which the bus has locked: an existing socket belongs to a dead bus.
        serve: serves one connection.
    """

    def __init__(self, directory: Path, serve: Serve) -> None:
        self._directory = directory
        self._serve = serve
        self._server: asyncio.Server | None = None  # None while it does not listen
        self._inode = 0  # of the socket's file; 0 before `open`
        self._serving: set[asyncio.Task[None]] = set()  # one for each connection

    @property
    def path(self) -> Path:
        return self._directory / SOCKET_FILE

    async def open(self) -> None:
        """Starts to listen.

        Raises:
            OSError: the socket cannot be created, or its path is taken by something that is not the bus's own.
        """
        if (taken := socket_taken(self.path)) and not self._is_empty():
            raise FileExistsError(errno.EEXIST, f"{self.path} {taken}: move it away")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path.unlink(missing_ok=True)
            with short_path(self.path) as path:
                listener.bind(path)
            self.path.chmod(0o600)
            self._inode = self.path.stat().st_ino
            self._server = await asyncio.start_unix_server(self._accept, sock=listener, limit=LINE_BYTES)
        except BaseException:
            listener.close()
            raise

    def _is_empty(self) -> bool:
        """Tells whether an empty file has the path: some backups restore a socket so."""
        state = self.path.lstat()
        return stat.S_ISREG(state.st_mode) and not state.st_size

    async def close(self) -> None:
        """Ends the socket and its connections."""
        if self._server is None:
            return
        self._server.close()
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self._inode:  # else another's has replaced it
                self.path.unlink()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self._server = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # it runs in one
        self._serving.add(task)
        try:
            if len(self._serving) > MAX_PIPES:
                raise PipeRefused(f"the bus has {MAX_PIPES} pipes, its limit mcp_pipes: end a bridge")
            check_peer(writer.get_extra_info("socket"))
            await self._serve(reader, writer)
        except PipeRefused as refused:
            writer.write(refusal(str(refused)))
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._serving.discard(task)
            writer.close()


def refusal(why: str) -> bytes:
    """Returns the line that says why a connection is not served."""
    import json

    return json.dumps({"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": why}}).encode() + b"\n"


def check_peer(connection: socket.socket) -> None:
    """Checks that the peer is this user or root.

    Raises:
        PipeRefused: it is another user.
    """
    uid = foreign_uid(connection)
    if uid is not None:
        raise PipeRefused(f"this pipe is {show_user(os.geteuid())}'s, and {show_user(uid)} asks: use a bus of your own")
