"""Ends of the process of scripts: of calls around it, each has an outcome that is true; the scripts come back."""

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.parts.dropin.test_script_group import registration
from tests.support.processes import Running
from tests.support.tool_folders import OfferedFolder, offered_folder, tool
from tests.support.waiting import until, until_sync, within
from toolbus.errors import Code, Stage
from toolbus.processes.supervisor import RestartPolicy
from toolbus.protocol.tool import Result
from toolbus.sdk import Host

PATIENT = RestartPolicy(backoff_seconds=0.01, max_deaths=99)
CALLS = 200
ENDS = 3  # of the process, around which they arrive
BODY = """
  print(`ran ${args.n}.`);
  if (args.bad === 'flood') { (async () => { while (true) await null })(); return new Promise(() => {}) }
  if (args.bad === 'heap') { globalThis.kept = []; while (true) kept.push('x'.repeat(1e6) + kept.length) }
  if (args.bad === 'slices') {
    return new Promise(() => setInterval(() => { const end = Date.now() + 50; while (Date.now() < end); }, 1));
  }
  return args.wait ? new Promise(() => {}) : args.n
"""
BAD = {
    "flood": "a script started jobs without end, for more than 0.333 s of processor time",
    "heap": "the scripts of this scope reached their limit of 64 MiB of memory",
}


def write(folder: Path) -> None:
    manifest = {"files": {"greedy.js": {"cpu_seconds": 1, "memory_mb": 128}}}
    (folder / "_manifest.json").write_text(json.dumps(manifest))
    (folder / "greedy.js").write_text(registration("greedy", BODY))


class Arrivals:
    """Calls that arrive every few milliseconds while the process of the scripts ends and another one comes."""

    def __init__(self, host: Host) -> None:
        self.results: dict[int, Result] = {}
        self._host = host
        self._made = 0

    async def call(self, **arguments: object) -> Result:
        self._made += 1
        number = self._made
        result = await self._host.call("greedy", {"n": number, **arguments}, timeout=60)
        if not arguments:
            self.results[number] = result
        return result

    async def around(self, end: Callable[[], object], offered: Callable[[], int]) -> None:
        for _ in range(ENDS):
            before, calls = offered(), list[asyncio.Task[Result]]()
            end()
            while offered() == before or len(calls) <= CALLS / ENDS:
                calls.append(asyncio.create_task(self.call()))
                await asyncio.sleep(0.002)  # they come at any moment: before the end, in it, and after it
            await within(asyncio.gather(*calls))

    def check(self, text: str, *, may_lose: bool) -> None:
        """Compares each result with what the scripts printed."""
        ran = Counter(map(int, re.findall(r"ran (\d+)\.", text)))
        assert len(self.results) >= CALLS
        for number, result in self.results.items():
            if result.error is None:
                assert result.output == number
                assert ran[number] == 1 or may_lose
            else:
                assert may_lose, result
                wrong = (result.error.code, result.error.stage, result.error.retry_safe)
                assert wrong == (Code.UNAVAILABLE, Stage.DISPATCHED, False), result


def offers(folder: OfferedFolder) -> Callable[[], int]:
    return lambda: len(re.findall(r"greedy\S+ offered ", folder.text))


async def test_calls_around_an_end_that_a_script_causes_wait_for_the_next_process(tmp_path: Path) -> None:
    write(tmp_path)
    causes = [*BAD, "flood"]
    async with offered_folder(tmp_path) as folder:
        await folder.wait_for_report(" offered ")
        async with Host(folder.bus.grpc_addresses[0]) as host:
            arrivals, ended = Arrivals(host), list[asyncio.Task[Result]]()
            await arrivals.around(
                lambda: ended.append(asyncio.create_task(arrivals.call(bad=causes[len(ended)]))), offers(folder)
            )
            for result, cause in zip(await within(asyncio.gather(*ended)), causes, strict=True):
                assert result.error is not None
                assert (result.error.code, result.error.stage) == (Code.TOOL, Stage.ACCEPTED)
                assert BAD[cause] in result.error.message
            arrivals.check(folder.text, may_lose=False)
        assert not re.search(" died ", folder.text)


