"""A source that is bound to a token is nobody else's."""

from __future__ import annotations

import grpc
import pytest

from tests.faults.conftest import Connect, until_sessions
from tests.faults.raw_peer import RawPeer, attach, echo, tool
from toolbus.bus import Bus
from toolbus.v1 import tool_bus_service_pb2 as wire

pytestmark = pytest.mark.usefixtures("bystander")


@pytest.mark.parametrize("token", ["", "wrong"])
async def test_a_bound_source_cannot_be_claimed_without_its_token(
    connect: Connect, stranger: RawPeer, token: str
) -> None:
    owner = await connect("bound", tool("mine"), answer=echo, token="right")
    request = wire.InvokeRequest(attach=attach("bound", tool("mine"), instance="thief", token=token))
    code, details = await stranger.refused(request)
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "token" in details
    host = await connect("host")
    assert (await host.call("mine", {"n": 1})).output_json == '{"n": 1}'
    assert owner.calls


async def test_sessions_with_the_token_share_a_bound_source(connect: Connect) -> None:
    await connect("bound", tool("mine"), instance="a", token="right")
    attached = await connect("bound", tool("mine"), instance="b", token="right")
    assert attached is not None


async def test_a_source_is_free_again_once_its_owner_has_left(bus: Bus, connect: Connect) -> None:
    owner = await connect("bound", tool("mine"), token="right")
    await owner.send(drain=wire.Drain(reason="bye"))
    await until_sessions(bus, 2)  # the bystanders'
    await connect("bound", tool("mine"), token="another")
