"""Loads folders of tool files into a registry, in the program's own process, and loads them again.

The files are those of `toolbus.dropin`: every way in which one declares tools works here too. Their code runs in this
process, without a sandbox, so grants of the manifest change nothing; its allow list counts. One bad file is one
warning, and the others are loaded.
"""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

from toolbus.dropin.file_loader import FileProblem, Loaded, load_folder, tool_files
from toolbus.dropin.manifest import load_manifest
from toolbus.errors import InvalidTool, SetupError
from toolbus.functions.tool_spec import ToolSpec
from toolbus.tools.registered_tools import RegisteredTools, spec_of_file

log = logging.getLogger("toolbus.tools")


class LoadedFolders:
    """The folders that a registry has loaded. Safe from any thread."""

    def __init__(self, registered: RegisteredTools) -> None:
        self._registered = registered
        self._lock = threading.Lock()  # one folder at a time: each swaps its tools as a whole
        self._files: dict[Path, dict[str, str]] = {}  # by folder, the file of each tool that it offers

    def __repr__(self) -> str:
        return f"<LoadedFolders {len(self._files)}>"

    def load(self, folder: Path, *, require_manifest: bool) -> Loaded:
        """Loads a folder, for the first time or again: see `load_tools` of the registry."""
        folder = folder.absolute()
        with self._lock:
            loaded = load_folder(folder, require_manifest=require_manifest)
            allowed = _allowed(folder, require_manifest=require_manifest)
            if allowed is None:
                return loaded
            failed = {problem.file for problem in loaded.problems if problem.skipped} & allowed
            files: dict[str, str] = {}
            refused: dict[str, FileProblem] = {}
            for spec in loaded.specs:
                file = _file_of(spec)
                try:
                    self._registered.register(spec_of_file(spec), {})
                except (InvalidTool, TypeError, ValueError) as error:
                    log.warning("tool %s of %s is not registered: %s", spec.tool.name, file, error)
                    refused[spec.tool.name] = FileProblem(file, str(error), skipped=False)
                else:
                    files[spec.tool.name] = file
            for name, file in self._files.get(folder, {}).items():
                if name not in files and (file in failed or name in refused):
                    files[name] = file
                elif name not in files:
                    self._registered.unregister(name)
            self._files[folder] = files
        return Loaded(loaded.specs, (*loaded.problems, *refused.values()))


def _allowed(folder: Path, *, require_manifest: bool) -> set[str] | None:
    """Returns the files that may be loaded; None where the folder or its manifest cannot be read."""
    try:
        manifest = load_manifest(folder, require=require_manifest)
        return {file for file in tool_files(folder) if manifest.allows(file)}
    except (SetupError, OSError):
        return None


def _file_of(spec: ToolSpec) -> str:
    return str(json.loads(spec.tool.metadata_json)["file"])