async def test_a_killed_process_of_scripts_loses_only_calls_that_may_have_run(tmp_path: Path) -> None:
    write(tmp_path)
    async with offered_folder(tmp_path, restarts=PATIENT) as folder:
        await folder.wait_for_report(" offered ")

        def kill() -> None:
            pid = int(re.findall(r"started \(pid (\d+)", folder.text)[-1])
            asyncio.get_running_loop().call_later(0.05, os.kill, pid, signal.SIGKILL)

        async with Host(folder.bus.grpc_addresses[0]) as host:
            arrivals = Arrivals(host)
            await arrivals.around(kill, offers(folder))
            arrivals.check(folder.text, may_lose=True)
            assert sum(result.error is not None for result in arrivals.results.values()) < CALLS / 2


async def test_calls_of_a_folder_in_toolbus_run_wait_for_the_next_process_too(tmp_path: Path) -> None:
    (folder := tmp_path / "tools").mkdir()
    write(folder)
    with Running(tmp_path, "serve", "--ephemeral", "--http", "off", "--grpc", "127.0.0.1:0") as bus:
        bus.says("toolbus ready")
        until_sync(lambda: bus.out.endswith("\n"), "the whole line")
        address = re.findall(r"grpc=(\S+)", bus.out)[0]
        with Running(tmp_path, "run", folder, "--bus", address) as run:
            await until(lambda: " * offers greedy" in run.err, "the offer")
            async with Host(address) as host:
                arrivals, ended = Arrivals(host), list[asyncio.Task[Result]]()
                await arrivals.around(
                    lambda: ended.append(asyncio.create_task(arrivals.call(bad="flood"))),
                    lambda: run.err.count(" * offers greedy"),
                )
                assert {result.error and result.error.code for result in await within(asyncio.gather(*ended))} == {
                    Code.TOOL
                }
            await until(lambda: len(re.findall(r"ran \d+\.", run.out)) >= len(arrivals.results), "the output")
            arrivals.check(run.out, may_lose=False)


async def test_a_call_beyond_its_time_ends_with_its_timers_and_its_neighbors_go_on(tmp_path: Path) -> None:
    write(tmp_path)
    async with offered_folder(tmp_path) as folder:
        await folder.wait_for_report(" offered ")
        async with Host(folder.bus.grpc_addresses[0]) as host:
            waiting = asyncio.create_task(host.call("greedy", {"n": 1, "wait": 1}, timeout=5))
            await folder.wait_for_report(r"ran 1\.")
            ended = (await within(host.call("greedy", {"n": 2, "bad": "slices"}))).error
            assert ended is not None
            assert ended.code is Code.TOOL
            assert "the script computed for more than 1 s in all, so it was stopped" in ended.message
            assert (await host.call("greedy", {"n": 3})).unwrap() == 3
            timed_out = (await within(waiting)).error
            assert timed_out is not None
            assert timed_out.code is Code.DEADLINE_EXCEEDED
        assert len(await folder.pids()) == 1


async def test_a_file_that_ends_the_scope_while_it_is_loaded_is_left_out_and_the_others_are_offered(
    tmp_path: Path,
) -> None:
    (tmp_path / "_manifest.json").write_text(json.dumps({"files": {"floods.js": {"cpu_seconds": 1}}}))
    (tmp_path / "floods.js").write_text(registration("floods", "return 1") + ";(async () => { for (;;) await 0 })()")
    (tmp_path / "_first.js").write_text(registration("first", "return 1"))
    (tmp_path / "own.py").write_text(tool("own", "1"))
    async with offered_folder(tmp_path) as folder:
        await folder.wait_for_report("floods.js: is not loaded, since a script started jobs without end")
        await until(lambda: set(folder.names()) == {"first", "own"}, "the others")
        assert await folder.call("own") == "1"
