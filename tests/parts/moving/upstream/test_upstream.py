from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from tests.parts.moving.upstream.conftest import BASE, Side
from tests.parts.moving.upstream.main_server import Answer, MainServer, Misbehaviour
from tests.parts.moving.upstream.upstream_cases import FOREIGN, logged, quiet
from tests.support.core_model import offered, tool
from tests.support.waiting import WAIT_SECONDS, Stopwatch
from toolbus.bus.catalog.policy import AccessRules
from toolbus.parts.moving.upstream.sync import Upstream
from toolbus.parts.moving.upstream.sync_state import UpstreamTimings

# -- kept in step --------------------------------------------------------------------------------------------------


async def test_the_tools_of_the_bus_are_registered_in_their_order(server: MainServer, side: Side) -> None:
    side.offer("a", *(tool(f"t{number}") for number in range(20)))
    upstream = await side.connect(server.url)
    await server.until(lambda: len(server.names()) == 20)
    assert server.names() == [f"t{number}" for number in range(20)]
    assert {body["via"][0] for body in server.bodies("register")} == {"b1"}
    await quiet(server)
    assert upstream.state == "connected"
    assert "connected: planned=20 registered=20 warnings=0" in repr(upstream)


async def test_added_and_removed_tools_are_synchronized(server: MainServer, side: Side) -> None:
    first = side.offer("a", tool("t"), tool("u"))
    await side.connect(server.url)
    await server.until(lambda: server.names() == ["t", "u"])
    second = side.offer("b", tool("v"))
    await server.until(lambda: server.names() == ["t", "u", "v"])
    side.withdraw(first)
    await server.until(lambda: server.names() == ["v"])
    side.withdraw(second)
    await server.until(lambda: server.names() == [])
    await quiet(server)
    assert [body["role"] for body in server.bodies("unregister")] == [None, None, None]


async def test_a_change_is_sent_at_once_and_not_at_the_next_poll(server: MainServer, side: Side) -> None:
    side.timings = replace(side.timings, poll_seconds=60.0)
    await side.connect(server.url)
    await server.until(lambda: server.counted("list") >= 1)
    side.offer("a", tool("t"))
    await server.until(lambda: server.names() == ["t"])


@pytest.mark.parametrize(
    "change",
    [{"description": "new"}, {"parameters_json": '{"type":"object","required":["x"]}'}, {"timeout_seconds": 7.0}],
)
async def test_a_changed_declaration_is_registered_again_in_its_place(
    change: dict[str, Any], server: MainServer, side: Side
) -> None:
    plugin = side.offer("a", tool("t"), tool("u"))
    await side.connect(server.url)
    await server.until(lambda: server.names() == ["t", "u"])
    side.registry.register(plugin, offered(tool("t", **change)))
    side.changed()
    await server.until(lambda: server.counted("register") == 3)
    await quiet(server)
    assert server.names() == ["t", "u"]
    assert server.bodies("register")[2]["name"] == "t"


async def test_an_offline_tool_stays_registered_until_its_grace_is_over(server: MainServer, side: Side) -> None:
    plugin = side.offer("a", tool("t"))
    await side.connect(server.url)
    await server.until(lambda: server.names() == ["t"])
    side.registry.lose(plugin, "broke", 0.0)
    side.changed()
    await quiet(server)
    side.registry.expire(1.0)
    side.changed()
    await server.until(lambda: server.names() == [])


# -- what the other side loses -------------------------------------------------------------------------------------


async def test_a_registration_that_the_server_lost_is_repeated(server: MainServer, side: Side) -> None:
    side.offer("a", tool("t"), tool("u"))
    await side.connect(server.url)
    for _ in range(3):
        await server.until(lambda: server.names() == ["t", "u"])
        await quiet(server)
        server.tools["default"].clear()


async def test_a_description_that_was_changed_there_is_restored(server: MainServer, side: Side) -> None:
    side.offer("a", tool("t", "mine"))
    await side.connect(server.url)
    await server.until(lambda: server.names() == ["t"])
    await quiet(server)
    server.tools["default"]["t"] = server.tools["default"]["t"] | {"description": "other"}
    await server.until(lambda: server.tools["default"]["t"]["description"] == "mine")


