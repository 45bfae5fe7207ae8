"""Defines a connection to a bus, as the bridge sees it, and the one over the socket in the bus's data directory."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

ATTACH = "toolbus/attach"  # the bridge's own request, with which a connection begins
SOCKET_FILE = "mcp.sock"
_LONGEST_PATH = 107
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid

TakeLine = Callable[[bytes], None]
TakeEnd = Callable[["Link", str], None]


class NoBus(Exception):
    """There is no bus, or it does not serve this client; the text says why."""


class Link(Protocol):
    """A connection to a bus."""

    where: str  # the bus, for people

    def send(self, line: bytes) -> None:
        """Sends a message.

        Raises:
            OSError: the connection has ended.
        """

    def close(self) -> None:
        """Ends it; `Bridge.ended` is not called because of that."""


class PipeLink:
    """A connection to the unix socket of a bus.

    Raises:
        NoBus: nothing that may be served listens there.
    """

    def __init__(self, path: Path, take: TakeLine, end: TakeEnd) -> None:
        self.where = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._closed = False
        try:
            with _short(path) as short:
                self._socket.connect(short)
            self._check_owner()
        except OSError as error:
            self._socket.close()
            raise NoBus(f"{path}: {error.strerror or error}") from None
        except NoBus:
            self._socket.close()
            raise
        threading.Thread(target=self._read, args=(take, end), name="bus", daemon=True).start()

    def send(self, line: bytes) -> None:
        self._socket.sendall(line if line.endswith(b"\n") else line + b"\n")

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _check_owner(self) -> None:
        if hasattr(socket, "SO_PEERCRED"):
            raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, uid, _ = _CREDENTIALS.unpack(raw)
            if uid not in (os.geteuid(), 0):
                raise NoBus(f"{self.where} belongs to the user with uid {uid}: a bridge uses its own user's bus")

    def _read(self, take: TakeLine, end: TakeEnd) -> None:
        why = "the bus has closed the pipe"
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    take(line)
        except OSError as error:
            why = str(error)
        self._socket.close()
        if not self._closed:
            end(self, why)


def log(text: str) -> None:
    """Tells people something, on standard error."""
    with contextlib.suppress(OSError, ValueError):
        print(f"toolbus mcp: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Gives a path that the kernel takes; a long one by way of its directory's descriptor."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
