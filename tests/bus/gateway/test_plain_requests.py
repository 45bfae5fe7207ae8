"""Plain requests: they are answered byte for byte as FastAPI answers them, and only those that are plain pass it by."""

import asyncio
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import ASGIApp

from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus
from toolbus.bus.gateway.app import application
from toolbus.bus.gateway.call_routes import MAX_BYTES, MAX_NESTED
from toolbus.bus.gateway.gateway_parts import GatewayParts
from toolbus.bus.gateway.http_connection import CONNECTION, UID
from toolbus.bus.gateway.remote_access import RemoteAccess, ResourceMetadata
from toolbus.errors import Code
from toolbus.testing import running_bus

INVOKE, LIST = ("POST", "/api/tools/invoke"), ("GET", "/api/tools")
JSON = (b"content-type", b"application/json")
DRAWN_ID = re.compile(rb"http-[0-9a-f]{16}")


class FakeConnection:
    """What a plain call asks of its connection; notes that one came to ask."""

    pipeline: tuple[object, ...] = ()

    def __init__(self) -> None:
        self.was_asked = False
        self._on_lost: Callable[[], None] | None = None

    @property
    def on_lost(self) -> Callable[[], None] | None:
        return self._on_lost

    @on_lost.setter
    def on_lost(self, value: Callable[[], None] | None) -> None:
        self.was_asked = True
        self._on_lost = value


@dataclass
class Gateway:
    """The application over a running bus, asked without a socket. It is plain only where it has a connection."""

    runner: asyncio.Runner
    bus: Bus
    app: ASGIApp
    began: asyncio.Event = field(default_factory=asyncio.Event)  # once ``nap`` runs

    def ask(self, plain: bool, target: tuple[str, str], body: bytes, *headers: tuple[bytes, bytes]) -> tuple[Any, bool]:
        """Returns what was sent, and whether a call passed FastAPI by."""
        connection = FakeConnection()
        sent = self.runner.run(self.exchange(connection if plain else None, target, [body], *headers))
        return sent, connection.was_asked

    async def exchange(
        self,
        connection: FakeConnection | None,
        target: tuple[str, str],
        chunks: list[bytes],
        *headers: tuple[bytes, bytes],
    ) -> list[Any]:
        path, _, query = target[1].partition("?")
        length = sum(map(len, chunks))
        scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
            "method": target[0], "path": path, "raw_path": path.encode(), "query_string": query.encode(),
            "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 48911), "state": {},
            "headers": [(b"host", b"127.0.0.1"), (b"content-length", str(length).encode()), *headers],
            "extensions": {UID: {"uid": os.geteuid()}},
        }  # fmt: skip
        if connection is not None:
            scope[CONNECTION] = connection
        messages = [
            {"type": "http.request", "body": chunk, "more_body": each < len(chunks)}
            for each, chunk in enumerate(chunks, 1)
        ]
        sent: list[Any] = []

        async def receive() -> Any:
            return messages.pop(0) if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append({key: DRAWN_ID.sub(b"drawn", v) if key == "body" else v for key, v in message.items()})

        async with asyncio.timeout(WAIT_SECONDS):
            await self.app(scope, receive, send)
        return sent


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with asyncio.Runner() as runner:
        running = running_bus(grace_seconds=0.0, roles=("Yui", "Ran"))
        bus = runner.run(running.__aenter__())
        remote = RemoteAccess(bus.core.sessions.doorman, ResourceMetadata(()), bus.core.rooms.web)
        parts = GatewayParts(bus.core, None, None, remote)
        made = Gateway(runner, bus, application(parts))

        @bus.tool
        def echo(value: Any = None) -> Any:
            return value

        @bus.tool
        async def nap() -> None:
            made.began.set()
            await asyncio.Event().wait()

        yield made
        runner.run(running.__aexit__(None, None, None))


# -- both ways are one ---------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(codec=None), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(2**63, 2**70) | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
FIELDS = {
    "name": st.sampled_from(["echo", "echo", "ecoh", "", "toolbus:drain"]) | VALUES,
    "arguments": VALUES | st.fixed_dictionaries({"value": VALUES}) | VALUES.map(json.dumps) | TEXTS,
    "role": st.sampled_from([None, "", "Yui", "Nobody", "\ud83d"]) | VALUES,
    "call_id": st.sampled_from(["", "mine", "x" * 200]) | VALUES,
    "timeout_seconds": st.sampled_from([None, 5, 2.5, "7", 0, 301, True]) | VALUES,
    "context": st.fixed_dictionaries({"user_id": TEXTS, "messages": st.just([{"role": "user"}])}) | VALUES,
    "schema_hash": st.sampled_from(["", "0" * 16]) | VALUES,
    "background_after_seconds": st.sampled_from([None, 0, "no"]),
    "unknown": VALUES,
}
OBJECTS = st.fixed_dictionaries({"name": FIELDS["name"]}, optional={k: v for k, v in FIELDS.items() if k != "name"})
BODIES = (
    OBJECTS.map(json.dumps).map(str.encode)
    | OBJECTS.map(lambda value: json.dumps(value, ensure_ascii=False, indent=1).encode("utf-8", "surrogatepass"))
    | OBJECTS.map(lambda value: json.dumps(value).encode("utf-16"))
    | VALUES.map(json.dumps).map(str.encode)
    | st.binary(max_size=20)
)
HEADERS = st.sampled_from([(), (JSON,), ((b"content-type", b"text/plain"),), (JSON, JSON), ((b"accept", b"*/*"), JSON)])


