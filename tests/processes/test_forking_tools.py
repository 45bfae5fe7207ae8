"""Tools that start processes: their own call and the connection of their plugin survive it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import environment
from tests.support.waiting import HANG_SECONDS
from toolbus.testing import running_bus

FORKS = """
import multiprocessing, os, subprocess, sys, time
from concurrent.futures import ProcessPoolExecutor
from toolbus import Plugin

plugin = Plugin("forks")
fork = multiprocessing.get_context("fork")

def square(number):
    time.sleep(0.02)
    return number * number

@plugin.tool(timeout=120)
def pooled() -> int:
    with ProcessPoolExecutor(4, mp_context=fork) as pool:
        return sum(pool.map(square, range(45)))

@plugin.tool(timeout=120)
def children() -> int:
    begun = [fork.Process(target=square, args=(1,)) for _ in range(45)]
    for each in begun:
        each.start()
    for each in begun:
        each.join()
    return sum(each.exitcode for each in begun)

@plugin.tool(timeout=120)
def forked() -> int:
    ids = []
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            os.execv(sys.executable, [sys.executable, "-c", "pass"])
        ids.append(pid)
    return sum(os.waitpid(pid, 0)[1] for pid in ids)

@plugin.tool(timeout=120)
def spawned() -> str:
    return subprocess.run(["echo", "hey"], capture_output=True, text=True).stdout.strip()

@plugin.tool(timeout=120)
def spawned_pool() -> int:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        return sum(pool.map(square, range(5)))

if __name__ == "__main__":
    plugin.run()
"""
PREFORKS = """
import os, signal
from toolbus import Host, Plugin, SyncHost

pid = os.fork()
if pid == 0:
    plugin = Plugin("worker")

    @plugin.tool
    def hello() -> str:
        return "hey"

    plugin.run()
    os._exit(0)
signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
os.waitpid(pid, 0)
"""

# A host that calls in each child of a program that forks first; grpc is imported before, as with gunicorn's preload.
FORKED_HOSTS = """
import asyncio, gc, os, sys
from concurrent.futures import ThreadPoolExecutor
import toolbus
from toolbus import Host, SyncHost
import toolbus.sdk.host, grpc

async def ask():
    async with Host() as host:
        return (await host.call("square", {"number": 3})).output

def sync():
    with SyncHost() as host:
        return host.call("square", {"number": 3}).output

def work(way):
    return asyncio.run(ask()) if way % 2 else sync()

def child(way):
    pid = os.fork()
    if pid == 0:
        code = 9
        try:
            code = work(way)
        finally:
            os._exit(code)
    return pid

codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in map(child, range(4))]
grandchild = os.fork()
if grandchild == 0:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child(1), 0)[1]))
codes.append(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))

# A host that is made before the forks is one of its own in each.
shared, (here, ready), (go, there) = SyncHost(), os.pipe(), os.pipe()

gc.disable()  # the loop of its parent is still counted

def sockets():
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")] if sys.platform == "linux" else []
    return {link for fd in fds if os.path.islink(fd) and "socket" in (link := os.readlink(fd))}

def work(way):
    before = sockets()
    with ThreadPoolExecutor(4) as threads:  # which make its first calls at once
        list(threads.map(lambda number: shared.call("square", {"number": number}).unwrap(), range(4)))
    alone = len(sockets() - before) > 2 or sys.platform != "linux"  # to the bus, and two that wake the loop
    os.write(ready, b".")
    os.read(go, 1)  # all have attached
    squared = shared.call("square", {"number": 3}).unwrap()
    return squared if alone else 8  # with a loop that its parent made each process takes wake-ups of all


children = [child(0), child(0), child(0)]
for _ in children:
    os.read(here, 1)
os.write(there, b"...")
codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
shared.call("square", {"number": 3})

def work(way):
    try:
        shared.call("square", {"number": 3})
    except toolbus.SetupError as error:
        return 9 if "was used before this process was forked" in str(error) else 7

codes.append(os.waitstatus_to_exitcode(os.waitpid(child(0), 0)[1]))
shared.close()
print(codes, flush=True)
"""
SPAWNING_PLUGIN = """
import multiprocessing, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
from plugin.sdk.plugin import NekoPluginBase, llm_tool, neko_plugin
from .work import square

