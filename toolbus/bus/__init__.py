"""Exports the bus: `Bus` runs one, `Config` configures it. Each name is loaded when it is first used.

The floors below the wiring are folders: catalog, calls, streams, storage, tasks, operators, upstream, gateway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbus.common.lazy import lazily

if TYPE_CHECKING:
    from toolbus.bus.config import Config
    from toolbus.bus.wiring import Bus

__all__ = ["Bus", "Config"]

__getattr__, __dir__ = lazily(__name__, {"bus.wiring": "Bus", "bus.config": "Config"})
