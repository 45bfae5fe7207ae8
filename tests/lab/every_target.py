"""Joins all fuzz targets in one, whose first byte chooses, so that one process of libFuzzer searches all of them."""

from collections.abc import Iterator
from itertools import chain, zip_longest

from lab.fuzz.target import NAMES, Target, load

TARGETS = tuple(map(load, NAMES))


def _run(data: bytes) -> None:
    TARGETS[data[0] % len(TARGETS) if data else 0].run(data[1:])


def _seeds() -> Iterator[bytes]:
    """Yields the seeds of all targets in turns."""
    yield from (
        seed for seed in chain.from_iterable(zip_longest(*map(_marked, range(len(TARGETS))))) if seed is not None
    )


def _marked(number: int) -> Iterator[bytes]:
    return (bytes([number]) + seed for seed in TARGETS[number].seeds())


TARGET = Target("every", "what each target holds", _run, _seeds, max(target.max_bytes for target in TARGETS))
