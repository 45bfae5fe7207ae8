"""Roles that come and go at run time: by operators, by programs that name them, by a main server; and over restarts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from tests.faults.callbacks import CallbackPlugin, Legacy
from tests.parts.moving.upstream.main_server import MainServer
from tests.support.waiting import WAIT_SECONDS, until
from toolbus import Host, Plugin
from toolbus.bus import Bus
from toolbus.bus.roles import ROLES
from toolbus.bus.storage.store import Store
from toolbus.errors import InvalidRequest, NotKept, SetupError, UnknownRole
from toolbus.protocol.limits import Limits
from toolbus.sdk import ToolScope
from toolbus.testing import running_bus
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

PLUGIN_ROLE = "小八"
CALLBACK = "http://127.0.0.1:9/call"


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[Bus, httpx.AsyncClient]]:
    async with (
        running_bus(http="127.0.0.1:0", **settings) as bus,
        httpx.AsyncClient(base_url=f"http://{bus.http_address}/api", verify=False, timeout=WAIT_SECONDS) as http,
    ):
        yield bus, http


async def register(http: httpx.AsyncClient, role: str, name: str = "t") -> httpx.Response:
    return await http.post("/tools/register", json={"name": name, "callback_url": CALLBACK, "role": role})


# -- over restarts -------------------------------------------------------------------------------------------------


async def test_added_roles_come_after_those_of_the_configuration_and_outlive_the_bus(tmp_path: Path) -> None:
    async with running_bus(data_dir=tmp_path, roles=("a", "b")) as bus:
        for role in ("z", "b", "y", "x"):
            assert (await bus.call("toolbus:role_add", {"role": role})).error is None
        bus.remove_role("y")
        bus.remove_role("b")
    async with running_bus(data_dir=tmp_path, roles=("c", "b", "x")) as bus:
        assert bus.registry.roles == ("c", "b", "x", "z")
        assert (await bus.call("toolbus:role_remove", {"role": "z"})).output == ["c", "b", "x"]
    async with running_bus(data_dir=tmp_path, roles=("a",)) as bus:
        assert bus.registry.roles == ("a", "x")


@pytest.mark.parametrize("role", ["", " a", "a\n", "a\x7f", "x" * 129, "\ud800"])
async def test_what_is_not_the_name_of_a_role_is_not_added(role: str) -> None:
    async with running_bus() as bus:
        with pytest.raises(InvalidRequest, match="is not the name of a role"):
            bus.add_role(role)
        assert bus.registry.roles == ("default",)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"roles": [["a"]]}', '{"roles": [["a", "x"]]}'])
async def test_a_damaged_file_keeps_the_bus_from_starting_and_stays_as_it_is(tmp_path: Path, text: str) -> None:
    (tmp_path / "roles.json").write_text(text)
    for _ in range(2):
        with pytest.raises(SetupError, match=r"roles.json is damaged.* to start with the roles of the configuration"):
            async with running_bus(data_dir=tmp_path):
                pass
    assert (tmp_path / "roles.json").read_text() == text


@pytest.mark.parametrize(("role", "origin"), [("a", "x"), ("", "operator"), ("a", None)])
async def test_a_damaged_role_keeps_the_bus_from_starting(tmp_path: Path, role: str, origin: object) -> None:
    with closing(Store.of(tmp_path)) as store:
        store.open()
        store.put(ROLES, role, origin)
    with pytest.raises(SetupError, match=r"'DELETE FROM roles'` to start with the roles of the configuration"):
        async with running_bus(data_dir=tmp_path):
            pass


async def test_a_role_that_cannot_be_written_down_is_in_force_and_the_error_says_so(tmp_path: Path) -> None:
    async with running_bus(data_dir=tmp_path / "data") as bus:
        (tmp_path / "data").rename(tmp_path / "away")
        with pytest.raises(NotKept, match="could not be written"):
            bus.add_role("a")
        assert bus.registry.roles == ("default", "a")
        (tmp_path / "away").rename(tmp_path / "data")
    with pytest.raises(UnknownRole):
        bus.remove_role("nobody")


# -- adopted -------------------------------------------------------------------------------------------------------


async def test_an_unknown_role_is_a_404_unless_roles_are_adopted() -> None:
    async with serving() as (bus, http):
        answer = await register(http, PLUGIN_ROLE)
        assert (answer.status_code, answer.json()) == (404, {"detail": f"unknown role: {PLUGIN_ROLE}"})
        assert bus.registry.roles == ("default",)


async def test_the_first_registration_for_a_role_adopts_it_for_good(tmp_path: Path) -> None:
    async with serving(data_dir=tmp_path, adopt_roles="first-use", audit=True) as (bus, http):
        answer = await register(http, PLUGIN_ROLE)
        wanted = {"ok": True, "registered": "t", "affected_roles": [PLUGIN_ROLE], "failed_roles": []}
        assert (answer.status_code, answer.json()) == (200, wanted)
        [listed] = (await http.get("/tools", params={"role": PLUGIN_ROLE})).json()["tools_by_role"][PLUGIN_ROLE]
        assert listed["name"] == "t"
        for verb, field in (("unregister", "name"), ("clear", "source")):
            assert (await http.post(f"/tools/{verb}", json={field: "t", "role": "x"})).status_code == 404
        for invalid in (" a", "x" * 200):
            assert (await register(http, invalid)).status_code == 404
        assert "adopted: first-use" in "".join(each.read_text() for each in (tmp_path / "audit").iterdir())
    async with running_bus(data_dir=tmp_path) as bus:
        assert bus.registry.roles == ("default", PLUGIN_ROLE)
    with closing(Store.of(tmp_path)) as store:
        store.open()
        assert store.load(ROLES) == {PLUGIN_ROLE: "first-use"}


async def test_only_so_many_roles_are_adopted_and_an_operator_may_add_more(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(adopt_roles="first-use", limits=Limits(unconfigured_roles=2)) as (bus, http):
        statuses = [(await register(http, f"r{number}")).status_code for number in range(4)]
        assert statuses == [200, 200, 404, 404]
        bus.add_role("r3")
        assert (await register(http, "r3")).status_code == 200
        bus.remove_role("r0")
        assert (await register(http, "r2")).status_code == 200
    assert sum("as many as the limit unconfigured_roles" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(("mode", "status"), [("first-use", 200), ("upstream", 404), ("off", 404)])
async def test_the_roles_of_a_main_server_are_adopted_and_tools_for_them_offered_there(mode: str, status: int) -> None:
    async with (
        MainServer("default", PLUGIN_ROLE, " bad ") as server,
        serving(adopt_roles=mode, upstream=server.url) as (bus, http),
    ):
        await server.until_asked("list", 1)
        if mode != "off":
            await until(lambda: bus.registry.roles == ("default", PLUGIN_ROLE))
            assert (await register(http, PLUGIN_ROLE)).status_code == 200
        assert (await register(http, "another")).status_code == status
        assert (PLUGIN_ROLE in bus.registry.roles) == (mode != "off")


# -- over gRPC -----------------------------------------------------------------------------------------------------


async def test_a_plugin_s_tool_waits_for_its_role_and_is_called_when_an_operator_adds_it() -> None:
    async with running_bus() as bus, Plugin("plugin", address=bus.grpc_addresses[0]) as plugin:

        @plugin.tool(role=PLUGIN_ROLE)
        def meow() -> str:
            return "meow"

        await plugin.ready()
        async with Host(bus.grpc_addresses[0]) as host:

            async def states() -> list[tuple[str, str, tuple[str, ...]]]:
                return [(each.name, each.state, each.roles) for each in await host.list(include_offline=True)]

            assert await states() == [("meow", "waiting", (PLUGIN_ROLE,))]
            assert list(await host.list()) == []
            assert [(each.name, each.role) for each in plugin.waiting] == [("meow", PLUGIN_ROLE)]
            bus.add_role(PLUGIN_ROLE)
            assert (await host.call("meow", role=PLUGIN_ROLE)).output == "meow"
            assert await states() == [("meow", "live", (PLUGIN_ROLE,))]
            await until(lambda: not plugin.waiting)
            bus.remove_role(PLUGIN_ROLE)
            assert await states() == [("meow", "waiting", (PLUGIN_ROLE,))]
            await until(lambda: plugin.waiting)


async def test_the_first_attach_for_a_role_adopts_it() -> None:
    async with (
        running_bus(adopt_roles="first-use") as bus,
        Plugin("plugin", address=bus.grpc_addresses[0]) as plugin,
    ):
        plugin.tool(role=PLUGIN_ROLE, name="meow")(lambda: "meow")
        await plugin.ready()
        assert bus.registry.roles == ("default", PLUGIN_ROLE)
        assert (await bus.call("meow", role=PLUGIN_ROLE)).output == "meow"


async def test_a_callback_tool_that_came_by_grpc_waits_for_its_role_over_a_restart(tmp_path: Path) -> None:
    with CallbackPlugin().come() as callback:
        tool = pb.Tool(name="t", callback_url=callback.url(), role=PLUGIN_ROLE)
        async with running_bus(data_dir=tmp_path) as bus, Legacy.of(bus) as legacy:
            answer = await legacy.stub.Register(wire.RegisterRequest(source="legacy", tools=[tool]))
            assert ([each.role for each in answer.waiting], answer.ok) == ([PLUGIN_ROLE], True)
            assert bus.registry.listings(include_offline=True) == bus.registry.listings()
        async with running_bus(data_dir=tmp_path) as bus:
            assert [each.tool.name for each in bus.registry.waiting(PLUGIN_ROLE)] == ["t"]
            bus.add_role(PLUGIN_ROLE)
            listed = bus.list(PLUGIN_ROLE, include_offline=True)
            assert [each.tool.name for each in listed] == ["t"]


@pytest.mark.parametrize("local", [False, True], ids=["session", "of the bus"])
async def test_a_tool_is_told_the_role_that_it_is_for_or_that_its_caller_named(local: bool) -> None:
    async with running_bus(roles=("A", "B")) as bus, Plugin("p", address=bus.grpc_addresses[0]) as plugin:
        owner = cast("Plugin", bus) if local else plugin  # both offer functions in the same way

        @owner.tool
        def of_all(scope: ToolScope) -> str:
            return scope.role

        @owner.tool(role="B")
        def of_one(scope: ToolScope) -> str:
            return scope.role

        @owner.tool
        async def nested(scope: ToolScope) -> Any:
            return (await scope.call("of_all", {})).output

        await plugin.ready()
        async with Host(bus.grpc_addresses[0]) as host:
            for name, role, told in (
                ("of_all", "B", "B"),
                ("of_all", "A", "A"),
                ("of_all", None, ""),
                ("of_one", None, "B"),
                ("nested", "B", "B"),
            ):
                assert (await host.call(name, {}, role=role)).unwrap() == told, (name, role)
