"""The kinds of overload: who offers how much to whom, and how long a call may take for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lab.benchmarks import workload
from lab.benchmarks.children import Child
from lab.overload.host import MAX_UNWRITTEN, call
from lab.overload.load import FOREIGN, Phase, Schedule
from lab.overload.stage import HEAD_START, Seen, Stage
from lab.overload.watch import Watch
from toolbus.bus.streams.grpc_server import READ_AHEAD_BYTES

TIMES = 10  # the capacity
GROWTH_MIB = 48.0  # that a bus may weigh more after the load than before
CALM_SHARE = 0.25  # of the capacity, before and after
PATIENCE = 1.0  # of calls in the windows of hosts
BYSTANDER = "bystander"  # a plugin that is killed in the middle of the load
WORK, ROOM = 0.02, 8  # of the plugin with a capacity of its own
CALLBACK_WORK, CALLBACK_ROOM = 1.0, 256
REST_WORK = 0.4  # few enough refusals for the gateway to have time to spare, which costs ten times what gRPC does
BUS_WINDOW, REST_WINDOW = 256, 256
BUS_SECONDS = 3.0  # of measuring what it can take: its hosts do not begin at the same moment
RUDE = "rude"  # a host that keeps to no window; so many of its calls may be sent and not yet read by the bus:
ON_THE_WAY = MAX_UNWRITTEN + READ_AHEAD_BYTES // call(FOREIGN, workload.TOOL_NAME).ByteSize()


@dataclass(frozen=True, slots=True)
class Plan:
    """How long the load lasts, and the calm before and after it."""

    seconds: float

    @property
    def calm(self) -> float:
        """Seconds of calm on either side."""
        return max(1.0, min(5.0, self.seconds / 4))

    def schedule(self, capacity: float, share: float = 1.0) -> Schedule:
        """Returns one host's share of calm, load and calm."""
        calm = Phase(capacity * CALM_SHARE * share, self.calm)
        after = Phase(calm.rate, self.calm + PATIENCE)
        return Schedule([calm, Phase(capacity * TIMES * share, self.seconds), after])


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of overload.

    Attributes:
        set_up: starts plugins and hosts; returns the capacity and the schedule of each host.
        window: calls that may be in flight; they take ``window / capacity`` seconds.
        waits: seconds that a call may wait in its host before it is sent.
        quick: whether the bus has time to spare, so that what is refused is refused at once.
        fills_bus: whether it is the bus that is full, and not a plugin: then its capacity is measured again afterwards.
        on_the_way: hosts that keep to no window, and how many calls they may have on the way to the bus.
    """

    name: str
    title: str
    set_up: Callable[[Stage, Plan], Awaitable[tuple[float, dict[str, Schedule]]]]
    window: int
    waits: float = 0.0
    quick: bool = True
    fills_bus: bool = False
    on_the_way: Mapping[str, int] = field(default_factory=dict)


async def play(part: Part, stage: Stage, plan: Plan) -> Seen:
    """Plays calm, load and calm, watches the bus meanwhile, and returns what was seen."""
    capacity, schedules = await part.set_up(stage, plan)
    bystander = await asyncio.to_thread(stage.plugin, BYSTANDER, "--tool", BYSTANDER, way="raw")
    del stage.plugins[BYSTANDER]  # it is killed, and ran nothing
    watch = Watch(stage.grpc, stage.http, (*stage.plugins, BYSTANDER), stage.bus.pid)
    watching = asyncio.create_task(watch.run())
    try:
        await asyncio.sleep(HEAD_START)  # what the bus weighs before
        watch.began_at = stage.begin(schedules)
        seconds = plan.seconds + 2 * plan.calm + PATIENCE
        killing = asyncio.create_task(_kill(bystander, watch, plan.calm + plan.seconds / 2))
        answers = await stage.answers(seconds)
        killed_at = await killing
        await watch.settled(GROWTH_MIB)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    if part.fills_bus:
        await asyncio.to_thread(stage.capacity_again)
    ran = await asyncio.to_thread(stage.ran)
    phases = (plan.calm, plan.calm + plan.seconds)
    return Seen(capacity, phases, answers, ran, watch, {"killed_at": killed_at}, stage.late(), stage.measured)


async def _kill(bystander: Child, watch: Watch, at: float) -> float:
    await asyncio.sleep(at - watch.now)
    moment = watch.now
    os.kill(bystander.pid, signal.SIGKILL)
    return moment


def shared(plan: Plan, capacity: float, hosts: Sequence[str]) -> dict[str, Schedule]:
    """Returns the schedules of hosts that offer the same."""
    return {host: plan.schedule(capacity, 1 / len(hosts)) for host in hosts}


async def _one_host(stage: Stage, plan: Plan) -> tuple[float, dict[str, Schedule]]:
    return await _hosts(stage, plan, ("host",))


async def _many_hosts(stage: Stage, plan: Plan) -> tuple[float, dict[str, Schedule]]:
    return await _hosts(stage, plan, tuple(f"host-{number}" for number in range(8)))


async def _hosts(stage: Stage, plan: Plan, names: Sequence[str]) -> tuple[float, dict[str, Schedule]]:
    await asyncio.to_thread(stage.plugin, "tools", "--work", str(WORK), "--room", str(ROOM))
    capacity = await asyncio.to_thread(stage.capacity, ROOM)
    await _start(stage, dict.fromkeys(names, ()))
    return capacity, shared(plan, capacity, names)


async def _fair(stage: Stage, plan: Plan) -> tuple[float, dict[str, Schedule]]:
    """A host that sends what it likes beside one on the SDK, which asks again for what was refused."""
    await asyncio.to_thread(stage.plugin, "tools", "--work", str(WORK), "--room", str(ROOM))
    capacity = await asyncio.to_thread(stage.capacity, ROOM)
    await _start(stage, {"greedy": ()})
    await _start(stage, {"modest": ("--patience", str(PATIENCE))}, "sdk_host")
    modest = Phase(capacity / 20, plan.seconds + 2 * plan.calm)
    return capacity, {"greedy": plan.schedule(capacity), "modest": Schedule([modest])}


async def _sdk(stage: Stage, plan: Plan) -> tuple[float, dict[str, Schedule]]:
    await asyncio.to_thread(stage.plugin, "tools", "--work", str(WORK), "--room", str(ROOM))
    capacity = await asyncio.to_thread(stage.capacity, ROOM)
    names = ("host-0", "host-1")
    await _start(stage, dict.fromkeys(names, ("--patience", str(PATIENCE))), "sdk_host")
    return capacity, shared(plan, capacity, names)


async def _bus(stage: Stage, plan: Plan) -> tuple[float, dict[str, Schedule]]:
    """Two hosts keep to the windows that they told the bus, one does not."""
    await asyncio.to_thread(stage.plugin, "tools", way="raw")
    rude = ("--max-in-flight", str(BUS_WINDOW), "--patience", str(PATIENCE))
    polite = (*rude, "--window", str(BUS_WINDOW))
    hosts = {"polite-0": polite, "polite-1": polite, RUDE: rude}
    capacity = await asyncio.to_thread(stage.capacity, BUS_WINDOW, seconds=BUS_SECONDS, hosts=len(hosts))
    await _start(stage, hosts)
    return capacity, shared(plan, capacity, tuple(hosts))


async def _rest(stage: Stage, plan: Plan) -> tuple[float, dict[str, Schedule]]:
    await asyncio.to_thread(stage.plugin, "tools", "--work", str(REST_WORK), "--room", str(ROOM))
    capacity = await asyncio.to_thread(stage.capacity, ROOM, "rest_host", 4 * REST_WORK)
    await _start(stage, {"host": ()}, "rest_host")
    return capacity, shared(plan, capacity, ("host",))


async def _flood(stage: Stage, plan: Plan) -> tuple[float, dict[str, Schedule]]:
    await asyncio.to_thread(stage.plugin, "tools", way="raw")
    names = ("host-0", "host-1")
    capacity = await asyncio.to_thread(stage.capacity, REST_WINDOW, "rest_host", BUS_SECONDS, len(names))
    await _start(stage, dict.fromkeys(names, ("--window", str(REST_WINDOW), "--patience", str(PATIENCE))), "rest_host")
    return capacity, shared(plan, capacity, names)


async def _callback(stage: Stage, plan: Plan) -> tuple[float, dict[str, Schedule]]:
    await asyncio.to_thread(stage.plugin, "tools", "--work", str(CALLBACK_WORK), way="callback")
    capacity = await asyncio.to_thread(stage.capacity, CALLBACK_ROOM, seconds=3 * CALLBACK_WORK)
    await _start(stage, {"host": ()})
    return capacity, shared(plan, capacity, ("host",))


async def _start(stage: Stage, hosts: Mapping[str, Sequence[str]], way: str = "host") -> None:
    for name, more in hosts.items():
        await asyncio.to_thread(stage.host, name, *more, way=way)


PARTS = {
    part.name: part
    for part in (
        Part("plugin", "one host, a plugin with room for 8", _one_host, ROOM),
        Part("hosts", "8 hosts, a plugin with room for 8", _many_hosts, ROOM),
        Part("fair", "a greedy host beside a modest one on the SDK", _fair, ROOM),
        Part("sdk", "hosts on the SDK, which call again in time", _sdk, ROOM, 2 * PATIENCE, quick=False),
        Part("callback", "a slow plugin behind a callback URL", _callback, CALLBACK_ROOM),
        Part(
            "bus",
            "more than the bus itself can take",
            _bus,
            3 * BUS_WINDOW,
            PATIENCE,
            quick=False,
            fills_bus=True,
            on_the_way={RUDE: ON_THE_WAY},
        ),
        Part("rest", "POST /api/tools/invoke, a plugin with room for 8", _rest, ROOM),
        Part("flood", "more requests than the gateway can take", _flood, 2 * REST_WINDOW, PATIENCE, False, True),
    )
}
