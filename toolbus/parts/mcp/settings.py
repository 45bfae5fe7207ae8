"""Holds the configuration of MCP: whether its endpoint is served, and the profiles that clients see.

A profile is one view of the catalog under a URL of its own: which tools, under which names, on behalf of which user.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from toolbus.bus.access.identity import Globs
from toolbus.common.reader import Keys, Reader
from toolbus.common.setting import PATH, CheckedRecord, Option, is_file, setting, table
from toolbus.common.text import quote
from toolbus.errors import SetupError
from toolbus.protocol.tool import MAX_LEVEL, MAX_TIMEOUT_SECONDS

DEFAULT_PROFILE = "default"
PROFILE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}", re.ASCII)  # it stands in a path and in a source
LONGEST_NAME = 50  # models take 64 characters, and clients put the name of the server before a tool's
MIN_LONGEST_NAME = 16  # a shortened name has nine characters of a hash
MAX_LONGEST_NAME = 128  # the protocol's own limit
MAX_PROFILES = 100
SHOWS = ("all", "search")
LOGIN_PATH = "/mcp-login"  # of the pages on which users log in at mounted servers


@dataclass(frozen=True, slots=True)
class Profile:
    """One view of the catalog.

    Attributes:
        name: the last part of its path; that of ``default`` is ``/mcp`` too.
        sources: patterns of sources whose tools it has. The bus's own tools only where they are named as ``toolbus``.
        allow, deny: patterns of tools, as ``NAME`` or ``SOURCE:NAME``; ``deny`` wins.
        role: whose tools it has; "" means those of all roles.
        user: on whose behalf its clients call; "" names no user.
        level: that user's access level.
        longest_name: characters of a tool's name towards clients.
        bare: sources whose tools are named without their source.
        show: ``all``, or ``search``: three tools, with which a model finds and calls the others.
        timeout_seconds: of calls of tools that set none themselves; 0: as everywhere.

    Raises:
        SetupError: from the constructor, naming the first rule that is broken.
    """

    name: str = DEFAULT_PROFILE
    sources: tuple[str, ...] = ("*",)
    allow: tuple[str, ...] = ("*",)
    deny: tuple[str, ...] = ()
    role: str = ""
    user: str = ""
    level: int = 0
    longest_name: int = LONGEST_NAME
    bare: tuple[str, ...] = ()
    show: Literal["all", "search"] = "all"
    timeout_seconds: float = 0.0
    _sources: Globs = field(init=False, repr=False, compare=False)
    _allow: Globs = field(init=False, repr=False, compare=False)
    _deny: Globs = field(init=False, repr=False, compare=False)
    _hidden: str = field(init=False, repr=False, compare=False)  # the bus's own source, unless `sources` names it

    def __post_init__(self) -> None:
        where = f"mcp.profiles.{self.name}"
        if not PROFILE_NAME.fullmatch(self.name):
            raise SetupError(
                f"mcp.profiles names {quote(self.name)}: a profile is 1 to 32 of a-z, 0-9, _ and -, and begins with a "
                "letter or digit"
            )
        if not MIN_LONGEST_NAME <= self.longest_name <= MAX_LONGEST_NAME:
            raise SetupError(
                f"{where}.longest_name is {self.longest_name}, it must be from {MIN_LONGEST_NAME} to {MAX_LONGEST_NAME}"
            )
        if not 0 <= self.level <= MAX_LEVEL:
            raise SetupError(f"{where}.level is {self.level}, it must be a whole number from 0 to {MAX_LEVEL}")
        if self.show not in SHOWS:
            raise SetupError(f"{where}.show is {quote(self.show)}, it must be one of {', '.join(SHOWS)}")
        if not 0 <= self.timeout_seconds <= MAX_TIMEOUT_SECONDS:
            raise SetupError(
                f"{where}.timeout_seconds is {self.timeout_seconds:g}, it must be from 0 (the tool's own) to "
                f"{MAX_TIMEOUT_SECONDS:g}"
            )
        for name in ("sources", "allow", "deny"):
            object.__setattr__(self, f"_{name}", Globs(getattr(self, name)))
        from toolbus.bus.catalog.entry import BUS_SOURCE  # not at the top: `toolbus serve --help` reads this module

        object.__setattr__(self, "_hidden", "" if BUS_SOURCE in self.sources else BUS_SOURCE)

    @property
    def source(self) -> str:
        return f"mcp:{self.name}"

    @property
    def administers(self) -> bool:
        """Whether it has the bus's own tools."""
        return not self._hidden

    def has(self, name: str, bare_name: str, source: str) -> bool:
        if source == self._hidden:
            return False
        names = (name, bare_name, f"{source}:{bare_name}")
        return self._sources.match(source) and self._allow.match(*names) and not self._deny.match(*names)


