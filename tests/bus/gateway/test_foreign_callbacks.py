"""No call reaches a program of another user that listens where a plugin with a callback URL did (REST-24).

Where tests run as root, the port really is nobody's; elsewhere the bus is told that this user may not serve it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

import aiohttp
import pytest

from tests.bus.gateway.calling import legacy_plugin
from tests.bus.gateway.misbehaving import offer
from tests.support.other_user import CAN_BE_NOBODY, NOBODY
from tests.support.waiting import until, within
from toolbus.bus import Bus, Config
from toolbus.bus.access.neighbours import Neighbours
from toolbus.bus.gateway.callback import accepts_connections
from toolbus.bus.outbound import open_session
from toolbus.errors import Code, Stage

OWN = os.geteuid()


class _Served(Neighbours):
    """Neighbours of whom some may not serve.

    Attributes:
        refused: the uids of these, besides those that the rule refuses.
    """

    refused: frozenset[int] = frozenset()

    def allows(self, uid: int | None) -> bool:
        return uid not in self.refused and super().allows(uid)


async def _echo(arguments: object) -> bytes:
    return b'{"output": "served"}'


async def test_a_call_is_not_sent_to_another_users_program_and_works_again_once_the_plugin_is_back() -> None:
    neighbours = _Served()
    async with (
        Bus(Config(grpc=("127.0.0.1:0",), http="off"), neighbours=neighbours) as bus,
        legacy_plugin(_echo) as url,
    ):
        await offer(bus, {"served": url, "taken": url})
        assert (await within(bus.call("served", {}))).output == "served"
        with socket.create_server(("127.0.0.1", 0)) as foreign:  # never accepts: whose it is counts before that
            foreign.setblocking(False)
            if CAN_BE_NOBODY:
                os.fchown(foreign.fileno(), NOBODY, -1)
            else:
                neighbours.refused = frozenset({OWN})
            await offer(bus, {"taken": f"http://127.0.0.1:{foreign.getsockname()[1]}/run"})
            for _ in range(3):
                error = (await within(bus.call("taken", {"secret": 1}))).error
                assert error is not None
                assert (error.code, error.stage, error.retry_safe) == (Code.UNAVAILABLE, Stage.NOT_DISPATCHED, True)
                assert "who may not use this bus" in error.message
            for _ in range(3):
                connection, _ = foreign.accept()
                with connection:
                    assert await within(asyncio.get_running_loop().sock_recv(connection, 1)) == b""
            neighbours.refused = frozenset()
            os.fchown(foreign.fileno(), OWN, -1)
            await until(lambda: "taken" in {each.entry.name for each in bus.list()}, "the probe of the port")


@pytest.mark.parametrize(("may_serve", "served"), [(lambda uid: uid == OWN, True), (lambda uid: uid != OWN, False)])
async def test_who_serves_a_connection_decides_whether_requests_and_probes_use_it(
    may_serve: Callable[[int], bool], served: bool
) -> None:
    asked: list[object] = []

    async def answer(arguments: object) -> bytes:
        asked.append(arguments)
        return b"{}"

    async with legacy_plugin(answer) as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        assert await within(accepts_connections(("http", "localhost", port), may_serve)) is served
        async with open_session(connections=0, seconds=30.0, may_serve=may_serve) as session:
            if served:
                async with session.post(url, data=b"{}"):
                    pass
            else:
                with pytest.raises(aiohttp.ClientConnectorError, match="may not use this bus"):
                    await session.post(url, data=b"{}")
    assert len(asked) == served
