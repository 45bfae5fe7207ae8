"""Runs three buses, a plugin on all of them and hosts under load, and takes one bus away after the other.

Every 5 s one bus is killed, stopped, or shut down, by a seed, and comes back. Each second prints what the callers got.
In the end: one outcome for each call, nothing ran twice that must not, nothing ran that was NOT_DISPATCHED, and no call
of a read-only tool was lost. Where Postgres is installed, the buses share their settings in one of the run's own, which
is killed too; a rule that is set at one bus is timed until another one has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

from lab.commands import add_results, console_of, parser_of, printer, repeat_command, run, write_json
from lab.judge import Verdict
from lab.report import verdict_table
from lab.stage import LOOPBACK, Stage, free_ports
from tests.support.postgres import Server, find_programs, running_server
from toolbus.errors import Code
from toolbus.errors import Stage as CallStage
from toolbus.protocol.tool import Result
from toolbus.sdk import Host, Plugin

BUSES, HOSTS, CALLERS = 3, 8, 64
WORK_SECONDS = 0.002  # of each call
ENDS = ("kill", "freeze", "shutdown", "database")
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
        self.read_lost = 0
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


def plugin_of(address: str, tally: Tally) -> Plugin:
    """Returns the plugin of a run."""
    plugin = Plugin("work", address=address)

    @plugin.tool(read_only=True)
    async def read(number: int) -> int:
        """Returns a number."""
        await asyncio.sleep(WORK_SECONDS)
        return number

    @plugin.tool
    async def write(number: int) -> int:
        """Returns a number, and must not run twice for it."""
        tally.runs[number] += 1
        await asyncio.sleep(WORK_SECONDS)
        return number

    return plugin


async def call_on(host: Host, first: int, tally: Tally, over: asyncio.Event) -> None:
    """Makes one call after the other."""
    tool, number = ("read", "write")[first % 2], first * 100_000_000
    while not over.is_set():
        number += 1
        began = time.monotonic()
        result = await host.call(tool, {"number": number})
        tally.add(tool, number, result, time.monotonic() - began)
        if result.error is not None:
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
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(*FROZEN_SECONDS))
            process.send_signal(signal.SIGCONT)
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


async def play(seconds: float, every: float, ends: Sequence[str], seed: int, say: Callable[[str], None]) -> Tally:
    """Runs the load for so long, and takes a bus away again and again."""
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
            plugin = await stack.enter_async_context(plugin_of(address, tally))
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
            until = time.monotonic() + seconds
            while (left := until - time.monotonic()) > 0:
                await asyncio.sleep(min(every, left))
                if until - time.monotonic() > every:
                    number, how = rng.randrange(BUSES), rng.choice(ends)
                    if how == "database" and server is not None:
                        say("database: killed")
                        server.end(signal.SIGKILL)
                        await asyncio.sleep(AWAY_SECONDS)
                        await asyncio.to_thread(server.start)
                        continue
                    say(f"{how}: bus {number} at {buses.addresses[number]}")
                    await buses.end(number, how, rng)
            over.set()
            await asyncio.gather(*callers)
            shows.cancel()
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
        Verdict("calls", "", str(total)),
        Verdict("lost calls of `write`, in flight on a bus that went", "", str(lost)),
        Verdict("longest call", "", f"{tally.longest:.2f} s"),
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


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = parser_of("buses", __doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two disturbances (default: 5)")
    parser.add_argument("--seed", type=int, default=None, help="of the disturbances (default: a new one)")
    parser.add_argument("--end", choices=ENDS, default=None, help="the only disturbance (default: all)")
    add_results(parser, "the outcomes")
    options = parser.parse_args(words)
    console = console_of()
    say = printer(console)
    seed = options.seed if options.seed is not None else random.randrange(1_000_000)
    tally = asyncio.run(play(options.seconds, options.every, [options.end] if options.end else ENDS, seed, say))
    verdicts = judge(tally)
    verdict_table("Several buses", verdicts).show(console)
    say(repeat_command("buses", {"--seed": seed, "--seconds": options.seconds, "--every": options.every}))
    write_json(options.json, {"seed": seed, "outcomes": dict(tally.outcomes)})
    return int(not all(verdict.good for verdict in verdicts))


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
