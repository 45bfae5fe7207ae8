"""Tests of granting and revoking the permission to offer tools at run time, and across restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.core_model import Core, StreamDouble, tool
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus
from toolbus.bus.audit import Audit
from toolbus.bus.operators.grants import Grants
from toolbus.bus.signals import Signals
from toolbus.errors import Code, InvalidRequest
from toolbus.sdk import Plugin
from toolbus.testing import running_bus
from toolbus.v1 import tool_pb2 as pb


def grants_of(core: Core) -> Grants:
    signals = Signals(core.registry, core.dispatcher.view, core.records, watch_seconds=0.02)
    signals.on_change.append(core._changed)
    return Grants(core.registry, core.policy, core.dispatcher.view, core.presence, signals, Audit())


def names(core: Core) -> list[str]:
    return [each.tool.name for each in core.dispatcher.view.listings(include_offline=True)]


def notices(stream: StreamDouble) -> list[tuple[str, tuple[Any, ...]]]:
    """Returns the notices of a stream about permissions: granted or revoked with all, or denied with the operation."""
    found: list[tuple[str, tuple[Any, ...]]] = []
    for event in stream.read("events"):
        kind = event.WhichOneof("kind")
        if kind == "permission_changed":
            change = event.permission_changed
            found.append(("granted" if change.granted else "revoked", (change.permission, *change.all_granted)))
        elif kind == "permission_denied":
            found.append(("denied", (event.permission_denied.permission, event.permission_denied.operation)))
        else:
            found.append((str(kind), ()))
    return found


def test_revoking_withdraws_every_tool_of_the_source_and_tells_its_sessions() -> None:
    core = Core()
    first, second = core.attached("p", tool("a"), tool("b"), instance="1"), core.attached("p", tool("a"), instance="2")
    other = core.attached("q", tool("c"))
    core.lose(core.plugin("p", tool("offline")))
    for stream in (first, second, other):
        stream.written()
    assert grants_of(core).revoke("p") == 3
    assert names(core) == ["c"]
    assert notices(first) == notices(second) == [("revoked", ("tools",)), ("tools_reviewed", ())]
    assert notices(other) == []
    assert not first.ended


def test_new_calls_are_refused_at_once_and_those_in_flight_end_well() -> None:
    core = Core()
    plugin, host = core.attached("p", tool("a")), core.peer("host")
    running = core.call(host, "a")
    core.dispatcher.admission.settled_at = (
        core.now + 5.0
    )  # a bus that has just started waits for tools, but not for this one
    grants_of(core).revoke("p")
    refused = core.refusal(host, "a")
    assert (refused.code, refused.message) == (
        Code.PERMISSION_DENIED,
        "tool 'a' is withdrawn: source 'p' may not offer tools any more; an operator grants it "
        "the permission with `toolbus access grant p`",
    )
    core.plugin("q", tool("b", min_level=1))
    grants_of(core).revoke("q")
    assert core.refusal(host, "b").code is Code.UNAVAILABLE, "it never was, for this caller"
    grants_of(core).grant("p")
    assert core.dispatcher.view.listings(names=["a"]), "the bus offers it again by itself"
    plugin.send(results=[pb.ToolResult(call_id=next(iter(plugin.peer.pending)), output_json="7")])
    assert [result.output_json for result in host.results[running]] == ["7"]


def test_what_is_offered_without_the_permission_is_refused_in_an_event_and_the_stream_stays() -> None:
    core = Core()
    changed = grants_of(core)
    changed.revoke("p")
    plugin = core.attached("p", tool("a"))
    (attached,) = [frame.attached for frame in plugin.written() if frame.HasField("attached")]
    assert [(each.name, "with `toolbus access grant p`" in each.error) for each in attached.refused] == [("a", True)]
    plugin.attach("p", tool("a"))
    assert notices(plugin) == [("denied", ("tools", "attach"))]
    assert (names(core), plugin.ended) == ([], False)
    changed.grant("p")
    assert notices(plugin) == [("granted", ("tools", "tools")), ("tools_reviewed", ())]
    assert names(core) == ["a"], "the bus offers it again by itself"
    plugin.attach("p", tool("a"))
    assert names(core) == ["a"]


def test_a_plugin_that_may_not_offer_its_tools_may_not_say_who_calls_either() -> None:
    core = Core(denied=frozenset({"p"}))
    assert core.attached("p", tool("a")).peer.may_set_context is False
    assert core.attached("p").peer.may_set_context is True


def test_what_changes_nothing_sends_no_notice() -> None:
    core = Core()
    plugin = core.attached("p", tool("a"))
    plugin.written()
    grants_of(core).grant("p")
    assert notices(plugin) == []
    grants_of(core).revoke("p")
    plugin.written()
    assert grants_of(core).revoke("p") == 0
    assert notices(plugin) == []


@pytest.mark.parametrize(
    ("source", "permission", "error"),
    [("p", "files", "permission 'files' does not exist"), ("", "tools", "source ''"), ("toolbus", "tools", "'toolbus'"),
     ("a b", "tools", "'a b'")],
)  # fmt: skip
def test_an_unknown_permission_or_invalid_source_is_refused(source: str, permission: str, error: str) -> None:
    for change in (grants_of(Core()).grant, grants_of(Core()).revoke):
        with pytest.raises(InvalidRequest, match=error):
            change(source, permission)


def offered(bus: Bus) -> list[str]:
    return [each.tool.name for each in bus.list()]


async def test_a_plugin_of_the_sdk_offers_its_tools_again_by_itself_when_it_may() -> None:
    async with running_bus() as bus:
        plugin = Plugin("p", address=bus.grpc_addresses[0])
        plugin.add_tool(lambda: 1, name="a")
        async with plugin:
            await plugin.ready()
            bus.revoke("p")
            assert offered(bus) == []
            bus.grant("p")
            await until(lambda: offered(bus) == ["a"])
            assert (await bus.call("a")).output == 1


async def test_callback_tools_go_with_the_permission_and_cannot_come_back_without_it(tmp_path: Path) -> None:
    body = {"name": "t", "description": "d", "callback_url": "http://127.0.0.1:9/x", "source": "plugin:old"}
    async with (
        running_bus(http="127.0.0.1:0", data_dir=tmp_path) as bus,
        httpx.AsyncClient(base_url=f"http://{bus.http_address}", verify=False, timeout=WAIT_SECONDS) as http,
    ):
        assert (await http.post("/api/tools/register", json=body)).json()["ok"] is True
        revoked = await http.post("/api/bus/revoke", json={"source": "plugin:old"})
        assert revoked.json()["output"] == {
            "source": "plugin:old",
            "permission": "tools",
            "granted": False,
            "removed": 1,
        }
        assert (await http.post("/api/tools/register", json=body)).status_code == 403
    async with running_bus(http="127.0.0.1:0", data_dir=tmp_path) as bus:
        assert offered(bus) == []
        async with httpx.AsyncClient(base_url=f"http://{bus.http_address}", verify=False, timeout=WAIT_SECONDS) as http:
            assert (await http.post("/api/tools/register", json=body)).status_code == 403
            bus.grant("plugin:old")
            assert (await http.post("/api/tools/register", json=body)).json()["ok"] is True
    may = []
    for _ in range(2):
        async with running_bus(data_dir=tmp_path, silenced=("plugin:old",)) as bus:
            may.append(bus.policy.may_offer("plugin:old"))
            bus.grant("plugin:old")
    # What was revoked and granted before is dropped; changes at run time have precedence over the configuration.
    assert may == [False, True]
