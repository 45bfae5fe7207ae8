"""Connections that say nothing take what a bus gives to all of their kind, and nothing of what others need."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.support.processes import Running
from tests.support.waiting import WAIT_SECONDS
from toolbus.common.descriptors import raise_descriptor_limit, share_of_descriptors
from toolbus.sdk import Host, Plugin
from toolbus.v1.tool_bus_service_pb2 import ListRequest
from toolbus.v1.tool_bus_service_pb2_grpc import ToolBusServiceStub

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts and says whose a connection is")

DESCRIPTORS = 192


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 1024:
        pytest.skip("this process may open too few files itself")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Few(Running):
    """A bus that may open few files."""

    def _command(self, words: tuple[str | Path, ...]) -> list[str | Path] | None:
        limits = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))"
        main = f"import sys; sys.argv[0] = 'toolbus'; {limits}; from toolbus.cli import main; main()"
        return [sys.executable, "-c", main, *words]


async def test_idle_connections_keep_neither_probes_nor_known_peers_out(few_descriptors: None, tmp_path: Path) -> None:
    words = ("serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--json")
    async with Few(tmp_path, *words, TOOLBUS_DATA_DIR=str(tmp_path / "data")) as bus:
        bus.says('"ready"')
        ready = json.loads(bus.out.splitlines()[0])
        address, http = ready["grpc"][0], ready["http"]
        host, _, port = address.rpartition(":")
        plugin = Plugin("tea", address=address)
        plugin.add_tool(brew)
        async with plugin, Host(address) as caller:
            with contextlib.ExitStack() as idle:
                for _ in range(2 * DESCRIPTORS):
                    idle.enter_context(socket.create_connection((host, int(port)), WAIT_SECONDS))
                with await asyncio.to_thread(
                    urllib.request.urlopen, f"http://{http}/healthz", timeout=WAIT_SECONDS
                ) as health:
                    assert health.status == 200
                assert (await caller.call("brew", {})).unwrap() == "tea"
                async with Host(address) as another:  # over the lane, which has descriptors left
                    assert (await another.call("brew", {})).unwrap() == "tea"
                async with asyncio.timeout(WAIT_SECONDS):  # a new program finds room, although all of them stay
                    while (answer := await status(address)) != grpc.StatusCode.OK:
                        assert answer == grpc.StatusCode.UNAVAILABLE  # a refusal would be final for an SDK
                        await asyncio.sleep(0.1)
                assert (await caller.call("brew", {})).unwrap() == "tea"
                assert "that said nothing" in bus.err
                metrics = await asyncio.to_thread(
                    urllib.request.urlopen, f"http://{http}/metrics", timeout=WAIT_SECONDS
                )
                with metrics:
                    assert b"toolbus_connections_ended_total{" in metrics.read()


async def status(address: str) -> grpc.StatusCode:
    """Returns what a program without the lane gets."""
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            await ToolBusServiceStub(channel).List(ListRequest(), timeout=WAIT_SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def brew() -> str:
    return "tea"


def test_a_bus_takes_the_descriptors_that_it_may(few_descriptors: None) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert share_of_descriptors(0.25) == max(64, soft // 4)
    raise_descriptor_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(65_536, hard), hard)
