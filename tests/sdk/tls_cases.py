"""Buses and credentials of tests with TLS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc

from tests.sdk.played_bus import PlayedBus, PlayedStream, played_bus
from tests.support.certificates import Authority, Pair, server_credentials
from toolbus.sdk import Credential
from toolbus.sdk.connection_settings import ConnectionTimings

AUTHORITY, FOREIGN = Authority(), Authority("another authority")
SERVER = AUTHORITY.server("127.0.0.1", "bus.example")
CLIENT = AUTHORITY.client("chat")
TOKEN = "tbk_1_PAWPAW"
SMALL_ATTACH = ConnectionTimings(attach_bytes=1000)
QUICK = ConnectionTimings(first_pause=0.01, max_pause=0.05, max_refused_pause=0.05)


def server(pair: Pair = SERVER, *, clients: bool = False) -> grpc.ServerCredentials:
    """Returns what a listener shows; with ``clients`` it asks for their certificates."""
    return server_credentials(pair, AUTHORITY if clients else None)


def credential(pair: Pair | None = None, *, token: str = TOKEN, ca: str = AUTHORITY.pem, days: int = 90) -> Credential:
    end = datetime.now(UTC) + timedelta(days=days)
    certificate, key = (pair.certificate, pair.key) if pair else ("", "")
    return Credential("", token, ca, certificate, key, end, "chat", Path("/keys/chat.toolbus"))


def write(file: Path, token: str) -> Path:
    fresh = file.with_suffix(".new")
    fresh.touch(0o600)
    fresh.write_text(f'token = "{token}"\nca = """{AUTHORITY.pem}"""\nname = "chat"\n', "utf-8")
    return fresh.replace(file)


async def accept(stream: PlayedStream) -> None:
    await stream.accept()
    while await stream.read() is not None:
        pass


@asynccontextmanager
async def tls_bus(*plays: object, tls: grpc.ServerCredentials | None = None) -> AsyncIterator[PlayedBus]:
    async with played_bus(*(plays or (accept,)), tls=tls or server()) as bus:  # type: ignore[arg-type]
        yield bus
