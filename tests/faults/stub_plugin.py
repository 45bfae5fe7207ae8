"""A plugin on the generated stubs alone, in a process of its own: ``stub_plugin.py ADDRESS``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "clients" / "python"))

from peer import Call, Peer

OBJECT = {"type": "object"}
peer = Peer(sys.argv[1], "stub")
runs: list[str] = []


@peer.tool("Notes that it ran.", OBJECT)
async def t(arguments: dict[str, Any], call: Call) -> None:
    runs.append(arguments["who"])


@peer.tool("Returns who ran.", OBJECT)
async def ran(arguments: dict[str, Any], call: Call) -> list[str]:
    return runs


async def main() -> None:
    running = asyncio.create_task(peer.run())
    await peer.attached.wait()
    print("ready", flush=True)
    await running


asyncio.run(main())
