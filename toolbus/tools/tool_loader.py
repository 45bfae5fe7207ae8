"""Loads a folder of tool files into a `ToolRegistry`, in the program's own process, and loads it again.

The files are those of `toolbus.dropin`: every way in which one declares tools works here too. Their code runs in this
process, without a sandbox, so grants of the manifest change nothing; its allow list counts. One bad file is one
warning, and the others are loaded.
"""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from toolbus.dropin.file_loader import FileProblem, Loaded, load_folder, tool_files
from toolbus.dropin.manifest import load_manifest
from toolbus.errors import InvalidTool, SetupError
from toolbus.functions.tool_spec import ToolSpec
from toolbus.tools.registered_tools import RegisteredTools, spec_of_file

if TYPE_CHECKING:
    from toolbus.tools.tool_registry import ToolRegistry

log = logging.getLogger("toolbus.tools")


def load_tools(directory: str | Path, registry: ToolRegistry, *, require_manifest: bool = False) -> Loaded:
    """Registers the tools of a folder's files; what went wrong with a file is logged as a warning.

    A folder that was loaded before is loaded again: new tools and new code take the place of the old ones one by one,
    calls in flight end on the old code, and what the folder no longer has is withdrawn. A file that fails to load
    keeps the tools that it had, and a tool that is refused stays as it was. A folder or manifest that cannot be read
    changes nothing.

    Args:
        require_manifest: a folder without a manifest loads nothing.

    Returns:
        What the files declare, and their problems; those of the manifest too.
    """
    return registry.folders.load(Path(directory), require_manifest=require_manifest)


def reload_tools(directory: str | Path, registry: ToolRegistry, *, require_manifest: bool = False) -> Loaded:
    """Loads a folder again; the same as `load_tools`, by the name that Stargazer's programs call."""
    return load_tools(directory, registry, require_manifest=require_manifest)


class LoadedFolders:
    """The folders that a registry has loaded. Safe from any thread."""

    def __init__(self, registered: RegisteredTools) -> None:
        self._registered = registered
        self._lock = threading.Lock()  # one folder at a time: each swaps its tools as a whole
        self._files: dict[Path, dict[str, str]] = {}  # by folder, the file of each tool that it offers

    def __repr__(self) -> str:
        return f"<LoadedFolders {len(self._files)}>"

    def load(self, folder: Path, *, require_manifest: bool) -> Loaded:
        """Loads a folder, for the first time or again: see `load_tools`."""
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
