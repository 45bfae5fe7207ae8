"""Offers a tool that takes its time, so that something can happen to it meanwhile.

toolbus run examples/counter/plugin.py
"""

from __future__ import annotations

import asyncio
import os

from toolbus import Plugin
from toolbus.sdk import ToolScope

plugin = Plugin("counter")


@plugin.tool
async def count_to(scope: ToolScope, number: int) -> int:
    """Counts up to a number, ten each second, and tells how far it is."""
    for reached in range(number):
        scope.progress(reached, total=number, message=f"process {os.getpid()}")
        await asyncio.sleep(0.1)
    return number


if __name__ == "__main__":
    plugin.run()
