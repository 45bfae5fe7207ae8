"""Shakes hands between a client and a server of the standard library's TLS, in memory."""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path

from toolbus.parts.identity.authority import Issued


def server_context(folder: Path, server: Issued, roots: bytes, more: bytes = b"") -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, folder, server, more)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=roots.decode())
    return context


def client_context(folder: Path, roots: bytes, client: Issued | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=roots.decode())
    if client is not None:
        _load(context, folder, client)
    return context


def _load(context: ssl.SSLContext, folder: Path, issued: Issued, more: bytes = b"") -> None:
    file = folder / "pair.pem"
    file.write_bytes(issued.key + issued.certificate + more)
    context.load_cert_chain(file)


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> str:
    """Returns the fingerprint of the client's certificate as the server sees it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
    seen = ends[1].getpeercert(True)
    assert seen is not None
    return hashlib.sha256(seen).hexdigest()
