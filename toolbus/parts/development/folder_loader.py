"""Finds the plugins of a folder as `toolbus new` writes it: `PluginFolderLoader`."""

from __future__ import annotations

import re
from pathlib import Path

from toolbus.processes.loader import FoundPlugins, Loader

_HELPER = re.compile(r"_|test_|conftest\.|setup\.")  # how the names of files that are no plugins begin
_MAKES_PLUGIN = re.compile(r"^\w+(?:: *[\w.]+)? *= *(?:\w+\.)?Plugin\(", re.MULTILINE)
MAX_FILES = 200
MAX_CHARACTERS = 1 << 20  # of a file


class PluginFolderLoader(Loader):
    """Runs the files of a folder in which each one, helpers and tests aside, makes a `Plugin`."""

    def find(self, folder: Path) -> FoundPlugins | None:
        if any(folder.glob("*.js")) or any(folder.glob("*.json")):
            return None  # drop-in tools, or what a loader of another part reads
        files = [file for file in sorted(folder.glob("*.py"))[: MAX_FILES + 1] if not _HELPER.match(file.name)]
        if not files or len(files) > MAX_FILES or not all(map(_makes_plugin, files)):
            return None
        return FoundPlugins(files)


def _makes_plugin(file: Path) -> bool:
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            return _MAKES_PLUGIN.search(opened.read(MAX_CHARACTERS)) is not None
    except OSError:
        return False
