"""Shows what came of a mount: waits for the bus that follows the file, or starts the server once without a bus."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import functools
import math
import os
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolbus.bus.storage.store import LOCK, Store
from toolbus.cli import terminal
from toolbus.cli.bus_client import BusTarget, with_host
from toolbus.errors import SetupError
from toolbus.parts.mcp.commands.mounts_command import print_mount

if TYPE_CHECKING:
    from toolbus.sdk import Host

WAIT_SECONDS = 330.0  # an installation may take 300 s
DOWN_SECONDS = 3.0  # to wait for a server over HTTP that cannot be reached: the bus goes on trying
LOOK_SECONDS = 0.2
_SETTLED = ("live", "degraded", "failed", "needs login")
_GOOD = ("live", "degraded")


def show_mounted(name: str, data_dir: Path, bus: BusTarget, *, remote: bool, as_json: bool) -> None:
    """Prints a mount that was just written, with its tools; ends the command with 1 if its server does not start."""
    try:
        if _is_served(data_dir):
            answer = with_host(bus, lambda host: settled(lambda: _ask(host, name), remote=remote))
        else:
            terminal.print_note("no bus runs with this data directory: the server is started once, to show its tools")
            answer = asyncio.run(_start_once(name, data_dir))
    except SetupError as error:
        terminal.fail(str(error))
    except KeyboardInterrupt:
        terminal.fail(f"mount {name} is written; `toolbus unmount {name}` removes it", terminal.INTERRUPTED)
    if as_json:
        terminal.print_json(answer)
    if name in answer["refused"]:
        terminal.fail(answer["refused"][name])
    [mount] = answer["mounts"]
    if not as_json:
        print_mount(mount)
    if mount["state"] not in _GOOD:
        for line in answer.get("log", ())[-10:]:
            terminal.print_note(line)
        how = f"`toolbus mounts logs {name}` shows why, `toolbus unmount {name}` removes it"
        if remote and mount["state"] != "needs login":
            how = (
                f"start it or correct --url with --replace; the bus goes on trying; `toolbus unmount {name}` removes it"
            )
        terminal.fail(f"mount {name} is written, but its server is not ready ({mount['state']}): {how}")


def _is_served(data_dir: Path) -> bool:
    """Tells whether a bus holds the data directory."""
    try:
        handle = os.open(data_dir / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


async def _ask(host: Host, name: str) -> dict[str, Any]:
    result = await host.call("toolbus:mounts", {})
    if result.is_error:
        raise SetupError(f"the bus says: {result.text}")
    answer: dict[str, Any] = result.output
    if name in {mount["name"] for mount in answer["mounts"]}:
        answer = (await host.call("toolbus:mounts", {"name": name})).output
        log = (await host.call("toolbus:mount_logs", {"name": name})).output
        answer["log"] = log["lines"]
    return answer


async def settled(
    look: Callable[[], Awaitable[dict[str, Any]]], *, remote: bool, down_seconds: float = DOWN_SECONDS
) -> dict[str, Any]:
    """Returns what the bus reports of a mount, as soon as its server runs or has failed.

    Args:
        remote: whether it is a server over HTTP, which needs no installation.
        down_seconds: how long to wait for such a server after its first failure.
    """
    state = ""
    clock = asyncio.get_running_loop().time
    down_since = math.inf
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                answer = await look()
                mounts = [mount for mount in answer["mounts"] if "declared" in mount]
                if (answer["refused"] and not mounts) or (mounts and mounts[0]["state"] in _SETTLED):
                    return answer
                if remote and mounts and mounts[0]["last_error"]:
                    down_since = min(down_since, clock())
                    if clock() - down_since >= down_seconds:
                        return answer
                if mounts and mounts[0]["state"] != state and mounts[0]["state"] != "stopped":
                    state = mounts[0]["state"]
                    terminal.print_note(f"{state}: {mounts[0]['reason'] or 'the server lists its tools'}")
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        raise SetupError(f"the server is not ready after {WAIT_SECONDS:g} s: see `toolbus mounts`") from None


async def _start_once(name: str, data_dir: Path) -> dict[str, Any]:
    """Starts a server without a bus, and ends it; its declarations are stored for the next bus."""
    from toolbus.bus import Bus
    from toolbus.bus.config import Config
    from toolbus.bus.serve_settings import settle
    from toolbus.parts.mcp.client.files import FILE, MountsFollower, variables_for
    from toolbus.parts.mcp.client.mounts import Mounts, open_remote
    from toolbus.parts.mcp.client.offer import MOUNTS, MountManifest
    from toolbus.parts.mcp.client.room import MountTools
    from toolbus.parts.mcp.settings import McpConfig

    variables = variables_for(settle({}, os.environ).config.part(McpConfig).mcp_secrets, os.environ)
    configured = MountsFollower(data_dir / FILE, None, variables).read_first()
    async with Bus(Config(http="off"), rooms=()) as bus:  # it listens nowhere
        tools = MountTools(bus.core.audit)
        tools.configured, tools.file = configured, str(data_dir / FILE)
        with closing(Store.of(data_dir)) as store:  # locked for a moment only: a bus may start meanwhile
            store.open()
            before = store.load(MOUNTS)
        trial = Store.of(None)
        trial.write(MOUNTS, before)
        manifest = MountManifest(trial)
        mounts = Mounts(bus.core, manifest, functools.partial(open_remote, data_dir))
        tools.follow(mounts, manifest)
        try:
            entry = configured.entries.get(name)
            await mounts.apply({name: dataclasses.replace(entry, eager=True)} if entry is not None else {})
            answer = await settled(
                lambda: asyncio.to_thread(tools.show_mounts, name if entry is not None else ""),
                remote=entry is not None and entry.is_remote,
            )
            return {**answer, "log": [] if entry is None else (await tools.mount_logs(name))["lines"]}
        finally:
            await mounts.stop()
            with suppress(SetupError), closing(Store.of(data_dir)) as store:  # a bus that has started lists it itself
                store.open()
                after = trial.load(MOUNTS)
                store.write(MOUNTS, after, before.keys() - after.keys())
