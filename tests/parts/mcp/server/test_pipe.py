"""Pipes: what a bridge and a bus say to each other over the socket in the data directory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.other_user import CAN_BE_NOBODY, run_program
from tests.support.waiting import within
from toolbus.parts.mcp.server import subscriptions
from toolbus.sdk import Plugin, ToolScope
from toolbus.testing import running_bus

Json = dict[str, Any]
META = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
INITIALIZE = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}


class Talk:
    """One connection to the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.passed: list[Json] = []  # messages that nobody has asked for yet

    def say(self, method: str, id: int | str | None = None, **params: Any) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params, **({} if id is None else {"id": id})}
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def next(self) -> Json | None:
        """Returns the next message; None at the end."""
        line = await within(self._reader.readline())
        return json.loads(line) if line else None

    async def answer(self, id: int | str | None) -> Json:
        """Returns the answer to a request, and keeps what comes before it."""
        while True:
            message = await self.next()
            assert message is not None, f"the pipe ended before the answer to {id}"
            if message.get("id") == id and "method" not in message:
                return message
            self.passed.append(message)

    async def ask(self, method: str, id: int | str, **params: Any) -> Json:
        self.say(method, id, **params)
        return await self.answer(id)

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def talk(folder: Path, profile: str = "") -> AsyncIterator[Talk]:
    """Connects and attaches."""
    conversation = Talk(*await asyncio.open_unix_connection(str(folder / "mcp.sock")))
    try:
        conversation.say("toolbus/attach", "attach", profile=profile)
        yield conversation
    finally:
        conversation.close()


def offered(address: str) -> Plugin:
    """Returns a plugin whose tools show what becomes of their calls."""
    plugin = Plugin("here", address=address)

    @plugin.tool
    def greet(name: str) -> str:
        """Greets a person"""
        return f"Hello, {name}!"

    @plugin.tool
    async def wait(scope: ToolScope) -> str:
        """Waits until it is cancelled"""
        scope.progress(message="waiting")
        await asyncio.Event().wait()
        return "never"

    return plugin


async def test_both_eras_are_answered_on_one_pipe_in_any_order(tmp_path: Path) -> None:
    async with running_bus(data_dir=tmp_path) as bus, offered(bus.grpc_addresses[0]) as plugin:
        await plugin.ready()
        async with talk(tmp_path) as pipe:
            assert (await pipe.answer("attach"))["result"]["bus"]["version"]
            discovered = await pipe.ask("server/discover", 1, _meta=META)
            assert discovered["result"]["supportedVersions"] == ["2026-07-28"]
            begun = await pipe.ask("initialize", 2, **INITIALIZE)
            assert begun["result"]["protocolVersion"] == "2025-11-25"
            pipe.say("notifications/initialized")
            modern = await pipe.ask("tools/call", 3, name="greet", arguments={"name": "Ann"}, _meta=META)
            legacy = await pipe.ask("tools/call", 3, name="greet", arguments={"name": "Bob"})
            assert modern["result"]["resultType"] == "complete"
            assert "resultType" not in legacy["result"]
            assert [each["result"]["content"][0]["text"] for each in (modern, legacy)] == ["Hello, Ann!", "Hello, Bob!"]


@pytest.mark.parametrize("meta", [{}, META], ids=["legacy", "modern"])
async def test_a_cancelled_request_is_not_answered_and_its_call_ends(tmp_path: Path, meta: Json) -> None:
    async with running_bus(data_dir=tmp_path) as bus, offered(bus.grpc_addresses[0]) as plugin:
        await plugin.ready()
        async with talk(tmp_path) as pipe:
            await pipe.answer("attach")
            await pipe.ask("initialize", 1, **INITIALIZE)
            meta = {**meta, "io.modelcontextprotocol/logLevel": "info"} if meta else {}
            pipe.say("tools/call", 2, name="wait", arguments={}, _meta={**meta, "progressToken": 2})
            while (await pipe.next() or {}).get("method") not in ("notifications/message", "notifications/progress"):
                pass  # now the call runs
            pipe.say("notifications/cancelled", requestId=2)
            assert (await pipe.ask("ping", 3))["result"] == {}
            assert all(each.get("id") != 2 for each in pipe.passed)


async def test_requests_that_are_cancelled_before_they_begin_leave_room_for_others(tmp_path: Path) -> None:
    async with running_bus(data_dir=tmp_path), talk(tmp_path) as client:
        for part in range(2):
            for number in range(600):  # two such parts are more than a pipe answers at once
                client.say("tools/list", f"{part}-{number}", _meta=META)
                client.say("notifications/cancelled", requestId=f"{part}-{number}")
            assert "result" in await client.ask("server/discover", f"{part}", _meta=META)


async def test_a_legacy_client_is_told_that_the_list_has_changed(tmp_path: Path) -> None:
    async with running_bus(data_dir=tmp_path) as bus, talk(tmp_path) as pipe:
        await pipe.answer("attach")
        await pipe.ask("initialize", 1, **INITIALIZE)
        pipe.say("notifications/initialized")
        await pipe.ask("tools/list", 2)
        async with offered(bus.grpc_addresses[0]) as plugin:
            await plugin.ready()
            message = await pipe.next()
            assert message is not None
            assert message["method"] == "notifications/tools/list_changed"


async def test_an_unknown_profile_is_refused_by_name(tmp_path: Path) -> None:
    async with running_bus(data_dir=tmp_path), talk(tmp_path, "desk") as pipe:
        refused = await pipe.answer(None)
        assert "'desk'" in refused["error"]["message"]
        assert await pipe.next() is None


async def test_a_client_learns_that_there_are_too_many_listeners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "MAX_LISTENERS", 0)
    async with running_bus(data_dir=tmp_path), talk(tmp_path) as client:
        refused = await client.ask("initialize", 1, **INITIALIZE)
        assert "mcp_listeners = 0" in refused["error"]["message"]


async def test_what_does_not_attach_is_refused(tmp_path: Path) -> None:
    async with running_bus(data_dir=tmp_path):
        pipe = Talk(*await asyncio.open_unix_connection(str(tmp_path / "mcp.sock")))
        pipe.say("initialize", 1, **INITIALIZE)
        assert "toolbus mcp" in (await pipe.answer(None))["error"]["message"]
        assert await pipe.next() is None
        pipe.close()


async def test_the_socket_is_its_owners_alone_and_goes_with_the_bus(tmp_path: Path) -> None:
    path = tmp_path / "mcp.sock"
    path.touch()  # of a bus that was killed
    async with running_bus(data_dir=tmp_path), talk(tmp_path) as pipe:
        await pipe.answer("attach")
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


@pytest.mark.skipif(not CAN_BE_NOBODY, reason="only root can be somebody else")
async def test_another_user_is_refused_at_the_socket() -> None:
    printed = await run_program(Path(__file__).with_name("other_peer.py"))
    assert "PipeRefused" in printed
    assert "use a bus of your own" in printed
