from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.bus.upstream.conftest import BASE, SHORT, Side
from tests.bus.upstream.main_server import Answer, MainServer, Misbehaviour
from tests.support.core_model import offered, tool
from tests.support.waiting import Stopwatch
from toolbus.bus import Bus, Config
from toolbus.bus.catalog.policy import AccessRules
from toolbus.bus.upstream import Upstream, sync
from toolbus.bus.upstream.plan import CALLBACK_PATH
from toolbus.bus.upstream.upstream_timings import UpstreamTimings
from toolbus.errors import SetupError
from toolbus.testing import running_bus

ELSEWHERE = "http://127.0.0.1:48999"  # of another bus, or of ours in another run
FOREIGN = {"name": "t", "description": "theirs", "source": "somebody", "callback_url": "http://127.0.0.1:1/x"}


def logged(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(1 for record in caplog.records if words in record.getMessage())


async def quiet(server: MainServer) -> None:
    """Waits out three looks after which nothing was changed."""
    before = len(server.requests)
    await server.until_asked("list", 3)
    changes = [verb for verb, _ in server.requests[before:] if verb != "list"]
    assert not changes, changes


# -- kept in step --------------------------------------------------------------------------------------------------


async def test_the_tools_of_the_bus_are_registered_in_their_order(server: MainServer, side: Side) -> None:
    side.offer("a", *(tool(f"t{number}") for number in range(20)))
    upstream = await side.connect(server.url)
    await server.until(lambda: len(server.names()) == 20)
    assert server.names() == [f"t{number}" for number in range(20)]
    assert {body["via"][0] for body in server.bodies("register")} == {"b1"}
    await quiet(server)
    assert upstream.state == "connected"
    assert "connected: wanted=20 registered=20 warnings=0" in repr(upstream)


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


async def test_what_the_server_forgot_is_put_back(server: MainServer, side: Side) -> None:
    side.offer("a", tool("t"), tool("u"))
    await side.connect(server.url)
    for _ in range(3):
        await server.until(lambda: server.names() == ["t", "u"])
        await quiet(server)
        server.tools["default"].clear()


async def test_a_changed_description_over_there_is_put_right(server: MainServer, side: Side) -> None:
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
    async with asyncio.timeout(20):
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
        async with asyncio.timeout(20):
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


# -- what others own -----------------------------------------------------------------------------------------------


async def test_a_tool_that_another_owner_replaced_is_left_alone(
    server: MainServer, side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = side.offer("a", tool("t"))
    await side.connect(server.url)
    await server.until(lambda: server.names() == ["t"])
    await quiet(server)
    server.tools["default"]["t"] = FOREIGN
    await server.until_asked("list", 2)
    await quiet(server)
    assert "replaced upstream by source 'somebody'" in side.warning("t")
    assert logged(caplog, "replaced upstream") == 1
    side.registry.register(plugin, offered(tool("t", "a new declaration")))
    side.changed()
    await server.until_asked("list", 3)
    assert server.tools["default"]["t"] == FOREIGN
    assert "taken there by source 'somebody'" in side.warning("t")


async def test_a_name_of_another_owner_is_left_alone_and_registered_once_it_is_free(
    server: MainServer, side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    server.tools["default"]["t"] = FOREIGN
    side.offer("a", tool("t"), tool("u"))
    await side.connect(server.url)
    await server.until(lambda: server.names() == ["t", "u"])
    await quiet(server)
    assert server.tools["default"]["t"] == FOREIGN
    assert "the name is taken there by source 'somebody' (role 'default')" in side.warning("t")
    assert logged(caplog, "taken there") == 1
    del server.tools["default"]["t"]
    await server.until(lambda: server.tools["default"].get("t", {}).get("source") == "plugin:a")
    await quiet(server)
    assert side.warning("t") == ""


async def test_a_name_that_is_taken_in_one_role_is_registered_in_the_others(server: MainServer, side: Side) -> None:
    server.roles.append("more")
    server.tools["more"] = {"t": FOREIGN}
    side.offer("a", tool("t"))
    await side.connect(server.url)
    await server.until(lambda: "t" in server.tools["default"])
    await quiet(server)
    assert server.tools["default"]["t"]["source"] == "plugin:a"
    assert server.tools["more"]["t"] == FOREIGN
    assert "'more'" in side.warning("t")


async def test_a_replaced_tool_is_put_back_when_the_other_one_is_gone(server: MainServer, side: Side) -> None:
    side.offer("a", tool("t"))
    await side.connect(server.url)
    await server.until(lambda: server.names() == ["t"])
    await quiet(server)
    server.tools["default"]["t"] = FOREIGN
    await server.until_asked("list", 2)
    await quiet(server)
    del server.tools["default"]["t"]
    await server.until(lambda: server.names() == ["t"])
    await quiet(server)
    assert side.warning("t") == ""


async def test_a_replaced_tool_that_goes_leaves_the_foreign_one_alone(server: MainServer, side: Side) -> None:
    plugin = side.offer("a", tool("t"))
    await side.connect(server.url)
    await server.until(lambda: server.names() == ["t"])
    await quiet(server)
    server.tools["default"]["t"] = FOREIGN
    server.tools["default"]["elsewhere"] = FOREIGN | {"name": "elsewhere", "source": "plugin:a"}
    side.withdraw(plugin)
    await quiet(server)
    assert server.names() == ["t", "elsewhere"]


async def test_in_other_roles_a_replaced_tool_is_put_back_role_by_role() -> None:
    side = Side()
    async with MainServer("r1", "r2") as server:
        side.offer("a", tool("t"))
        upstream = await side.connect(server.url)
        await server.until(lambda: server.names("r2") == ["t"])
        await quiet(server)
        server.tools = {"r1": {"t": FOREIGN}, "r2": {}}
        await server.until(lambda: server.names("r2") == ["t"])
        await quiet(server)
        assert server.tools["r1"]["t"] == FOREIGN
        assert server.bodies("register")[-1]["role"] == "r2"
        await upstream.stop()


async def test_a_tool_of_the_same_source_and_name_is_not_replaced_and_registered_once_it_is_gone(
    server: MainServer, side: Side
) -> None:
    other = Side()
    other.offer("a", tool("t"))
    first = await other.connect(server.url, ELSEWHERE)
    await server.until(lambda: server.names() == ["t"])
    side.offer("a", tool("t"), tool("u"))
    await side.connect(server.url)
    await server.until(lambda: server.names() == ["t", "u"])
    await quiet(server)
    theirs = server.tools["default"]["t"]["callback_url"]
    assert theirs.startswith(ELSEWHERE)
    assert side.warning("t") == (
        f"upstream {server.url}: the name is taken there by source 'plugin:a' at {theirs!r} (role 'default'): stop "
        "that program, unregister its tool there, or rename one of the tools; the bus registers its own when the name "
        "is free"
    )
    await first.stop()
    await server.until(lambda: server.tools["default"].get("t", {}).get("callback_url", "").startswith(BASE))
    await quiet(server)
    assert server.names() == ["u", "t"]
    assert side.warning("t") == ""


async def _stop_as_if_killed(side: Side, server: MainServer) -> None:
    """Stops an upstream that cannot withdraw what it has registered."""
    assert side.upstream is not None
    server.misbehave["list"] = server.hang
    await side.upstream.stop(0.05)
    server.misbehave.clear()
    server.release()


@pytest.mark.parametrize("base", [BASE, ELSEWHERE])
async def test_what_a_killed_bus_left_behind_is_taken_over_or_withdrawn_also_from_another_port(
    base: str, server: MainServer, side: Side, tmp_path: Path
) -> None:
    killed = Side()
    killed.offer("a", tool("t"), tool("old"))
    killed.offer("gone", tool("older"))
    await killed.connect(server.url, directory=tmp_path)
    await server.until(lambda: server.names() == ["t", "old", "older"])
    await quiet(server)
    await _stop_as_if_killed(killed, server)
    foreign = FOREIGN | {"name": "theirs", "source": "plugin:a", "callback_url": f"{BASE}{CALLBACK_PATH}a/theirs"}
    server.tools["default"]["theirs"] = foreign
    side.offer("a", tool("t"))
    await side.connect(server.url, base, tmp_path)
    await server.until(lambda: server.names() == ["t", "theirs"] and server.counted("register") == 4)
    await quiet(server)
    assert server.tools["default"]["t"]["callback_url"] == f"{base}{CALLBACK_PATH}a/t"
    assert server.tools["default"]["theirs"] == foreign


async def test_a_program_that_listens_at_our_former_port_keeps_the_tools_there(
    server: MainServer, side: Side, tmp_path: Path
) -> None:
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as plugin_server:
        base = f"http://127.0.0.1:{plugin_server.sockets[0].getsockname()[1]}"
        killed = Side()
        killed.offer("a", tool("t"))
        await killed.connect(server.url, base, tmp_path)
        await server.until(lambda: server.names() == ["t"])
        await quiet(server)
        await _stop_as_if_killed(killed, server)
        side.offer("a", tool("t"), tool("u"))
        await side.connect(server.url, directory=tmp_path)
        await server.until(lambda: server.names() == ["t", "u"])
        await quiet(server)
        assert server.tools["default"]["t"]["callback_url"].startswith(base)
        assert "taken there by source 'plugin:a'" in side.warning("t")


async def test_tools_that_lead_to_us_and_that_we_did_not_register_are_left_alone_and_logged_once(
    server: MainServer, side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    left = {"name": "old", "source": "plugin:gone", "callback_url": f"{BASE}{CALLBACK_PATH}gone/old"}
    server.tools["default"] = {"old": left, "t": FOREIGN}
    await side.connect(server.url)
    await server.until_asked("list", 1)
    await quiet(server)
    assert server.names() == ["old", "t"]
    assert logged(caplog, "lists tools=old with a callback URL of this bus, which has not registered them") == 1


async def test_a_file_that_cannot_be_written_is_logged_once_and_stops_nothing(
    server: MainServer, side: Side, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    await side.connect(server.url, directory=directory)
    directory.rmdir()
    side.offer("a", tool("t"))
    await server.until(lambda: server.names() == ["t"])
    side.offer("a", tool("u"))
    await server.until(lambda: server.names() == ["t", "u"])
    assert logged(caplog, "cannot write upstream.json") == 1


async def test_the_tools_of_a_plugin_on_its_way_back_keep_their_place(server: MainServer) -> None:
    side = Side(grace_seconds=60.0)
    left = {"name": "t", "source": "plugin:a", "callback_url": f"{BASE}/api/llm-tools/callback/a/t"}
    server.tools["default"] = {"t": left, "u": {**FOREIGN, "name": "u"}}
    upstream = await side.connect(server.url)
    await quiet(server)
    side.offer("a", tool("t"))
    await server.until(lambda: server.counted("register") == 1)
    assert server.names() == ["t", "u"]
    await upstream.stop()


async def test_what_was_overwritten_here_goes_there_too_when_its_successor_is_refused(
    server: MainServer, side: Side
) -> None:
    side.offer("a", tool("t"))
    await side.connect(server.url)
    await server.until(lambda: server.names() == ["t"])
    await quiet(server)
    server.misbehave["register"] = server.answering(422, {"detail": "no"})
    side.offer("b", tool("t", "of b"))
    await server.until(lambda: server.names() == [])
    assert server.tools == {"default": {}}


async def test_a_real_bus_is_synchronized(server: MainServer, tmp_path: Path) -> None:
    async with Bus(Config(grpc=(f"unix:{tmp_path}/bus",), http="off")) as bus:
        upstream = Upstream(
            server.url,
            bus.registry,
            bus.dispatcher.view,
            callback_base=BASE,
            bus_id="b",
            changed=bus.watch,
            on_warning=lambda: None,
            timings=SHORT,
        )
        await upstream.start()

        @bus.tool
        def add(a: int, b: int) -> int:
            return a + b

        await server.until(lambda: server.names() == ["add"])
        (body,) = server.bodies("register")
        assert (body["source"], body["parameters"]["required"]) == ("plugin:local", ["a", "b"])
        assert bus.remove_tool("add")
        await server.until(lambda: server.names() == [])
        await upstream.stop()


async def test_a_bus_whose_port_is_taken_listens_on_another_one_says_so_and_is_called_back_there(
    server: MainServer, caplog: pytest.LogCaptureFixture
) -> None:
    taken = f"127.0.0.1:{server.port}"
    async with MainServer() as main_server:
        async with running_bus(http=taken, http_fallback=True, upstream=main_server.url, data_dir=None) as bus:

            @bus.tool
            def five() -> int:
                return 5

            await main_server.until(lambda: main_server.names() == ["five"])
            url = main_server.tools["default"]["five"]["callback_url"]
            assert bus.http_address not in (None, taken, main_server.url.removeprefix("http://"))
            assert url == f"http://{bus.http_address}{CALLBACK_PATH}local/five"
            async with aiohttp.ClientSession() as client, client.post(url, json={"arguments": {}}) as response:
                assert await response.json() == {"output": 5, "is_error": False}
        assert main_server.names() == []
    assert logged(caplog, f"port {server.port} is taken, by another plugin server perhaps: listening on") == 1
    with pytest.raises(SetupError, match="in use"):
        async with running_bus(http=taken):
            pass


# -- refusals ------------------------------------------------------------------------------------------------------

VALIDATION = {"detail": [{"type": "x", "loc": ["body", "callback_url"], "msg": "must be loopback", "input": "?"}]}


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (200, {"ok": False, "error": "no role accepted the registration"}, "no role accepted the registration"),
        (200, {"ok": False, "failed_roles": [{"role": "r", "error": "E: why"}]}, "role 'r': E: why"),
        (200, {"ok": False}, "ok is false, without a reason"),
        (404, {"detail": "unknown role: x"}, "HTTP 404: unknown role: x"),
        (422, VALIDATION, "HTTP 422: callback_url: must be loopback"),
        (422, {"detail": [1, None, {"loc": 3}]}, "HTTP 422: request: None"),
        (500, "Internal\x1b[31m\nServer Error", "HTTP 500: Internal�[31m Server Error"),
        (503, "", "HTTP 503"),
        (307, "", "HTTP 307"),
        (200, "<html>", "a body that breaks the REST contract: <html>"),
        (200, [1], "a body that breaks the REST contract: [1]"),
        (200, {"ok": "yes"}, "a body that breaks the REST contract"),
        (200, "", "a body that breaks the REST contract: empty"),
    ],
)
async def test_a_refusal_is_shown_once_and_others_are_not_stopped(
    status: int, answer: object, words: str, server: MainServer, side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    refuse = server.answering(status, answer)

    async def register(request: web.Request, body: dict[str, Any]) -> Answer | None:
        return await refuse(request, body) if body["name"] == "bad" else None

    server.misbehave["register"] = register
    side.offer("a", tool("bad"), tool("good"))
    await side.connect(server.url)
    await server.until(lambda: server.names() == ["good"])
    await quiet(server)
    assert words in side.warning("bad")
    assert side.warning("good") == ""
    assert logged(caplog, "tool='bad'") == 1
    assert side.warning_changes == 1
    server.misbehave.clear()
    side.offer("a", tool("bad", "changed"))
    await server.until(lambda: "bad" in server.names())
    await quiet(server)
    assert side.warning("bad") == ""


async def test_a_refused_tool_is_retried_after_a_while_and_logged_once(
    server: MainServer, side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    side.timings = replace(side.timings, retry_seconds=0.05)
    server.misbehave["register"] = server.answering(422, {"detail": "no"})
    side.offer("a", tool("t"))
    await side.connect(server.url)
    await server.until(lambda: server.counted("register") >= 3)
    assert logged(caplog, "HTTP 422: no") == 1
    server.misbehave.clear()
    await server.until(lambda: server.names() == ["t"])
    await quiet(server)
    assert side.warning("t") == ""


async def test_a_tool_that_no_function_name_fits_is_shown_without_asking(server: MainServer, side: Side) -> None:
    side.offer("s" * 60, tool("long"), qualified=True)
    await side.connect(server.url)
    await quiet(server)
    assert "not offered upstream: its name there would be" in side.warning(f"{'s' * 60}:long")


async def test_a_server_that_accepts_a_tool_and_does_not_list_it_is_not_retried_for_ever(
    server: MainServer, side: Side
) -> None:
    server.misbehave["register"] = server.answering(200, {"ok": True, "affected_roles": ["default"]})
    side.offer("a", tool("t"))
    await side.connect(server.url)
    await server.until(lambda: server.counted("register") == 2)
    await quiet(server)
    assert "accepted the tool and does not list it as it was sent: role 'default'" in side.warning("t")


async def test_a_server_that_does_not_unregister_is_retried_with_backoff_and_logged_once(
    server: MainServer, side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = side.offer("a", tool("t"))
    await side.connect(server.url)
    await server.until(lambda: server.names() == ["t"])
    server.misbehave["unregister"] = server.answering(500, "broken")
    side.withdraw(plugin)
    await server.until(lambda: server.counted("unregister") == 3)
    assert logged(caplog, "does not unregister tool='t': HTTP 500: broken") == 1
    server.misbehave.clear()
    await server.until(lambda: server.names() == [])


# -- bad servers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        "garbage",
        "[" * 100_000,
        [],
        {"ok": True},
        {"ok": False, "error": "starting"},
        {"ok": True, "tools_by_role": []},
        {"ok": True, "tools_by_role": {"r": {}}},
        {"ok": True, "tools_by_role": {"r": [None]}},
        {"ok": True, "tools_by_role": {"r": [{"name": 5}]}},
    ],
)
async def test_an_invalid_listing_counts_as_unreachable_and_the_loop_goes_on(
    answer: object, server: MainServer, side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    server.misbehave["list"] = server.answering(200, answer)
    side.offer("a", tool("t"))
    await side.connect(server.url)
    await server.until_asked("list", 3)
    assert logged(caplog, "unreachable: GET /api/tools") == 1
    assert server.counted("register") == 0
    server.misbehave.clear()
    await server.until(lambda: server.names() == ["t"])


@pytest.mark.parametrize("verb", ["list", "register"])
async def test_an_endless_answer_is_cut_off(
    verb: str, server: MainServer, side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    side.max_response_bytes = 1 << 20
    server.misbehave[verb] = server.endless
    side.offer("a", tool("t"))
    await side.connect(server.url)
    await server.until(lambda: server.counted(verb) >= 2)
    assert logged(caplog, "a response has more than 1048576 bytes") == 1
    server.misbehave.clear()
    await server.until(lambda: server.names() == ["t"])


@pytest.mark.usefixtures("short_requests")
async def test_one_registration_that_hangs_does_not_stop_the_others(server: MainServer, side: Side) -> None:
    async def register(request: web.Request, body: dict[str, Any]) -> Answer | None:
        return await server.hang(request, body) if body["name"].startswith("bad") else None

    server.misbehave["register"] = register
    side.offer("a", *(tool(f"bad{number}") for number in range(4)), tool("good"))
    await side.connect(server.url)
    await server.until(lambda: "good" in server.names())
    await side.until(lambda: "POST /api/tools/register was not answered within 0.1 s" in side.warning("bad0"))
    server.misbehave.clear()
    server.release()
    await side.until(lambda: not any(side.warning(f"bad{number}") for number in range(4)))
    assert len(server.names()) == 5


@pytest.mark.usefixtures("short_requests")
async def test_a_server_that_hangs_is_unreachable_until_it_answers(server: MainServer, side: Side) -> None:
    server.misbehave["list"] = server.hang
    side.offer("a", tool("t"))
    upstream = await side.connect(server.url)
    await server.until(lambda: server.counted("list") == 2)
    assert "was not answered within 0.1 s" in upstream.state
    server.misbehave.clear()
    server.release()
    await server.until(lambda: server.names() == ["t"])


async def test_a_server_that_dies_in_the_middle_has_refused_nothing(server: MainServer, side: Side) -> None:
    async def die(request: web.Request, body: dict[str, Any]) -> Answer | None:
        server.misbehave["list"] = server.answering(503, "going down")
        assert request.transport is not None
        request.transport.abort()
        return None

    server.misbehave["register"] = die
    side.offer("a", tool("t"), tool("u"))
    await side.connect(server.url)
    await server.until_asked("list", 3)
    assert (side.warning("t"), side.warning_changes) == ("", 0)
    server.misbehave.clear()
    await server.until(lambda: server.names() == ["t", "u"])


async def test_an_exception_of_ours_is_logged_and_the_loop_goes_on(
    server: MainServer, side: Side, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("a bug")

    monkeypatch.setattr(sync, "make_plan", broken)
    side.offer("a", tool("t"))
    await side.connect(server.url)
    await server.until(lambda: server.names() == ["t"])
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "a fault of the bus" in record.getMessage()


async def test_a_catalog_that_stops_telling_of_changes_is_polled(
    server: MainServer, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side()

    async def broken() -> AsyncIterator[object]:
        for fault in (RuntimeError("a bug"),):
            raise fault
        yield None

    upstream = Upstream(
        server.url,
        side.registry,
        side.view,
        callback_base=BASE,
        bus_id="b",
        changed=broken,
        on_warning=lambda: None,
        timings=SHORT,
    )
    await upstream.start()
    await server.until_asked("list", 2)
    side.offer("a", tool("t"))
    await server.until(lambda: server.names() == ["t"])
    await upstream.stop()
    assert logged(caplog, "a fault of the bus") >= 1


async def test_localhost_is_connected_to_without_asking_a_name_service(
    server: MainServer, side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_lookup(*_: object, **__: object) -> None:  # REST-32
        raise AssertionError("a name was looked up")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", no_lookup)
    side.offer("a", tool("t"))
    await side.connect(f"http://localhost:{server.port}")
    await server.until(lambda: server.names() == ["t"])


async def test_no_redirect_is_followed(server: MainServer, side: Side) -> None:
    async with MainServer() as elsewhere:

        async def away(_: web.Request, __: dict[str, Any]) -> Answer:
            return web.Response(status=307, headers={"Location": f"{elsewhere.url}/api/tools"})

        server.misbehave["list"] = away
        side.offer("a", tool("t"))
        await side.connect(server.url)
        await server.until_asked("list", 2)
        assert elsewhere.requests == []


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
    assert server.bodies("clear") == [{"source": "plugin:a"}, {"source": "plugin:b"}]
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
