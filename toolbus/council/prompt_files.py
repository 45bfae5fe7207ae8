"""Files of prompt tools, as far as they are files: found, parsed, and taken apart into entries.

What cannot be read becomes a sentence; nothing is raised.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolbus.tool import MIB

_MAX_FILE = 1 * MIB
_SUFFIXES = (".json", ".toml")


def entries_of(path: Path, problems: list[str]) -> Iterator[tuple[str, object]]:
    """Yields the entries of a file, or of those of a folder by name, each with its place in words.

    Args:
        problems: gets a sentence for each file that is left out.
    """
    for file in _files(path, problems):
        yield from _entries(file, problems)


def _files(path: Path, problems: list[str]) -> list[Path]:
    if not path.exists():
        problems.append(f"{path} is not there: write it, or name a file or folder that is")
        return []
    if not path.is_dir():
        return [path]
    try:
        return sorted(each for each in path.iterdir() if each.suffix in _SUFFIXES and not each.name.startswith("."))
    except OSError as problem:
        problems.append(f"{path} cannot be read: {problem.strerror}: let this user read it")
        return []


def _entries(file: Path, problems: list[str]) -> Iterator[tuple[str, object]]:
    """Yields the tools of a file as they are written, each with its place in words."""
    try:
        said = _parsed(file)
    except OSError as problem:
        problems.append(f"{file} cannot be read: {problem.strerror}: name a file or folder that this user may read")
        return
    except ValueError as problem:
        problems.append(f"{file} is left out: {problem}: mend it")
        return
    except RecursionError:
        problems.append(f"{file} is left out: it is nested too deep: flatten it")
        return
    if isinstance(said, Mapping) and "tools" in said:
        said = said["tools"]
        if not isinstance(said, list):
            problems.append(f"{file}: tools are {said!r:.80}, they must be a list: write [{{…}}, {{…}}]")
            return
    if not isinstance(said, list):
        yield str(file), said
        return
    yield from ((f"{file}, tool {number}", entry) for number, entry in enumerate(said, 1))


def _parsed(file: Path) -> Any:
    """Raises ValueError with a sentence for what is neither JSON nor TOML."""
    if file.suffix not in _SUFFIXES:
        raise ValueError(f"it is no {' or '.join(_SUFFIXES)} file")
    with file.open("rb") as opened:
        content = opened.read(_MAX_FILE + 1)
    if len(content) > _MAX_FILE:
        raise ValueError(f"it has more than {_MAX_FILE} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("it is no UTF-8 text") from None
    try:
        return tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except ValueError as problem:
        raise ValueError(f"it is no {file.suffix[1:].upper()} ({problem})") from None
