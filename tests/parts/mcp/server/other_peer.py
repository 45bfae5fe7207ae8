"""Asks, as another user, for a connection that belongs to this one; prints how it is refused."""

from __future__ import annotations

import os
import socket
import tempfile

from tests.support.other_user import become_nobody
from toolbus.parts.mcp.server.pipe_listener import PipeRefused, check_peer


def main() -> None:
    """Listens, connects from a child that is somebody else, and checks who it is."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        os.chmod(folder, 0o755)
        listener.bind(f"{folder}/sock")
        os.chmod(f"{folder}/sock", 0o666)
        listener.listen()
        child = os.fork()
        if child == 0:
            become_nobody()
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(f"{folder}/sock")
                peer.recv(1)
            os._exit(0)
        connection, _ = listener.accept()
        with connection:
            try:
                check_peer(connection)
            except PipeRefused as refused:
                print(type(refused).__name__, refused)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
