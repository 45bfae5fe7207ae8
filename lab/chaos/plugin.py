"""A plugin on the SDK: ``python -m lab.chaos.plugin ADDRESS FOLDER PART``."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

from lab.chaos.cast import PARTS, TIMEOUT_SECONDS, tool_name
from lab.chaos.work import Runs
from toolbus.sdk import Err, Plugin


def main(address: str, folder: str, name: str) -> None:
    """Offers the part's tools until it is told to end."""
    logging.basicConfig(level=logging.WARNING)
    part = next(part for part in PARTS if part.name == name)
    broken = os.environ.get("CHAOS_BROKEN", "")
    runs = Runs(Path(folder), name, broken)

    haunted = broken == "ghost"  # whether it will offer a tool that nobody expects, with its first call

    async def run(token: str, seconds: float = 0.0, refuse: bool = False) -> Any:
        nonlocal haunted
        if haunted:
            haunted = False
            plugin.add_tool(run, name="ghost", description="Nobody expects it.")
        may_return = runs.begin(token)
        await asyncio.sleep(seconds)
        output = runs.end(token)
        if not may_return:
            await asyncio.Event().wait()
        return Err("as you asked") if refuse else output

    plugin = Plugin(part.source, address=address)
    for idempotent in (False, True):
        plugin.tool(
            name=tool_name(part, idempotent),
            description="Writes down that it ran.",
            idempotent=idempotent,
            timeout=TIMEOUT_SECONDS,
        )(run)
    plugin.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
