"""Lists the kinds of overload: who offers how much to whom."""

from __future__ import annotations

from collections.abc import Sequence

from lab.load.schedule import Phase, Schedule
from lab.overload.run import MAX_WAIT, MEASURE_SECONDS, Part, Plan, Run

WORK, ROOM = 0.02, 8  # of the plugin with a capacity of its own
CALLBACK_WORK, CALLBACK_ROOM = 1.0, 256
REST_WORK = 0.4  # few enough refusals for the gateway to have time to spare, which costs ten times what gRPC does
BUS_WINDOW, REST_WINDOW = 256, 256
BUS_SECONDS = 3.0  # of measuring what it can take: its hosts do not begin at the same moment
MODEST = "modest"  # a host on the SDK beside a greedy one
RUDE = "rude"  # a host that keeps to no window
SCHEDULES = tuple[float, dict[str, Schedule]]
WAITING = ("--max-wait", str(MAX_WAIT))


def _shared(plan: Plan, capacity: float, hosts: Sequence[str]) -> SCHEDULES:
    """Returns the schedules of hosts that offer the same."""
    return capacity, {host: plan.schedule(capacity, 1 / len(hosts)) for host in hosts}


def _small_plugin(run: Run, plan: Plan) -> float:
    """Starts a plugin with room for 8 calls of 20 ms and returns its capacity."""
    run.plugin("tools", "--work", str(WORK), "--room", str(ROOM))
    return run.capacity(ROOM, MEASURE_SECONDS * plan.measure)


def _one_host(run: Run, plan: Plan) -> SCHEDULES:
    return _hosts(run, plan, ("host",))


def _many_hosts(run: Run, plan: Plan) -> SCHEDULES:
    return _hosts(run, plan, tuple(f"host-{number}" for number in range(8)))


def _hosts(run: Run, plan: Plan, names: Sequence[str]) -> SCHEDULES:
    capacity = _small_plugin(run, plan)
    run.start_hosts(dict.fromkeys(names, ()))
    return _shared(plan, capacity, names)


def _fair(run: Run, plan: Plan) -> SCHEDULES:
    """A host that sends what it likes beside one on the SDK, which sends again what was refused."""
    capacity = _small_plugin(run, plan)
    run.start_hosts({"greedy": ()})
    run.start_hosts({MODEST: WAITING}, "sdk")
    modest = Schedule([Phase(capacity / 20, plan.seconds + 2 * plan.calm)])
    return capacity, {"greedy": plan.schedule(capacity), MODEST: modest}


def _sdk(run: Run, plan: Plan) -> SCHEDULES:
    capacity = _small_plugin(run, plan)
    names = ("host-0", "host-1")
    run.start_hosts(dict.fromkeys(names, WAITING), "sdk")
    return _shared(plan, capacity, names)


def _bus(run: Run, plan: Plan) -> SCHEDULES:
    """Two hosts keep to the windows that they declared to the bus, one does not."""
    run.plugin(way="raw")
    rude = ("--max-in-flight", str(BUS_WINDOW), *WAITING)
    polite = (*rude, "--window", str(BUS_WINDOW))
    hosts = {"polite-0": polite, "polite-1": polite, RUDE: rude}
    capacity = run.capacity(BUS_WINDOW, BUS_SECONDS * plan.measure, hosts=len(hosts))
    run.start_hosts(hosts)
    return _shared(plan, capacity, tuple(hosts))


def _rest(run: Run, plan: Plan) -> SCHEDULES:
    run.plugin("tools", "--work", str(REST_WORK), "--room", str(ROOM))
    capacity = run.capacity(ROOM, 4 * REST_WORK, "rest")
    run.start_hosts({"host": ()}, "rest")
    return _shared(plan, capacity, ("host",))


def _flood(run: Run, plan: Plan) -> SCHEDULES:
    run.plugin(way="raw")
    names = ("host-0", "host-1")
    capacity = run.capacity(REST_WINDOW, BUS_SECONDS * plan.measure, "rest", len(names))
    run.start_hosts(dict.fromkeys(names, ("--window", str(REST_WINDOW), *WAITING)), "rest")
    return _shared(plan, capacity, names)


def _callback(run: Run, plan: Plan) -> SCHEDULES:
    run.plugin("tools", "--work", str(CALLBACK_WORK), way="callback")
    capacity = run.capacity(CALLBACK_ROOM, 3 * CALLBACK_WORK)
    run.start_hosts({"host": ()})
    return _shared(plan, capacity, ("host",))


PARTS = {
    part.name: part
    for part in (
        Part("plugin", "one host, a plugin with room for 8", _one_host),
        Part("hosts", "8 hosts, a plugin with room for 8", _many_hosts),
        Part("fair", "a greedy host beside a modest one on the SDK", _fair, on_sdk=True),
        Part("sdk", "hosts on the SDK, which call again in time", _sdk, waits_in_hosts=True, on_sdk=True),
        Part("callback", "a slow plugin behind a callback URL", _callback),
        Part("bus", "more than the bus itself can take", _bus, waits_in_hosts=True, fills_bus=True, rude=RUDE),
        Part("rest", "POST /api/tools/invoke, a plugin with room for 8", _rest),
        Part("flood", "more requests than the gateway can take", _flood, waits_in_hosts=True, fills_bus=True),
    )
}