@given(BODIES, HEADERS)
def test_fastapi_would_have_answered_each_call_with_the_same_bytes(
    gateway: Gateway, body: bytes, headers: tuple[tuple[bytes, bytes], ...]
) -> None:
    plain, _ = gateway.ask(True, INVOKE, body, *headers)
    other, passed_by = gateway.ask(False, INVOKE, body, *headers)
    assert plain == other
    assert not passed_by


@pytest.mark.parametrize("query", ["", "?role=", "?role=Yui", "?role=Nobody", "?level=x", "?user_id=ann&level=2"])
def test_fastapi_would_have_answered_each_list_with_the_same_bytes(gateway: Gateway, query: str) -> None:
    target = (LIST[0], LIST[1] + query)
    assert gateway.ask(True, target, b"")[0] == gateway.ask(False, target, b"")[0]


# -- which are plain -----------------------------------------------------------------------------------------------

CALL = b'{"name":"echo","arguments":{"value":3}}'


@pytest.mark.parametrize("headers", [(), (JSON,), ((b"content-type", b"application/json; charset=utf-8"),)])
def test_a_call_passes_fastapi_by(gateway: Gateway, headers: tuple[tuple[bytes, bytes], ...]) -> None:
    sent, passed_by = gateway.ask(True, INVOKE, CALL, *headers)
    assert passed_by
    assert json.loads(sent[1]["body"])["output"] == 3


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (CALL, ((b"content-type", b"application/vnd.toolbus+json"),)),
        (CALL, ((b"accept", b"text/event-stream"),)),
        (CALL, (JSON, JSON)),
        (b'{"name":"echo","arguments":{"value":"%s"}}' % (b"x" * MAX_BYTES), ()),
        (b'{"name":"echo","arguments":{"value":%s1%s}}' % (b"[" * MAX_NESTED, b"]" * MAX_NESTED), ()),
    ],
    ids=["type", "stream", "two types", "large", "nested"],
)
def test_an_unusual_call_is_left_to_fastapi(
    gateway: Gateway, body: bytes, headers: tuple[tuple[bytes, bytes], ...]
) -> None:
    sent, passed_by = gateway.ask(True, INVOKE, body, *headers)
    assert not passed_by
    assert sent[0]["status"] == 200


def test_a_body_in_pieces_is_read_to_its_end(gateway: Gateway) -> None:
    for connection in (FakeConnection(), None):
        sent = gateway.runner.run(gateway.exchange(connection, INVOKE, [CALL[:9], CALL[9:]], JSON))
        assert json.loads(sent[1]["body"])["output"] == 3
    wrong = [b'{"name":"echo",', b'"timeout_seconds":0}']
    answers = [gateway.runner.run(gateway.exchange(each, INVOKE, wrong)) for each in (FakeConnection(), None)]
    assert answers[0] == answers[1]
    assert answers[0][0]["status"] == 422


# -- who is gone ---------------------------------------------------------------------------------------------------


def test_a_lost_connection_cancels_its_call_at_once(gateway: Gateway) -> None:
    async def lose() -> None:
        gateway.began.clear()
        cancelled = gateway.bus.records.outcomes[Code.CANCELLED]
        connection = FakeConnection()
        asking = asyncio.create_task(gateway.exchange(connection, INVOKE, [b'{"name":"nap"}']))
        await asyncio.wait_for(gateway.began.wait(), WAIT_SECONDS)
        assert connection.on_lost is not None
        connection.on_lost()
        sent = await asking
        assert sent[0]["status"] == 499
        assert gateway.bus.records.outcomes[Code.CANCELLED] == cancelled + 1
        assert connection.on_lost is None

    gateway.runner.run(lose())


def test_a_request_that_the_bus_itself_ends_is_not_taken_for_a_lost_connection(gateway: Gateway) -> None:
    async def end() -> None:
        gateway.began.clear()
        asking = asyncio.create_task(gateway.exchange(FakeConnection(), INVOKE, [b'{"name":"nap"}']))
        await asyncio.wait_for(gateway.began.wait(), WAIT_SECONDS)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    gateway.runner.run(end())
