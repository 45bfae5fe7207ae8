"""Tests MCP over streamable HTTP: what is sent, how streams and sessions survive, and how far a lost call had got."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from tests.parts.mcp.client.remote_server import QUICK, Owner, answer, connected, event, serving, stream
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import outbound
from toolbus.errors import Stage
from toolbus.parts.mcp.client import http_link
from toolbus.parts.mcp.client.connection import Incoming, McpConnection
from toolbus.parts.mcp.client.http_link import PublicResolver, is_private_host
from toolbus.parts.mcp.client.transport import Lost, NeedsLogin
from toolbus.parts.mcp.messages import eras

CALL = ("tools/call", {"name": "add", "arguments": {}})


async def call(connection: McpConnection, **more: Any) -> str:
    result = await connection.request(*CALL, name="add", **more)
    return str(result["content"][0]["text"])


# -- what is sent ------------------------------------------------------------------------------------------------------


async def test_a_modern_server_gets_the_headers_of_its_era_and_no_session() -> None:
    async with serving(modern=True) as server, connected(server, written={"X-Key": "k"}) as connection:
        assert connection.peer is not None
        assert connection.peer.modern
        assert await call(connection) == "done"
        _, sent, message = server.seen[-1]
        assert sent["Mcp-Method"] == "tools/call"
        assert sent["Mcp-Name"] == "add"
        assert sent["MCP-Protocol-Version"] == eras.NEWEST == message["params"]["_meta"][eras.META_VERSION]
        assert sent["X-Key"] == "k"
        assert "Mcp-Session-Id" not in sent
    assert server.methods() == ["server/discover", "tools/call"]


async def test_a_legacy_server_is_found_by_its_refusal_and_gets_its_session() -> None:
    async with serving(modern=False) as server:
        async with connected(server) as connection:
            assert await call(connection) == "done"
            _, sent, _ = server.seen[-1]
            assert sent["Mcp-Session-Id"] == "s1"
            assert sent["MCP-Protocol-Version"] == eras.NEWEST_LEGACY
            assert "Mcp-Method" not in sent
        assert server.methods() == ["server/discover", "initialize", "notifications/initialized", "tools/call"]
        assert server.seen[-1][0] == "DELETE"


@pytest.mark.parametrize("modern", [True, False])
async def test_calls_share_a_connection(modern: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(http_link, "KEEP_ALIVE_SECONDS", 60.0)  # this machine may be slow
    async with serving(modern=modern) as server, connected(server) as connection:
        for _ in range(5):
            await call(connection)
        assert len(server.peers) <= 2  # a legacy session tries for a stream as well


async def test_a_redirect_to_another_origin_is_not_followed_and_gets_nothing() -> None:
    async with serving(modern=True) as other, serving(modern=True) as server, connected(server) as connection:

        async def away(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            return web.Response(status=307, headers={"Location": other.url})

        async def within(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            if request.path == "/mcp":
                return web.Response(status=308, headers={"Location": "/mcp/"})
            return server.result(message, {"content": [{"type": "text", "text": "moved"}]})

        server.on["tools/call"] = within
        assert await call(connection) == "moved"
        server.on["tools/call"] = away
        with pytest.raises(Lost, match="redirects") as lost:
            await call(connection)
        assert lost.value.stage is Stage.NOT_DISPATCHED
        assert other.seen == []


@pytest.mark.parametrize("status", [401, 403, 404, 500, 502])
async def test_a_refusal_names_its_status_and_what_to_do(status: int) -> None:
    async with serving(modern=True) as server, connected(server) as connection:

        async def refuse(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            return web.Response(status=status, text="no entry")

        server.on["tools/call"] = refuse
        with pytest.raises(Lost, match=rf"answered {status}.*no entry") as lost:
            await call(connection)
        assert (lost.value.stage is Stage.DISPATCHED) == (status >= 500)
        assert isinstance(lost.value, NeedsLogin) == (status == 401)


# -- streams -----------------------------------------------------------------------------------------------------------


async def test_progress_comes_before_the_answer_of_its_stream() -> None:
    async with serving(modern=True) as server, connected(server) as connection:

        async def slow(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            response = await stream(request)
            token = message["params"]["_meta"]["progressToken"]
            for value in (1, 2):
                params = {"progressToken": token, "progress": value}
                await response.write(event({"jsonrpc": "2.0", "method": "notifications/progress", "params": params}))
            await response.write(event(answer(message, "slow")))
            return response

        server.on["tools/call"] = slow
        seen: list[float] = []
        assert await call(connection, on_progress=lambda params: seen.append(params["progress"])) == "slow"
        assert seen == [1, 2]


async def test_a_stream_that_ends_early_is_resumed_behind_its_last_event() -> None:
    async with serving(modern=False) as server, connected(server) as connection:
        asked: list[dict[str, Any]] = []

        async def cut(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            asked.append(message)
            response = await stream(request)
            await response.write(event(None, "e1", retry=20))
            return response

        async def resume(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            if "Last-Event-ID" not in request.headers:
                return web.Response(status=405)
            response = await stream(request)
            if request.headers["Last-Event-ID"] == "e2":
                await response.write(event(answer(asked[0], "resumed"), "e3"))
            else:
                await response.write(event(None, "e2"))
            return response

        server.on |= {"tools/call": cut, "GET": resume}
        assert await call(connection) == "resumed"
        assert [sent["Last-Event-ID"] for _, sent, _ in server.seen if "Last-Event-ID" in sent] == ["e1", "e2"]


async def test_a_server_cannot_have_a_stream_resumed_in_a_busy_loop_nor_never() -> None:
    async with serving(modern=False) as server:
        timings = replace(QUICK, min_retry=0.05, max_retry=0.1)
        async with connected(server, timings=timings) as connection:
            times: list[float] = []
            asked: list[dict[str, Any]] = []

            async def cut(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
                asked.append(message)
                times.append(asyncio.get_running_loop().time())
                response = await stream(request)
                await response.write(event(None, "e1", retry=0))
                return response

            async def resume(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
                if "Last-Event-ID" not in request.headers:
                    return web.Response(status=405)
                times.append(asyncio.get_running_loop().time())
                response = await stream(request)
                if len(times) == 2:
                    await response.write(event(None, "e2", retry=3_600_000))
                else:
                    await response.write(event(answer(asked[0])))
                return response

            server.on |= {"tools/call": cut, "GET": resume}
            assert await call(connection) == "done"
            assert times[1] - times[0] >= 0.045


async def test_a_stream_that_ends_without_an_id_ends_the_call_as_accepted() -> None:
    async with serving(modern=False) as server, connected(server) as connection:

        async def cut(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            return await stream(request)

        server.on["tools/call"] = cut
        with pytest.raises(Lost, match="before its answer") as lost:
            await call(connection)
        assert lost.value.stage is Stage.ACCEPTED


async def test_the_standing_stream_is_open_before_the_first_call_and_may_bring_its_answer() -> None:
    async with serving(modern=False) as server:
        calls: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        async def standing(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            response = await stream(request)
            await response.write(event(answer(await calls.get(), "elsewhere")))
            await asyncio.sleep(60)
            return response

        async def accept(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            calls.put_nowait(message)
            return await stream(request)

        server.on |= {"GET": standing, "tools/call": accept}
        async with connected(server) as connection:
            assert await call(connection) == "elsewhere"
        kinds = [message.get("method", kind) for kind, _, message in server.seen]
        assert kinds.index("GET") < kinds.index("tools/call")


async def test_a_server_that_does_not_answer_the_standing_stream_delays_calls_within_bounds() -> None:
    async with serving(modern=False) as server:

        async def silent(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            await asyncio.sleep(60)
            raise AssertionError

        server.on["GET"] = silent
        async with connected(server, timings=replace(QUICK, gate=0.05)) as connection:
            assert await call(connection) == "done"


async def test_a_question_of_the_server_is_answered_by_a_post() -> None:
    async with serving(modern=False) as server:
        owner = Owner()
        answered: asyncio.Event = asyncio.Event()

        async def ask(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            response = await stream(request)
            await response.write(event({"jsonrpc": "2.0", "id": "q", "method": "roots/list"}))
            await answered.wait()
            await response.write(event(answer(message, "asked")))
            return response

        server.on["tools/call"] = ask
        async with connected(server, owner) as connection:
            calling = asyncio.create_task(call(connection))
            await until(lambda: owner.asked)
            asked: Incoming = owner.asked[0]
            assert asked.stream == str(server.seen[-1][2]["id"])
            connection.respond(asked, {"roots": []})
            await until(lambda: server.seen[-1][2].get("id") == "q")
            assert server.seen[-1][2]["result"] == {"roots": []}
            answered.set()
            assert await calling == "asked"


async def test_an_answer_beyond_the_limit_ends_its_call_and_no_other() -> None:
    async with serving(modern=True) as server, connected(server) as connection:

        async def large(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            response = await stream(request)
            for _ in range(17):
                await response.write(b"data: " + b"x" * 1024 * 1024 + b"\n")
            return response

        server.on["tools/call"] = large
        with pytest.raises(Lost, match="more than 16777216 bytes") as lost:
            await call(connection)
        assert lost.value.stage is Stage.ACCEPTED
        assert (await connection.request("server/discover"))["supportedVersions"]


@pytest.mark.parametrize(
    "text", ["", "[]", "nonsense", '{"jsonrpc":"2.0","id":"other","result":{}}', '{"id":$ID,"result":{}}']
)
async def test_an_answer_that_is_none_ends_the_call(text: str) -> None:
    async with serving(modern=True) as server, connected(server) as connection:

        async def wrong(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            return web.Response(text=text.replace("$ID", json.dumps(message["id"])), content_type="application/json")

        server.on["tools/call"] = wrong
        with pytest.raises(Lost, match="not a response to the request") as lost:
            await call(connection)
        assert lost.value.stage is Stage.ACCEPTED


# -- cancelling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modern", [True, False])
async def test_a_cancelled_call_closes_its_stream_and_is_told_to_a_legacy_server(modern: bool) -> None:
    async with serving(modern=modern) as server, connected(server) as connection:
        ended = asyncio.Event()

        async def hang(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            response = await stream(request)
            try:
                while True:
                    await response.write(b": here\n\n")
                    await asyncio.sleep(0.005)
            except (ConnectionError, asyncio.CancelledError):
                ended.set()
                raise

        server.on["tools/call"] = hang
        calling = asyncio.create_task(call(connection))
        await until(lambda: "tools/call" in server.methods())
        calling.cancel()
        await asyncio.wait((calling,))
        await asyncio.wait_for(ended.wait(), WAIT_SECONDS)
        assert ("notifications/cancelled" in server.methods()) == (not modern)


# -- servers that end and come back ------------------------------------------------------------------------------------


@pytest.mark.parametrize("modern", [True, False])
async def test_a_killed_server_ends_its_calls_at_once_and_serves_the_next_when_it_is_back(modern: bool) -> None:
    async with serving(modern=modern) as server:
        owner = Owner()
        async with connected(server, owner) as connection:

            async def hang(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
                await asyncio.sleep(60)
                raise AssertionError

            usual, server.on["tools/call"] = server.on["tools/call"], hang
            calls = [asyncio.create_task(call(connection)) for _ in range(3)]
            await until(lambda: server.methods().count("tools/call") == 3)
            await server.kill()
            for each in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(each, Lost)
                assert each.stage is Stage.DISPATCHED
            with pytest.raises(Lost, match="cannot be reached") as lost:
                await call(connection)
            assert lost.value.stage is Stage.NOT_DISPATCHED
            server.on["tools/call"] = usual
            await server.start()
            assert await call(connection) == "done"
        assert owner.closed == ["the connection was closed"]


async def test_a_lost_session_is_opened_again_once_and_each_call_runs_once() -> None:
    async with serving(modern=False) as server:
        owner = Owner()
        async with connected(server, owner) as connection:
            await call(connection)
            server.sessions.clear()
            assert await asyncio.gather(*(call(connection) for _ in range(5))) == ["done"] * 5
            assert server.made_sessions == 2
            assert "notifications/tools/list_changed" in owner.told  # what changed meanwhile is asked for
            assert not owner.closed


async def test_a_new_session_is_opened_also_by_a_server_that_asks_before_it_answers() -> None:
    async with serving(modern=False) as server:
        owner = Owner()
        async with connected(server, owner) as connection:
            server.sessions.clear()

            async def initialize(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
                server.sessions.append("s9")
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Mcp-Session-Id": "s9"})
                await response.prepare(request)
                result = {"protocolVersion": eras.NEWEST_LEGACY, "capabilities": {}, "serverInfo": {}}
                for each in (
                    {"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "x"}},
                    {"jsonrpc": "2.0", "id": "q", "method": "roots/list"},
                    {"jsonrpc": "2.0", "id": message["id"], "result": result},
                ):
                    await response.write(event(each))
                return response

            server.on["initialize"] = initialize
            assert await call(connection) == "done"
            assert [each.method for each in owner.asked] == ["roots/list"]
            assert server.seen[-1][1]["Mcp-Session-Id"] == "s9"


async def test_a_server_that_says_400_for_a_session_that_it_does_not_know_gets_a_new_one() -> None:
    async with serving(modern=False) as server, connected(server) as connection:
        usual = server.on["tools/call"]

        async def old_way(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            if request.headers["Mcp-Session-Id"] == "s1":
                return web.Response(status=400, text="Bad Request: No valid session ID provided")
            return await usual(request, message)

        server.on["tools/call"] = old_way
        assert await call(connection) == "done"
        assert server.made_sessions == 2


async def test_a_server_that_restarts_with_another_version_ends_the_connection() -> None:
    async with serving(modern=False) as server:
        owner = Owner()
        async with connected(server, owner) as connection:
            server.sessions.clear()
            server.modern = True
            with pytest.raises(Lost, match="lost the session"):
                await call(connection)
            assert len(owner.closed) == 1


async def test_the_stream_of_notifications_is_opened_again_and_the_lists_are_read_again() -> None:
    async with serving(modern=True) as server:
        owner = Owner()
        opened = asyncio.Event()

        async def listen(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            response = await stream(request)
            await response.write(event({"jsonrpc": "2.0", "method": "notifications/subscriptions/acknowledged"}))
            opened.set()
            await asyncio.sleep(60)
            return response

        server.on["subscriptions/listen"] = listen
        async with connected(server, owner) as connection:
            listening = asyncio.create_task(connection.request("subscriptions/listen", {}))
            await opened.wait()
            await until(lambda: owner.told)
            opened.clear()
            await server.kill()
            await server.start()
            await opened.wait()
            await until(lambda: "notifications/tools/list_changed" in owner.told)
            assert not listening.done()
            listening.cancel()


async def test_the_standing_stream_is_opened_again_after_a_restart() -> None:
    async with serving(modern=False) as server:
        owner = Owner()

        async def standing(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            if server._refusal(request):
                return web.Response(status=404)
            response = await stream(request)
            await response.write(event({"jsonrpc": "2.0", "method": "notifications/hello"}))
            await asyncio.sleep(60)
            return response

        server.on["GET"] = standing
        async with connected(server, owner):
            await until(lambda: owner.told)
            await server.kill()
            await server.start()
            await until(lambda: owner.told.count("notifications/hello") == 2)
            assert "notifications/tools/list_changed" in owner.told


# -- addresses ---------------------------------------------------------------------------------------------------------


class Names(AbstractResolver):
    """A name service in which every name is at the same addresses."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = addresses

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> list[ResolveResult]:
        return [
            ResolveResult(hostname=host, host=each, port=port, family=family, proto=0, flags=0)
            for each in self._addresses
        ]

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.7", "169.254.169.254", "::1", "fd00::1", "100.64.0.1"])
async def test_a_public_name_does_not_lead_to_an_address_that_is_not_public(address: str) -> None:
    resolver = PublicResolver(frozenset({"mcp.example.com"}), Names(address))
    with pytest.raises(OSError, match="is not public"):
        await resolver.resolve("mcp.example.com", 443)


async def test_configured_private_names_and_public_addresses_are_reached() -> None:
    inside = PublicResolver(frozenset({"tools.internal"}), Names("10.0.0.7"))
    assert (await inside.resolve("tools.internal"))[0]["host"] == "10.0.0.7"
    with pytest.raises(OSError, match="is not public"):
        await inside.resolve("other.internal")  # not in the configuration
    mixed = PublicResolver(frozenset({"mcp.example.com"}), Names("127.0.0.1", "93.184.216.34"))
    assert [each["host"] for each in await mixed.resolve("mcp.example.com")] == ["93.184.216.34"]


def test_private_hosts_are_recognized_without_a_name_service() -> None:
    for host in ("127.0.0.1", "10.1.2.3", "::1", "localhost", "nas", "a.local", "b.internal", "c.home.arpa"):
        assert is_private_host(host)
    for host in ("example.com", "93.184.216.34", "mcp.internal.example.com"):
        assert not is_private_host(host)
