"""Tests mounts of servers over HTTP: they go away, come back, and want a login."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.parts.mcp.client.remote_server import RemoteServer, answer, event, serving, stream
from tests.parts.mcp.client.test_authorization import Guarded
from tests.support.waiting import until
from toolbus.bus import Bus, Config
from toolbus.bus.local import LocalCaller
from toolbus.errors import Code, Stage
from toolbus.parts.mcp.client.authorization import token_path, write_document
from toolbus.parts.mcp.client.entries import MountEntry
from toolbus.parts.mcp.client.mount import Mount, MountState, MountTimings
from toolbus.parts.mcp.client.mounts import Mounts, open_remote
from toolbus.parts.mcp.client.offer import MountManifest
from toolbus.processes.supervisor import RestartPolicy
from toolbus.v1 import tool_pb2 as pb

QUICK = MountTimings(relist_seconds=0.01, restarts=RestartPolicy(backoff_seconds=0.01, max_backoff_seconds=0.05))


def with_a_tool(server: RemoteServer) -> RemoteServer:
    async def tools(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return server.result(message, {"tools": [{"name": "add", "inputSchema": {"type": "object"}}]})

    server.on["tools/list"] = tools
    return server


@asynccontextmanager
async def mounted(server: RemoteServer, home: Path) -> AsyncIterator[tuple[Bus, Mount]]:
    config = Config(grpc=("127.0.0.1:0",), http="off", data_dir=home / "data")
    async with Bus(config, rooms=()) as bus:
        mounts = Mounts(bus.core, MountManifest(None), partial(open_remote, config.data_dir), timings=QUICK)
        try:
            await mounts.apply({"far": MountEntry("far", url=server.url)})
            mount = mounts.get("far")
            assert mount is not None
            yield bus, mount
        finally:
            await mounts.stop()


async def test_a_server_elsewhere_is_tried_until_it_is_there_and_calls_do_not_wait_for_it(tmp_path: Path) -> None:
    async with serving(modern=True) as server:
        with_a_tool(server)
        await server.kill()
        async with mounted(server, tmp_path) as (_, mount):
            await until(lambda: mount.restarts > QUICK.restarts.max_deaths)
            assert mount.state is not MountState.FAILED
            await server.start()
            mount.wake()
            await until(lambda: mount.state is MountState.LIVE)


@pytest.mark.parametrize("modern", [True, False])
async def test_a_killed_server_elsewhere_fails_calls_at_once_and_serves_the_next_one(
    tmp_path: Path, modern: bool
) -> None:
    async with serving(modern=modern) as server, mounted(with_a_tool(server), tmp_path) as (bus, mount):
        await until(lambda: mount.state is MountState.LIVE)
        started = asyncio.Event()
        usual = server.on["tools/call"]

        async def hang(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            started.set()
            await asyncio.sleep(60)
            raise AssertionError

        server.on["tools/call"] = hang
        calling = asyncio.create_task(bus.call("far:add"))
        await started.wait()
        await server.kill()
        lost = await calling
        assert lost.error is not None
        assert (lost.error.code, lost.error.stage) == (Code.UNAVAILABLE, Stage.DISPATCHED)
        refused = await bus.call("far:add", timeout=30)
        assert refused.error is not None
        assert (refused.error.code, refused.error.stage) == (Code.UNAVAILABLE, Stage.NOT_DISPATCHED)
        assert refused.error.retry_safe
        server.on["tools/call"] = usual
        await server.start()
        assert (await bus.call("far:add")).unwrap() == "done"
        assert [each.tool.name for each in bus.list()] == ["far:add"]


async def test_a_mount_that_needs_a_login_goes_on_once_a_user_has_logged_in(tmp_path: Path) -> None:
    server = Guarded(modern=True)
    await server.start()
    try:
        async with mounted(with_a_tool(server), tmp_path) as (bus, mount):
            await until(lambda: mount.state is MountState.NEEDS_LOGIN)
            assert "--login" in mount.status().reason
            document = {"url": server.url, "tokens": {"access_token": "t1", "token_type": "Bearer"}, "expires_at": 0}
            write_document(token_path(tmp_path / "data", "far"), document)
            await until(lambda: mount.state is MountState.LIVE)
            assert (await bus.call("far:add")).unwrap() == "done"
    finally:
        await server.kill()


async def test_a_mount_that_was_replaced_while_it_needed_a_login_goes_on_too(tmp_path: Path) -> None:
    server = Guarded(modern=True)
    await server.start()
    data = tmp_path / "data"
    try:
        async with Bus(Config(grpc=("127.0.0.1:0",), http="off", data_dir=data), rooms=()) as bus:
            mounts = Mounts(bus.core, MountManifest(None), partial(open_remote, data), timings=QUICK)
            with_a_tool(server)

            def state() -> MountState:
                mount = mounts.get("far")
                assert mount is not None
                return mount.state

            try:
                for rate in (0.0, 5.0):
                    await mounts.apply({"far": MountEntry("far", url=server.url, rate=rate)})
                    await until(lambda: state() is MountState.NEEDS_LOGIN)
                tokens = {"access_token": "t1", "token_type": "Bearer"}
                write_document(token_path(data, "far"), {"url": server.url, "tokens": tokens, "expires_at": 0})
                await until(lambda: state() is MountState.LIVE)
            finally:
                await mounts.stop()
    finally:
        await server.kill()


async def test_a_call_that_goes_on_with_answers_may_be_asked_again_on_its_stream(tmp_path: Path) -> None:
    async with serving(modern=False) as server, mounted(with_a_tool(server), tmp_path) as (bus, mount):

        async def ask(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            response = await stream(request)
            for number in ("q1", "q2"):
                asking = {"method": "elicitation/create", "params": {"message": number, "requestedSchema": {}}}
                await response.write(event({"jsonrpc": "2.0", "id": number, **asking}))
                await until(lambda number=number: server.seen[-1][2].get("id") == number)  # type: ignore[misc]
            await response.write(event(answer(message, "asked twice")))
            return response

        server.on["tools/call"] = ask
        await until(lambda: mount.state is MountState.LIVE)
        caller, messages = LocalCaller("host", bus.dispatcher), []
        result = await caller.call(pb.ToolCall(name="far:add", accepts=["elicitation.form"]))
        while result.input_requests_json:
            asked = json.loads(result.input_requests_json)
            messages += [each["params"]["message"] for each in asked.values()]
            call = pb.ToolCall(name="far:add", accepts=["elicitation.form"], request_state=result.request_state)
            call.input_responses_json = json.dumps({key: {"action": "decline"} for key in asked})
            result = await caller.call(call)
        assert result.unwrap() == "asked twice"
        assert messages == ["q1", "q2"]
