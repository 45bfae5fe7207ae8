"""Tests that what was registered by a callback URL is there again after a restart, as it was, and nothing else is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.callbacks import CallbackPlugin, Legacy, Start, callback_tool, catalog, names, starting
from tests.faults.raw_peer import RawPeer
from toolbus.bus import Bus
from toolbus.errors import Code, Stage
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

NUMBER = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a bus on this test's data directory."""
    return starting(tmp_path / "data")


async def test_a_registration_is_restored_with_everything_and_its_place(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="one", callback_url=plugin.url("one"), timeout_seconds=1.5)
            await legacy.ask("register", name="with space/あ", callback_url=plugin.url("x?a=%2F"), description="é\n")
            await legacy.ask("register", name="b", callback_url=plugin.url(), role="B", source="plugin:b")
            await legacy.ask(
                "register", name="c", callback_url=plugin.url(), source="", parameters={"type": "object", "x": [1.0, 2]}
            )
            fields = {"timeout_seconds": 7.0, "display_name": "D", "idle_timeout_seconds": 2.0, "role": "A"}
            await legacy.register("s", callback_tool("over-grpc", plugin, parameters_json=NUMBER, **fields))
            await legacy.ask("register", name="one", callback_url=plugin.url("two"), description="again")
            wanted, records = catalog(bus), [item.tool for item in bus.list()]
        assert wanted["A"] == [
            ("one", "external"),
            ("with space/あ", "external"),
            ("c", ""),
            ("over-grpc", "s"),
        ]
        for _ in range(2):  # once more, so that what is put back is also kept
            async with start() as bus, Legacy.of(bus) as legacy:
                assert catalog(bus, away=False) == wanted
                assert [item.tool for item in bus.list()] == records
                assert await legacy.listed() == {role: [name for name, _ in tools] for role, tools in wanted.items()}
        assert plugin.bytes == 0, "nobody was called"


async def test_arguments_are_checked_and_stripped_after_a_restart_as_before(start: Start) -> None:
    async def seen(bus: Bus) -> list[Any]:
        answers: list[Any] = []
        for name in ("checked", "unchecked", "forced", "rest"):
            for arguments in ({"n": "text", "userId": "mallory"}, {"n": 1, "__user_id": "mallory"}):
                result = await bus.call(name, arguments)
                answers.append((name, result.error.code if result.error else result.output))
        return answers

    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.register(
                "s",
                callback_tool("checked", plugin, parameters_json=NUMBER),
                callback_tool("unchecked", plugin, parameters_json=NUMBER, validate=False),
                callback_tool("forced", plugin, parameters_json=NUMBER, validate=True),
            )
            await legacy.ask("register", name="rest", callback_url=plugin.url(), parameters={"required": ["z"]})
            before = await seen(bus)
        async with start() as bus:
            assert await seen(bus) == before
    assert ("checked", Code.INVALID_ARGUMENTS) in before
    assert ("unchecked", {"n": "text"}) in before
    assert ("rest", {"n": "text", "userId": "mallory"}) in before


async def test_an_unreachable_restored_tool_is_offered_in_its_place_when_its_plugin_registers_again(
    start: Start,
) -> None:
    with CallbackPlugin().come() as plugin, CallbackPlugin().come() as other:
        async with start() as bus, Legacy.of(bus) as legacy:
            for number in range(3):
                await legacy.ask("register", name=f"t{number}", callback_url=plugin.url(), source="plugin:p")
            await legacy.ask("register", name="other", callback_url=other.url())
            wanted = catalog(bus)
        plugin.leave()
        async with start() as bus, Legacy.of(bus) as legacy:
            assert names(bus, away=False) == ["other"]
            assert catalog(bus) == wanted
            assert await legacy.listed() == {"A": ["other"], "B": ["other"]}
            result = await bus.call("t1")
            assert result.error
            assert (result.error.code, result.error.stage) == (Code.UNAVAILABLE, Stage.NOT_DISPATCHED)
            assert result.error.retry_safe
            assert not (await bus.call("other")).is_error
            plugin.come()
            assert (await bus.call("t1")).is_error, "whoever listens there now may be another program"
            for number in range(3):
                await legacy.ask("register", name=f"t{number}", callback_url=plugin.url(), source="plugin:p")
            assert catalog(bus, away=False) == wanted
            assert plugin.bytes == 0
            assert (await bus.call("t1", {"a": 1})).output == {"a": 1}