@dataclass(frozen=True, slots=True)
class McpSettings:
    """What MCP clients are offered.

    Attributes:
        enabled: whether ``/mcp`` is served.
        task_after_seconds: how long a call may take before a client that can follow tasks gets one.
        profiles: by name, ``default`` included.
        login_url: the address of the bus for browsers that log users in at mounted servers; "": its own HTTP.
    """

    enabled: bool = True
    task_after_seconds: float = 5.0
    profiles: Mapping[str, Profile] = field(default_factory=lambda: {DEFAULT_PROFILE: Profile()})
    login_url: str = ""

    def __post_init__(self) -> None:
        if len(self.profiles) > MAX_PROFILES:
            raise SetupError(f"mcp.profiles has {len(self.profiles)} profiles, a bus has at most {MAX_PROFILES}")
        if self.login_url and not re.fullmatch(r"https?://[^\s/?#@\\]+", self.login_url, re.ASCII):
            raise SetupError(
                f"mcp.login_url is {quote(self.login_url)}: write the address of the bus alone, as https://HOST or "
                "https://HOST:PORT"
            )


def _profiles(reader: Reader) -> dict[str, Profile]:
    profiles = {name: Profile(name=name, **each.record(_PROFILE_KEYS)) for name, each in reader.entries().items()}
    return {DEFAULT_PROFILE: Profile()} | profiles


_PROFILE_KEYS: Keys = {
    "sources": ("sources", Reader.names),
    "allow": ("allow", Reader.names),
    "deny": ("deny", Reader.names),
    "role": ("role", Reader.text),
    "user": ("user", Reader.text),
    "level": ("level", Reader.whole),
    "longest_name": ("longest_name", Reader.whole),
    "bare": ("bare", Reader.names),
    "show": ("show", Reader.text),
    "timeout_seconds": ("timeout_seconds", Reader.number),
}
_KEYS: Keys = {
    "enabled": ("enabled", Reader.flag),
    "task_after": ("task_after_seconds", lambda reader: reader.number(0.0, MAX_TIMEOUT_SECONDS)),
    "profiles": ("profiles", _profiles),
    "login_url": ("login_url", Reader.text),
}


@dataclass(frozen=True, slots=True)
class McpConfig(CheckedRecord):
    """The settings of a bus for MCP: what clients see, and which servers it mounts."""

    mcp: McpSettings = setting(McpSettings, table(lambda reader: McpSettings(**reader.record(_KEYS))))
    mcp_secrets: Path | None = setting(
        None,
        PATH,
        'a TOML file (`NAME = "value"`, yours, mode 0600) from which `${VAR}` of '
        "[mounts](../start/mcp-mounts.md) is taken before the environment",
        option=Option("Take ${VAR} of mounted MCP servers from this TOML file (0600).", "FILE"),
    )
    mcp_servers: Path | None = setting(
        None,
        PATH,
        "a file of MCP servers to [mount](../start/mcp-mounts.md), in addition to those of `toolbus mounts add`",
        check=is_file,
        option=Option("Also mount the MCP servers of this JSON file, and follow its changes.", "FILE"),
    )
