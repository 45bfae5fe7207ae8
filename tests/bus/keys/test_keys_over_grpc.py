"""Tests the certificates with grpc's own TLS: a credential connects, also while the authority rotates."""

from __future__ import annotations

import hashlib
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.bus.keys.keys_directory import KeysDirectory
from toolbus.bus.keys.keyring import Keyring
from toolbus.sdk.bus_address import BusAddress
from toolbus.sdk.credential import Credential, tls_credentials


@pytest.fixture
def keys(tmp_path: Path) -> KeysDirectory:
    """Keys by the machine's clock: TLS checks the dates."""
    keys = KeysDirectory(tmp_path, time.time())
    keys.store.init(["bus.example"], "mtls:localhost:1")
    return keys


@asynccontextmanager
async def served(ring: Keyring) -> AsyncIterator[int]:
    """A server that asks for client certificates, and answers with the identity that the caller's proves."""
    key, chain, roots = ring.server_certificate()
    server = grpc.aio.server()

    async def answer(request: bytes, context: Any) -> bytes:
        (pem,) = context.auth_context()["x509_pem_cert"]
        fingerprint = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode())).hexdigest()
        return ring.identity_of_certificate(fingerprint).name.encode()

    handler = grpc.method_handlers_generic_handler("t.T", {"Who": grpc.unary_unary_rpc_method_handler(answer)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([(key, chain)], roots, True))
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def who(port: int, credential: Credential) -> str:
    """Returns the identity that the server sees; raises `grpc.aio.AioRpcError` where no connection comes about."""
    async with grpc.aio.secure_channel(f"localhost:{port}", tls_credentials(credential)) as channel:
        answer: bytes = await channel.unary_unary("/t.T/Who", None, None)(b"", timeout=20)
        return answer.decode()


async def test_a_credential_is_read_by_the_sdk_and_connects_over_mtls(keys: KeysDirectory) -> None:
    keys.add("chat")
    credential = Credential.read(keys.folder / "chat.toolbus")
    assert BusAddress.parse(credential.address).mtls
    async with served(keys.ring()) as port:
        assert await who(port, credential) == "chat"


async def test_credentials_of_before_and_after_a_rotation_work_side_by_side(keys: KeysDirectory) -> None:
    keys.add("old")
    old = Credential.read(keys.folder / "old.toolbus")
    keys.store.rotate()
    keys.add("new")
    new = Credential.read(keys.folder / "new.toolbus")
    async with served(keys.ring()) as port:
        assert [await who(port, old), await who(port, new)] == ["old", "new"]
    keys.store.finish_rotation(force=True)
    async with served(keys.ring()) as port:
        assert await who(port, new) == "new"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await who(port, old)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
