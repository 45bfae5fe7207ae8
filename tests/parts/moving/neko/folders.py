"""Copies the plugin folders of these tests, since a plugin writes into its own, and loads them as a process would."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.process_state import restored_imports
from toolbus.processes.loader import LoadedPlugin, load_plugin

PLUGINS = Path(__file__).parent / "plugins"


def copied(name: str, place: Path, as_name: str = "") -> Path:
    """Returns a copy of a folder of `plugins/`."""
    return Path(
        shutil.copytree(PLUGINS / name, place / (as_name or name), ignore=shutil.ignore_patterns("__pycache__"))
    )


@contextmanager
def loaded(folder: Path, *, entries: bool = False) -> Iterator[LoadedPlugin]:
    """Yields a loaded plugin, and removes what its import left in this process."""
    with restored_imports():
        yield load_plugin(folder, entries=entries)
