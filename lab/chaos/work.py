"""What the plugins of a run do and write down, however they are offered.

The standard library only: a copy of this file lies beside the drop-in tool, whose sandbox reads nothing else.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

RUNS = "runs.jsonl"  # what plugins began and ended
CALLS = "calls.jsonl"  # what hosts asked, and what they were told
ONE_IN = 20  # calls of which a broken program treats one badly


class Ledger:
    """A file that many processes append lines to. A line is written at once or not at all, whenever one is killed."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, **line: Any) -> None:
        """Appends a line with this moment, by the clock that all processes of a machine share."""
        os.write(self._file, (json.dumps({**line, "at": time.monotonic(), "pid": os.getpid()}) + "\n").encode())


class Runs:
    """The runs of one plugin process.

    Args:
        part: the name of the plugin in the cast.
        broken: how the plugin misbehaves, to show that it is noticed: ``twice``, ``unwritten``, ``stranger`` or
            ``kept``. Empty: not at all.
    """

    def __init__(self, folder: Path, part: str, broken: str = "") -> None:
        self._ledger = Ledger(folder / RUNS)
        self._part = part
        self._broken = broken
        self._count = 0
        self._before = ""  # the token of the call before

    def begin(self, token: str) -> bool:
        """Notes that a call's work begins; returns whether its result may be returned."""
        self._count += 1
        bad = self._count % ONE_IN == 0
        if not (bad and self._broken == "unwritten"):
            self._ledger.write(began=token, part=self._part)
        if bad and self._broken == "twice":
            self._ledger.write(began=token, part=self._part)
        return not (bad and self._broken == "kept")

    def end(self, token: str) -> dict[str, str]:
        """Notes that it has ended; returns the call's output."""
        self._ledger.write(ended=token, part=self._part)
        before, self._before = self._before, token
        stranger = self._broken == "stranger" and self._count % ONE_IN == 0
        return {"ran": before if stranger else token, "part": self._part}
