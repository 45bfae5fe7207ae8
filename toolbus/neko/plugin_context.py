"""Defines what a plugin's constructor is given."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PluginContext:
    """What `toolbus run` hands to a plugin's constructor as `ctx`.

    Attributes:
        plugin_id: the plugin's id.
        logger: a logger of the plugin's own.
        folder: where the plugin's file lies.
    """

    plugin_id: str
    logger: logging.Logger
    folder: Path