@neko_plugin
class SpawnsPlugin(NekoPluginBase):
    @llm_tool(description="Computes in other processes.", timeout=120)
    def spawned(self, *, way: str):
        context = multiprocessing.get_context(way)
        with ProcessPoolExecutor(2, mp_context=context) as pool:
            return sum(pool.map(square, range(5)))

    @llm_tool(description="Runs a program.", timeout=120)
    async def program(self):
        return subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, text=True).stdout.strip()
"""


async def _started(*words: str, address: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, *words, env=environment({"TOOLBUS_ADDRESS": address}))


@pytest.mark.parametrize("way", [[], ["-m", "toolbus.cli", "run"]], ids=["python", "toolbus run"])
async def test_a_tool_may_start_processes(tmp_path: Path, way: list[str]) -> None:
    file = tmp_path / "forks.py"
    file.write_text(FORKS)
    async with running_bus() as bus:
        plugin = await _started(*way, str(file), address=bus.grpc_addresses[0])
        try:
            await _offered(bus, 5)
            assert (await bus.call("spawned_pool", {}, timeout=120)).output == 30
            for _ in range(2):
                results = await asyncio.gather(
                    *(bus.call(name, {}, timeout=120) for name in ("pooled", "children", "forked", "spawned"))
                )
                assert [each.error for each in results] == [None] * 4
                assert [each.output for each in results] == [sum(n * n for n in range(45)), 0, 0, "hey"]
        finally:
            plugin.terminate()
            await plugin.wait()


async def test_a_plugin_in_the_child_of_a_program_that_forks_first_works(tmp_path: Path) -> None:
    file = tmp_path / "preforks.py"
    file.write_text(PREFORKS)
    async with running_bus() as bus:
        program = await _started(str(file), address=bus.grpc_addresses[0])
        try:
            await _offered(bus, 1)
            assert (await bus.call("hello", {})).output == "hey"
        finally:
            program.terminate()
            await program.wait()


async def _offered(bus: Any, number: int) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        async for _ in bus.watch():
            if len(bus.list()) == number:
                return


@pytest.mark.parametrize(("given", "found"), [({}, "0"), ({"GRPC_ENABLE_FORK_SUPPORT": "1"}, "1")])
async def test_what_the_user_has_set_for_forks_stays(given: dict[str, str], found: str) -> None:
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "import os, toolbus; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'])"),
        env=environment(given),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await program.communicate()
    assert out.decode().strip() == found


async def test_a_host_in_the_children_of_a_program_that_forks_first_works(tmp_path: Path) -> None:
    file = tmp_path / "hosts.py"
    file.write_text(FORKED_HOSTS)
    async with running_bus() as bus:

        def square(number: int) -> int:
            return number * number

        bus.tool(square)
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, str(file)),
            env=environment({"TOOLBUS_ADDRESS": bus.grpc_addresses[0]}),
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(HANG_SECONDS):
            out, _ = await program.communicate()
    assert out.decode().strip() == str([9] * 9)


async def test_a_plugin_folder_of_n_e_k_o_may_start_processes(tmp_path: Path) -> None:
    folder = tmp_path / "plugins" / "spawns"
    folder.mkdir(parents=True)
    entry = "plugins.spawns:SpawnsPlugin"
    (folder / "plugin.toml").write_text(f'[plugin]\nid = "spawns"\nname = "Spawns"\nentry = "{entry}"\n')
    (folder / "__init__.py").write_text(SPAWNING_PLUGIN)
    (folder / "work.py").write_text("def square(number):\n    return number * number\n")
    async with running_bus() as bus:
        program = await _started("-m", "toolbus.cli", "run", str(folder), address=bus.grpc_addresses[0])
        try:
            async with asyncio.timeout(HANG_SECONDS):
                async for _ in bus.watch():
                    if "program" in [each.entry.tool.name for each in bus.list()]:
                        break
            for way in ("fork", "spawn", "forkserver"):
                result = await bus.call("spawned", {"way": way}, timeout=120)
                assert result.output == 30, (way, result.error)
            assert (await bus.call("program", {}, timeout=120)).output == "7"
        finally:
            program.terminate()
            await program.wait()
