"""Declares the setting of a bus for its console."""

from __future__ import annotations

from dataclasses import dataclass

from toolbus.common.setting import FLAG, setting


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """Whether operators have a page over HTTP."""

    console: bool = setting(True, FLAG, "serves the [console](../start/console.md) at `/console`, over HTTP and HTTPS")
