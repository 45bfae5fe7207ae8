"""Tests who may use a bus over loopback: the rule, and each way into a bus for a program of another user (REST-24).

Where tests run as root, that program really is another user's; elsewhere the kernel's answer is given by the test.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from tests.bus.gateway.calling import client
from tests.support.other_user import CAN_BE_NOBODY, NOBODY, run_program
from tests.support.waiting import until, within
from toolbus.bus import Bus, Config
from toolbus.bus.access.budgets import Budgets
from toolbus.bus.access.neighbours import Neighbours
from toolbus.bus.serve_settings import settle
from toolbus.common.local_users import Address, owner_of
from toolbus.errors import NotPermitted, SetupError
from toolbus.sdk import Host, Plugin
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1.tool_bus_service_pb2_grpc import ToolBusServiceStub

STRANGER = Path(__file__).with_name("stranger.py")
OWN = os.geteuid()
OPEN = ("GET /healthz", "GET /readyz", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")


class Kernel:
    """Says whose a connection is.

    Attributes:
        uid: the answer; None: the kernel's own.
        asked: how often it was asked.
    """

    def __init__(self) -> None:
        self.uid: int | None = OWN
        self.asked = 0

    def owner_of(self, end: Address, other: Address) -> int | None:
        self.asked += 1
        return self.uid if self.uid is not None else owner_of(end, other)


@asynccontextmanager
async def _bus(kernel: Kernel, **settings: Any) -> AsyncIterator[Bus]:
    config = Config(**{"grpc": ("127.0.0.1:0",), "http": "127.0.0.1:0", "lane": False, **settings})
    async with Bus(config, neighbours=Neighbours(config.neighbours, ask=kernel.owner_of)) as bus:
        kernel.asked = 0
        yield bus


async def _attempts(bus: Bus) -> dict[str, Any]:
    """Returns every way into a bus: what descriptors and OpenAPI list, and paths that are nearly the open ones."""
    services = (
        wire.DESCRIPTOR.services_by_name["ToolBusService"],
        health_pb2.DESCRIPTOR.services_by_name["Health"],
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    )
    async with client(bus) as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
    return {
        "grpc": [*bus.grpc_addresses, await bus.dropin_address()],
        "rpcs": [rpc for service in services for rpc in _rpcs(service)],
        "http": bus.http_address,
        "requests": [
            *((method.upper(), path) for path, methods in paths.items() for method in methods),
            *(("GET", path) for path in ("/", "/docs", "/openapi.json", "/healthz/", "/HEALTHZ", "//readyz")),
        ],
    }


def _rpcs(service: ServiceDescriptor) -> list[tuple[str, bool, bool]]:
    return [(f"/{service.full_name}/{rpc.name}", rpc.client_streaming, rpc.server_streaming) for rpc in service.methods]


async def _try_all(attempts: dict[str, Any], *, as_nobody: bool) -> dict[str, list[Any]]:
    options = ["--as-nobody"] if as_nobody else []
    printed = await within(run_program(STRANGER, *options, json.dumps(attempts)), 120)
    seen: dict[str, list[Any]] = json.loads(printed)
    return seen


def _is_open(attempt: str) -> bool:
    return attempt.endswith(OPEN)


async def test_refused_rpcs_leave_nothing_to_the_garbage_collection() -> None:
    kernel = Kernel()
    async with _bus(kernel) as bus, grpc.aio.insecure_channel(bus.grpc_addresses[0]) as channel:
        kernel.uid = NOBODY
        stub: Any = ToolBusServiceStub(channel)
        gc.collect()
        gc.disable()
        try:
            for rpc in [call for _ in range(10) for call in (stub.List(wire.ListRequest()), stub.Invoke())]:
                assert await within(rpc.code()) is grpc.StatusCode.PERMISSION_DENIED

            def refused() -> int:
                return sum(type(each) in (grpc.aio.AbortError, NotPermitted) for each in gc.get_objects())

            await until(lambda: refused() < 5, "what ended them has gone")  # grpcio holds the last ones
        finally:
            gc.enable()


class Waits(Budgets):
    """Counts who waited for a turn."""

    def __init__(self) -> None:
        self.accounts: list[str] = []

    async def spend(self, account: str, seconds: float) -> None:
        self.accounts.append(account)


async def test_many_probes_of_strangers_wait_for_the_turn_of_their_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolbus.bus.streams.doors.PROBES_PER_SECOND", 1e-6)  # one at once, and no more in this test
    kernel, waits = Kernel(), Waits()
    async with _bus(kernel) as bus, grpc.aio.insecure_channel(bus.grpc_addresses[0]) as channel:
        bus.core.calls.dispatcher.seams.budgets = waits
        stub = health_pb2_grpc.HealthStub(channel)
        for uid, waited in ((NOBODY, 3), (OWN, 0)):
            kernel.uid, waits.accounts = uid, []
            for _ in range(4):
                answer = await within(stub.Check(health_pb2.HealthCheckRequest()))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert waits.accounts == ["probes ipv4:127.0.0.1"] * waited


async def test_a_program_of_another_user_is_refused_wherever_it_asks() -> None:
    kernel = Kernel()
    async with _bus(kernel) as bus:
        attempts = await _attempts(bus)
        kernel.uid = None if CAN_BE_NOBODY else NOBODY
        seen = await _try_all(attempts, as_nobody=CAN_BE_NOBODY)
        main, dropin = attempts["grpc"]
    unknown = {name for name, (status, _) in seen.items() if status == "UNIMPLEMENTED"}
    assert {name.split()[0] for name in unknown} == {dropin}  # that port has neither health nor reflection
    refused = {name: answer for name, answer in seen.items() if name not in unknown and not _is_open(name)}
    assert {name.split()[0] for name in refused} >= {main, dropin, "GET", "POST", "DELETE"}
    assert len(refused) > 30
    for name, (status, text) in refused.items():
        over_http = name.split()[0].isupper()
        assert status == (403 if over_http else "PERMISSION_DENIED"), (name, status, text)
        said = json.loads(text)["detail"] if over_http else text
        assert f"(uid {NOBODY})" in said, name
        assert f"--neighbours {NOBODY}" in said, name
        assert not over_http or list(json.loads(text)) == ["detail"]


async def test_probes_of_another_user_learn_only_that_the_bus_runs() -> None:
    kernel = Kernel()
    async with _bus(kernel) as bus:
        attempts = await _attempts(bus)
        kernel.uid = None if CAN_BE_NOBODY else NOBODY
        seen = await _try_all(attempts, as_nobody=CAN_BE_NOBODY)
        main = bus.grpc_addresses[0]
    assert {name: answer for name, answer in seen.items() if _is_open(name) and main in name} == {
        f"{main} /grpc.health.v1.Health/Check": ["OK", ""],
        f"{main} /grpc.health.v1.Health/Watch": ["OK", ""],
    }
    assert seen["GET /healthz"] == [200, '{"status":"ok"}']
    assert seen["GET /readyz"] == [200, '{"status":"ready"}']


async def test_the_health_of_a_source_is_not_for_other_users() -> None:
    kernel = Kernel()
    async with _bus(kernel, http="off") as bus, grpc.aio.insecure_channel(bus.grpc_addresses[0]) as channel:
        kernel.uid = NOBODY
        health = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service="toolbus.source.weather")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await within(health.Check(asked))
        assert failure.value.code() is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await within(health.Watch(asked).read())
        assert failure.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_program_of_the_same_user_is_refused_nowhere() -> None:
    kernel = Kernel()
    async with _bus(kernel) as bus:
        attempts = await _attempts(bus)
        attempts["requests"] = [each for each in attempts["requests"] if each[0] == "GET"]
        kernel.uid = None
        seen = await _try_all(attempts, as_nobody=False)
        main = bus.grpc_addresses[0]
    # What the port of drop-in tools itself refuses is tested with it.
    assert not [name for name, (status, _) in seen.items() if status in (403, "PERMISSION_DENIED") and main in name]
    assert not [text for _, text in seen.values() if "neighbours" in (text or "")]


@pytest.mark.parametrize(
    ("allowed", "uid", "enters"),
    [
        (("self",), 0, True),
        (("self",), OWN, True),
        (("self",), NOBODY, False),
        (("self",), None, False),
        (("any",), NOBODY, True),
        (("any",), None, True),
        ((str(NOBODY),), NOBODY, True),
        ((str(NOBODY),), OWN, True),
        ((str(NOBODY),), 0, True),
        ((str(NOBODY),), NOBODY - 1, False),
        (("1001", "root"), NOBODY, False),
        (("1001", "any"), NOBODY, True),
    ],
)
async def test_the_rule_decides_which_users_may_connect(
    allowed: tuple[str, ...], uid: int | None, enters: bool
) -> None:
    neighbours = Neighbours(allowed, ask=lambda end, other: uid)
    assert neighbours.allows(uid) is enters
    assert (neighbours.refusal(uid) == "") is enters


@pytest.mark.parametrize(
    ("user", "says"),
    [
        ("no-such-user", "neighbours names 'no-such-user', which is not a user of this machine"),
        (str(2**32 - 1), "a uid is from 0 to 4294967294"),
        ("-1", "neighbours names '-1'"),
        ("\0", "neighbours names '\\x00'"),
        ("", "neighbours has an empty item"),
    ],
)
def test_a_rule_that_names_an_unknown_user_is_refused(user: str, says: str) -> None:
    with pytest.raises(SetupError) as failure:
        Config(neighbours=(user,))
    assert says in str(failure.value)


@pytest.mark.parametrize(
    ("written", "read"),
    [('"any"', ("any",)), ('["root", 1001]', ("root", "1001")), ("1001", None), ("[true]", None), ("[1.5]", None)],
)
def test_a_file_names_one_user_or_a_list_of_names_and_uids(
    tmp_path: Path, written: str, read: tuple[str, ...] | None
) -> None:
    file = tmp_path / "toolbus.toml"
    file.write_text(f"neighbours = {written}\n", "utf-8")
    if read is not None:
        assert settle({}, {}, file).config.neighbours == read
        return
    with pytest.raises(SetupError) as failure:
        settle({}, {}, file)
    assert "neighbours" in str(failure.value)


def test_a_variable_names_users_with_commas() -> None:
    assert settle({}, {"TOOLBUS_NEIGHBOURS": "root, 1001"}).config.neighbours == ("root", "1001")


async def test_an_sdk_of_another_user_gives_up_with_the_reason() -> None:
    kernel = Kernel()
    async with _bus(kernel, http="off") as bus:
        kernel.uid = NOBODY
        plugin = Plugin("weather", address=bus.grpc_addresses[0])
        for peer in (Host(bus.grpc_addresses[0]), plugin):
            async with peer:
                with pytest.raises(NotPermitted) as failure:
                    await within(peer.ready())
            assert f"--neighbours {NOBODY}" in str(failure.value)


async def test_the_user_is_looked_up_once_for_a_stream_and_once_for_an_http_connection() -> None:
    kernel = Kernel()
    async with _bus(kernel) as bus:
        bus.tool(_double)
        async with Host(bus.grpc_addresses[0]) as host:
            for number in range(100):
                assert (await host.call("_double", {"number": number})).unwrap() == 2 * number
            assert kernel.asked == 1
        async with client(bus) as http:
            for _ in range(10):
                assert (await http.get("/api/tools")).status_code == 200
            assert kernel.asked == 2


def _double(number: int) -> int:
    return 2 * number


async def test_a_unix_socket_is_decided_by_its_directory(tmp_path: Path) -> None:
    kernel = Kernel()
    async with _bus(kernel, grpc=(f"unix:{tmp_path}/bus.sock", "127.0.0.1:0"), http="off") as bus:
        kernel.uid = NOBODY
        async with Host(bus.grpc_addresses[0]) as host:
            assert (await host.list()).revision
        assert kernel.asked == 0
        with pytest.raises(NotPermitted):
            async with Host(bus.grpc_addresses[1]) as host:
                await within(host.list())


def _port_of_both_families() -> int:
    """Returns a port that is free on 127.0.0.1 and on ::1: `localhost:0` may get one that is free on one of them."""
    for _ in range(100):
        with socket.create_server(("127.0.0.1", 0)) as first, socket.socket(socket.AF_INET6) as second:
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError):
                second.bind(("::1", port))
                return port
    raise AssertionError("no port was free on both: this machine may have no ::1")


@pytest.mark.parametrize("address", ["localhost:0", "[::1]:0", "127.0.0.3:0", "[::ffff:127.0.0.1]:0"])
async def test_the_user_is_looked_up_by_the_address_that_a_peer_used(address: str) -> None:
    kernel = Kernel()
    kernel.uid = None
    grpc = f"localhost:{_port_of_both_families()}" if address.startswith("localhost") else address
    async with _bus(kernel, grpc=(grpc, "127.0.0.1:0"), http=address) as bus:
        for host in ("127.0.0.1", "[::1]") if address.startswith("localhost") else (address.removesuffix(":0"),):
            async with Host(f"{host}:{bus.grpc_addresses[0].rpartition(':')[2]}") as peer:
                assert (await within(peer.list())).revision
        async with client(bus) as http:
            assert (await http.get("/api/tools")).status_code == 200


async def test_where_the_system_does_not_say_whose_a_connection_is_everyone_enters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel = Kernel()
    kernel.uid = 2**32 - 2  # not this user: what it says about our own connection is wrong
    with caplog.at_level(logging.WARNING, "toolbus"):
        async with _bus(kernel) as bus, Host(bus.grpc_addresses[0]) as host, client(bus) as http:
            assert (await host.list()).revision
            assert (await http.get("/api/tools")).status_code == 200
    assert [record.message for record in caplog.records if "every user of this machine may use" in record.message]


def test_a_system_that_has_no_socket_left_for_the_check_does_not_let_everyone_in() -> None:
    neighbours = Neighbours(ask=lambda end, other: None)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        neighbours.check_system()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not neighbours.everyone
    neighbours.check_system()
    assert neighbours.everyone


def test_a_refusal_is_logged_once_for_each_user_and_not_for_clients_that_gave_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "toolbus")
    neighbours = Neighbours()
    with socket.create_server(("127.0.0.1", 0)) as server:  # a bus that hangs
        with socket.create_connection(server.getsockname()) as client:
            peer = client.getsockname()
        accepted, _ = server.accept()
        with accepted:
            gave_up = neighbours.uid_of(peer, server.getsockname())
    for uid in (NOBODY, NOBODY, gave_up, gave_up):
        assert neighbours.refusal(uid)
    refused, gone = caplog.records
    assert (refused.levelname, gone.levelname) == ("WARNING", "INFO")
    assert "refused" not in gone.getMessage()
