"""Tests of the audit of a running bus: which acts are written down, by whom, and what a bus without one does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.faults.raw_peer import RawPeer
from tests.parts.audit.chains import entries
from tests.parts.audit.test_audit_writer import filled, full_disk
from tests.support.processes import toolbus
from tests.support.waiting import WAIT_SECONDS, until
from toolbus import Host, Plugin
from toolbus.bus import Bus, Config
from toolbus.errors import Code, SetupError, ToolBusError
from toolbus.parts.audit.audit_log import FOLDER, files_of, verify
from toolbus.testing import running_bus
from toolbus.v1 import tool_bus_service_pb2 as wire


def found(tmp_path: Path, *acts: str) -> list[dict[str, Any]]:
    return [each for each in entries(tmp_path / FOLDER) if each["act"] in acts]


async def test_each_act_is_written_with_who_did_it_and_how_it_ended(tmp_path: Path) -> None:
    async with running_bus(data_dir=tmp_path, silenced=("mute",), http="127.0.0.1:0") as bus:
        plugin = Plugin("weather", address=bus.grpc_addresses[0])

        @plugin.tool
        def sun() -> str:
            return "yes"

        async with plugin:
            await plugin.ready()
            async with Host(bus.grpc_addresses[0], source="chat") as host:
                for name, arguments in (
                    ("permit", {"kind": "tools", "name": "sun", "users": ["ann"]}),
                    ("permit", {"kind": "nothing", "name": "sun", "users": []}),
                    ("role_add", {"role": "Yui"}),
                    ("role_remove", {"role": "Yui"}),
                    ("revoke", {"source": "weather"}),
                    ("grant", {"source": "weather"}),
                ):
                    await host.call(f"toolbus:{name}", arguments)
                await until(lambda: "sun" in bus.core.catalog.registry.first, "the tool that the grant brought back")
                assert (await host.call("sun")).error is not None
        async with httpx.AsyncClient(base_url=f"http://{bus.http_address}", verify=False, timeout=WAIT_SECONDS) as http:
            url = "http://127.0.0.1:9/x"
            await http.post("/api/tools/register", json={"name": "x", "source": "rest", "callback_url": url})
            await http.post("/api/tools/clear", json={"source": "rest"})
        await bus.call("toolbus:drain", {"source": "weather"})
    assert not verify(tmp_path / FOLDER).fault
    assert [(each["act"], each["source"]) for each in found(tmp_path, "start", "stop")] == [
        *(("start", "toolbus"), ("stop", "toolbus"))
    ]
    acts = [
        (each["act"], each["who"], each["target"], each["outcome"], each["why"])
        for each in found(tmp_path, "permit", "role", "revoke", "grant", "drain", "denied", "register", "withdraw")
        # The plugin declares its tools once more after the grant, at a time of its own.
        if (each["act"], each["who"], each["why"]) != ("register", "weather", "")
    ]
    no_kind = next(why for act, _, target, _, why in acts if target == "nothing sun")
    assert acts == [
        ("permit", "chat", "tools sun", "ok", "users: ann"),
        ("permit", "chat", "nothing sun", "failed", no_kind),
        ("role", "chat", "Yui", "ok", "added"),
        ("role", "chat", "Yui", "ok", "removed"),
        ("revoke", "chat", "weather", "ok", "tools"),
        ("register", "weather", "sun", "ok", "tried again: a permission changed"),
        ("grant", "chat", "weather", "ok", "tools"),
        ("denied", "chat", "sun", "refused", acts[7][4]),
        ("register", "rest", "x", "ok", ""),
        ("withdraw", "http", "rest", "ok", "every tool of the source"),
        ("drain", "local", "weather", "ok", ""),
    ]
    assert "no table 'nothing'" in no_kind
    attached = {each["source"]: each for each in found(tmp_path, "attach")}
    ended = {each["source"]: each for each in found(tmp_path, "end")}
    assert attached.keys() == ended.keys() == {"weather", "chat"}
    assert (attached["weather"]["tools"], attached["chat"]["tools"]) == (1, 0)
    assert attached["chat"]["peer"] == ended["chat"]["peer"] != ""
    assert attached["chat"]["why"].startswith(("from lane:", "from ipv4:127.0.0.1:"))
    assert all(each["how"] == "local" and each["boot"] for each in entries(tmp_path / FOLDER))


async def test_a_refused_attach_is_written_with_the_reason(tmp_path: Path) -> None:
    async with running_bus(data_dir=tmp_path) as bus, RawPeer(bus.grpc_addresses[0]) as peer:
        attach = wire.Attach(protocol_version=1, source="toolbus", instance="x")
        await peer.refused(wire.InvokeRequest(attach=attach))
    (refused,) = found(tmp_path, "refuse")
    assert (refused["source"], refused["instance"], refused["outcome"]) == ("toolbus", "x", "refused")
    assert refused["peer"].startswith("ipv4:127.0.0.1:")
    assert "belongs to the bus itself" in refused["why"]


async def test_calls_are_written_only_where_the_configuration_says_so_and_each_once(tmp_path: Path) -> None:
    for calls in (False, True):
        settings: dict[str, Any] = {"audit_calls": calls, "record_contents": True, "grace_seconds": 0.0}
        async with running_bus(data_dir=tmp_path, **settings) as bus:

            @bus.tool
            async def echo(value: str) -> str:
                return value

            for number in range(1_250):
                await bus.call("echo", {"value": f"secret {number}"})
            await bus.call("nothing")
    lines = found(tmp_path, "calls")
    assert [line["count"] for line in lines] == [len(line["calls"]) for line in lines]
    calls_written = [call for line in lines for call in line["calls"]]
    assert len(calls_written) == 1_251
    assert {tuple(call[1:6]) for call in calls_written} == {
        ("echo", "local", "local", "", "OK"),
        ("nothing", "", "local", "", Code.NOT_FOUND.name),
    }
    assert b"secret" not in files_of(tmp_path / FOLDER)[0].read_bytes()


async def test_the_head_is_that_of_the_files(tmp_path: Path) -> None:
    async with running_bus(data_dir=tmp_path) as bus:
        await bus.call("toolbus:role_add", {"role": "Yui"})
        await until(lambda: found(tmp_path, "role"), "the line")
        head: dict[str, Any] = {"seq": 0}
        while not head["seq"]:  # the writer's thread notes the head after it has written the lines
            head = (await bus.call("toolbus:audit_head")).output
        assert head == {"seq": len(entries(tmp_path / FOLDER)), "head": verify(tmp_path / FOLDER).head}
    assert not verify(tmp_path / FOLDER, head["head"]).fault
    async with running_bus() as bus:
        error = (await bus.call("toolbus:audit_head")).error
        assert error is not None
        assert "has no audit: start it with a data directory" in error.message


async def test_an_operator_s_act_is_refused_where_the_audit_is_required_and_the_disk_is_full(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    filled(tmp_path / FOLDER)
    async with running_bus(data_dir=tmp_path, audit_required=True) as bus:
        assert (await bus.call("toolbus:role_add", {"role": "Before"})).error is None
        with full_disk(tmp_path / FOLDER):
            for name, arguments in (
                ("role_add", {"role": "Yui"}),
                ("permit", {"kind": "tools", "name": "sun", "users": []}),
                ("revoke", {"source": "weather"}),
                ("drain", {}),
            ):
                error = (await bus.call(f"toolbus:{name}", arguments)).error
                assert error is not None
                assert "this was not done, because the audit could not be written" in error.message
            assert bus.registry.roles == ("default", "Before")
            assert not bus.policy.denied
            async with RawPeer(bus.grpc_addresses[0]) as peer:
                attach = wire.Attach(protocol_version=1, source="chat")
                code, details = await peer.refused(wire.InvokeRequest(attach=attach))
                assert (code, "this was not done" in details) == (grpc.StatusCode.UNAVAILABLE, True)
            ended = await asyncio.to_thread(toolbus, "list", "--bus", bus.grpc_addresses[0])
            assert (ended.returncode, "this was not done" in ended.stderr) == (3, True), (
                "the bus is there, and says why"
            )
            with pytest.raises(ToolBusError, match="this was not done"):
                bus.permit("tools", "sun", [])
        assert (await bus.call("toolbus:role_add", {"role": "Yui"})).error is None
    assert not verify(tmp_path / FOLDER).fault
    assert [(each["target"], each["outcome"]) for each in found(tmp_path, "role")[4_000:]] == [
        *(("Before", "begun"), ("Before", "ok"), ("Yui", "refused"), ("Yui", "begun"), ("Yui", "ok"))
    ]


async def test_a_bus_without_a_data_directory_or_with_audit_off_writes_nothing(tmp_path: Path) -> None:
    async with running_bus(data_dir=tmp_path, audit=False) as bus:
        await bus.call("toolbus:role_add", {"role": "Yui"})
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.parametrize("name", ["audit_required", "audit_calls"])
def test_settings_that_need_an_audit_are_refused_without_one(name: str, tmp_path: Path) -> None:
    setting: dict[str, Any] = {name: True}
    with pytest.raises(SetupError, match=f"{name} needs a data directory"):
        Config(**setting)
    with pytest.raises(SetupError, match=f"{name} contradicts audit = false"):
        Config(data_dir=tmp_path, audit=False, **setting)


async def test_a_bus_that_cannot_write_its_audit_does_not_start(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text(json.dumps("a file"))
    with pytest.raises(SetupError, match="cannot write the audit in"):
        await Bus(Config(grpc=("127.0.0.1:0",), http="off", data_dir=tmp_path)).start()
