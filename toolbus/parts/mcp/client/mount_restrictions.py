"""Reads the restrictions that the files of other MCP clients put on a server: switched off, or some tools only.

Restrictions fail closed: a key that looks like one is read, or its entry is refused with the key's name. A server
would otherwise start, or offer a tool, that its owner has forbidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from toolbus.common.reader import Reader, snake_case
from toolbus.common.text import quote
from toolbus.errors import SetupError

# Keys of entries, as Python spells them, with the clients that have them.
_ON = frozenset(("enabled", "is_enabled", "enable", "active", "is_active"))  # Zed, Codex, opencode, Cherry Studio
_OFF = frozenset(("is_disabled", "disable", "inactive"))
_ONLY = frozenset(  # Gemini CLI, Codex, Copilot CLI, Claude, goose
    ("include_tools", "enabled_tools", "tools", "allowed_tools", "allow_tools", "available_tools", "included_tools")
)
_NOT = frozenset(  # Gemini CLI, Codex, Cline, Windsurf
    ("exclude_tools", "disabled_tools", "excluded_tools", "denied_tools", "deny_tools", "blocked_tools", "block_tools")
)
_LOOKS_RESTRICTIVE = re.compile(
    r"tool|allow|den(y|ied)|disabl|enabl|exclu|inclu|block|restrict|permi|read_?only|sandbox|filter|(^|_)only|"
    r"white_?list|black_?list|forbid|limit|approv|confirm|polic"
)
_LOOSENS = re.compile(r"auto_?(approv|allow)|always_?allow|^trust|tool_timeout|timeout")  # dialogs of other clients
# Keys of a whole file that name servers.
_SERVERS_ONLY = frozenset(("allow_mcpservers", "enabled_mcpjson_servers", "enabled_mcp_servers"))
_SERVERS_NOT = frozenset(("exclude_mcpservers", "disabled_mcpjson_servers", "disabled_mcp_servers"))


@dataclass(frozen=True, slots=True)
class Restrictions:
    """What an entry restricts.

    Attributes:
        is_off: whether the server is switched off.
        only: globs of the tools that it may offer; None: the entry names none.
        denied: globs of the tools that it may not offer.
        keys: the keys that were read.
    """

    is_off: bool = False
    only: tuple[str, ...] | None = None
    denied: tuple[str, ...] = ()
    keys: frozenset[str] = frozenset()


def read_restrictions(reader: Reader, name: str, known: Iterable[str]) -> Restrictions:
    """Reads the restrictions of an entry in the words of other clients.

    Args:
        name: of the server: some clients write it before the names of tools.
        known: the keys that have a meaning of their own.

    Raises:
        SetupError: a key restricts in a way that the bus does not know.
    """
    is_off, only, denied, keys = False, dict[str, tuple[str, ...]](), list[str](), set[str]()
    for key, at in reader.entries().items():
        word = snake_case(key.replace("-", "_"))
        if key in known or _LOOSENS.search(word):
            continue
        if word in _ON or word in _OFF:
            is_off = is_off or at.flag() is (word in _OFF)
        elif word in _ONLY and isinstance(at.value, Mapping):
            allowed, refused = _switches(at)
            denied += _patterns(refused, name)
            if allowed:
                only[key] = _patterns(allowed, name)
        elif word in _ONLY:
            only[key] = _patterns(_names(at), name)
        elif word in _NOT:
            denied += _patterns((each.partition("(")[0] for each in _names(at)), name)
        elif not looks_restrictive(word) or _is_empty(word, at.value):
            continue
        else:
            raise SetupError(
                f"{reader.place}: {quote(key)[1:-1]} looks like a restriction that the bus does not know: remove it, "
                'and restrict the mount with "disabled", or with "allow" and "deny" below "toolbus"',
                at.loc,
            )
        keys.add(key)
    if len(only) > 1:
        raise SetupError(f"{reader.place}: {' and '.join(only)} both choose tools: write one of them")
    chosen = next(iter(only.values()), None)
    return Restrictions(is_off, chosen, tuple(denied), frozenset(keys))


def is_restriction(key: str) -> bool:
    """Tells whether `read_restrictions` reads a key of an entry."""
    return snake_case(key.replace("-", "_")) in _ON | _OFF | _ONLY | _NOT


def looks_restrictive(key: str) -> bool:
    """Tells whether an unknown key may restrict a server."""
    return _LOOKS_RESTRICTIVE.search(snake_case(key)) is not None


def switched_off(file: Mapping[str, Any], name: str) -> str:
    """Returns the key by which a file switches a server off; "" if none does.

    Args:
        file: the object that holds the table of servers: of the whole file, or of a project in it.
    """
    settings = [(key, value) for key, value in file.items()]
    inner = file.get("mcp")  # Gemini CLI
    if isinstance(inner, Mapping):
        settings += [(f"mcp.{key}", value) for key, value in inner.items()]
    for key, value in settings:
        word = snake_case(key)
        if word in _SERVERS_ONLY or key == "mcp.allowed":
            if not _names_server(value, name, otherwise=False):
                return key
        elif (word in _SERVERS_NOT or key == "mcp.excluded") and _names_server(value, name, otherwise=True):
            return key
    return ""


def _names_server(value: Any, name: str, *, otherwise: bool) -> bool:
    """Tells whether a list names a server; `otherwise` if it is no list."""
    names = [value] if isinstance(value, str) else value
    return name in names if isinstance(names, list) else otherwise


def _names(reader: Reader) -> tuple[str, ...]:
    return (reader.text(),) if isinstance(reader.value, str) else reader.names()


def _switches(reader: Reader) -> tuple[list[str], list[str]]:
    """Reads an object that switches tools on and off; returns the names of both kinds."""
    kinds: tuple[list[str], list[str]] = ([], [])
    for name, at in reader.entries().items():
        if isinstance(at.value, Mapping):
            rules = read_restrictions(at, "", ())
            if rules.only is not None or rules.denied:
                raise at.error('it must be true, false, or {"enabled": …}')
            kinds[rules.is_off].append(name)
        else:
            kinds[not at.flag()].append(name)
    return kinds


def _patterns(names: Iterable[str], server: str) -> tuple[str, ...]:
    """Returns patterns for names of tools, as they are and without the server before them."""
    globs: list[str] = []
    for each in names:
        pattern = each.replace("[", "[[]")
        globs.append(pattern)
        for prefix in (f"mcp__{server}__", f"{server}__", f"{server}:", f"{server}/", f"{server}."):
            if server and pattern.startswith(prefix) and len(pattern) > len(prefix):
                globs.append(pattern.removeprefix(prefix))
    return tuple(globs)


def _is_empty(word: str, value: Any) -> bool:
    """Tells whether a key restricts nothing: it has no value, or is switched off."""
    if value is False:
        return "enabl" not in word and "allow" not in word and "permi" not in word
    return value is None or value == "" or value == [] or value == {}
