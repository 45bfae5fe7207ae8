"""Tests that what peers send reaches the log of a bus as one line each, whichever program embeds it and formats its
records."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
from pathlib import Path
from urllib.parse import quote

import grpc
import httpx
import pytest

from tests.parts.audit.chains import entries
from tests.support.waiting import WAIT_SECONDS, until
from toolbus import Host
from toolbus.parts.audit.audit_log import FOLDER
from toolbus.testing import running_bus
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb

FORGED = "x\n12:00:00 info toolbus.sessions: attached source=operator\r\x1b]0;owned\x07\x9b31m\u202e\u2028y\x85z"
UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u202e]")


def _attach(source: str, instance: str = "", **fields: object) -> wire.InvokeRequest:
    attach = wire.Attach(protocol_version=1, source=source, instance=instance, **fields)  # type: ignore[arg-type]
    return wire.InvokeRequest(attach=attach)


REFUSED = (
    _attach("p", FORGED),
    _attach(FORGED),
    _attach("p", tools=[pb.Tool(name=FORGED)], all_or_none=True),
)
TAKEN = (
    _attach("p", tools=[pb.Tool(name=FORGED), pb.Tool(name="t", parameters_json=FORGED)]),
    _attach("p", tools=[pb.Tool(name="t", role=FORGED)]),
)
ACCEPTED = (
    _attach("p", "i", tools=[pb.Tool(name="t", description=FORGED, display_name=FORGED)], notices=[FORGED]),
    wire.InvokeRequest(
        calls=[pb.ToolCall(call_id=FORGED[:100], name=FORGED, arguments_json=FORGED)],
        progress=[pb.ToolProgress(call_id=FORGED, message=FORGED, output_chunk=FORGED)],
        cancels=[pb.ToolCancel(call_id=FORGED, reason=FORGED)],
        results=[pb.ToolResult(call_id=FORGED, error=pb.CallError(message=FORGED, reason=FORGED))],
        drain=wire.Drain(reason=FORGED),
    ),
)


def _send_everything(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = rpc.ToolBusServiceStub(channel)
        for refused in REFUSED:
            with pytest.raises(grpc.RpcError):
                list(stub.Invoke(iter([refused]), timeout=30))
        for taken in TAKEN:
            list(stub.Invoke(iter([taken]), timeout=30))
        list(stub.Invoke(iter(ACCEPTED), timeout=30))
        for request in (
            functools.partial(stub.Register, wire.RegisterRequest(source=FORGED, tools=[pb.Tool(name=FORGED)])),
            functools.partial(stub.Unregister, wire.UnregisterRequest(session_id=FORGED, name=FORGED)),
            functools.partial(stub.Clear, wire.ClearRequest(source=FORGED, role=FORGED)),
        ):
            with contextlib.suppress(grpc.RpcError):
                request()


async def test_no_text_of_a_peer_makes_a_line_of_its_own_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "toolbus"):
        async with (
            running_bus(http="127.0.0.1:0") as bus,
            httpx.AsyncClient(trust_env=False, verify=False, timeout=WAIT_SECONDS) as client,
        ):
            await asyncio.to_thread(_send_everything, bus.grpc_addresses[0])
            body = {"name": FORGED[:64], "callback_url": "http://127.0.0.1:9/", "source": "rest"}
            await client.post(f"http://{bus.http_address}/api/tools/register", json=body | {"description": FORGED})
            url = f"http://{bus.http_address}/{quote(FORGED)}"
            await client.get(url, headers={b"Host": f"evil.example{FORGED[-4:]}".encode()})
            await client.get(url, headers={"Host": "evil.example"})
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("toolbus")]
    assert any("attached source=p instance=i" in line for line in lines)
    assert any("registered tool='x\\n12:00:00 info" in line for line in lines)
    assert any("evil.example" in line for line in lines)
    assert [line for line in lines if UNSAFE.search(line)] == []


async def test_a_program_that_only_calls_comes_and_goes_without_a_line_at_info(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "toolbus"):
        async with running_bus() as bus:
            async with Host(bus.grpc_addresses[0]) as host:
                await host.ready()
            await until(lambda: not bus.core.sessions.presence.sessions, "the end of its session")
            assert [record for record in caplog.records if record.name == "toolbus.sessions"] == []


async def test_a_log_line_an_audit_line_and_a_record_of_one_call_share_its_call_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "toolbus.calls"):
        async with running_bus(data_dir=tmp_path, audit_calls=True, slow_seconds=1e-9) as bus:
            bus.tool(name="wait")(lambda: 1)
            assert (await bus.call("wait")).output == 1
            (record,) = bus.records
    fields = vars(next(each for each in caplog.records if each.getMessage() == "slow call"))
    (audited,) = [row for line in entries(tmp_path / FOLDER) if line["act"] == "calls" for row in line["calls"]]
    assert fields["call_id"] == audited[0] == record.call_id
    assert (fields["tool"], fields["outcome"]) == (audited[1], audited[5]) == ("wait", "OK")
