"""Connections to MCP servers: the handshake of both eras, requests both ways, and what servers do wrong."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import WAIT_SECONDS
from toolbus.parts.mcp.client.calls import number_of
from toolbus.parts.mcp.client.connection import (
    MAX_USELESS_MESSAGES,
    DiedOfProbe,
    Incoming,
    McpConnection,
    open_connection,
)
from toolbus.parts.mcp.client.server_process import ServerProgram
from toolbus.parts.mcp.client.transport import Lost, Outgoing, Receiver, RequestId, StdioTransport
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError
from toolbus.processes.lifeline import Lifeline

SERVER = Path(__file__).parents[3] / "support" / "mcp_server.py"


ENDED = r"ended \(SIGKILL\)|closed its standard output"  # whichever the system tells first


class Owner:
    """Collects what a server asks, tells, and how it ended."""

    def __init__(self) -> None:
        self.asked: list[Incoming] = []
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.closed: list[str] = []
        self.ended = asyncio.Event()

    def take_closed(self, why: str) -> None:
        self.closed.append(why)
        self.ended.set()


@asynccontextmanager
async def connected(*switches: str, owner: Owner | None = None) -> AsyncIterator[McpConnection]:
    owner = owner or Owner()
    with Lifeline() as lifeline:
        program = ServerProgram((sys.executable, "-I", "-S", str(SERVER), *switches), {})
        transport = StdioTransport("small", program, lambda: lifeline)
        connection = McpConnection(
            transport,
            on_request=owner.asked.append,
            on_notification=lambda method, params, stream: owner.told.append((method, params)),
            on_closed=owner.take_closed,
            name="small",
        )
        await transport.start(connection)
        try:
            yield connection
        finally:
            await connection.close()


@pytest.mark.parametrize(
    "junk", [b"x", b"{}", b"[]", b'{"jsonrpc":"2.0","id":7,"result":{}}', b'{"jsonrpc":"2.0","id":null}']
)
async def test_a_server_that_writes_what_is_of_no_use_without_end_is_given_up_with_the_reason(junk: bytes) -> None:
    owner = Owner()
    async with connected(owner=owner) as connection:
        peer = await open_connection(connection, modern=None)
        for _ in range(2):
            for _ in range(MAX_USELESS_MESSAGES - 1):
                connection.received(junk)
            assert "echo" in {tool["name"] for tool in (await connection.request("tools/list"))["tools"]}
        assert not owner.closed
        assert peer.info["name"] == "small"
        for _ in range(MAX_USELESS_MESSAGES + 5):
            connection.received(junk)
        (why,) = owner.closed
        assert why.startswith(f"wrote {MAX_USELESS_MESSAGES} lines in a row that are of no use to the bus, the last: ")


@pytest.mark.parametrize(
    ("switches", "modern"),
    [
        ((), False),
        (("modern",), True),
        (("both",), True),
        (("silent",), False),
        (("noise", "modern"), True),
        (("noise",), False),
    ],
)
async def test_the_era_of_a_server_is_found_out_over_one_pipe(switches: tuple[str, ...], modern: bool) -> None:
    async with connected(*switches) as connection:
        peer = await open_connection(connection, modern=None)
        assert (peer.modern, peer.version) == (modern, "2026-07-28" if modern else "2025-11-25")
        assert peer.info["name"] == "small"
        assert peer.can("tools", "listChanged")
        listed = await connection.request("tools/list")
        assert "echo" in {tool["name"] for tool in listed["tools"]}


async def test_a_server_that_dies_of_a_question_before_initialize_is_to_be_started_again_as_legacy() -> None:
    async with connected("dies") as connection:
        with pytest.raises(DiedOfProbe):
            await open_connection(connection, modern=None)
    async with connected("dies") as connection:
        assert not (await open_connection(connection, modern=False)).modern


async def test_an_error_of_the_server_keeps_its_code_and_data() -> None:
    async with connected("both") as connection:
        await open_connection(connection, modern=True)
        with pytest.raises(RpcError) as caught:
            await connection.request("tools/call", {"name": "refuse", "arguments": {"text": "no"}})
        assert (caught.value.code, caught.value.data) == (-32050, {"why": "no"})


async def test_progress_reaches_the_request_that_it_is_about() -> None:
    async with connected() as connection:
        await open_connection(connection, modern=None)
        seen: list[dict[str, Any]] = []
        await connection.request("tools/call", {"name": "progress"}, on_progress=seen.append)
        assert [each["progress"] for each in seen] == [1, 2, 3]


async def test_a_cancelled_request_is_cancelled_at_the_server() -> None:
    async with connected() as connection:
        await open_connection(connection, modern=None)
        arguments = {"name": "sleep", "arguments": {"seconds": 60}}
        with pytest.raises(TimeoutError):
            await connection.request("tools/call", arguments, timeout=0.05)

        async def cancelled() -> str:
            result = await connection.request("tools/call", {"name": "cancelled"})
            return str(result["content"][0]["text"])

        async with asyncio.timeout(WAIT_SECONDS):
            while await cancelled() != "1":
                await asyncio.sleep(0.01)


async def test_a_request_of_the_server_is_answered_or_refused() -> None:
    owner = Owner()
    async with connected(owner=owner) as connection:
        await open_connection(connection, modern=None)

        async def ask(text: str) -> str:
            asking = asyncio.create_task(connection.request("tools/call", {"name": "ask", "arguments": {"text": text}}))
            while not owner.asked:
                await asyncio.sleep(0.001)
            incoming = owner.asked.pop()
            if incoming.method == "roots/list":
                connection.refuse(incoming, McpCode.METHOD_NOT_FOUND, "no roots")
            else:
                connection.respond(incoming, {"action": "decline"})
            return str((await asking)["content"][0]["text"])

        async with asyncio.timeout(WAIT_SECONDS):
            assert await ask("elicitation/create") == '{"action": "decline"}'
            assert "no roots" in await ask("roots/list")
            assert await connection.request("tools/call", {"name": "ask", "arguments": {"text": "ping"}})


async def test_requests_end_when_the_server_ends() -> None:
    owner = Owner()
    async with connected(owner=owner) as connection:
        await open_connection(connection, modern=None)
        with pytest.raises(Lost, match=ENDED):
            await connection.request("tools/call", {"name": "die"})
        (why,) = owner.closed
        assert re.search(ENDED, why)
        with pytest.raises(Lost):
            await connection.request("tools/list")


async def test_an_answer_that_a_server_writes_before_it_exits_is_not_lost() -> None:
    async with connected() as connection:
        await open_connection(connection, modern=None)
        result = await connection.request("tools/call", {"name": "last_words"})
        assert result["content"][0]["text"] == "bye"


class Written:
    """A transport that leads nowhere."""

    shares_one_pipe = True

    def __init__(self) -> None:
        self.sent: list[Outgoing] = []

    async def start(self, receiver: Receiver) -> None: ...

    def send(self, message: Outgoing) -> None:
        self.sent.append(message)

    def cancel(self, request: RequestId) -> None: ...

    def agreed(self, version: str, *, modern: bool) -> None: ...

    async def close(self) -> None: ...


def nowhere(owner: Owner) -> McpConnection:
    """Returns a connection whose server a test plays."""
    return McpConnection(
        Written(),
        on_request=owner.asked.append,
        on_notification=lambda method, params, stream: owner.told.append((method, params)),
        on_closed=owner.take_closed,
    )


async def test_a_handshake_that_is_given_up_is_not_cancelled_at_the_server_since_the_protocol_forbids_it() -> None:
    connection = nowhere(Owner())
    with pytest.raises(TimeoutError):
        await connection.request("initialize", timeout=0.001)
    with pytest.raises(TimeoutError):
        await connection.request("tools/list", timeout=0.001)
    assert isinstance(connection.transport, Written)
    methods = [each.method for each in connection.transport.sent]
    assert methods == ["initialize", "tools/list", "notifications/cancelled"]


@pytest.mark.parametrize("value", ["1e999", '"\\ud800"', "9" * 5000, "[" * 100_000 + "]" * 100_000])
async def test_values_without_measure_break_neither_the_connection_nor_what_waits(value: str) -> None:
    owner = Owner()
    connection = nowhere(owner)
    asking = asyncio.create_task(connection.request("tools/list"))
    await asyncio.sleep(0)
    for method in ("notifications/progress", "notifications/message"):
        connection.received(b'{"jsonrpc":"2.0","method":"%b","params":{"x":%b}}' % (method.encode(), value.encode()))
    connection.received(b'{"jsonrpc":"2.0","id":"q","method":"roots/list","params":{"x":%b}}' % value.encode())
    connection.received(b'{"jsonrpc":"2.0","id":1,"result":{"tools":%b}}' % value.encode())
    if not asking.done():  # what cannot be read at all is no message
        connection.received(b'{"jsonrpc":"2.0","id":1,"result":7}')
    with pytest.raises(RpcError, match="cannot be read"):
        await asking


@pytest.mark.parametrize("value", ["x", None, [1], True, 10**400])
def test_a_number_of_a_server_that_is_none_is_zero(value: object) -> None:
    assert number_of(value) == 0.0


async def test_a_fault_with_one_message_leaves_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    connection = nowhere(owner)
    monkeypatch.setattr(connection, "_on_notification", lambda *_: 1 / 0)
    asking = asyncio.create_task(connection.request("tools/list"))
    await asyncio.sleep(0)
    connection.received(b'{"jsonrpc":"2.0","method":"notifications/x"}')
    connection.received(b'{"jsonrpc":"2.0","id":1,"result":{}}')
    assert await asking == {}
