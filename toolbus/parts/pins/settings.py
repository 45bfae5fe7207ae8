"""Declares which sources of a bus are pinned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from toolbus.bus.config import check_sources
from toolbus.common.reader import Reader
from toolbus.common.setting import CheckedRecord, setting, table
from toolbus.errors import SetupError

Pin = Literal["warn", "block"]
PINS: tuple[Pin, ...] = ("warn", "block")


def _pins(reader: Reader) -> dict[str, str]:
    return {source: pin.choice(PINS) for source, pin in reader.entries().items()}


def _check_pins(name: str, pins: Mapping[str, Pin]) -> None:
    check_sources(name, pins)
    for source, pin in pins.items():
        if pin not in PINS:
            raise SetupError(f"{name}.{source} is {pin!r}, it must be one of {', '.join(PINS)}")


@dataclass(frozen=True, slots=True)
class PinSettings(CheckedRecord):
    """What happens to tools that a source changes after it was trusted; sources without a rule are not pinned."""

    pins: Mapping[str, Pin] = setting(dict, table(_pins), check=_check_pins)

    @property
    def needed_room(self) -> str:
        """The room that enforces it; "" where no source is pinned."""
        return "PinsRoom" if self.pins else ""
