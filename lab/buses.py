"""Runs three buses, a plugin on all of them and hosts under load, and takes one bus away after the other.

Every 5 s one bus is killed, stopped, or shut down, by a seed, and comes back. Each second prints what the callers got.
In the end: one outcome for each call, nothing ran twice that must not, nothing ran that was NOT_DISPATCHED, no call of
a read-only tool was lost, and 10 s after the last disturbance all buses list the same tools. Where Postgres is
installed, the buses share their settings in one of the run's own, which is killed too; a rule that is set at one bus is
timed until another one has it.

`make chaos ARGS=buses` has two plugins in processes of their own, which are killed, stopped and shut down too, and cuts
the first one off from one bus at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from lab.child import Child
from lab.commands import add_results, console_of, parser_of, printer, repeat_command, run, write_json
from lab.judge import Verdict
from lab.ledger import RUNS, Ledger, LedgerReader
from lab.report import verdict_table
from lab.stage import LOOPBACK, Stage, free_ports, stop_event
from tests.support.postgres import Server, find_programs, running_server
from toolbus.errors import Code
from toolbus.errors import Stage as CallStage
from toolbus.protocol.tool import Result
from toolbus.sdk import Host, Plugin

BUSES, HOSTS, CALLERS = 3, 8, 64
WORK_SECONDS = 0.002  # of each call
ENDS = ("kill", "freeze", "shutdown", "database")
PLUGINS = 2  # of a run with chaos
WEIGHTS = {"bus": 4, "plugin": 2}  # of kinds of disturbances; others come back sooner, and are free more often
ALIKE_SECONDS = 10.0  # until all buses list the same tools
AWAY_SECONDS = 2.0  # until a bus comes back
FROZEN_SECONDS = (0.5, 4.0)
PAUSE_SECONDS = 0.01  # of a caller after a failed call
CHANGE_SECONDS = 0.1  # between two changes of a rule
GIVE_UP_SECONDS = 2.0  # for a bus to answer who changes or reads a rule: it may be the one that goes


class Tally:
    """What ran and what the callers got."""

    def __init__(self) -> None:
        self.runs: Counter[int] = Counter()  # of `write`, by its number
        self.outcomes: Counter[str] = Counter()
        self.undispatched: list[int] = []  # numbers of `write` whose callers were told that it did not run
        self.longest = 0.0
        self.gap = 0.0  # the longest time in which no call of a host ended well
        self._answered: dict[str, float] = {}  # by host, when a call ended well last
        self.read_lost = 0
        self.alike_after = 0.0  # seconds until all buses listed the same tools; infinite where they never did
        self.events: Counter[str] = Counter()  # disturbances
        self.shared: list[float] = []  # seconds until another bus had a rule
        self.refused = 0  # changes of rules

    def add(self, tool: str, number: int, result: Result, seconds: float) -> None:
        """Counts the outcome of a call."""
        self.longest = max(self.longest, seconds)
        error = result.error
        if error is None:
            self.outcomes[f"{tool} ok"] += 1
            return
        self.outcomes[f"{tool} {error.code.name} {error.stage.name}"] += 1
        if tool == "read" and error.code is Code.UNAVAILABLE and error.stage is not CallStage.NOT_DISPATCHED:
            self.read_lost += 1
        if tool == "write" and error.stage is CallStage.NOT_DISPATCHED:
            self.undispatched.append(number)

    def answered(self, host: str) -> None:
        """Notes that a call of a host ended well."""
        now = time.monotonic()
        self.gap = max(self.gap, now - self._answered.get(host, now))
        self._answered[host] = now


def plugin_of(address: str, began: Callable[[int], object]) -> Plugin:
    """Returns the plugin of a run, which notes each run of the tool that must not run twice."""
    plugin = Plugin("work", address=address)

    @plugin.tool(read_only=True)
    async def read(number: int) -> int:
        """Returns a number."""
        await asyncio.sleep(WORK_SECONDS)
        return number

    @plugin.tool
    async def write(number: int) -> int:
        """Returns a number, and must not run twice for it."""
        began(number)
        await asyncio.sleep(WORK_SECONDS)
        return number

    return plugin


async def plugin_process(address: str, folder: Path) -> None:
    """Runs the plugin in a process of its own, until it is ended."""
    ledger, ended = Ledger(folder / RUNS), stop_event()
    async with plugin_of(address, lambda number: ledger.write(began=number)) as plugin:
        await plugin.ready()
        print("ready", flush=True)
        await ended.wait()


class Line:
    """The way of a plugin to one bus, which can be cut: packets then wait, as they do where a network drops them."""

    def __init__(self, address: str) -> None:
        self._to = address.rpartition(":")
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None  # None before `start`
        self._pumps: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Returns its address."""
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def cut(self, seconds: float) -> None:
        """Lets nothing through for so long."""
        self._open.clear()
        await asyncio.sleep(seconds)
        self._open.set()

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        if self._server is not None:
            self._server.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._open.wait()
            there = await asyncio.open_connection(self._to[0], int(self._to[2]))
        except OSError:
            writer.close()
            return
        for source, to in ((reader, there[1]), (there[0], writer)):
            pump = asyncio.create_task(self._pump(source, to))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self._open.wait()
                to.write(data)
                await to.drain()
        to.close()


