"""Assigns names to tools towards MCP clients, so that a name never changes its tool.

A tool's name on the bus is ``NAME`` or ``SOURCE:NAME``; models and clients accept neither a colon nor more than 64
characters, of which clients use some themselves. A name belongs to its first tool forever, also while the tool is not
offered and after a restart: otherwise a model with an old conversation would call another tool than it knows.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable
from pathlib import Path

from toolbus.bus.mcp_settings import Profile
from toolbus.bus.storage.state_file import read_state, write_state
from toolbus.errors import ToolBusError

log = logging.getLogger("toolbus.mcp")

STATE_FILE = "mcp-names.json"  # in the data directory
MAX_NAMES = 200_000  # of all profiles; beyond it, names of tools that are not offered are removed, oldest first
_HASH_LENGTH = 8
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_-]")


class ToolNames:
    """The names of the tools of all profiles.

    Args:
        path: of the file of names; None: a restart loses them.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._listed: dict[tuple[str, str], str] = {}  # the name on the bus by profile and wire name, oldest first
        self._wire: dict[tuple[str, str], str] = {}  # the current wire name by profile and name on the bus
        self._missing: set[tuple[str, str]] = set()  # profile and name on the bus of tools not seen since the start
        self.unsaved = False  # whether names are not persisted yet
        if path is not None:
            self._load(path)

    def __repr__(self) -> str:
        return f"<ToolNames {len(self._wire)}>"

    def name_of(self, profile: Profile, name: str, bare_name: str, source: str) -> str:
        """Returns the name of a tool towards the clients of a profile; assigns one to a new tool.

        Args:
            name: of the tool on the bus.
        """
        if self._missing:
            self._missing.discard((profile.name, name))
        wire = self._wire.get((profile.name, name))
        if wire is None or len(wire) > profile.longest_name:
            wire = self._new(profile, name, bare_name if source in profile.bare else name)
        return wire

    def listed_as(self, profile: Profile, wire: str) -> str | None:
        """Returns the name on the bus for a name towards clients; None if no tool had that name."""
        return self._listed.get((profile.name, wire))

    def has_missing(self, profile: Profile) -> bool:
        """Tells whether a profile had tools before the start of this bus that are still missing."""
        return any(name == profile.name for name, _ in self._missing)

    def is_missing(self, profile: Profile, wire: str) -> bool:
        """Tells whether the tool of a name is one of them."""
        return (profile.name, self._listed.get((profile.name, wire), "")) in self._missing

    def save(self, offered: Iterable[tuple[str, str]] = ()) -> None:
        """Persists new names, if any; blocks until they are written.

        Args:
            offered: profile and name on the bus of each tool whose name must not be removed.
        """
        if not self.unsaved:
            return
        self.unsaved = False
        if len(self._listed) > MAX_NAMES:
            self._forget(set(offered))
        if self._path is None:
            return
        tables: dict[str, dict[str, str]] = {}
        for (profile, wire), name in list(self._listed.items()):
            tables.setdefault(profile, {})[wire] = name
        try:
            write_state(self._path, tables)
        except OSError as error:
            self.unsaved = True
            log.warning("names of tools could not be persisted in %s: %s", self._path, error)

    def _forget(self, offered: set[tuple[str, str]]) -> None:
        unused = [(profile, wire) for (profile, wire), name in self._listed.items() if (profile, name) not in offered]
        for profile, wire in unused[: len(self._listed) - MAX_NAMES]:
            self._wire.pop((profile, self._listed.pop((profile, wire))), None)

    def _new(self, profile: Profile, name: str, shown: str) -> str:
        stem = _FORBIDDEN.sub("_", shown).strip("_") or "tool"
        wire, attempt = stem, 0
        while len(wire) > profile.longest_name or (profile.name, wire) in self._listed:
            digest = hashlib.sha256(f"{name}\0{attempt}".encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_LENGTH]
            wire = f"{stem[: profile.longest_name - _HASH_LENGTH - 1]}_{digest}"
            attempt += 1
        self._put(profile.name, name, wire)
        self.unsaved = True
        return wire

    def _put(self, profile: str, name: str, wire: str) -> None:
        self._wire[profile, name] = wire
        self._listed[profile, wire] = name

    def _load(self, path: Path) -> None:
        try:
            tables = read_state(path)
            for profile, names in tables.items():
                for wire, name in names.items():
                    self._put(str(profile), str(name), str(wire))
                    self._missing.add((str(profile), str(name)))
        except FileNotFoundError:
            return
        except (OSError, ValueError, AttributeError, ToolBusError) as error:
            log.warning("names of tools in %s cannot be read, so tools may get other names: %s", path, error)
