"""Makes the TLS side of HTTPS: clients may prove themselves by a certificate, or by a token in a request."""

from __future__ import annotations

import contextlib
import os
import ssl
import tempfile
from collections.abc import Iterator

from toolbus.bus.keys.keyring import Keyring


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
