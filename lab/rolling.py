"""Restarts three buses one after the other, under hosts of every kind, and counts the calls that fail.

SDK hosts and `toolbus mcp` have the addresses of all buses; a program over REST has all URLs, and goes to the next one
where a bus does not listen or drains; `toolbus call` is started anew for each call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

import httpx

from lab.buses import BUSES, plugin_of
from lab.commands import add_results, console_of, parser_of, printer, run, write_json
from lab.judge import Verdict
from lab.report import verdict_table
from lab.stage import BusProcess, Stage, free_ports
from toolbus.sdk import Host

HOSTS, CALLERS = 4, 16  # of the SDK
UP_SECONDS = 3.0  # between two restarts
REST_PAUSE, REST_SECONDS = 0.05, 20.0
Tally = Counter[tuple[str, str]]  # by the kind of host and how its call ended: "ok", or the failure


async def sdk(host: Host, tally: Tally, over: asyncio.Event) -> None:
    while not over.is_set():
        result = await host.call("write", {"number": 1})
        tally["SDK", "ok" if result.error is None else str(result.error)] += 1


async def rest(urls: Sequence[str], tally: Tally, over: asyncio.Event) -> None:
    place = 0
    async with httpx.AsyncClient(timeout=30.0) as client:
        while not over.is_set():
            until, text = time.monotonic() + REST_SECONDS, ""
            while time.monotonic() < until:
                try:
                    body = {"name": "write", "arguments": {"number": 1}}
                    answer = await client.post(f"{urls[place]}/api/tools/invoke", json=body)
                except httpx.ConnectError:
                    text = "no bus listens"
                else:
                    text = "" if answer.status_code == 200 and not answer.json().get("is_error") else answer.text[:200]
                    if "NOT_DISPATCHED" not in answer.text:
                        break
                place = (place + 1) % len(urls)
                await asyncio.sleep(REST_PAUSE)
            tally["REST", text or "ok"] += 1


async def mcp(address: str, tally: Tally, over: asyncio.Event) -> None:
    command = (sys.executable, "-m", "toolbus.cli", "mcp", "--bus", address)
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.DEVNULL}
    process = await asyncio.create_subprocess_exec(*command, **pipes)  # type: ignore[arg-type]
    assert process.stdin is not None
    assert process.stdout is not None
    number = 0

    async def ask(method: str, params: Mapping[str, object]) -> dict[str, object]:
        nonlocal number
        number += 1
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        process.stdin.write(json.dumps(message).encode() + b"\n")  # type: ignore[union-attr]
        while True:
            answer: dict[str, object] = json.loads(await process.stdout.readline())  # type: ignore[union-attr]
            if answer.get("id") == number:
                return answer

    about = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "rolling", "version": "1"}}
    await ask("initialize", about)
    process.stdin.write(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n')
    while not over.is_set():
        answer = await ask("tools/call", {"name": "write", "arguments": {"number": 1}})
        result = answer.get("result")
        good = isinstance(result, dict) and not result.get("isError")
        tally["MCP", "ok" if good else json.dumps(answer)[:200]] += 1
    process.terminate()
    await process.wait()


async def cli(address: str, tally: Tally, over: asyncio.Event) -> None:
    while not over.is_set():
        command = (sys.executable, "-m", "toolbus.cli", "call", "write", "number=1", "--bus", address)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        _, text = await process.communicate()
        tally["CLI", "ok" if process.returncode == 0 else text.decode()[:200]] += 1


async def play(rounds: int, say: Callable[[str], None]) -> Tally:
    """Restarts each bus so often."""
    tally, over = Tally(), asyncio.Event()
    with contextlib.ExitStack() as ending:
        stage = ending.enter_context(Stage())
        ports = free_ports(2 * BUSES)
        grpc = [f"127.0.0.1:{port}" for port in ports[:BUSES]]
        http = [f"127.0.0.1:{port}" for port in ports[BUSES:]]

        async def start(number: int) -> BusProcess:
            return await asyncio.to_thread(stage.bus, grpc=grpc[number], http=http[number])

        buses = [await start(number) for number in range(BUSES)]
        address, urls = ",".join(grpc), [f"http://{each}" for each in http]
        async with contextlib.AsyncExitStack() as stack:
            plugin = await stack.enter_async_context(plugin_of(address, lambda number: None))
            await plugin.ready()
            hosts = [await stack.enter_async_context(Host(address, source=f"host-{n}")) for n in range(HOSTS)]
            callers: list[Awaitable[None]] = [sdk(hosts[n % HOSTS], tally, over) for n in range(CALLERS)]
            callers += [rest(urls, tally, over), mcp(address, tally, over), cli(address, tally, over)]
            tasks = [asyncio.ensure_future(each) for each in callers]
            for number in [*range(BUSES)] * rounds:
                await asyncio.sleep(UP_SECONDS)
                say(f"restart: bus {number} at {grpc[number]}")
                buses[number].child.send_signal(signal.SIGTERM)
                await asyncio.to_thread(buses[number].child.wait)
                buses[number] = await start(number)
            await asyncio.sleep(UP_SECONDS)
            over.set()
            await asyncio.gather(*tasks)
    return tally


def judge(tally: Tally) -> list[Verdict]:
    """Returns the verdicts about a run, one for each kind of host."""
    verdicts = []
    for kind in ("SDK", "REST", "MCP", "CLI"):
        failed = sum(count for (who, how), count in tally.items() if who == kind and how != "ok")
        verdicts.append(Verdict(f"failed calls, {kind}", "0", f"{failed} of {failed + tally[kind, 'ok']}", failed == 0))
    return verdicts


def main() -> int:
    """Runs the command line; returns the exit code."""
    parser = parser_of("rolling", __doc__)
    parser.add_argument("--rounds", type=int, default=2, help="restarts of each bus (default: 2)")
    add_results(parser, "the outcomes")
    options = parser.parse_args()
    console = console_of()
    say = printer(console)
    tally = asyncio.run(play(options.rounds, say))
    for (kind, how), count in sorted(tally.items()):
        if how != "ok":
            say(f"{kind}: {count} × {how}")
    verdicts = judge(tally)
    verdict_table("Rolling restart", verdicts).show(console)
    write_json(options.json, {f"{kind} {how}": count for (kind, how), count in tally.items()})
    return int(not all(verdict.good for verdict in verdicts))


if __name__ == "__main__":
    run(main)
