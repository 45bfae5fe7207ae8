"""Defines the findings of a check."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path


class Effect(enum.Enum):
    """What a finding means for the code that is checked."""

    STOPS = "stops"  # it does not start, or a call fails at this place: it has to be changed
    DIFFERS = "differs"  # it runs, but behaves in another way than in its own system
    NOTE = "note"  # it runs as in its own system; the operator has to know something


@dataclass(frozen=True, slots=True)
class Finding:
    """One place where something differs.

    Attributes:
        path: the file or folder.
        line: its line, from 1; 0 means the whole of it.
        effect: what it means.
        what: the fact, as a sentence without a full stop.
        remedy: what to do, as a sentence; empty where nothing has to be done.
    """

    path: Path
    line: int
    effect: Effect
    what: str
    remedy: str = ""