# -- what went does not come back ------------------------------------------------------------------------------------


async def _unregister(bus: Bus, legacy: Legacy) -> None:
    await legacy.ask("unregister", name="gone")


async def _unregister_by_grpc(bus: Bus, legacy: Legacy) -> None:
    await legacy.stub.Unregister(wire.UnregisterRequest(name="gone"))


async def _clear(bus: Bus, legacy: Legacy) -> None:
    await legacy.ask("clear", source="plugin:gone")


async def _clear_by_grpc(bus: Bus, legacy: Legacy) -> None:
    await legacy.stub.Clear(wire.ClearRequest(source="plugin:gone"))


async def _overwritten_by_a_stream(bus: Bus, legacy: Legacy) -> None:
    async with RawPeer(bus.grpc_addresses[0]) as peer:
        await peer.attach("streaming", pb.Tool(name="gone", parameters_json="{}"))


async def _overwritten_in_process(bus: Bus, legacy: Legacy) -> None:
    bus.tool(lambda: 1, name="gone", description="another")


WAYS_OUT = (_unregister, _unregister_by_grpc, _clear, _clear_by_grpc)


@pytest.mark.parametrize("go", WAYS_OUT, ids=lambda go: go.__name__[1:])
@pytest.mark.parametrize("away", [False, True], ids=["answering", "away"])
async def test_a_withdrawn_tool_is_not_restored_whichever_way_it_was_withdrawn(
    start: Start, go: Callable[[Bus, Legacy], Awaitable[None]], away: bool
) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="stays", callback_url=plugin.url())
            await legacy.ask("register", name="gone", callback_url=plugin.url(), source="plugin:gone")
            if not away:
                await go(bus, legacy)
        if away:
            plugin.leave()
            async with start() as bus, Legacy.of(bus) as legacy:
                assert names(bus) == ["stays", "gone"]
                await go(bus, legacy)
        async with start() as bus:
            assert names(bus) == ["stays"]
            assert not (await bus.call("toolbus:role_add", {"role": "C"})).is_error
            assert names(bus, "C") == ["stays"]


@pytest.mark.parametrize("overwrite", [_overwritten_by_a_stream, _overwritten_in_process])
async def test_an_overwritten_tool_is_restored_since_the_one_that_has_its_name_ended_with_the_bus(
    start: Start, overwrite: Callable[[Bus, Legacy], Awaitable[None]]
) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="gone", callback_url=plugin.url(), source="plugin:gone")
            await overwrite(bus, legacy)
        async with start() as bus:
            assert names(bus) == ["gone"]
            assert (await bus.call("gone", {"a": 1})).output == {"a": 1}