class Plugins:
    """The processes of the plugins, each at all buses; the first one by lines that can be cut."""

    def __init__(self, stage: Stage, folder: Path, buses: Sequence[str]) -> None:
        self.lines = [Line(each) for each in buses]
        self._stage, self._folder = stage, folder
        self._addresses = [",".join(buses)] * PLUGINS
        self._processes: list[Child] = []

    async def start(self) -> None:
        self._addresses[0] = ",".join([await line.start() for line in self.lines])
        self._processes = [self._begin(number) for number in range(PLUGINS)]
        for process in self._processes:
            await asyncio.to_thread(process.line)

    def _begin(self, number: int) -> Child:
        return self._stage.module("buses", "--plugin", self._addresses[number], str(self._folder))

    async def end(self, number: int, how: str, rng: random.Random) -> None:
        """Takes a plugin away in one way, and brings it back."""
        process = self._processes[number]
        if how == "freeze":
            await freeze(process, rng)
            return
        process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
        await asyncio.to_thread(process.wait)
        await asyncio.sleep(AWAY_SECONDS)
        self._processes[number] = self._begin(number)
        await asyncio.to_thread(self._processes[number].line)  # until then the other one is alone

    def runs(self) -> Counter[int]:
        """Returns how often each call ran."""
        return Counter(line["began"] for line in LedgerReader(self._folder / RUNS).new_lines())


async def freeze(process: Child, rng: random.Random) -> None:
    """Stops a process for a while."""
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(rng.uniform(*FROZEN_SECONDS))
    process.send_signal(signal.SIGCONT)


async def call_on(host: Host, first: int, tally: Tally, over: asyncio.Event) -> None:
    """Makes one call after the other."""
    tool, number = ("read", "write")[first // HOSTS % 2], first * 100_000_000  # each host calls both
    while not over.is_set():
        number += 1
        began = time.monotonic()
        result = await host.call(tool, {"number": number})
        tally.add(tool, number, result, time.monotonic() - began)
        if result.error is None:
            tally.answered(host.source)
        else:
            await asyncio.sleep(PAUSE_SECONDS)


class Buses:
    """The processes of the buses, each at an address of its own."""

    def __init__(self, stage: Stage, storage: str) -> None:
        self._stage = stage
        self._settings = {"TOOLBUS_STORAGE": storage} if storage else {}
        self.addresses = [f"{LOOPBACK.partition(':')[0]}:{port}" for port in free_ports(BUSES)]
        self._processes = [stage.bus(grpc=address, **self._settings).child for address in self.addresses]

    async def end(self, number: int, how: str, rng: random.Random) -> None:
        """Takes a bus away in one way, and brings it back."""
        process = self._processes[number]
        if how == "freeze":
            await freeze(process, rng)
            return
        process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
        await asyncio.to_thread(process.wait)
        await asyncio.sleep(AWAY_SECONDS)
        again = await asyncio.to_thread(self._stage.bus, grpc=self.addresses[number], **self._settings)
        self._processes[number] = again.child


async def change_rules(addresses: Sequence[str], tally: Tally, rng: random.Random, over: asyncio.Event) -> None:
    """Sets a rule at one bus after the other, and takes the time until another bus has it."""
    async with contextlib.AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(Host(each, source=f"operator-{each}")) for each in addresses]
        number = 0
        while not over.is_set():
            await asyncio.sleep(CHANGE_SECONDS)
            number += 1
            here, there = rng.sample(hosts, 2)
            rule, began = {"kind": "tools", "name": "rule", "users": [f"user-{number}"]}, time.monotonic()
            if (await here.call("toolbus:permit", rule, timeout=GIVE_UP_SECONDS)).error is not None:
                tally.refused += 1
                continue
            while not over.is_set():
                seen = await there.call("toolbus:permissions", {}, timeout=GIVE_UP_SECONDS)
                if seen.error is not None:
                    break
                if f'"user-{number}"' in json.dumps(seen.output):
                    tally.shared.append(time.monotonic() - began)
                    break


