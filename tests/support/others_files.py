"""Puts files of others where a bus makes its sockets."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

OTHERS = ("file", "folder", "link", "socket", "datagram socket")


@contextlib.contextmanager
def somebody_elses(kind: str, path: Path) -> Iterator[Callable[[], bool]]:
    """Puts something at the path of a socket; yields what tells whether it is still there."""
    lock, other = Path(f"{path}.lock"), path.with_name("other")
    with contextlib.ExitStack() as stack:
        if kind.endswith("socket"):
            mine = stack.enter_context(
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM if kind == "datagram socket" else socket.SOCK_STREAM)
            )
            mine.bind(str(path))
            if kind == "socket":
                mine.listen(1)
        elif kind == "folder":
            path.mkdir()
        elif kind == "link":
            other.write_text("mine")
            path.symlink_to(other)
        elif kind == "lock link":
            other.write_text("mine")
            lock.symlink_to(other)
        else:
            (lock if kind == "lock" else path).write_text("mine")
        there = lock if kind.startswith("lock") else path
        before = there.lstat().st_ino
        yield (
            lambda: (
                there.lstat().st_ino == before
                and (not there.is_file() or there.read_text() == "mine")
                and (not other.exists() or other.read_text() == "mine")
            )
        )
