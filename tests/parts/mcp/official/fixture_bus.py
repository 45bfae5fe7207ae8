"""Starts a bus with what the conformance suite of MCP calls, in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from lab.stage import free_ports
from tests.parts.mcp.official import fixture_plugin
from tests.support.processes import ROOT, Running
from toolbus.processes.lifeline import Lifeline

Transport = Literal["stdio", "http"]

TRANSPORTS: tuple[Transport, ...] = ("stdio", "http")
MOUNT = "fixture"  # the name of the mounted server
FIXTURE_SERVER = Path(__file__).with_name("fixture_server.py")
# A call becomes a task soon, so that the scenarios of tasks need not wait; names are those of the suite, without the
# source before them.
CONFIG = f"""
[mcp]
task_after = 0.5

[mcp.profiles.default]
bare = ["{fixture_plugin.SOURCE}", "{MOUNT}"]
"""
SDK = Path(sys.prefix) / "mcp-sdk"  # where the examples of the official SDK are unpacked


class RunningModule(Running):
    """A module that keeps running."""

    def _command(self, words: tuple[str | Path, ...]) -> list[str | Path]:
        return [sys.executable, "-m", *words]


@contextlib.contextmanager
def _tied(command: Running) -> Iterator[Running]:
    """Runs a command until the block is left; it ends with this process too, also where that is killed."""
    with Lifeline() as lifeline, command:
        lifeline.add(command.process.pid)
        yield command


@contextlib.contextmanager
def running(folder: Path) -> Iterator[str]:
    """Runs a bus, the plugin that offers the tools, and the server that has the rest; gives the endpoint's URL."""
    server = {"command": sys.executable, "args": [str(FIXTURE_SERVER)]}
    with (
        _bus(folder, server) as (grpc, url),
        _tied(RunningModule(folder, "tests.parts.mcp.official.fixture_plugin", grpc)) as plugin,
    ):
        plugin.says("ready")
        yield url


@contextlib.contextmanager
def mounted(folder: Path, transport: Transport, *, legacy: bool) -> Iterator[str]:
    """Runs a bus that has everything from the SDK's own server; gives the endpoint's URL.

    Args:
        legacy: whether the server speaks the legacy era alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join((str(everything_server()), str(ROOT)))
    words = ["tests.parts.mcp.official.everything_server", transport, *(["--legacy"] if legacy else [])]
    with contextlib.ExitStack() as stack:
        if transport == "stdio":
            server: dict[str, Any] = {
                "command": sys.executable,
                "args": ["-m", *words],
                "env": {"PYTHONPATH": path},
            }
        else:
            (port,) = free_ports(1)
            running = RunningModule(folder, *words, "--port", str(port), PYTHONPATH=path)
            stack.enter_context(_tied(running)).says("Uvicorn running")
            server = {"type": "http", "url": f"http://127.0.0.1:{port}/mcp"}
        yield stack.enter_context(_bus(folder, server))[1]


@contextlib.contextmanager
def _bus(folder: Path, server: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Runs a bus that mounts a server; gives its address for gRPC and the URL of its endpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "data"
    data.mkdir(mode=0o700, exist_ok=True)
    config, servers = folder / "toolbus.toml", data / "mcp.json"
    config.write_text(CONFIG, encoding="utf-8")
    servers.write_text(json.dumps({"mcpServers": {MOUNT: server}}), encoding="utf-8")
    servers.chmod(0o600)
    words: list[str | Path] = ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--data-dir", data]
    with _tied(Running(folder, "serve", "--config", config, *words)) as bus:
        bus.says("toolbus ready")
        ready = re.search(r"grpc=(\S+) http=(\S+)", bus.out)
        assert ready, bus.out
        bus.says(f"mount {MOUNT}: live")  # the first start of a server takes longer than that of a bus
        yield ready[1].split(",")[0], f"http://{ready[2]}/mcp"


def everything_server() -> Path:
    """Returns the folder of the SDK's everything-server, which only its source package has; fetches it once."""
    found = next(iter(SDK.glob(f"mcp-{version('mcp')}/examples/servers/everything-server")), None)
    if found is None:
        SDK.mkdir(parents=True, exist_ok=True)
        print("fetching the examples of the SDK (pip builds its metadata, which takes minutes) …", flush=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--dest", str(SDK), f"mcp=={version('mcp')}"], check=True)
        with tarfile.open(next(SDK.glob("mcp-*.tar.gz"))) as archive:
            archive.extractall(SDK, filter="data")
        return everything_server()
    return found
