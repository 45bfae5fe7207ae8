"""Runs what a page shows against a bus of its own: plugins as processes, hosts in this process."""

from __future__ import annotations

import asyncio
import inspect
import io
import os
import queue
import runpy
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, chdir, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import grpc
import pytest

from tests.docs.pages import ROOT, Block
from tests.support.fork_server import Forked, fork, fork_python
from toolbus.sdk import Plugin
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc

MAX_SECONDS = 60.0  # for anything here on a loaded machine; nothing waits for it to pass


@dataclass(frozen=True)
class Addresses:
    """Where a bus and a model listen."""

    grpc: str
    http: str
    model: str

    def variables(self) -> dict[str, str]:
        bus = {"TOOLBUS_ADDRESS": self.grpc, "MAIN_SERVER": f"http://{self.http}"}
        return bus | {"OPENAI_BASE_URL": self.model, "OPENAI_API_KEY": "none", "NO_PROXY": "*"}


@contextmanager
def process(arguments: list[str], folder: Path, addresses: Addresses) -> Iterator[None]:
    """Runs Python until the block is left, then asks it to end; its exit code has to be 0."""
    errors = folder / "stderr"
    environment = {**os.environ, **addresses.variables(), "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "NONE"}
    with errors.open("a+b") as stderr, (folder / "stdout").open("a+b") as stdout, chdir(folder):
        running = _start(arguments, environment, stdout, stderr)
    try:
        yield
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            code = running.wait(MAX_SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()
            raise
    assert code == 0, f"{arguments} ended with {code}:\n{errors.read_text('utf-8')}"


def _start(arguments: list[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]) -> Forked:
    if arguments[:2] == ["-m", "toolbus.cli"]:
        return fork(arguments[2:], environment, out, err)
    with open(os.devnull, "rb") as null:
        return fork_python(arguments, environment, {0: null.fileno(), 1: out.fileno(), 2: err.fileno()})


@contextmanager
def _catalog_changes(address: str) -> Iterator[Iterator[wire.CatalogChange]]:
    """Yields the changes of a catalog, the full list first."""
    attach = wire.Attach(protocol_version=1, source="docs", subscribe=[wire.SUBSCRIPTION_CATALOG])
    requests: queue.SimpleQueue[wire.InvokeRequest | None] = queue.SimpleQueue()
    requests.put(wire.InvokeRequest(attach=attach))
    with grpc.insecure_channel(address) as channel:
        stream = rpc.ToolBusServiceStub(channel).Invoke(iter(requests.get, None), timeout=MAX_SECONDS)
        yield (event.catalog for frame in stream for event in frame.events)
        requests.put(None)


@contextmanager
def _until_tools_arrive(arguments: list[str], folder: Path, addresses: Addresses, sources: int = 1) -> Iterator[None]:
    """Runs a process that offers tools; the block begins when the bus has those of so many sources."""
    with ExitStack() as running:
        with _catalog_changes(addresses.grpc) as changes:
            assert next(changes).full
            running.enter_context(process(arguments, folder, addresses))
            try:
                seen: set[str] = set()
                while len(seen) < sources:
                    seen |= {entry.source for entry in next(changes).added}
            except grpc.RpcError:
                pytest.fail(f"{arguments} offered no tools\n{(folder / 'stderr').read_text('utf-8')}")
        yield


@contextmanager
def plugin(block: Block, folder: Path, addresses: Addresses) -> Iterator[None]:
    """Runs a plugin file as ``python FILE`` or as ``toolbus run`` does."""
    (folder / block.file).write_text(block.text, "utf-8")
    arguments = [block.file] if block.is_program else ["-m", "toolbus.processes.plugin_process", block.file]
    with _until_tools_arrive(arguments, folder, addresses):
        yield


@contextmanager
def borrowed_plugin(block: Block, folder: Path) -> Iterator[None]:
    """Runs the plugin of another page in this process; on its own page it runs as a process."""
    (folder / block.file).write_text(block.text, "utf-8")
    borrowed = runpy.run_path(str(folder / block.file), run_name="borrowed")["plugin"]
    assert isinstance(borrowed, Plugin)

    async def begin() -> None:
        await borrowed.start()
        await borrowed.ready()

    asyncio.run(begin())
    try:
        yield
    finally:
        asyncio.run(borrowed.close())


@contextmanager
def tool_folder(drop_ins: list[Block], folder: Path, addresses: Addresses) -> Iterator[None]:
    """Runs the drop-in files of a page as ``toolbus run tools/`` does."""
    tools = folder / "tools"
    tools.mkdir()
    for block in drop_ins:
        (tools / block.file).write_text(block.text, "utf-8")
    languages = {block.kind for block in drop_ins}  # each has a process and a source of its own
    with _until_tools_arrive(["-m", "toolbus.cli", "run", "tools/"], folder, addresses, len(languages)):
        yield


def output_of(block: Block, folder: Path) -> str:
    """Runs a snippet as a program, in this process, or the tests in it; returns what it printed."""
    file = folder / (block.file or "snippet.py")
    file.write_text(block.text, "utf-8")
    with redirect_stdout(io.StringIO()) as printed:
        names = runpy.run_path(str(file), run_name="__main__")
        for name, test in names.items():
            if name.startswith("test_") and inspect.iscoroutinefunction(test):
                asyncio.run(test())
    return printed.getvalue()