class Disturbances:
    """What takes things away, by what it is; each of them is away once at a time, and comes back."""

    def __init__(self, rng: random.Random, tally: Tally, say: Callable[[str], None]) -> None:
        self._rng, self._tally, self._say = rng, tally, say
        self._ways: dict[str, Callable[[], tuple[str, Awaitable[None]]]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    def add(self, what: str, way: Callable[[], tuple[str, Awaitable[None]]]) -> None:
        """Adds a kind: the function returns what it does in words, and what brings it back."""
        self._ways[what] = way

    async def one(self, *, wait: bool) -> None:
        """Begins one; waits until it has come back."""
        free = [what for what in self._ways if what not in self._running]
        if not free:
            return
        what = self._rng.choices(free, [WEIGHTS.get(each, 1) for each in free])[0]
        words, act = self._ways[what]()
        self._say(words)
        self._tally.events[words.partition(":")[0]] += 1
        task = self._running[what] = asyncio.ensure_future(act)
        task.add_done_callback(lambda _: self._running.pop(what))
        if wait:
            await task

    async def settled(self) -> None:
        """Waits until all have come back; raises what one of them met."""
        await asyncio.gather(*self._running.values())


def disturbances_of(
    buses: Buses, plugins: Plugins | None, server: Server | None, ends: Sequence[str], rng: random.Random
) -> dict[str, Callable[[], tuple[str, Awaitable[None]]]]:
    """Returns the ways in which a run takes things away."""

    def of_bus() -> tuple[str, Awaitable[None]]:
        number, how = rng.randrange(BUSES), rng.choice([each for each in ends if each != "database"])
        return f"{how}: bus {number} at {buses.addresses[number]}", buses.end(number, how, rng)

    async def restart(server: Server) -> None:
        server.end(signal.SIGKILL)
        await asyncio.sleep(AWAY_SECONDS)
        await asyncio.to_thread(server.start)

    def of_plugin(plugins: Plugins) -> tuple[str, Awaitable[None]]:
        number, how = rng.randrange(PLUGINS), rng.choice(("kill", "freeze", "shutdown"))
        return f"plugin {how}: {number}", plugins.end(number, how, rng)

    def of_line(plugins: Plugins) -> tuple[str, Awaitable[None]]:
        number = rng.randrange(BUSES)
        return f"cut off: plugin 0 from bus {number}", plugins.lines[number].cut(rng.uniform(0.5, 12.0))

    ways: dict[str, Callable[[], tuple[str, Awaitable[None]]]] = {}
    if set(ends) - {"database"}:
        ways["bus"] = of_bus
    if server is not None and "database" in ends:
        ways["database"] = lambda: ("database: killed", restart(server))
    if plugins is not None:
        ways["plugin"], ways["line"] = functools.partial(of_plugin, plugins), functools.partial(of_line, plugins)
    return ways


async def alike(addresses: Sequence[str], sessions: int) -> float:
    """Returns after how many seconds all buses list the same tools; infinity where they do not in time."""
    async with contextlib.AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(Host(each, source="watcher")) for each in addresses]
        began = time.monotonic()
        while time.monotonic() - began < ALIKE_SECONDS:
            listings = [await host.list(timeout=ALIKE_SECONDS) for host in hosts]
            shown = [{(each.name, each.source, each.schema_hash, each.sessions) for each in one} for one in listings]
            if all(each == shown[0] for each in shown) and {each[3] for each in shown[0]} == {sessions}:
                return time.monotonic() - began
            await asyncio.sleep(PAUSE_SECONDS)
    return float("inf")


async def play(
    seconds: float, every: float, ends: Sequence[str], seed: int, say: Callable[[str], None], *, chaos: bool = False
) -> Tally:
    """Runs the load for so long, and takes something away again and again; a bus, or with chaos anything."""
    tally, over, rng = Tally(), asyncio.Event(), random.Random(seed)
    with contextlib.ExitStack() as ending:
        server: Server | None = None
        if find_programs() is not None:
            server = ending.enter_context(running_server())
        else:
            say("each bus has settings of its own: install Postgres (apt-get install postgresql) to have them shared")
            ends = [each for each in ends if each != "database"] or ["kill"]
        stage = ending.enter_context(Stage())
        buses = await asyncio.to_thread(Buses, stage, server.url("postgres") if server else "")
        address = ",".join(buses.addresses)
        async with contextlib.AsyncExitStack() as stack:
            plugins: Plugins | None = None
            if chaos:
                plugins = Plugins(stage, Path(stage.folder()), buses.addresses)
                await plugins.start()
                for line in plugins.lines:
                    stack.callback(line.close)
            else:
                plugin = plugin_of(address, lambda number: tally.runs.update((number,)))
                await stack.enter_async_context(plugin)
                await plugin.ready()
            hosts = [await stack.enter_async_context(Host(address, source=f"host-{n}")) for n in range(HOSTS)]
            for host in hosts:
                await host.ready()
                while not {"read", "write"} <= {each.name for each in await host.list()}:
                    await asyncio.sleep(PAUSE_SECONDS)
            callers = [asyncio.create_task(call_on(hosts[n % HOSTS], n, tally, over)) for n in range(CALLERS)]
            shows = asyncio.create_task(show(tally, say))
            if server is not None:
                callers.append(asyncio.create_task(change_rules(buses.addresses, tally, random.Random(seed), over)))
            disturbances = Disturbances(rng, tally, say)
            for what, way in disturbances_of(buses, plugins, server, ends, rng).items():
                disturbances.add(what, way)
            until = time.monotonic() + seconds
            while (left := until - time.monotonic()) > 0:
                await asyncio.sleep(min(every, left))
                if until - time.monotonic() > every:
                    await disturbances.one(wait=not chaos)
            await disturbances.settled()
            tally.alike_after = await alike(buses.addresses, PLUGINS if chaos else 1)
            over.set()
            await asyncio.gather(*callers)
            shows.cancel()
            if plugins is not None:
                tally.runs = plugins.runs()
    return tally


