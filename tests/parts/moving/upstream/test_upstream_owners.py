from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from tests.parts.moving.upstream.conftest import BASE, SHORT, Side
from tests.parts.moving.upstream.main_server import MainServer
from tests.parts.moving.upstream.upstream_cases import FOREIGN, logged, quiet
from tests.support.core_model import offered, tool
from toolbus.bus import Bus, Config
from toolbus.bus.storage.store import Store
from toolbus.errors import SetupError
from toolbus.parts.moving.upstream.plan import CALLBACK_PATH
from toolbus.parts.moving.upstream.sync import Upstream
from toolbus.testing import running_bus

ELSEWHERE = "http://127.0.0.1:48999"  # of another bus, or of ours in another run


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


async def test_a_replaced_tool_is_registered_again_when_the_other_one_was_withdrawn(
    server: MainServer, side: Side
) -> None:
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


async def test_a_tool_of_the_same_source_and_name_is_not_replaced_and_ours_is_registered_once_it_was_withdrawn(
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
    base: str, server: MainServer, side: Side, store: Store
) -> None:
    killed = Side()
    killed.offer("a", tool("t"), tool("old"))
    killed.offer("gone", tool("older"))
    await killed.connect(server.url, store=store)
    await server.until(lambda: server.names() == ["t", "old", "older"])
    await quiet(server)
    await _stop_as_if_killed(killed, server)
    foreign = FOREIGN | {"name": "theirs", "source": "plugin:a", "callback_url": f"{BASE}{CALLBACK_PATH}a/theirs"}
    server.tools["default"]["theirs"] = foreign
    side.offer("a", tool("t"))
    await side.connect(server.url, base, store)
    await server.until(lambda: server.names() == ["t", "theirs"] and server.counted("register") == 4)
    await quiet(server)
    assert server.tools["default"]["t"]["callback_url"] == f"{base}{CALLBACK_PATH}a/t"
    assert server.tools["default"]["theirs"] == foreign


async def test_a_program_that_listens_at_our_former_port_keeps_the_tools_there(
    server: MainServer, side: Side, store: Store
) -> None:
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as plugin_server:
        base = f"http://127.0.0.1:{plugin_server.sockets[0].getsockname()[1]}"
        killed = Side()
        killed.offer("a", tool("t"))
        await killed.connect(server.url, base, store)
        await server.until(lambda: server.names() == ["t"])
        await quiet(server)
        await _stop_as_if_killed(killed, server)
        side.offer("a", tool("t"), tool("u"))
        await side.connect(server.url, store=store)
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
    server: MainServer, side: Side, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await side.connect(server.url, store=store)
    (tmp_path / "data").rename(tmp_path / "away")
    side.offer("a", tool("t"))
    await server.until(lambda: server.names() == ["t"])
    side.offer("a", tool("u"))
    await server.until(lambda: server.names() == ["t", "u"])
    assert logged(caplog, "cannot store ownership") == 1


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
