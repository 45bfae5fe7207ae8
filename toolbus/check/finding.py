"""Defines what a check finds."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path


class Effect(enum.Enum):
    """What a finding means for the code that is checked."""

    STOPS = "stops"  # it does not start, or a call fails there: it has to be changed
    DIFFERS = "differs"  # it runs, and does something else than there
    NOTE = "note"  # it runs as there; the operator has to know something


@dataclass(frozen=True, slots=True)
class Finding:
    """One place where something differs.

    Attributes:
        path: the file or folder.
        line: its line, from 1; 0 means the whole of it.
        effect: what it means.
        what: what is there, as a sentence without its end.
        remedy: what to do, as a sentence; empty where there is nothing to do.
    """

    path: Path
    line: int
    effect: Effect
    what: str
    remedy: str = ""
