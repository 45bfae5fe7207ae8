"""Calls all the time: ``python -m lab.chaos.host NAME ADDRESS HTTP FOLDER SEED GENERATION TOOL...``."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
from pathlib import Path

from lab.chaos.callers import RawCaller, RestCaller, SdkCaller
from lab.chaos.cast import PARTS
from lab.chaos.load import Caller, Load, orders
from lab.ledger import CALLS, Ledger


async def main(name: str, address: str, http: str, folder: str, seed: str, generation: str, *tools: str) -> None:
    """Calls until it is terminated."""
    logging.basicConfig(level=logging.WARNING)
    part = next(part for part in PARTS if part.name == name)
    ledger = Ledger(Path(folder) / CALLS)
    caller: Caller
    if part.way == "sdk":
        caller = SdkCaller(address, name)
    elif part.way == "raw":
        caller = RawCaller(address, name, ledger)
    else:
        caller = RestCaller(http)
    drawn = f"{seed}/{name}/{generation}"
    calls = orders(drawn, f"{name}.{generation}", tools)
    load = Load(ledger, name, caller, os.environ.get("CHAOS_BROKEN", ""))
    await load.run(calls, part.rate, random.Random(drawn))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
