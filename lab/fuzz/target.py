"""Defines a target, how its oracle reports that something does not hold, and lists all targets."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue

from google.protobuf import json_format
from google.protobuf.message import Message

CONFORMANCE = (
    Path(__file__).parents[2] / "toolbus" / "parts" / "conformance"
)  # exchanges as data, from which seeds are made
VECTORS = Path(__file__).parents[2] / "tests" / "vectors"  # likewise, over HTTP


class Finding(AssertionError):
    """Something that has to hold does not. Whatever else a target raises is a finding too."""


@dataclass(frozen=True, slots=True)
class Target:
    """One entrance that bytes from outside come through.

    Attributes:
        name: as on the command line.
        about: what has to hold, for `--help` and tables.
        run: takes one input through the entrance; raises where something does not hold.
        seeds: inputs that lead deep from the beginning, built from real messages.
        max_bytes: of an input; longer ones only repeat what shorter ones show.
    """

    name: str
    about: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    max_bytes: int = 2048


def hold(condition: object, sentence: str) -> None:
    """Asks for what has to hold.

    Raises:
        Finding: it does not.
    """
    if not condition:
        raise Finding(sentence)


def conversations(file: str, message: type[Message]) -> Iterator[list[bytes]]:
    """Yields, of each conversation of the conformance vectors, the messages that are sent, as bytes."""
    for scenario in map(json.loads, (CONFORMANCE / file).read_text("utf-8").splitlines()):
        sent = [each["send"] for each in scenario["steps"] if "send" in each and "$" not in json.dumps(each["send"])]
        yield [json_format.ParseDict(each, message()).SerializeToString() for each in sent]


@contextmanager
def no_faults() -> Iterator[None]:
    """Raises a finding for a fault that toolbus caught and logged in the block, and silences its log."""
    log, records = logging.getLogger("toolbus"), SimpleQueue[logging.LogRecord]()
    collecting, level, propagate = QueueHandler(records), log.level, log.propagate
    collecting.prepare = lambda record: record  # type: ignore[method-assign]  # with its exception
    log.addHandler(collecting)
    log.setLevel(logging.ERROR)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(collecting)
        log.setLevel(level)
        log.propagate = propagate
    while not records.empty():
        if (text := (record := records.get()).getMessage()).startswith("a fault of"):
            raise Finding(f"toolbus logged {text!r}") from (record.exc_info[1] if record.exc_info else None)


# A target is a module with a `TARGET`, imported only where it is run.
NAMES = (
    "frames",
    "lane",
    "responses",
    "json_texts",
    "schemas",
    "callback_urls",
    "manifests",
    "settings",
    "deltas",
    "mcp",
)


def load(name: str) -> Target:
    """Returns a target: one of ours, or by its dotted name a module of another package.

    Raises:
        KeyError: no target has this name.
    """
    if name not in NAMES and "." not in name:
        raise KeyError(name)
    target = import_module(name if "." in name else f"lab.fuzz.{name}").TARGET
    if not isinstance(target, Target):
        raise KeyError(name)
    return target
