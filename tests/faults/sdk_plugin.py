"""A plugin on the SDK in a process of its own, with one thread for its tools: ``sdk_plugin.py ADDRESS``."""

from __future__ import annotations

import asyncio
import sys
import time

from toolbus.sdk.plugin_client import Plugin

plugin = Plugin("sdk", address=sys.argv[1], workers=1)
runs: list[str] = []


@plugin.tool
def t(who: str) -> None:
    runs.append(who)


@plugin.tool
async def u(who: str) -> None:
    runs.append(who)


@plugin.tool
def hold() -> None:
    print("holding", flush=True)
    time.sleep(0.5)  # so long that the process can be stopped meanwhile


@plugin.tool
async def ran() -> list[str]:
    return runs


async def main() -> None:
    async with plugin:
        await plugin.ready()
        print("ready", flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
