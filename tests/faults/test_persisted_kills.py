"""A bus is killed again and again while tools are registered: what was answered is there afterwards, and nothing else.

``make crash`` does it a hundred times; ``TOOLBUS_KILLS`` and ``TOOLBUS_KILL_SEED`` say how often, and which dice.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import httpx
import pytest

from tests.faults.callbacks import CallbackPlugin, Legacy
from tests.support.processes import Running
from tests.support.waiting import until
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

KILLS = int(os.environ.get("TOOLBUS_KILLS", "3"))
SEED = int(os.environ.get("TOOLBUS_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
CLIENTS = 4
NAMES = 6  # of each client: few, so that most registrations replace
MAX_ANSWERS = 400  # a round is over after so many at the latest
GONE = (httpx.TransportError, grpc.aio.AioRpcError)

State = dict[str, int]  # name → version, in the order of the list


class Client:
    """Registers, replaces and withdraws tools of a source of its own, one at a time, and notes what was answered.

    Attributes:
        may_be: what the bus may hold: after what was answered, or after what is under way too.
    """

    def __init__(self, number: int, url: str, dice: random.Random) -> None:
        self.source = f"plugin:{number}"
        self.may_be: tuple[State, State] = ({}, {})
        self.answered = 0
        self._number = number
        self._url = url
        self._dice = dice
        self._version = 0  # rises with every registration

    def __repr__(self) -> str:
        return f"<Client {self.source} answered={self.answered} {self.may_be}>"

    async def run(self, legacy: Legacy, told: Callable[[], None]) -> None:
        """Goes on until the bus is gone; odd ones speak gRPC."""
        by_grpc = bool(self._number % 2)
        while True:
            after, work = self._next(legacy, by_grpc)
            self.may_be = (self.may_be[0], after)
            try:
                await work
            except GONE:
                return
            self.may_be = (after, after)
            self.answered += 1
            told()

    def _next(self, legacy: Legacy, by_grpc: bool) -> tuple[State, Awaitable[object]]:
        name = f"{self._number}-{self._dice.randrange(NAMES)}"
        now, chance = self.may_be[0], self._dice.random()
        if chance < 0.02:
            if by_grpc:
                return {}, legacy.stub.Clear(wire.ClearRequest(source=self.source))
            return {}, legacy.ask("clear", source=self.source)
        if chance < 0.3:
            after = {each: version for each, version in now.items() if each != name}
            if by_grpc:
                return after, legacy.stub.Unregister(wire.UnregisterRequest(name=name))
            return after, legacy.ask("unregister", name=name)
        self._version += 1
        text = str(self._version)
        after = {**now, name: self._version}
        if by_grpc:
            return after, legacy.register(self.source, pb.Tool(name=name, callback_url=self._url, description=text))
        return after, legacy.ask("register", name=name, callback_url=self._url, description=text, source=self.source)

    def settle(self, found: State) -> None:
        """Compares with what a bus holds that was started again."""
        candidates = [list(each.items()) for each in self.may_be]
        assert list(found.items()) in candidates, f"{self!r} found {found}"
        self.may_be = (found, found)


@pytest.mark.timeout(180 + 8 * KILLS)
async def test_no_kill_loses_a_confirmed_registration_or_restores_a_withdrawn_one(tmp_path: Path) -> None:
    print(f"TOOLBUS_KILL_SEED={SEED} TOOLBUS_KILLS={KILLS}")
    dice = random.Random(SEED)
    with CallbackPlugin().come() as plugin:
        clients = [Client(number, plugin.url(), random.Random(dice.random())) for number in range(CLIENTS)]
        for number in range(KILLS + 1):
            with Running(
                tmp_path,
                *("serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log-level", "warning"),
                *("--data-dir", tmp_path / "data"),
            ) as bus:
                await asyncio.to_thread(bus.says, "toolbus ready")
                await _settle(bus, clients)
                if number < KILLS:
                    await _work_until_killed(bus, clients, dice, is_last=number == KILLS - 1)
                    assert await asyncio.to_thread(bus.code) == -signal.SIGKILL
        assert plugin.bytes == 0, "nobody was called"
    answered = sum(client.answered for client in clients)
    print(f"{answered} answers, {answered / KILLS if KILLS else 0:.0f} a round")
    assert all(client.answered for client in clients)


def _ask(bus: Running) -> Legacy:
    ready = bus.out.split()
    return Legacy(http=ready[3].removeprefix("http="), grpc_address=ready[2].removeprefix("grpc="))


async def _settle(bus: Running, clients: list[Client]) -> None:
    async with _ask(bus) as legacy:
        listed = await legacy.stub.List(wire.ListRequest(include_offline=True))
        offered = (await legacy.listed())["default"]
    assert [each.tool.name for each in listed.tools] == offered, "what is kept is offered at once"
    for client in clients:
        client.settle(
            {each.tool.name: int(each.tool.description) for each in listed.tools if each.source == client.source}
        )


async def _work_until_killed(bus: Running, clients: list[Client], dice: random.Random, *, is_last: bool) -> None:
    """Kills the bus after a few answers or many; before the last kill each client gets one, however few they were."""
    left = dice.choice((1, dice.randrange(2, 20), dice.randrange(20, MAX_ANSWERS)))
    delay = dice.choice((0.0, dice.uniform(0.0, 0.003)))  # in the middle of what is being done, too
    loop = asyncio.get_running_loop()
    killing: list[asyncio.TimerHandle] = []

    def told() -> None:
        nonlocal left
        left -= 1
        if left <= 0 and not killing and (not is_last or all(client.answered for client in clients)):
            killing.append(loop.call_later(delay, bus.send, signal.SIGKILL))

    asking = [_ask(bus) for _ in clients]
    work = [asyncio.create_task(client.run(legacy, told)) for client, legacy in zip(clients, asking, strict=True)]
    try:
        await until(lambda: all(task.done() for task in work), "the killed bus to be noticed", 20.0)
        for task in work:
            task.result()
    finally:
        for task in work:
            task.cancel()
        for legacy in asking:
            await legacy.__aexit__(None, None, None)
