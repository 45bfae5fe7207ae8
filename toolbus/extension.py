"""Keeps the import path ``toolbus.extension``: everything public of `toolbus.council`, under its documented name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolbus import council

if TYPE_CHECKING:
    from toolbus.council import *  # noqa: F403

__all__ = council.__all__


def __getattr__(name: str) -> Any:
    return getattr(council, name)


def __dir__() -> list[str]:
    return dir(council)
