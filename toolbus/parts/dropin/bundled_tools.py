"""Lists the drop-in tools that are installed with toolbus, and copies one into a folder with its grants."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolbus.errors import SetupError
from toolbus.parts.dropin.file_loader import is_shared, tool_files
from toolbus.parts.dropin.manifest import FILE, grant, load_manifest, write_file

JAVASCRIPT = "javascript"  # the folder of the tools that need this extra


@dataclass(frozen=True, slots=True)
class Bundled:
    """A tool file that is installed with toolbus.

    Attributes:
        name: of the file, without its suffix.
        about: the first line of its docstring.
        files: to be copied, relative to its folder and in this order: data, helpers, the file itself.
        helpers: those of them that it imports.
        grants: its entry in the manifest.
        home: its folder.
    """

    name: str
    about: str
    files: tuple[str, ...]
    helpers: tuple[str, ...]
    grants: Mapping[str, Any]
    home: Path


@dataclass(frozen=True, slots=True)
class Added:
    """The result of adding a tool to a folder.

    Attributes:
        files: each file with its state: ``added``, ``replaced`` or ``unchanged``.
        granted: whether the manifest was changed.
    """

    files: tuple[tuple[str, str], ...]
    granted: bool


def bundled() -> list[Bundled]:
    """Returns the bundled tools, by name.

    Raises:
        SetupError: they are missing from this installation.
    """
    home = _home()
    entries = json.loads((home / FILE).read_text("utf-8"))["files"]
    files = [(each, file) for each in (home, home / JAVASCRIPT) for file in tool_files(each) if not is_shared(file)]
    return [_bundled(each, file, entries.get(file, {})) for each, file in sorted(files, key=lambda pair: pair[1])]


def add(tool: Bundled, folder: Path, *, force: bool = False) -> Added:
    """Copies a tool into a folder, which is created if it does not exist, and grants it what it needs.

    The tool file is copied last, so that a process which follows the folder loads it with everything in place.

    Args:
        force: replace files there that differ from the bundled ones.

    Raises:
        SetupError: a file there differs, and `force` is False; then nothing is changed. The manifest is broken, or the
            folder cannot be written.
    """
    home = tool.home
    if folder.exists() and not folder.is_dir():
        raise SetupError(f"{folder} is not a folder: name another one with --dir")
    try:
        load_manifest(folder)
    except SetupError as error:
        raise SetupError(f"nothing was added, since the manifest in {folder} is broken: {error}") from None
    states = {file: _state(home / file, folder / file) for file in tool.files}
    changed = [file for file, state in states.items() if state == "replaced"]
    if changed and not force:
        paths = ", ".join(str(folder / file) for file in changed)
        raise SetupError(
            f"{paths} would be overwritten, with other content: use --force if you want that, or name another folder "
            "with --dir"
        )
    try:
        folder.mkdir(exist_ok=True)
        *first, last = tool.files
        for file in first:
            _copy(home / file, folder / file, states[file])
        granted = grant(folder, last, tool.grants, tool.helpers)
        _copy(home / last, folder / last, states[last])
    except OSError as error:
        raise SetupError(
            f"{error.filename or folder} cannot be written: {error.strerror}: create its parent folder, and let this "
            "user write there"
        ) from None
    return Added(tuple(states.items()), granted)


def _home() -> Path:
    """Returns the folder of the tools: in the installed package, or in a checkout among the examples."""
    package = Path(__file__).resolve().parents[2]
    for home in (package / "bundled_dropin", package.parent / "examples" / "dropin"):
        if (home / FILE).is_file():
            return home
    raise SetupError("the bundled tools are missing from this installation: reinstall toolbus")


def _bundled(home: Path, file: str, grants: Mapping[str, Any]) -> Bundled:
    parsed = ast.parse((home / file).read_text("utf-8"))
    imported = [node.module for node in ast.walk(parsed) if isinstance(node, ast.ImportFrom) and node.module]
    helpers = tuple(f"{name}.py" for name in imported if (home / f"{name}.py").is_file())
    data = tuple(path for path in grants.get("read", ()) if (home / path).is_file())
    about = (ast.get_docstring(parsed) or "").partition("\n")[0].replace("`", "")
    return Bundled(file.removesuffix(".py"), about, (*data, *helpers, file), helpers, grants, home)


def _state(bundled_file: Path, target: Path) -> str:
    if not target.exists() and not target.is_symlink():
        return "added"
    try:
        same = target.read_bytes() == bundled_file.read_bytes()
    except OSError:  # a folder, a dangling link, not readable
        same = False
    return "unchanged" if same else "replaced"


def _copy(bundled_file: Path, target: Path, state: str) -> None:
    if state != "unchanged":
        target.parent.mkdir(exist_ok=True)
        write_file(target, bundled_file.read_bytes())
