"""Takes over the MCP servers that a client's file configures: shows what becomes of each, then adds them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from toolbus.common.reader import Reader
from toolbus.common.text import shorten
from toolbus.errors import SetupError
from toolbus.parts.mcp.client.entries import ENTRY_KEYS, is_restriction, mount_name, read_entry, switched_off
from toolbus.parts.mcp.client.files import MAX_MOUNTS, TABLES, load_document
from toolbus.parts.mcp.commands.mcp_clients import McpClientName, client_files


@dataclass(frozen=True, slots=True)
class ImportedServer:
    """A server in a client's file, and what becomes of it.

    Attributes:
        entry: what is written; its variables stay as they are.
        why: why it is skipped; "" where it is added.
    """

    name: str
    target: str
    origin: str
    entry: Mapping[str, Any]
    why: str = ""


class AnyVariable(dict[str, str]):
    """An environment in which every variable is set: what a bus lacks shows there, not when an entry is written."""

    def get(self, name: str, default: Any = None) -> Any:
        """Returns some text."""
        return "x"


def files_to_import(what: str, environment: Mapping[str, str], home: Path, project: Path) -> list[Path]:
    """Returns the files that an argument of `--import` means: those of a client that exist, or a file.

    Raises:
        SetupError: the client has no file here.
    """
    if what not in tuple(McpClientName):
        return [Path(what)]
    files = client_files(McpClientName(what), environment=environment, home=home, project=project)
    places = [path for path in (files.project, files.user) if path is not None]
    existing = [path for path in places if path.is_file()]
    if not existing:
        raise SetupError(
            f"{what} has no file of MCP servers here ({' or '.join(map(str, places))}): name a file instead"
        )
    return existing


def find_servers(paths: list[Path], taken: Mapping[str, Any], project: Path) -> list[ImportedServer]:
    """Returns the servers of files, each with what becomes of it.

    Args:
        taken: names of mounts that exist.
        project: whose servers are read where a file has those of several projects.

    Raises:
        SetupError: a file cannot be read, or has no servers.
    """
    servers: list[ImportedServer] = []
    used = set(taken)
    for path in paths:
        for written, entry, off in _entries(load_document(path), path, project):
            name = mount_name(written)
            why = _why_not(name, written, entry, path, used)
            if not why and off:
                why = f"{off} of the file switches it off"
            if not why and len(used) >= MAX_MOUNTS:
                why = f"a bus has at most {MAX_MOUNTS} mounts of its own"
            if not why:
                used.add(name)
            fields = entry.items() if isinstance(entry, dict) else ()
            ours = {key: value for key, value in fields if key in ENTRY_KEYS or is_restriction(key)}
            servers.append(ImportedServer(name or written, target_of(entry), str(path), ours, why))
    if not servers:
        raise SetupError(f"{' and '.join(map(str, paths))} configure no MCP servers: there is nothing to import")
    return servers


def target_of(entry: Any) -> str:
    """Returns what an entry runs or reaches, without arguments and queries, which may be secret."""
    if not isinstance(entry, dict):
        return ""
    url = str(entry.get("url") or "").partition("?")[0]
    return shorten(url or str(entry.get("command") or ""), 60)


def _entries(document: Any, path: Path, project: Path) -> Iterator[tuple[str, Any, str]]:
    """Yields the servers of a file: the name, the entry, and the key by which the file switches it off, or ""."""
    whole = Reader(document, str(path)).entries()
    # Claude Code keeps the servers of a project in the file of the user, VS Code its own in older settings.
    projects = document.get("projects")
    own = projects.get(str(project)) if isinstance(projects, dict) else None
    own = own if isinstance(own, dict) else {}
    for table in (whole, Reader(own, f"{path}: {project}").entries()):
        for key in TABLES:
            if key in table:
                for name, reader in table[key].entries().items():
                    yield name, reader.value, switched_off(document, name) or switched_off(own, name)


def _why_not(name: str, written: str, entry: Any, path: Path, used: set[str]) -> str:
    if not name:
        return "its name has no letter or digit"
    if name in used:
        return f"a mount {name} exists already"
    if _is_ourselves(entry):
        return "it is this bus itself"
    try:
        read_entry(Reader(entry, f"mount {written}"), name, AnyVariable(os.environ), [], str(path))
    except SetupError as error:
        return str(error).removeprefix(f"mount {written}: ")
    return ""


def _is_ourselves(entry: Any) -> bool:
    """Tells whether an entry is a bridge to a bus, which would mount itself."""
    if not isinstance(entry, dict):
        return False
    words = [str(entry.get("command") or ""), *map(str, entry.get("args") or ())]
    stems = [PurePath(word).name.removesuffix(".exe") for word in words]
    return ("toolbus", "mcp") in itertools.pairwise(stems)
