"""Describes the unix socket between `toolbus mcp` and the bus: its file, its first request, and who may use it.

Both ends import it, and the bridge loads the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

ATTACH = "toolbus/attach"  # the first request of a connection, from the bridge itself
SOCKET_FILE = "mcp.sock"  # in the data directory of the bus
_LONGEST = 107  # bytes of a path that the kernel takes (sockaddr_un)
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid: struct ucred


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yields a path that is short enough for a socket; a long one by way of its directory's descriptor."""
    if len(os.fsencode(path)) <= _LONGEST:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def foreign_uid(connection: socket.socket) -> int | None:
    """Returns the uid of a peer that is neither this user nor root; None for those two.

    On other systems than Linux, only the permissions of the directory protect the socket, and it is always None.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(raw)[1]
    return uid if uid not in (os.geteuid(), 0) else None
