"""A port where nobody listens."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def free_port() -> Iterator[int]:
    """Holds a port of 127.0.0.1 on which connections are refused, since it is bound and not listened on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
