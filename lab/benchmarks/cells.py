"""What is asked of a contestant: so many calls in flight, with arguments of such a size, one cell after another."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass

MAX_IN_FLIGHT = 4096  # that a session takes
MAX_BYTES = 1_000_000  # of one call's arguments: what NATS and the bus take by default, with a little to spare
MAX_BYTES_IN_FLIGHT = 64_000_000  # what the bus holds for one source, and what a small machine holds several times


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a contestant's row.

    Attributes:
        size: bytes of arguments; 0 means about 30, as small as they come.
    """

    in_flight: int
    size: int = 0

    def __str__(self) -> str:
        return f"{self.in_flight}x{self.size}"

    @property
    def title(self) -> str:
        """Names it for a person."""
        return f"{self.in_flight} in flight" + (f", {size_title(self.size)}" if self.size else "")

    def is_within(self, other: Cell) -> bool:
        """Whether the other asks at least as much in every way, so that who fails here will fail there."""
        return self.in_flight <= other.in_flight and self.size <= other.size


def cells(in_flight: Iterable[int], sizes: Iterable[int]) -> tuple[Cell, ...]:
    """Returns the cells of a run, small arguments first, without those that would fill the memory."""
    levels = tuple(in_flight)
    every = (Cell(level, size) for size in sizes for level in levels)
    return tuple(cell for cell in every if cell.in_flight * cell.size <= MAX_BYTES_IN_FLIGHT)


def size_title(size: int) -> str:
    """Names a size of arguments for a person."""
    if not size:
        return "small"
    for unit, name in ((1_000_000, "MB"), (1_000, "kB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def read_cells(text: str) -> list[Cell]:
    """Reads what ``str`` wrote of cells, with commas between."""
    return [Cell(*map(int, each.split("x"))) for each in text.split(",")]


def options_of(description: str | None) -> argparse.ArgumentParser:
    """Returns the command line that every load generator understands."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("address")
    parser.add_argument("--middle-pid", type=int, default=0, help="whose CPU time is charged; 0: this process's")
    parser.add_argument("--cells", type=read_cells, default=[Cell(1), Cell(16), Cell(64), Cell(512)])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warm-up", type=float, default=0.5)
    return parser