async def test_after_a_restart_everything_is_back_within_three_seconds(
    server: MainServer, side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    side.timings = UpstreamTimings()
    side.offer("a", tool("t"), tool("u"))
    await side.connect(server.url)
    await server.until(lambda: server.names() == ["t", "u"])
    stopwatch = Stopwatch()
    await server.restart()
    await server.until(lambda: server.names() == ["t", "u"])
    assert stopwatch.seconds() < 3.0


async def test_a_server_that_comes_late_and_goes_is_logged_once_each_time(
    side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "toolbus.upstream")
    server = MainServer()
    await server.start()  # only to have a port
    await server.stop()
    side.offer("a", tool("t"))
    upstream = await side.connect(server.url)
    async with asyncio.timeout(WAIT_SECONDS):
        while not upstream.state.startswith("unreachable since"):
            await asyncio.sleep(0.001)
    async with server:
        await server.until(lambda: server.names() == ["t"])
        await quiet(server)
        assert (logged(caplog, "unreachable"), logged(caplog, "is back after")) == (1, 1)
        await server.restart()
        await server.until(lambda: server.names() == ["t"])
        await quiet(server)
        assert upstream.state == "connected"
    assert side.warning("t") == ""


async def test_changes_do_not_hammer_a_server_that_is_down(side: Side) -> None:
    side.timings = replace(side.timings, first_backoff_seconds=60.0, max_backoff_seconds=60.0)
    async with MainServer() as server:
        server.misbehave["list"] = server.answering(500, {"detail": "starting"})
        upstream = await side.connect(server.url)
        async with asyncio.timeout(WAIT_SECONDS):
            while not upstream.state.startswith("unreachable"):
                await asyncio.sleep(0.001)
        for number in range(50):
            side.offer("a", tool(f"t{number}"))
            await asyncio.sleep(0.001)  # for a request, if there were one
        assert server.counted("list") == 1
        assert "HTTP 500: starting" in upstream.state


async def test_a_burst_of_changes_costs_few_looks(server: MainServer, side: Side) -> None:
    side.timings = replace(side.timings, poll_seconds=60.0, debounce_seconds=0.05)
    await side.connect(server.url)
    await server.until(lambda: server.counted("list") >= 2)
    before = server.counted("list")
    for number in range(50):
        side.offer("a", tool(f"t{number}"))
        await asyncio.sleep(0)
    await server.until(lambda: len(server.names()) == 50)
    assert server.counted("list") - before <= 4
    assert server.counted("register") == 50


# -- roles ---------------------------------------------------------------------------------------------------------


async def test_a_tool_for_one_role_is_registered_and_withdrawn_for_that_role() -> None:
    side = Side("r1", "r2")
    async with MainServer("r1", "r2") as server:
        plugin = side.offer("a", tool("t", role="r1"))
        upstream = await side.connect(server.url)
        await server.until(lambda: server.names("r1") == ["t"])
        await quiet(server)
        assert server.names("r2") == []
        side.withdraw(plugin)
        await server.until(lambda: server.names("r1") == [])
        assert server.bodies("unregister") == [{"name": "t", "role": "r1"}]
        await upstream.stop()


async def test_a_role_that_the_server_does_not_know_is_shown_and_taken_when_it_comes() -> None:
    side = Side("r1")
    async with MainServer("other") as server:
        side.offer("a", tool("t", role="r1"), tool("u"))
        upstream = await side.connect(server.url)
        await server.until(lambda: server.names("other") == ["u"])
        await quiet(server)
        assert side.warning("t") == f"upstream {server.url}: HTTP 404: unknown role: r1"
        server.roles.append("r1")
        await server.until(lambda: set(server.names("r1")) == {"t", "u"})
        await quiet(server)
        assert side.warning("t") == ""
        await upstream.stop()


async def test_a_tool_for_one_role_keeps_its_role_when_one_for_all_roles_is_registered_again() -> None:
    side = Side("r1", "r2")
    async with MainServer("r1", "r2") as server:
        side.offer("all", tool("t"))
        side.offer("one", tool("t", role="r1"))
        upstream = await side.connect(server.url)

        def sources() -> list[str]:
            return [server.tools[role].get("t", {}).get("source", "") for role in ("r1", "r2")]

        for _ in range(2):
            await server.until(lambda: sources() == ["plugin:one", "plugin:all"])
            await quiet(server)
            del server.tools["r2"]["t"]
        await upstream.stop()


async def test_a_role_that_fails_is_shown_and_the_others_have_the_tool(caplog: pytest.LogCaptureFixture) -> None:
    side = Side()
    async with MainServer("r1", "r2") as server:
        server.misbehave["register"] = _fails_in(server, "r2")
        side.offer("a", tool("t"))
        upstream = await side.connect(server.url)
        await server.until(lambda: server.names("r1") == ["t"])
        await quiet(server)
        assert side.warning("t") == f"upstream {server.url}: not accepted in every role: role 'r2': LimitExceeded: full"
        assert logged(caplog, "LimitExceeded: full") == 1
        del server.tools["r1"]["t"]
        await server.until(lambda: server.names("r1") == ["t"])
        await upstream.stop()


def _fails_in(server: MainServer, role: str) -> Misbehaviour:
    async def register(_: web.Request, body: dict[str, Any]) -> Answer:
        taken = [other for other in server.roles if other != role]
        for other in taken:
            server.tools[other][body["name"]] = body
        failed = [{"role": role, "error": "LimitExceeded: full"}]
        return {"ok": True, "registered": body["name"], "affected_roles": taken, "failed_roles": failed}

    return register


# -- the end -------------------------------------------------------------------------------------------------------


async def test_at_the_end_each_source_is_cleared_once_and_others_stay(server: MainServer, side: Side) -> None:
    side.offer("a", tool("t"), tool("u"))
    side.offer("plugin:b", tool("v"))
    gone = side.offer("c", tool("w"))
    server.tools["default"]["x"] = FOREIGN | {"name": "x"}
    upstream = await side.connect(server.url)
    await server.until(lambda: len(server.names()) == 5)
    side.withdraw(gone)
    await server.until(lambda: len(server.names()) == 4)
    await quiet(server)
    await upstream.stop()
    assert sorted(body["source"] for body in server.bodies("clear")) == ["plugin:a", "plugin:b"]
    assert server.names() == ["x"]
    assert upstream.state == "stopped"
    await upstream.stop()
    assert server.counted("clear") == 2


async def test_at_the_end_a_source_that_others_use_too_is_not_cleared_and_keeps_their_tools(
    server: MainServer, side: Side
) -> None:
    side.offer("a", tool("t"), tool("u"))
    side.offer("b", tool("v"))
    upstream = await side.connect(server.url)
    await server.until(lambda: len(server.names()) == 3)
    await quiet(server)
    theirs = FOREIGN | {"name": "theirs", "source": "plugin:a"}
    server.tools["default"] |= {"theirs": theirs, "u": FOREIGN | {"name": "u"}}
    await quiet(server)
    await upstream.stop()
    assert server.names() == ["u", "theirs"]
    assert server.bodies("clear") == [{"source": "plugin:b"}]
    assert server.bodies("unregister") == [{"name": "t", "role": None}]


async def test_a_stop_in_the_middle_of_a_registration_leaves_nothing_behind(server: MainServer, side: Side) -> None:
    server.misbehave["register"] = server.hang
    side.offer("a", *(tool(f"t{number}") for number in range(50)))
    upstream = await side.connect(server.url)
    await server.until(lambda: server.counted("register") == 1)
    stopping = asyncio.create_task(upstream.stop())
    await asyncio.sleep(0)
    server.misbehave.clear()
    server.release()
    await stopping
    assert (server.names(), server.counted("register"), server.counted("clear")) == ([], 1, 1)


@pytest.mark.parametrize("verb", ["list", "register", "clear"])
async def test_a_stop_does_not_wait_for_a_server_that_hangs(
    verb: str, server: MainServer, side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "toolbus.upstream")
    side.offer("a", tool("t"))
    upstream = await side.connect(server.url)
    await server.until(lambda: server.names() == ["t"])
    server.misbehave = {verb: server.hang, "clear": server.hang}
    side.offer("a", tool("t", "changed"))
    if verb != "clear":
        await server.until_asked(verb, 1)
    stopwatch = Stopwatch()
    await upstream.stop(0.2)
    assert stopwatch.seconds() < 1.0
    assert logged(caplog, "did not respond in 0.2 s") == 1


async def test_a_stop_while_the_server_is_away_ends_at_once(server: MainServer, side: Side) -> None:
    side.offer("a", tool("t"))
    upstream = await side.connect(server.url)
    await server.until(lambda: server.names() == ["t"])
    await server.stop()
    stopwatch = Stopwatch()
    await upstream.stop()
    assert stopwatch.seconds() < 1.0


async def test_an_upstream_that_was_never_started_stops() -> None:
    side = Side()
    upstream = Upstream(
        "http://127.0.0.1:1",
        side.registry,
        side.view,
        callback_base=BASE,
        bus_id="b",
        changed=side.watch,
        on_warning=lambda: None,
    )
    await upstream.stop()
    assert "not started" in repr(upstream)


async def test_a_tool_that_needs_a_user_is_not_offered_and_comes_and_goes_with_the_rule(
    server: MainServer, side: Side
) -> None:
    await side.connect(server.url)
    side.offer("a", tool("open"), tool("closed"))
    await server.until(lambda: server.names() == ["open", "closed"])
    side.view.permit(AccessRules.read({"tools": {"closed": ["ann"]}}))
    side.changed()
    await server.until(lambda: server.names() == ["open"])
    side.view.permit(AccessRules())
    side.changed()
    await server.until(lambda: server.names() == ["open", "closed"])
