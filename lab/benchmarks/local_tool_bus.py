"""Runs a bus whose tool is a function of its own process; prints ``ready http=ADDRESS``.

Uses nothing but what `toolbus.testing` has had for long, and no other file of this folder, so that it also runs on the
toolbus of another checkout: ``CHECKOUT/.venv/bin/python -P THIS_FILE`` with that checkout as the current directory.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys

sys.path.insert(0, os.getcwd())

import uvloop

from toolbus.testing import running_bus


async def main() -> None:
    async with running_bus(http="127.0.0.1:0") as bus:

        @bus.tool
        async def forecast(place: str, days: int, note: str = "") -> dict[str, object]:
            """Tells the weather of a place for some days ahead."""
            return {"celsius": 21.5, "sky": "clear"}

        gc.collect()
        gc.freeze()  # as `toolbus serve` does
        print(f"ready http={bus.http_address}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
