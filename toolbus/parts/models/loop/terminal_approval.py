"""Asks the person at the terminal whether a call may run: `ask_on_terminal`, an `approve` for programs with a console.

The question goes to standard error. Lines are read without a thread, so that Ctrl-C ends the question, and so that a
turn that is cancelled takes no line from the next reader.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from toolbus.common.text import clean_chunk, clean_line, escape_unsafe
from toolbus.parts.models.loop.approval import ApprovalRequest, Decision

MAX_SHOWN_ARGUMENTS = 10_000  # characters: a person does not read more than a few screens

_YES, _NO = frozenset(("y", "yes")), frozenset(("", "n", "no"))


async def ask_on_terminal(request: ApprovalRequest) -> Decision:
    """Shows a call to the person at the terminal. Returns their answer: yes, no, or a text for the model.

    Lines that were typed or pasted before the question are discarded: they do not answer it. Without a terminal the
    call is refused.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        return "the user cannot be asked, since the program has no terminal"
    _discard_input()
    print(f"\n{_described(request)}", file=sys.stderr, flush=True)
    line = await read_line("Run it? y: yes; Enter: no; or write what to do instead:")
    answer = "" if line is None else clean_line(line)
    if answer.lower() in _YES:
        return True
    return False if answer.lower() in _NO else f"the user wrote: {answer}"


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


def _discard_input() -> None:
    """Discards lines of the terminal that were not read."""
    try:
        import termios

        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
    except ImportError:  # Windows, whose console has its own functions
        import msvcrt

        while msvcrt.kbhit():  # type: ignore[attr-defined]
            msvcrt.getwch()  # type: ignore[attr-defined]


def _described(request: ApprovalRequest) -> str:
    """Returns a call as a person reads it; no text of a model or a plugin can change the terminal."""
    arguments = escape_unsafe(json.dumps(request.arguments, ensure_ascii=False, indent=2))
    if len(arguments) > MAX_SHOWN_ARGUMENTS:
        left_out = len(arguments) - MAX_SHOWN_ARGUMENTS
        arguments = f"{arguments[:MAX_SHOWN_ARGUMENTS]}\n… and {left_out} more characters"
    danger = ", which may destroy data" if request.tool.annotations.destructive is True else ""
    return f"The model wants to call {clean_line(request.tool.name)}{danger}:\n{arguments}"
