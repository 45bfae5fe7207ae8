"""Declares a bridge's connection to a bus, and implements the one over the socket in the bus's data directory."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, Protocol

from toolbus.parts.mcp.bridge.bridge_socket import foreign_uid, short_path

TakeLine = Callable[[bytes], None]
TakeEnd = Callable[["Link", str], None]


class NoBus(Exception):
    """No bus answers, or it does not serve this client; the text says why."""


class Link(Protocol):
    """A connection to a bus."""

    where: str  # the address of the bus, for people

    @property
    def unsent(self) -> Container[str]:
        """The requests, by their ids as JSON, of which nothing was sent when it ended."""

    @property
    def running(self) -> Container[str]:
        """Those that are answered although it has ended, or whose end it tells by calling `TakeEnd` again."""

    def send(self, line: bytes) -> None:
        """Sends a message.

        Raises:
            OSError: the connection has ended.
        """

    def leave(self, why: str) -> bool:
        """Ends the connection for further requests, if a new one leads to another bus; returns whether it does."""

    def close(self) -> None:
        """Closes the connection, without a call of `Bridge.ended`."""


class PipeLink:
    """A connection to the unix socket of a bus.

    Raises:
        NoBus: no bus listens there, or that of another user.
    """

    unsent: Container[str] = ()
    running: Container[str] = ()

    def __init__(self, path: Path, take: TakeLine, end: TakeEnd) -> None:
        self.where = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._closed = False
        try:
            with short_path(path) as short:
                self._socket.connect(short)
            uid = foreign_uid(self._socket)
        except OSError as error:
            self._socket.close()
            raise NoBus(f"{path}: {error.strerror or error}") from None
        if uid is not None:
            self._socket.close()
            raise NoBus(f"{path} belongs to the user with uid {uid}: a bridge uses its own user's bus")
        threading.Thread(target=self._read, args=(take, end), name="bus", daemon=True).start()

    def send(self, line: bytes) -> None:
        self._socket.sendall(line if line.endswith(b"\n") else line + b"\n")

    def leave(self, why: str) -> bool:
        return False

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

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


def params_of(message: Any, key: str = "params") -> dict[str, Any]:
    """Returns an object inside a message; empty if it is missing or of another type."""
    value = message.get(key) if isinstance(message, dict) else None
    return value if isinstance(value, dict) else {}


def log(text: str) -> None:
    """Writes a line for people to standard error."""
    with contextlib.suppress(OSError, ValueError):
        print(f"toolbus mcp: {text}", file=sys.stderr, flush=True)
