"""Times what is set at one of three buses that share a database, until it holds at the others.

Rules, roles, approved pins and revoked keys, one change after the other, each at another bus, while hosts call a tool.
Where a change was made it has to hold in the next call. The database is up all the time; needs Postgres.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from lab.buses import BUSES, PAUSE_SECONDS, Tally, call_on, plugin_of
from lab.commands import add_results, console_of, parser_of, printer, run, write_json
from lab.judge import Verdict, none
from lab.load.workload import quantile
from lab.report import verdict_table
from lab.stage import BusProcess, Stage, address_of, bus_command, free_ports
from tests.bus.keys.keys_directory import KeysDirectory
from tests.support.postgres import INSTALL, find_programs, running_server
from toolbus.parts.identity.key_store import KeyStore
from toolbus.sdk import Host, Plugin

HOSTS, CALLERS = 4, 16
LOOK_SECONDS = 0.002  # between two looks whether a change holds
HOLD_SECONDS, GIVE_UP_SECONDS = 1.0, 30.0
PINNED = "pinned"  # the source whose changes need an approval


class Change(ABC):
    """One kind of change."""

    at_once = True  # whether it is made by a call of the bus, which then holds it

    async def prepare(self, number: int) -> None:
        """Brings about what is changed."""
        return

    @abstractmethod
    async def make(self, number: int, bus: int) -> None:
        """Makes a change at a bus."""

    @abstractmethod
    async def holds(self, number: int, bus: int) -> bool:
        """Tells whether it holds at a bus."""


class Rule(Change):
    """Who may call a tool."""

    def __init__(self, operators: Sequence[Host]) -> None:
        self._operators = operators

    async def make(self, number: int, bus: int) -> None:
        rule = {"kind": "tools", "name": "rule", "users": [f"user-{number}"]}
        (await self._operators[bus].call("toolbus:permit", rule)).unwrap()

    async def holds(self, number: int, bus: int) -> bool:
        return f'"user-{number}"' in json.dumps((await self._operators[bus].call("toolbus:permissions")).unwrap())


class Role(Change):
    """A role that is added, or removed by the next change."""

    def __init__(self, operators: Sequence[Host]) -> None:
        self._operators = operators

    async def make(self, number: int, bus: int) -> None:
        act = "remove" if number % 2 else "add"
        (await self._operators[bus].call(f"toolbus:role_{act}", {"role": f"role-{number // 2}"})).unwrap()

    async def holds(self, number: int, bus: int) -> bool:
        roles = (await self._operators[bus].call("toolbus:stats")).unwrap()["roles"]
        return (f"role-{number // 2}" in roles) is not bool(number % 2)


class Approval(Change):
    """An approved change of a pinned plugin."""

    def __init__(self, operators: Sequence[Host], plugin: Plugin) -> None:
        self._operators, self._plugin = operators, plugin

    async def prepare(self, number: int) -> None:
        self._plugin.remove_tool("changing")
        self._plugin.add_tool(lambda: number, name="changing", description=f"Returns {number}.")
        while not await self._has_arrived(number):
            await asyncio.sleep(PAUSE_SECONDS)

    async def _has_arrived(self, number: int) -> bool:
        if number:
            return len(self._plugin.refused) == BUSES
        return all([await self.holds(number, bus) for bus in range(BUSES)])  # the first one is trusted

    async def make(self, number: int, bus: int) -> None:
        (await self._operators[bus].call("toolbus:approve", {"source": PINNED})).unwrap()

    async def holds(self, number: int, bus: int) -> bool:
        listed = await self._operators[bus].list(names=["changing"])
        return [each.tool.description for each in listed] == [f"Returns {number}."]


class Key(Change):
    """A key that is revoked in the files of one bus, which looks at them twice a second."""

    at_once = False

    def __init__(
        self, keys: Sequence[KeyStore], tokens: Sequence[str], urls: Sequence[str], client: httpx.AsyncClient
    ) -> None:
        self._keys, self._tokens, self._urls, self._client = keys, tokens, urls, client

    async def make(self, number: int, bus: int) -> None:
        await asyncio.to_thread(self._keys[bus].revoke, f"key-{number}")

    async def holds(self, number: int, bus: int) -> bool:
        token = {"Authorization": f"Bearer {self._tokens[number]}"}
        return (await self._client.get(f"{self._urls[bus]}/api/tools", headers=token)).status_code == 401


async def timed(change: Change, number: int, seconds: dict[int, float], here: int) -> bool:
    """Makes a change, and notes for each bus after how many seconds it held; returns whether it did at once here."""
    await change.prepare(number)
    await change.make(number, here)
    began = time.monotonic()

    async def look(bus: int) -> None:
        while not await change.holds(number, bus):
            if time.monotonic() - began > GIVE_UP_SECONDS:
                seconds[bus] = float("inf")
                return
            await asyncio.sleep(LOOK_SECONDS)
        seconds[bus] = time.monotonic() - began

    at_once = await change.holds(number, here) if change.at_once else True
    await asyncio.gather(*(look(bus) for bus in range(BUSES) if bus != here or not change.at_once))
    return at_once


def start(stage: Stage, storage: str, folders: Sequence[Path]) -> tuple[list[BusProcess], list[str]]:
    """Starts the buses; returns them, and their addresses for programs with a key."""
    buses, urls = [], []
    for folder, port in zip(folders, free_ports(BUSES), strict=True):
        (folder / "toolbus.toml").write_text(f'[pins]\n{PINNED} = "block"\n')
        options = ("--grpc", f"127.0.0.1:{port}", "--http", "off", "--https", "127.0.0.1:0", "--data-dir", str(folder))
        settings = {"TOOLBUS_STORAGE": storage, "TOOLBUS_CONFIG": str(folder / "toolbus.toml")}
        child = stage.start("toolbus", bus_command(*options), **settings)
        ready = child.line()
        buses.append(BusProcess(child, address_of(ready), ""))
        urls.append(f"https://{address_of(ready, 'https')}")
    return buses, urls


async def play(count: int, say: Callable[[str], None]) -> dict[str, tuple[list[float], int]]:
    """Makes so many changes of each kind; returns by kind the seconds until they held, and how many came late here."""
    outcome: dict[str, tuple[list[float], int]] = {}
    over = asyncio.Event()
    with running_server() as server, Stage() as stage:
        folders = [Path(stage.folder()) for _ in range(BUSES)]
        first = KeysDirectory(folders[0], now=time.time(), host="127.0.0.1")
        tokens = [first.add(f"key-{number}")["token"] for number in range(count)]
        for folder in folders[1:]:
            shutil.copytree(first.path, folder / "keys")
        keys = [KeyStore(folder / "keys", time.time) for folder in folders]
        buses, urls = await asyncio.to_thread(start, stage, server.url("postgres"), folders)
        address = ",".join(bus.grpc for bus in buses)
        async with contextlib.AsyncExitStack() as stack:
            plugin = await stack.enter_async_context(plugin_of(address, lambda number: None))
            pinned = await stack.enter_async_context(Plugin(PINNED, address=address))
            await plugin.ready()
            hosts = [await stack.enter_async_context(Host(address, source=f"host-{n}")) for n in range(HOSTS)]
            operators = [await stack.enter_async_context(Host(bus.grpc, source=f"op-{bus.grpc}")) for bus in buses]
            tally = Tally()
            callers = await stack.enter_async_context(asyncio.TaskGroup())
            for n in range(CALLERS):
                callers.create_task(call_on(hosts[n % HOSTS], n, tally, over))
            client = await stack.enter_async_context(httpx.AsyncClient(verify=False))  # an authority of this run
            kinds: dict[str, Change] = {
                "a rule": Rule(operators),
                "a role": Role(operators),
                "an approved pin": Approval(operators, pinned),
                "a revoked key": Key(keys, tokens, urls, client),
            }
            for kind, change in kinds.items():
                seconds: list[float] = []
                late = 0
                for number in range(count):
                    each: dict[int, float] = {}
                    late += not await timed(change, number, each, number % BUSES)
                    seconds += each.values()
                outcome[kind] = (seconds, late)
                say(f"{kind}: {count} changes")
            over.set()
    return outcome


def judge(outcome: dict[str, tuple[list[float], int]], hold_seconds: float = HOLD_SECONDS) -> list[Verdict]:
    """Returns the verdicts about a run, in which changes have to hold after so many seconds."""
    verdicts = []
    for kind, (seconds, late) in outcome.items():
        half, most, longest = quantile(seconds, 0.5), quantile(seconds, 0.99), max(seconds)
        shown = f"{half:.3f} s, {most:.3f} s, {longest:.3f} s"
        what = f"{kind} holds at every other bus after (half, 99 of 100, longest)"
        verdicts.append(Verdict(what, f"≤ {hold_seconds:g} s", shown, most <= hold_seconds))
        verdicts.append(none(f"changes of {kind} that did not hold in the next call of the same bus", late))
    return verdicts


def main() -> int:
    """Runs the command line; returns the exit code."""
    parser = parser_of("changes", __doc__)
    parser.add_argument("--count", type=int, default=60, help="changes of each kind (default: 60)")
    add_results(parser, "all times")
    options = parser.parse_args()
    if find_programs() is None:
        parser.error(f"Postgres is not installed: {INSTALL}")
    console = console_of()
    logging.getLogger("toolbus.sdk").setLevel(logging.ERROR)  # every change of the pinned plugin is refused at first
    outcome = asyncio.run(play(options.count, printer(console)))
    verdicts = judge(outcome)
    verdict_table("Changes at one of several buses", verdicts).show(console)
    write_json(options.json, {kind: seconds for kind, (seconds, _) in outcome.items()})
    return int(not all(verdict.good for verdict in verdicts))


if __name__ == "__main__":
    run(main)
