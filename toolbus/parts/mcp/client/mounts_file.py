"""Reads files of mounts in the common JSON of MCP clients, and follows them.

A file has `mcpServers`, or `servers` as in VS Code; comments and trailing commas are allowed. One bad entry does not
stop the others. A file starts programs, so one that another user could write is refused.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolbus.bus.path_ownership import check_path
from toolbus.common.reader import Reader
from toolbus.common.text import list_names, quote, refuse_constant
from toolbus.errors import SetupError
from toolbus.parts.mcp.client.mount_entry import MountEntry as MountEntry
from toolbus.parts.mcp.client.mount_entry import mount_name, read_entry
from toolbus.parts.mcp.client.mount_restrictions import switched_off

FILE = "mcp.json"  # in the data directory; `toolbus mount` writes it
TABLES = ("mcpServers", "servers")
MAX_MOUNTS = 64
MAX_FILE_BYTES = 4 * 1024 * 1024
_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\r\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING = re.compile(r'"(?:\\.|[^"\\])*"|,(?=\s*[}\]])', re.DOTALL)
_KNOWN_KEYS = frozenset({*TABLES, "inputs", "$schema"})  # keys of a file that need no notice


@dataclass(frozen=True, slots=True)
class MountsReading:
    """The content of a file.

    Attributes:
        entries: by name, in the order of the file, disabled ones included.
        refused: by name, why an entry cannot be mounted and how to fix it.
        notices: what is ignored, or read differently than written.
    """

    entries: Mapping[str, MountEntry] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between the running and the configured mounts; a changed mount is restarted."""

    added: tuple[MountEntry, ...] = ()
    changed: tuple[MountEntry, ...] = ()
    removed: tuple[str, ...] = ()


def compare(running: Mapping[str, MountEntry], configured: Mapping[str, MountEntry]) -> Difference:
    """Returns the mounts to start, restart and end; a disabled mount counts as not configured."""
    live = {name: entry for name, entry in configured.items() if not entry.disabled}
    return Difference(
        tuple(entry for name, entry in live.items() if name not in running),
        tuple(entry for name, entry in live.items() if name in running and running[name] != entry),
        tuple(name for name in running if name not in live),
    )


def read_mounts(path: Path, environment: Mapping[str, str]) -> MountsReading:
    """Reads a file of mounts.

    Args:
        environment: where `${VAR}` is looked up.

    Raises:
        SetupError: the whole file cannot be used; single entries are in `refused`.
    """
    return read_document(load_document(path), str(path), environment)


def load_document(path: Path) -> Any:
    """Returns the JSON of a file that only this user and root can change.

    Raises:
        SetupError: it cannot be read or parsed, is too large, or another user could have written it.
    """
    try:
        check_path(path, f"the file of mounts {path}")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror or error}: name a file that can be read") from None
    if len(content) > MAX_FILE_BYTES:
        raise SetupError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB: a file of mounts has a few KiB")
    try:
        return parse_commented(content.decode("utf-8-sig"))
    except RecursionError:
        raise SetupError(f"{path}: it is nested too deep: flatten it") from None
    except UnicodeDecodeError:
        raise SetupError(f"{path} is not UTF-8: save it in that encoding") from None
    except ValueError as error:
        raise SetupError(f"{path} is not JSON: {error}: correct the file") from None


def parse_commented(text: str) -> Any:
    """Parses JSON with comments and trailing commas; positions in errors are those of the text.

    Raises:
        ValueError: it is invalid, or has NaN or Infinity.
        RecursionError: it is nested too deep.
    """
    bare = _COMMENT.sub(lambda match: match[0] if match[0][0] == '"' else re.sub(r"[^\r\n]", " ", match[0]), text)
    bare = _TRAILING.sub(lambda match: match[0] if match[0][0] == '"' else " ", bare)
    return json.loads(bare, parse_constant=refuse_constant)


def read_document(document: Any, place: str, environment: Mapping[str, str]) -> MountsReading:
    """Reads the JSON of a file.

    Args:
        place: names the file in errors.

    Raises:
        SetupError: it has no object of mounts.
    """
    whole = Reader(document, place).entries()
    tables = [name for name in TABLES if name in whole]
    if not tables:
        raise SetupError(f'{place} has neither "mcpServers" nor "servers": write {{"mcpServers": {{…}}}}')
    entries: dict[str, MountEntry] = {}
    refused: dict[str, str] = {}
    notices: list[str] = []
    reading = {name: each.value for name, each in whole.items()}
    others = [name for name in whole if name not in _KNOWN_KEYS]
    if others:
        notices.append(f"{place}: unknown keys {list_names(map(_shown, others))}: they are ignored")
    for table in tables:
        for written, reader in whole[table].entries().items():
            name = mount_name(written)
            label = Reader(reader.value, f"{place}: mount {_shown(written)}", loc=reader.loc)
            try:
                if not name:
                    raise SetupError(f"{label.subject}: its name has no letter or digit: rename it")
                if name in entries or name in refused:
                    raise SetupError(f"{label.subject}: another mount has the name {name} already: rename one")
                if len(entries) >= MAX_MOUNTS:
                    raise SetupError(f"{label.subject}: a file may have {MAX_MOUNTS} mounts (mounts): remove some")
                entry = read_entry(label, name, environment, notices, place)
                if not entry.disabled and (key := switched_off(reading, written)):
                    notices.append(f"{label.subject} is not started: {key} of the file switches it off")
                    entry = replace(entry, disabled=True)
                entries[name] = entry
            except SetupError as error:
                # By the mount's name, unless another mount has it: then by the name as written. Two tables may have the
                # same name, and two written names may become the same mount name.
                refused[_free(name or written, written, {*entries, *refused})] = str(error)
            else:
                if name != written:
                    notices.append(f"{label.subject} is named {name}, since a source consists of [A-Za-z0-9_.-]")
    return MountsReading(entries, refused, tuple(notices))


def _free(name: str, written: str, used: set[str]) -> str:
    """Returns a key for a refused mount that no other mount has, so that no reason is lost."""
    candidates = itertools.chain((name, written), (f"{written} ({number})" for number in itertools.count(2)))
    return next(key for key in candidates if key not in used)


def _shown(name: str) -> str:
    return quote(name)[1:-1]
