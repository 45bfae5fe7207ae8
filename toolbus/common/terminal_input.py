"""Reads lines that a person types at the terminal, without a thread.

So Ctrl-C ends a question, and a question that is cancelled takes no line from the next reader.
"""

from __future__ import annotations

import asyncio
import os
import sys

from toolbus.common.text import clean_chunk, clean_line


async def read_line(prompt: str) -> str | None:
    """Returns a line that a person types; None at the end of the input, Ctrl-D."""
    print(clean_chunk(clean_line(prompt) + " "), end="", file=sys.stderr, flush=True)
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    handle = sys.stdin.fileno()
    try:
        loop.add_reader(handle, ready.set)
    except NotImplementedError:  # Windows cannot wait for a console
        line = await asyncio.to_thread(sys.stdin.readline)
        return line.rstrip("\r\n") if line else None
    try:
        await ready.wait()
    finally:
        loop.remove_reader(handle)
    data = os.read(handle, 65_536)  # a terminal gives one line at a time
    if not data:
        print(file=sys.stderr, flush=True)
    return data.decode(sys.stdin.encoding or "utf-8", "replace").rstrip("\r\n") if data else None