async def show(tally: Tally, say: Callable[[str], None]) -> None:
    """Prints the outcomes of each second."""
    before: Counter[str] = Counter()
    while True:
        await asyncio.sleep(1.0)
        now = Counter(tally.outcomes)
        say("  ".join(f"{count:6d} {outcome}" for outcome, count in sorted((now - before).items())) or "no calls")
        before = now


def judge(tally: Tally) -> list[Verdict]:
    """Returns the verdicts about a run."""
    twice = sum(count > 1 for count in tally.runs.values())
    ran = sum(tally.runs[number] > 0 for number in tally.undispatched)
    lost = sum(count for outcome, count in tally.outcomes.items() if outcome.startswith("write UNAVAILABLE"))
    total = sum(tally.outcomes.values())
    return [
        Verdict("calls of `write` that ran twice", "0", str(twice), twice == 0),
        Verdict("calls that ran although their callers were told NOT_DISPATCHED", "0", str(ran), ran == 0),
        Verdict("lost calls of the read-only tool", "0", str(tally.read_lost), tally.read_lost == 0),
        Verdict(
            "until all buses list the same tools after the last disturbance",
            f"≤ {ALIKE_SECONDS:.0f} s",
            f"{tally.alike_after:.2f} s",
            tally.alike_after <= ALIKE_SECONDS,
        ),
        Verdict("disturbances", "", ", ".join(f"{count} {what}" for what, count in sorted(tally.events.items()))),
        Verdict("calls", "", str(total)),
        Verdict("lost calls of `write`, in flight on a bus that went", "", str(lost)),
        Verdict("longest call", "", f"{tally.longest:.2f} s"),
        Verdict("longest time in which no call of a host ended well", "", f"{tally.gap:.2f} s"),
        *_shared(tally),
    ]


def _shared(tally: Tally) -> list[Verdict]:
    seconds = sorted(tally.shared)
    if not seconds:
        return []
    half, most = (seconds[int(len(seconds) * share)] for share in (0.5, 0.99))
    changes = f"{len(seconds) + tally.refused}, {tally.refused}"
    return [
        Verdict("a rule of one bus holds at another after (half, 99 of 100)", "", f"{half:.3f} s, {most:.3f} s"),
        Verdict("changes of rules, and those refused while a bus or the database was away", "", changes),
    ]


def main(words: Sequence[str] | None = None, *, chaos: bool = False) -> int:
    """Runs the command line; returns the exit code.

    Args:
        chaos: whether plugins and the ways to them are disturbed too.
    """
    if words and words[0] == "--plugin":
        asyncio.run(plugin_process(words[1], Path(words[2])))
        return 0
    parser = parser_of("chaos buses" if chaos else "buses", __doc__)
    length, pause = (600.0, 3.0) if chaos else (60.0, 5.0)
    parser.add_argument("--seconds", type=float, default=length, help=f"how long (default: {length:g})")
    parser.add_argument("--every", type=float, default=pause, help=f"seconds between disturbances (default: {pause:g})")
    parser.add_argument("--seed", type=int, default=None, help="of the disturbances (default: a new one)")
    parser.add_argument("--end", choices=ENDS, default=None, help="the only disturbance (default: all)")
    add_results(parser, "the outcomes")
    options = parser.parse_args(words)
    console = console_of()
    say = printer(console)
    seed = options.seed if options.seed is not None else random.randrange(1_000_000)
    ends = [options.end] if options.end else ENDS
    tally = asyncio.run(play(options.seconds, options.every, ends, seed, say, chaos=chaos))
    verdicts = judge(tally)
    verdict_table("Several buses", verdicts).show(console)
    given = {"--seed": seed, "--seconds": options.seconds, "--every": options.every}
    say(repeat_command("chaos", given, "buses") if chaos else repeat_command("buses", given))
    write_json(options.json, {"seed": seed, "outcomes": dict(tally.outcomes)})
    return int(not all(verdict.good for verdict in verdicts))


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
