"""Tests what the audit says about peers beyond this machine: their identity and key, and who was refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.bus.keys.keys_directory import KeysDirectory
from tests.bus.test_doors import NO_HEARTBEATS, House, attached, bearer, next_of
from tests.parts.audit.chains import entries
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus, Config
from toolbus.bus.access.identity import Globs, Scopes
from toolbus.parts.audit.audit_log import FOLDER, files_of
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb

PORT = "127.0.0.1:0"


def _settings(keys: KeysDirectory, data: Path) -> Config:
    addresses = (PORT, f"tls:{PORT}", f"mtls:{PORT}")
    return Config(grpc=addresses, http=PORT, https=PORT, keys=keys.path, data_dir=data, grace_seconds=0)


async def test_lines_name_the_identity_and_its_key_and_who_was_refused_for_which_reason(tmp_path: Path) -> None:
    keys = KeysDirectory(tmp_path, time.time())
    data = tmp_path / "data"
    async with Bus(_settings(keys, data), timings=NO_HEARTBEATS) as bus:
        tls, mtls = (address.partition(":")[2] for address in bus.grpc_addresses[1:])
        house = House(bus, keys, tls=tls, mtls=mtls)
        chat = keys.add("chat", Scopes(attach=Globs(["chat"]), call=Globs(["*"])))
        async with house.channel(chat, certificate=False) as by_token, house.channel(chat) as by_certificate:
            stub = rpc.ToolBusServiceStub(by_token)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.List(wire.ListRequest())
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Clear(wire.ClearRequest(source="local"), metadata=bearer(chat))
            stream, first = await attached(by_certificate, "chat")
            await stream.write(wire.InvokeRequest(calls=[pb.ToolCall(call_id="1", name="toolbus:drain")]))
            await next_of(stream, "results", first)
            with pytest.raises(grpc.aio.AioRpcError):
                await attached(by_certificate, "home")
            keys.store.revoke("chat")
            await until(lambda: _found(data, "end"), "the end of the session")
        keys.edit('attach = ["chat"]', 'attach = ["chatter"]')
        await until(lambda: _found(data, "identities"), "the change of the scopes")
        async with httpx.AsyncClient(base_url=f"http://{bus.http_address}", verify=False, timeout=WAIT_SECONDS) as web:
            assert (await web.get("/api/tools", headers={"Origin": "http://evil.test"})).status_code == 403
        async with house.web(None) as web:
            assert (await web.get("/api/tools")).status_code == 401
    seen = [
        (each["act"], each["who"], each["how"], each["source"], each["target"], each["outcome"])
        for each in _found(data, "refuse", "denied", "attach", "end")
    ]
    assert seen == [
        ("refuse", "", "", "", "/toolbus.v1.ToolBusService/List", "refused"),
        ("denied", "chat", "token", "", "Clear", "refused"),
        ("attach", "chat", "cert", "chat", "", "ok"),
        ("denied", "chat", "cert", "chat", "toolbus:drain", "refused"),
        ("refuse", "chat", "cert", "home", "", "refused"),
        ("end", "chat", "cert", "chat", "", "ok"),
        ("refuse", "", "", "", "GET /api/tools", "refused"),
        ("refuse", "", "", "", "GET /api/tools", "refused"),
    ]
    reasons = [each["why"] for each in _found(data, "refuse", "denied", "end")]
    for reason, part in zip(
        reasons,
        ("needs a key", "administer", "administer", "may not attach as source 'home'", "revoked", "Origin", "key"),
        strict=True,
    ):
        assert part in reason
    assert all(each["key"] for each in _found(data, "attach", "denied", "end"))
    assert all(each["peer"] for each in _found(data, "attach", "end"))
    (attach,) = _found(data, "attach")
    assert attach["key"] in [each["target"] for each in _found(data, "key.revoke")]
    assert [each["target"] for each in _found(data, "identities")] == ["chat"]
    text = b"".join(file.read_bytes() for file in files_of(data / FOLDER))
    assert chat["token"].encode() not in text


async def test_calls_beyond_the_quota_of_an_identity_are_one_line(tmp_path: Path) -> None:
    keys = KeysDirectory(tmp_path, time.time())
    data = tmp_path / "data"
    async with Bus(_settings(keys, data), timings=NO_HEARTBEATS) as bus:
        house = House(bus, keys, mtls=bus.grpc_addresses[2].partition(":")[2])
        scopes = Scopes(attach=Globs(["chat"]), call=Globs(["*"]), rate=1)
        async with house.channel(keys.add("chat", scopes)) as channel:
            stream, first = await attached(channel, "chat")
            results = list(first.results)
            for start in (0, 10):
                calls = [pb.ToolCall(call_id=str(start + each), name="nothing") for each in range(10)]
                await stream.write(wire.InvokeRequest(calls=calls))
            while len(results) < 20:
                results += await next_of(stream, "results")
    (line,) = _found(data, "rate")
    assert (line["who"], line["source"], line["outcome"]) == ("chat", "chat", "refused")
    assert "calls_per_second" in line["why"] or "calls a second" in line["why"]
    assert 5 <= line["calls"] <= 10


def _found(data: Path, *acts: str) -> list[dict[str, Any]]:
    return [each for each in entries(data / FOLDER) if each["act"] in acts]
