"""Turns the declarations of an MCP server into tools of the bus, each checked alone.

A name that breaks our rules is replaced by one that fits, always the same one. A tool whose schema is refused is left
out. Invisible characters are made visible, since models read them. Nothing here knows connections.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from toolbus.bus.catalog.entry import CompiledTool, compile_tool
from toolbus.bus.catalog.schema import compile_output_schema
from toolbus.bus.pins.pins import tool_subject
from toolbus.common.text import mark_unsafe, quote
from toolbus.errors import InvalidTool
from toolbus.parts.mcp.client.mount_entry import MountEntry
from toolbus.parts.mcp.messages.tools import read_declaration
from toolbus.protocol.json_schema import SchemaFault
from toolbus.protocol.limits import Limits
from toolbus.protocol.tool import MAX_NAME, NAME, Tool

MAX_TOOLS = 10_000  # of one mount
_HASH_DIGITS = 8  # in a name that replaces the server's
_READ_BY_MODELS = ("title", "description")


@dataclass(frozen=True, slots=True)
class Left:
    """A tool of a server that is not offered, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Declared:
    """The declarations of a server as the bus offers them.

    Attributes:
        compiled: the tools for the registry, in the server's order.
        server_names: the server's name of each tool, by our name.
        left: tools that are refused, or wait for an approval.
        hidden: how many tools `allow` and `deny` leave out.
        notices: hints for people about tools that are offered, by our name.
    """

    compiled: tuple[CompiledTool, ...] = ()
    server_names: Mapping[str, str] = field(default_factory=dict)
    left: tuple[Left, ...] = ()
    hidden: int = 0
    notices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def tools(self) -> list[Tool]:
        """The tools that are offered."""
        return [each.tool for each in self.compiled]


def tools_of(
    entry: MountEntry,
    declarations: Sequence[Any],
    limits: Limits,
    blocked: Collection[str] = frozenset(),
    broken: Mapping[str, str] = MappingProxyType({}),
    *,
    max_tools: int = MAX_TOOLS,
) -> Declared:
    """Returns the tools that the bus offers for the declarations of a server.

    Args:
        declarations: entries of `tools/list`; a server may send any value.
        blocked: subjects that wait for an approval; see `fingerprints.review`.
        broken: why a tool's output schema is left out, by our name.
    """
    compiled: list[CompiledTool] = []
    names: dict[str, str] = {}
    notices: dict[str, tuple[str, ...]] = {}
    left: list[Left] = []
    hidden = 0
    for number, declaration in enumerate(declarations):
        if len(compiled) >= max_tools:
            rest = len(declarations) - number
            left.append(Left("…", f"{rest} more tools: a mount has {max_tools} at most: choose some with allow"))
            break
        theirs = declaration.get("name") if isinstance(declaration, Mapping) else None
        if not isinstance(theirs, str) or not theirs:
            left.append(Left(f"[{number}]", "it has no name, which a declaration of a tool needs"))
            continue
        ours = our_name(theirs)
        if not is_allowed(entry, theirs, ours):
            hidden += 1
            continue
        if tool_subject(theirs) in blocked:
            left.append(
                Left(ours, f"it changed since the server was trusted: run `toolbus approve {entry.name} {ours}`")
            )
            continue
        try:
            if ours in names:
                raise InvalidTool([f"tool {quote(theirs)} is declared twice: the first one is offered"])
            if ours in broken:
                declaration = {key: value for key, value in declaration.items() if key != "outputSchema"}
            item, hints = _compile(entry, declaration, ours, limits)
        except InvalidTool as fault:
            left.append(Left(ours, "; ".join(fault.faults)))
            continue
        compiled.append(item)
        names[ours] = theirs
        if ours in broken:
            hints = (*hints, broken[ours])
        if hints:
            notices[ours] = hints
    return Declared(tuple(compiled), names, tuple(left), hidden, notices)


def our_name(theirs: str) -> str:
    """Returns the name of a server's tool on the bus: its own, or one that depends only on its own.

    Such a name never becomes that of another tool when the server's other tools change.
    """
    if NAME.fullmatch(theirs):
        return theirs
    digest = hashlib.sha256(theirs.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", theirs).strip("_")[: MAX_NAME - _HASH_DIGITS - 1]
    return f"{stem or 'tool'}_{digest}"


def is_allowed(entry: MountEntry, theirs: str, ours: str) -> bool:
    """Tells whether the globs of a mount allow a tool; they may use the server's name or the bus's."""
    if entry.allow and not _matches(entry.allow, theirs, ours):
        return False
    return not _matches(entry.deny, theirs, ours)


def _matches(globs: Sequence[str], *names: str) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs for name in names)


def _compile(
    entry: MountEntry, declaration: Mapping[str, Any], name: str, limits: Limits
) -> tuple[CompiledTool, tuple[str, ...]]:
    """Returns a tool and hints for people about it.

    Raises:
        InvalidTool: the tool breaks a rule of the bus.
    """
    notices = []
    if name != declaration["name"]:
        notices.append(f"the server calls it {quote(declaration['name'])}")
    try:
        visible = {key: _visible(value, key) for key, value in declaration.items()}
        if visible != dict(declaration):
            notices.append("its texts have invisible or direction-changing characters, which are written as [U+…]")
        tool = read_declaration(visible, name)
        tool, dropped = _within(tool, limits)
        # The size limits of the wire apply too.
        tool = replace(Tool.from_wire(tool.to_wire(), limits), **_overrides(entry, tool))
        item = compile_tool(tool, limits)
    except RecursionError:
        raise InvalidTool(
            [f"tool {quote(name)} is nested too deep: a bus takes {limits.schema_depth} levels"]
        ) from None
    except ValueError as error:  # a value that JSON or UTF-8 cannot represent
        raise InvalidTool([f"tool {quote(name)} cannot be written: {type(error).__name__}"]) from None
    return item, (*notices, *dropped, *item.warnings)


def _overrides(entry: MountEntry, tool: Tool) -> dict[str, Any]:
    return {
        "role": entry.role,
        "min_level": entry.min_level,
        "timeout_seconds": entry.timeout_seconds or tool.timeout_seconds,
        "hints_trusted": entry.trust_hints,
        "no_defaults": True,  # which arguments a server gets is between it and the model
    }


def _within(tool: Tool, limits: Limits) -> tuple[Tool, list[str]]:
    """Returns a tool without the optional parts that break a limit: metadata, the schema of its output."""
    notices = []
    if len(tool.metadata_json.encode()) > limits.schema_bytes:
        tool = replace(tool, metadata_json="")
        notices.append(f"its icons and _meta are left out: they exceed schema_bytes = {limits.schema_bytes}")
    if tool.output_schema_json:
        try:
            compile_output_schema(tool.output_schema_json, limits)
        except SchemaFault as fault:
            tool = replace(tool, output_schema_json="")
            notices.append(f"its outputSchema is left out: {fault}")
    return tool, notices


def _visible(value: Any, key: str = "") -> Any:
    """Returns a part of a declaration; invisible characters in texts that models read are made visible."""
    if isinstance(value, str):
        return mark_unsafe(value) if key in _READ_BY_MODELS else value
    if isinstance(value, Mapping):
        return {name: _visible(each, str(name)) for name, each in value.items()}
    return [_visible(each) for each in value] if isinstance(value, list) else value
