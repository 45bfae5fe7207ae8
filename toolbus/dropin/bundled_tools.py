"""The drop-in tools that come along, and copying one into a folder, with what it needs and what it is granted."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolbus.dropin.file_grants import FILE
from toolbus.dropin.file_loader import is_shared, tool_files
from toolbus.dropin.manifest import grant, load_manifest, write_whole
from toolbus.errors import SetupError


@dataclass(frozen=True, slots=True)
class Bundled:
    """A tool file that comes along.

    Attributes:
        name: of the file, without its ending.
        about: the first line of what the file says about itself.
        files: what it consists of, relative to its folder, in the order in which it is to be copied: data, what it
            imports, itself.
        helpers: those of them that it imports.
        grants: its entry in the manifest.
    """

    name: str
    about: str
    files: tuple[str, ...]
    helpers: tuple[str, ...]
    grants: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Added:
    """What became of a tool that was to be added.

    Attributes:
        files: each file and whether it was ``added``, ``replaced`` or left ``unchanged``.
        granted: whether the manifest had to be changed.
    """

    files: tuple[tuple[str, str], ...]
    granted: bool


def bundled() -> list[Bundled]:
    """Returns what comes along, by name.

    Raises:
        SetupError: this installation has lost it.
    """
    home = _home()
    entries = json.loads((home / FILE).read_text("utf-8"))["files"]
    return [_bundled(home, file, entries.get(file, {})) for file in tool_files(home) if not is_shared(file)]


def add(tool: Bundled, folder: Path, *, force: bool = False) -> Added:
    """Copies a tool into a folder, which is made where it is not there, and grants it what it needs.

    The tool file comes last, so that whoever follows the folder loads it with everything in place.

    Args:
        force: files that are different from those that come along are replaced.

    Raises:
        SetupError: a file there is different, and `force` was not given; then nothing is changed. The manifest is
            broken, or the folder cannot be written.
    """
    home = _home()
    if folder.exists() and not folder.is_dir():
        raise SetupError(f"{folder} is no folder: name another one with --dir")
    try:
        load_manifest(folder)
    except SetupError as error:
        raise SetupError(f"nothing was added, since the manifest in {folder} is broken: {error}") from None
    states = {file: _state(home / file, folder / file) for file in tool.files}
    changed = [file for file, state in states.items() if state == "replaced"]
    if changed and not force:
        raise SetupError(
            f"{', '.join(str(folder / file) for file in changed)} would be overwritten, and differs from what comes "
            "along: keep it and name another folder with --dir, or give it up with --force"
        )
    try:
        folder.mkdir(exist_ok=True)
        *first, last = tool.files
        for file in first:
            _copy(home / file, folder / file, states[file])
        granted = grant(folder, last, tool.grants, tool.helpers)
        _copy(home / last, folder / last, states[last])
    except OSError as problem:
        raise SetupError(
            f"{problem.filename or folder} cannot be written: {problem.strerror}: make its folder, and let this user "
            "write there"
        ) from None
    return Added(tuple(states.items()), granted)


def _home() -> Path:
    """Returns where the tools lie: in an installed package beside it, in a checkout among the examples."""
    package = Path(__file__).resolve().parents[1]
    for home in (package / "bundled_dropin", package.parent / "examples" / "dropin"):
        if (home / FILE).is_file():
            return home
    raise SetupError("the tools that come along are not in this installation: install toolbus again")


def _bundled(home: Path, file: str, grants: Mapping[str, Any]) -> Bundled:
    parsed = ast.parse((home / file).read_text("utf-8"))
    imported = [node.module for node in ast.walk(parsed) if isinstance(node, ast.ImportFrom) and node.module]
    helpers = tuple(f"{name}.py" for name in imported if (home / f"{name}.py").is_file())
    data = tuple(path for path in grants.get("read", ()) if (home / path).is_file())
    about = (ast.get_docstring(parsed) or "").partition("\n")[0].replace("`", "")
    return Bundled(file.removesuffix(".py"), about, (*data, *helpers, file), helpers, grants)


def _state(ours: Path, theirs: Path) -> str:
    if not theirs.exists() and not theirs.is_symlink():
        return "added"
    try:
        same = theirs.read_bytes() == ours.read_bytes()
    except OSError:  # a folder, a link to nowhere, somebody else's
        same = False
    return "unchanged" if same else "replaced"


def _copy(ours: Path, theirs: Path, state: str) -> None:
    if state != "unchanged":
        theirs.parent.mkdir(exist_ok=True)
        write_whole(theirs, ours.read_bytes())
