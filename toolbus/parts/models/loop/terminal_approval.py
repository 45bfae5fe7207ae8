"""Asks the person at the terminal whether a call may run: `ask_on_terminal`, an `approve` for programs with a console.

The question goes to standard error.
"""

from __future__ import annotations

import json
import sys

from toolbus.common.terminal_input import discard_input, read_line
from toolbus.common.text import clean_line, escape_unsafe
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
    discard_input()
    print(f"\n{_described(request)}", file=sys.stderr, flush=True)
    line = await read_line("Run it? y: yes; Enter: no; or write what to do instead:")
    answer = "" if line is None else clean_line(line)
    if answer.lower() in _YES:
        return True
    return False if answer.lower() in _NO else f"the user wrote: {answer}"


def _described(request: ApprovalRequest) -> str:
    """Returns a call as a person reads it; no text of a model or a plugin can change the terminal."""
    arguments = escape_unsafe(json.dumps(request.arguments, ensure_ascii=False, indent=2))
    if len(arguments) > MAX_SHOWN_ARGUMENTS:
        left_out = len(arguments) - MAX_SHOWN_ARGUMENTS
        arguments = f"{arguments[:MAX_SHOWN_ARGUMENTS]}\n… and {left_out} more characters"
    danger = ", which may destroy data" if request.tool.annotations.destructive is True else ""
    return f"The model wants to call {clean_line(request.tool.name)}{danger}:\n{arguments}"
