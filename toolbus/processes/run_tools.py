"""Offers a supervisor's plugins to operators, by tools of a peer `run.HOST.PID-ID`: state, output, restart, stop.

So operators read the output of plugins on any machine over the bus. The bus shows these tools to operators only, and
forwards the requests of `toolbus logs` and the console to them. Importing this file loads grpc.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from collections.abc import Callable
from typing import Any

from toolbus.errors import PeerLost, RequestError
from toolbus.processes.output_tail import MAX_WAIT_SECONDS, OutputTails
from toolbus.sdk import Credential, Plugin

ACT_SECONDS = 10.0  # timeout of a call, in addition to what it waits for a line
MAX_IN_FLIGHT = 32  # each follower holds a call
MAX_HOST = 64  # characters of the machine's name in the source

Act = Callable[[str], object]
"""Restarts or stops a plugin by its name; raises InvalidRequest for an unknown one."""


def run_source() -> str:
    """Returns a source for a supervisor in this process.

    Containers of one image may have equal host names and equal process ids, so a random part makes the source unique.
    """
    host = re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname().partition(".")[0])[:MAX_HOST].strip("-")
    return f"run.{host or 'unnamed'}.{os.getpid()}-{secrets.token_hex(3)}"


class RunTools:
    """The tools of one supervisor.

    Args:
        tails: the output of its plugins.
        restart, stop: restart or stop a plugin by its name.

    Attributes:
        source: of the peer that offers the tools.
    """

    def __init__(self, tails: OutputTails, restart: Act, stop: Act, source: str = "") -> None:
        self.source = source or run_source()
        self._tails = tails
        self._restart = restart
        self._stop = stop

    async def plugins(self) -> list[dict[str, Any]]:
        """Shows the plugins of this supervisor: name, state, pid, restarts, since, last exit."""
        return self._tails.described()

    async def tail(self, plugin: str, lines: int = 100, since: int = -1, wait_seconds: float = 0.0) -> dict[str, Any]:
        """Shows the newest lines that a plugin has written, or those after a number.

        Args:
            plugin: its name.
            lines: the largest number of lines.
            since: the `next` of the answer before; -1: the newest lines.
            wait_seconds: how long to wait for a line after that number, at most 60.
        """
        return await self._tails.read(plugin, lines, since, wait_seconds)

    async def restart(self, plugin: str) -> dict[str, Any]:
        """Shuts a plugin down gracefully and starts it again, also one that was given up."""
        self._restart(plugin)
        return {"plugin": plugin, "restarted": True}

    async def stop(self, plugin: str) -> dict[str, Any]:
        """Shuts a plugin down gracefully; it stays stopped until it is restarted."""
        self._stop(plugin)
        return {"plugin": plugin, "stopped": True}

    def as_plugin(self, address: str, credential: Credential | None) -> Plugin:
        """Returns the peer that offers them.

        Raises:
            SetupError: the address or credential cannot be used.
        """
        plugin = Plugin(
            self.source,
            address=address or None,
            credential=credential,
            token=secrets.token_hex(16),  # no other peer may attach as this source
            qualified=True,
            max_in_flight=MAX_IN_FLIGHT,
        )
        for function, timeout, read_only in (
            (self.plugins, ACT_SECONDS, True),
            (self.tail, MAX_WAIT_SECONDS + ACT_SECONDS, True),
            (self.restart, ACT_SECONDS, False),
            (self.stop, ACT_SECONDS, False),
        ):
            plugin.add_tool(function, timeout=timeout, read_only=read_only, allow_repeat=True)
        return plugin


async def offer(tools: RunTools, address: str, credential: Credential | None, log: Callable[[str], object]) -> None:
    """Offers the tools until cancelled, on the bus at an address.

    Args:
        address: "" means that of the environment or the credential.
        log: takes the reason if a bus refuses them.

    Raises:
        SetupError: the address or credential cannot be used.
    """
    plugin = tools.as_plugin(address, credential)
    try:
        await plugin.start()
        await plugin.ended()
    except (RequestError, PeerLost) as error:
        log(f"the bus refuses the tools of this run, so `toolbus logs` cannot show its output: {error}")
    finally:
        with contextlib.suppress(PeerLost):
            await plugin.close(0.0)