async def test_the_earlier_owner_of_a_persisted_name_has_it_again_after_a_restart_of_the_bus(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            for source in ("plugin:a", "plugin:b", "plugin:c"):
                await legacy.ask("register", name="t", callback_url=plugin.url(), source=source)
        for owner in ("plugin:c", "plugin:b", "plugin:a"):
            async with start() as bus, Legacy.of(bus) as legacy:
                assert catalog(bus)["A"] == [("t", owner)]
                await legacy.ask("clear", source=owner)


async def test_only_the_last_writer_is_restored(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url("old"), source="one")
            await legacy.ask("register", name="y", callback_url=plugin.url("y"), source="one")
            await legacy.ask("register", name="x", callback_url=plugin.url("new"), source="two")
            await legacy.ask("register", name="x", callback_url=plugin.url("b"), source="three", role="B")
        async with start() as bus:
            assert catalog(bus) == {"A": [("x", "two"), ("y", "one")], "B": [("x", "three"), ("y", "one")]}
            for role, path in (("A", "new"), ("B", "b")):
                assert not (await bus.call("x", role=role)).is_error
                assert plugin.requests[-1][0].startswith(f"post /{path} ")


# -- roles -----------------------------------------------------------------------------------------------------------


async def test_a_removed_role_takes_its_own_tools_along_for_good(start: Start) -> None:
    with CallbackPlugin() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="own", callback_url=plugin.url(), role="B")
            await legacy.ask("register", name="all", callback_url=plugin.url())
            assert not (await bus.call("toolbus:role_remove", {"role": "B"})).is_error
        async with start() as bus:
            assert catalog(bus) == {"A": [("all", "external")], "B": [("all", "external")]}  # REST-12


async def test_a_tool_waits_for_its_role_over_any_number_of_restarts(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="all", callback_url=plugin.url())
            await legacy.ask("register", name="own", callback_url=plugin.url(), role="B")
            await legacy.ask("register", name="late", callback_url=plugin.url())
            wanted = catalog(bus)
        for _ in range(2):
            async with start("A") as bus:
                assert names(bus) == ["all", "late"]
        async with start("A") as bus:
            assert not (await bus.call("toolbus:role_add", {"role": "B"})).is_error
            assert {role: sorted(tools) for role, tools in catalog(bus).items()} == {
                role: sorted(tools) for role, tools in wanted.items()
            }
            assert not (await bus.call("own", role="B")).is_error
            wanted = catalog(bus)
        async with start() as bus:
            assert catalog(bus) == wanted


async def test_a_tool_for_all_roles_is_in_a_role_that_is_new_at_the_next_start(start: Start) -> None:
    with CallbackPlugin() as plugin:
        async with start("A", "B") as bus, Legacy.of(bus) as legacy:
            for name in ("one", "partly", "two"):
                await legacy.ask("register", name=name, callback_url=plugin.url())
            await legacy.ask("register", name="own", callback_url=plugin.url(), role="A")
            await legacy.ask("unregister", name="partly", role="B")
        async with start("A", "B", "C") as bus:  # REST-12
            assert names(bus, "C") == ["one", "partly", "two"]
            assert names(bus, "B") == ["one", "two"], "what was taken out of a role stays out of it"
            assert names(bus, "A") == ["one", "partly", "two", "own"]
            assert not (await bus.call("toolbus:role_add", {"role": "D"})).is_error
            assert names(bus, "D") == ["one", "partly", "two"]


async def test_a_role_that_was_removed_is_new_when_it_comes_back(start: Start) -> None:
    with CallbackPlugin() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            for name in ("x", "y"):
                await legacy.ask("register", name=name, callback_url=plugin.url())
            await legacy.ask("unregister", name="x", role="B")
            bus.remove_role("B")
        async with start() as bus:
            assert names(bus, "B") == ["x", "y"]


async def test_what_is_registered_or_cleared_while_a_role_is_missing_holds_for_it_too(start: Start) -> None:
    with CallbackPlugin() as plugin:
        async with start() as bus, Legacy.of(bus) as legacy:
            for name in ("cleared", "replaced", "unregistered"):
                await legacy.ask("register", name=name, callback_url=plugin.url(), role="B", source=f"plugin:{name}")
        async with start("A") as bus, Legacy.of(bus) as legacy:
            await legacy.ask("clear", source="plugin:cleared")
            await legacy.ask("unregister", name="unregistered")
            await legacy.ask("register", name="replaced", callback_url=plugin.url(), source="new")
            assert not (await bus.call("toolbus:role_add", {"role": "B"})).is_error
            assert catalog(bus)["B"] == [("replaced", "new")]
        async with start() as bus:
            assert catalog(bus)["B"] == [("replaced", "new")]
