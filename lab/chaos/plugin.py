"""Answers calls on the SDK: ``python -m lab.chaos.plugin ADDRESS FOLDER PART``."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

from lab.chaos.cast import TIMEOUT_SECONDS, part_of, tool_name
from lab.ledger import Runs
from toolbus.sdk import Err, Plugin


def main(address: str, folder: str, name: str) -> None:
    """Offers the part's tools until it is terminated."""
    logging.basicConfig(level=logging.WARNING)
    part = part_of(name)
    broken = os.environ.get("CHAOS_BROKEN", "")
    runs = Runs(Path(folder), name, broken)

    offers_ghost = broken == "ghost"  # whether its first call will make it offer an unexpected tool

    async def run(token: str, seconds: float = 0.0, refuse: bool = False) -> Any:
        nonlocal offers_ghost
        if offers_ghost:
            offers_ghost = False
            plugin.add_tool(run, name="ghost", description="Not expected.")
        may_return = runs.begin(token)
        await asyncio.sleep(seconds)
        output = runs.end(token)
        if not may_return:
            await asyncio.Event().wait()
        return Err("refused on purpose") if refuse else output

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
