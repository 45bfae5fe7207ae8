"""Offers the declarations of a mounted server in the catalog, and stores them for the next start.

A mount is a source, and its tools are always listed as `MOUNT:TOOL`. Only changes reach the catalog. Each declaration
is checked alone: a name that breaks our rules is replaced by one that fits, always the same one; a tool whose schema
is refused is left out; invisible characters are made visible, since models read them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from toolbus.bus.catalog.entry import CompiledTool, compile_tool, memory_of
from toolbus.bus.catalog.schema import compile_output_schema, compile_schema
from toolbus.bus.core import Core
from toolbus.bus.storage.database import checksum_of, time_bytes
from toolbus.bus.storage.store import Earlier, Kind, Store, WriteFailed, earlier_database
from toolbus.common.text import clean_line, dump_json, list_names, mark_unsafe, quote, repair_utf8
from toolbus.errors import InvalidTool
from toolbus.functions.tool_spec import cut_description
from toolbus.parts.mcp.client.calls import MountHandler
from toolbus.parts.mcp.client.connection import ServerInfo, ServerLists, name_of_written
from toolbus.parts.mcp.client.entries import MountEntry
from toolbus.parts.mcp.client.features import MountFeatures
from toolbus.parts.mcp.features import features_of
from toolbus.parts.mcp.messages.headers import marked
from toolbus.parts.mcp.messages.hops import only_path, path_of, why_refused
from toolbus.parts.mcp.messages.tools import METADATA_KEY, read_declaration, with_native
from toolbus.parts.pins import pins
from toolbus.parts.pins.pins import Fingerprints, earlier_fingerprints, tool_subject
from toolbus.protocol.json_schema import SchemaFault
from toolbus.protocol.limits import Limits
from toolbus.protocol.tool import MAX_NAME, NAME, Tool
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.mounts")


class MountOffer:
    """The offer of one mount.

    Attributes:
        lists: the declarations of the server, by kind.
        declared: the tools that the bus offers for them.
        changed: subjects that differ from the trusted ones.
    """

    def __init__(
        self, entry: MountEntry, handler: MountHandler, features: MountFeatures, manifest: MountManifest, core: Core
    ) -> None:
        self.features = features
        self.lists: Mapping[str, list[Any]] = {}
        self.declared = Declared()
        self.changed: tuple[str, ...] = ()
        self._entry = entry
        self._handler = handler
        self._manifest = manifest
        self._core = core
        self._all_features = features_of(core)
        self._peer: ServerInfo | None = None  # None before the first handshake
        self._offered: tuple[object, ...] | None = None  # the tools and blocked subjects in the catalog; None: none
        self._notices: dict[str, tuple[str, ...]] = {}  # about its lists, by method
        self._broken: dict[str, str] = {}  # why the output schema of a tool is not offered, by our name
        self._circles: tuple[str, ...] = ()  # what is left out because of the buses that it came through
        self._tools: dict[bytes, ReadTool] = {}  # its tools by digest
        self._beyond: tuple[Left, ...] = ()  # tools that would take too much memory
        self._may_offer = True  # whether the source had permission when its tools were last offered

    def __repr__(self) -> str:
        return f"<MountOffer {self._entry.name} tools={self.tools}>"

    @property
    def tools(self) -> int:
        return len(self.declared.compiled)

    @property
    def why_degraded(self) -> str:
        """Why not all tools of the server are offered; "" if all are."""
        left = self.declared.left
        if left:
            first = list_names(f"{each.name} ({each.reason})" for each in left[:3])
            return f"{len(left)} tools are not offered: {first}"
        if self.changed:
            return f"changed since it was trusted: {list_names(self.changed)}"
        return ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with the server, for operators."""
        return (
            *(f"{method}: {notice}" for method, notices in self._notices.items() for notice in notices),
            *self._broken.values(),
            *self._circles,
        )

    def output_broken(self, tool: str, why: str) -> None:
        """Offers a tool without its output schema from now on, since its results break it."""
        if self._peer is not None and tool not in self._broken:
            self._broken[tool] = why
            log.warning("mount %s: %s", self._entry.name, why)
            self._put(self._peer, self.lists)

    def restore(self) -> ServerInfo | None:
        """Offers the stored declarations. Returns the server's description; None if nothing is stored."""
        entry = self._entry
        stored = self._manifest.load(entry.name, entry.command_digest)
        if stored is None:
            return None
        peer = _read_peer(stored.peer)
        if peer is not None:
            self._put(peer, dict(stored.declarations))
        return peer

    async def take(self, peer: ServerInfo, listing: ServerLists) -> None:
        """Offers the current declarations of the server, and stores them; lists that were not read stay as they are."""
        entry, lists = self._entry, {**self.lists, **listing.entries}
        lists["tools"] = await self._read(lists.get("tools", []))
        self._notices.update(listing.notices)
        if lists.get("tools") != self.lists.get("tools"):
            self._broken.clear()
        same = self._peer == peer and self.lists == lists
        is_new = self._manifest.is_new(entry.name, entry.command_digest)
        self._put(peer, lists, trusts_first=is_new)
        if not same or is_new:
            stored = StoredServer(dataclasses.asdict(peer), {kind: list(entries) for kind, entries in lists.items()})
            try:
                await asyncio.to_thread(self._manifest.save, entry.name, entry.command_digest, stored)
            except WriteFailed as error:
                log.error("the declarations of mount %s could not be stored: %s", entry.name, error)

    async def _read(self, tools: Sequence[Any]) -> list[Any]:
        """Reads tools on a thread, in a part of the time; returns those that fit, unchanged ones as they were before.

        What a server lists may take seconds to compile, and many times its size in memory.
        """
        limits = self._core.config.limits
        limit, held = limits.declared_bytes_per_source, 0
        compile_beside = self._core.calls.dispatcher.seams.budgets.compile
        why = f"the tools before it take what declared_bytes_per_source = {limit} allows: choose some with allow"
        read: dict[bytes, ReadTool] = {}
        beyond: list[Left] = []
        fit: list[Any] = []
        for tool in tools:
            # What has no room as it is written has none as it is compiled, and takes no time to compile.
            if isinstance(tool, msgspec.Raw) and held + len(bytes(tool)) > limit:
                beyond.append(Left(str(name_of_written(tool)), why))
                continue
            reading = partial(_read_tool, self._entry, tool, limits, self._tools, limit - held)
            each = await compile_beside(f"mount {self._entry.name}", reading)
            if not isinstance(each, ReadTool):
                fit.append(each)
                continue
            if held + each.size > limit:
                beyond.append(Left(str(each.declaration.get("name")), why))
                continue
            held += each.size
            read[each.digest] = each
            fit.append(each.declaration)
        self._tools, self._beyond = read, tuple(beyond)
        return fit

    async def review_again(self) -> None:
        """Offers the same declarations again, after an approval."""
        if self._peer is not None:
            self._put(self._peer, self.lists)

    def permission_changed(self) -> None:
        """Offers or withdraws the tools if the source's permission to offer tools has changed."""
        if self._peer is None or self._offered is None:
            return
        if self._may_offer != self._core.catalog.policy.may_offer(self._entry.name):
            self._put(self._peer, self.lists)

    def withdraw(self) -> None:
        """Withdraws everything at once."""
        self._offered = None
        self._core.catalog.registry.withdraw(self._handler)
        self._all_features.remove(self._entry.name)
        self._announce()

    def take_offline(self, why: str) -> None:
        """Takes the tools offline; they hold their places for the grace period, those of a bus until it is back."""
        self._offered = None
        if self._entry.bus:
            self._core.catalog.registry.suspend((self._handler,), why)
        else:
            self._core.catalog.registry.lose(self._handler, why, time.monotonic())
        self._all_features.remove(self._entry.name)
        self._announce()

    def _put(self, peer: ServerInfo, lists: Mapping[str, list[Any]], *, trusts_first: bool = True) -> None:
        entry = self._entry
        self._peer, self.lists = peer, lists
        lists = self._without_circles(lists)
        tools = lists.get("tools", [])
        blocked = self._review(peer, lists, trusts_first=trusts_first)
        self._may_offer = self._core.catalog.policy.may_offer(entry.name)
        if not self._may_offer:
            self.declared = Declared(left=(Left("all", f"source {entry.name!r} may not offer tools: grant it"),))
            tools = []
        key = (tools, blocked, frozenset(self._broken), self._beyond, peer.modern)
        if self._offered is None or self._offered != key:
            if self._may_offer:
                items = {id(each.declaration): each.item for each in self._tools.values() if each.item is not None}
                limits, modern = self._core.config.limits, peer.modern
                declared = tools_of(entry, tools, limits, blocked, self._broken, items=items, modern=modern)
                self.declared = replace(declared, left=(*declared.left, *self._beyond))
            self._register()
            self._offered = key
        prompts = [each for each in lists.get("prompts", ()) if _prompt_subject(each) not in blocked]
        moved = self.features.declare(peer.can, {**lists, "prompts": prompts})
        has_instructions = entry.instructions and pins.INSTRUCTIONS not in blocked
        self.features.instructions = peer.instructions if has_instructions else ""
        has_any = self.features.capabilities or self.features.instructions
        if has_any and self.features not in self._all_features.providers:
            self._all_features.add(self.features)
        else:
            for kind in moved:
                self._all_features.changed("prompts" if kind == "prompts" else "resources")

    def _without_circles(self, lists: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Returns the lists without what came through this bus, or through too many, or is not the other bus's own."""
        own_ids = self._all_features.bus_id, self._core.sessions.presence.handshake.boot_id
        refused: dict[str, list[str]] = {}  # what is left out, by the reason
        kept: dict[str, list[Any]] = {}
        for kind, entries in lists.items():
            kept[kind] = []
            for each in entries:
                why = why_refused(each, *own_ids)
                if not why and self._entry.bus and not self._entry.transit and len(path_of(each)) > 1:
                    why = 'came to it from another bus: mount that one, or set "transit"'
                if why:
                    shown = next((str(each[key]) for key in _NAMING if key in each), "?")
                    refused.setdefault(why, []).append(shown)
                else:
                    kept[kind].append(each)
        circles = tuple(
            f"{len(names)} of its tools, prompts and resources are left out: {clean_line(list_names(names))} {why}"
            for why, names in refused.items()
        )
        if circles != self._circles:
            self._circles = circles
            for line in circles:
                log.warning("mount %s: %s", self._entry.name, line)
        return kept

    def _register(self) -> None:
        declared = self.declared
        self._handler.names = dict(declared.server_names)
        self._handler.param_names = _marked(declared)
        self._handler.output_checkers = {
            each.tool.name: compile_output_schema(each.tool.output_schema_json, self._core.config.limits)
            for each in declared.compiled
            if each.tool.output_schema_json
        }
        outcome = self._core.catalog.registry.register(self._handler, declared.compiled, qualified=True, declare=True)
        if outcome.failed:
            left = (*declared.left, *(Left(name, why) for _, name, why in outcome.failed))
            self.declared = dataclasses.replace(declared, left=left)
        self._announce()

    def _announce(self) -> None:
        self._core.signals.catalog_changed()
        self._core.signals.source_changed(self._entry.name)

    def _review(self, peer: ServerInfo, lists: Mapping[str, list[Any]], *, trusts_first: bool) -> frozenset[str]:
        """Compares the declarations with the trusted ones. Returns the subjects that must not be offered."""
        entry = self._entry
        tools, prompts = ([each for each in lists.get(kind, ()) if isinstance(each, dict)] for kind in KINDS[:2])
        texts = {id(each.declaration): each.canonical for each in self._tools.values()}
        seen = pins.subjects_of(tools, prompts, peer.instructions, texts)
        known = self._manifest.fingerprints(entry.name, entry.command_digest)
        review = pins.review(known, seen, entry.pin, trusts_first=trusts_first)
        if review.pinned != known:
            try:
                self._manifest.save_fingerprints(entry.name, entry.command_digest, review.pinned)
            except WriteFailed as error:
                log.error("the fingerprints of mount %s could not be stored: %s", entry.name, error)
        if review.news:
            subjects = list_names(review.news)
            name = entry.name
            log.warning("mount %s: %s changed since it was trusted: see `toolbus mounts %s`", name, subjects, name)
            self._core.audit.record("change", target=name, why=subjects, source=name)
        self.changed = tuple(pins.pending({subject: review.pinned[subject] for subject in seen}))
        return review.blocked


def _prompt_subject(declaration: object) -> str:
    return pins.prompt_subject(str(declaration.get("name"))) if isinstance(declaration, dict) else ""


def _marked(declared: Declared) -> dict[str, Mapping[str, tuple[str, ...]]]:
    """Returns the arguments that go into headers, by tool; a tool with invalid marks has none."""
    names: dict[str, Mapping[str, tuple[str, ...]]] = {}
    for item in declared.compiled:
        if "x-mcp-header" in item.declared.parameters_json:
            try:
                names[item.tool.name] = marked(item.declared.parameters)
            except ValueError as error:
                log.warning("tool %s: %s", item.tool.name, error)
    return names


def _read_peer(written: Mapping[str, Any]) -> ServerInfo | None:
    try:
        return ServerInfo(**written)
    except TypeError:  # another version of the bus wrote it
        return None


# -- declarations as tools of the bus ----------------------------------------------------------------------------------

MAX_TOOLS = 10_000  # of one mount
_HASH_DIGITS = 8  # in a name that replaces the server's
_READ_BY_MODELS = ("title", "description")
_NAMING = ("name", "uri", "uriTemplate")  # fields that name a declaration, of any kind


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
        return [each.tool for each in self.compiled]


def tools_of(
    entry: MountEntry,
    declarations: Sequence[Any],
    limits: Limits,
    blocked: Collection[str] = frozenset(),
    broken: Mapping[str, str] = MappingProxyType({}),
    *,
    max_tools: int = MAX_TOOLS,
    items: Mapping[int, Item] = MappingProxyType({}),
    modern: bool = False,
) -> Declared:
    """Returns the tools that the bus offers for the declarations of a server.

    Args:
        declarations: entries of `tools/list`; a server may send any value.
        blocked: subjects that wait for an approval; see `fingerprints.review`.
        broken: why a tool's output schema is left out, by our name.
        items: those of the declarations that were read before, by identity.
        modern: whether the server speaks the era whose tasks the bus follows.
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
            how = f"run `toolbus access approve {entry.name} {ours}`"
            left.append(Left(ours, f"it changed since the server was trusted: {how}"))
            continue
        try:
            if ours in names and not entry.bus:  # a bus lists a name once for each role that has a tool of its own
                raise InvalidTool([f"tool {quote(theirs)} is declared twice: the first one is offered"])
            if ours in broken:
                declaration = {key: value for key, value in declaration.items() if key != "outputSchema"}
            if not modern and _only_as_task(declaration):
                raise InvalidTool([f"tool {quote(theirs)} runs only as a task of revision 2025-11-25"])
            item, hints = _item(items.get(id(declaration))) or _compile(entry, declaration, ours, limits)
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


Item = tuple[CompiledTool, tuple[str, ...]] | InvalidTool  # a tool with hints for people, or why it is refused


@dataclass(frozen=True, slots=True)
class ReadTool:
    """A declaration of a server that was read on a thread.

    Attributes:
        canonical: see `pins.canonical`.
        size: the memory that it counts.
        item: None where it has no name.
    """

    digest: bytes
    declaration: dict[str, Any]
    canonical: str
    size: int
    item: Item | None


def _read_tool(
    entry: MountEntry, tool: Any, limits: Limits, before: Mapping[bytes, ReadTool], room: int
) -> ReadTool | Any:
    """Reads a tool, or returns the same one as before; what is no object stays as it is.

    One that takes more memory than there is room for is not compiled.
    """
    declaration = tool
    if isinstance(tool, msgspec.Raw):
        try:
            declaration = msgspec.json.decode(tool)
        except (msgspec.DecodeError, RecursionError) as fault:
            declaration = f"{bytes(tool)[:100]!r}, which cannot be read: {fault}"
    if not isinstance(declaration, dict):
        return declaration
    try:
        text = json.dumps(declaration, sort_keys=True)
    except (ValueError, RecursionError):  # `_compile` says what is wrong with it
        text = ""
    digest = hashlib.sha256(text.encode() if text else repr(id(declaration)).encode()).digest()
    known = before.get(digest)
    if known is None:
        theirs = declaration.get("name")
        item: Item | None = None
        size = 0
        if isinstance(theirs, str) and theirs and (not text or (size := _least_size(declaration)) <= room):
            try:
                item = _compile(entry, declaration, our_name(theirs), limits)
            except InvalidTool as fault:
                item = fault
            size = memory_of(item[0].tool, item[0].compile_cost) if isinstance(item, tuple) else 0
        canonical = pins.canonical(declaration) if text else ""
        known = ReadTool(digest, declaration, canonical, size + len(text), item)
    return known


def _least_size(declaration: Mapping[str, Any]) -> int:
    """Returns what a tool that is not compiled yet takes at least."""
    schemas = [declaration.get(key) for key in ("inputSchema", "outputSchema")]
    text = repair_utf8(json.dumps(schemas, ensure_ascii=False, separators=(",", ":")))
    return memory_of(pb.Tool(parameters_json=text))


def _item(item: Item | None) -> tuple[CompiledTool, tuple[str, ...]] | None:
    """Returns what was read.

    Raises:
        InvalidTool: it is refused.
    """
    if isinstance(item, InvalidTool):
        raise InvalidTool(item.faults)
    return item


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
    return (not entry.allow or _matches(entry.allow, theirs, ours)) and not _matches(entry.deny, theirs, ours)


def _only_as_task(declaration: Mapping[str, Any]) -> bool:
    execution = declaration.get("execution")
    return isinstance(execution, Mapping) and execution.get("taskSupport") == "required"


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
        if entry.bus:
            tool = with_native(tool, visible)
        tool, dropped = _within(tool, declaration, limits)
        # The size limits of the wire apply too.
        tool = replace(Tool.from_wire(tool.to_wire(), limits), **_overrides(entry, tool))
        item = compile_tool(tool, limits)
        if not entry.check_arguments:  # an object they have to be, for the message around them
            item = replace(item, checker=compile_schema('{"type":"object"}', limits))
    except (RecursionError, ValueError) as error:
        why = f"is nested too deep: a bus takes {limits.schema_depth} levels"
        if isinstance(error, ValueError):  # a value that JSON or UTF-8 cannot represent
            why = f"cannot be written: {type(error).__name__}"
        raise InvalidTool([f"tool {quote(name)} {why}"]) from None
    return item, (*notices, *dropped, *item.warnings)


def _overrides(entry: MountEntry, tool: Tool) -> dict[str, Any]:
    return {
        "role": entry.role or tool.role,
        "min_level": max(entry.min_level, tool.min_level),
        "timeout_seconds": entry.timeout_seconds or tool.timeout_seconds,
        "hints_trusted": entry.trust_hints or (bool(entry.bus) and tool.hints_trusted),
        "no_defaults": True,  # which arguments a server gets is between it and the model
    }


def _within(tool: Tool, declaration: Mapping[str, Any], limits: Limits) -> tuple[Tool, list[str]]:
    """Returns a tool without the optional parts that break a limit, and with a description that does not."""
    notices = []
    if (size := len(tool.description.encode())) > limits.description_bytes:
        tool = replace(tool, description=cut_description(tool.name, tool.description, limits.description_bytes))
        notices.append(f"its description has {size} bytes and is cut to description_bytes = {limits.description_bytes}")
    if len(tool.metadata_json.encode()) > limits.schema_bytes:
        path = only_path(declaration.get("_meta"))
        tool = replace(tool, metadata_json=dump_json({METADATA_KEY: {"_meta": path}}) if path else "")
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


# -- what is stored ----------------------------------------------------------------------------------------------------

MAX_COMMANDS = 4  # command lines of one mount that are stored
KINDS = ("tools", "prompts", "resources", "templates")


def _read_earlier(path: Path) -> Mapping[str, Any]:
    """Reads ``mcp.db`` of earlier releases; the row of a server that is damaged is left out."""
    with earlier_database(path, application_id=0x5442746D, versions=2) as connection:
        rows = earlier_fingerprints(connection, path)
        for mount, command, *texts, saved, checksum in connection.execute("SELECT * FROM servers"):
            if checksum != checksum_of(*(each.encode() for each in (mount, command, *texts)), time_bytes(saved)):
                log.error("%s: the row of mount %s is damaged and left out: its checksum is wrong", path, mount)
                continue
            peer, declarations = map(json.loads, texts)
            rows[json.dumps([mount, command])] = {"peer": peer, "declarations": declarations, "saved": saved}
    return rows


MOUNTS = Kind(  # by mount, command and subject; of a server by mount and command
    "mounts",
    needed=False,
    without="let servers list their tools again, without approvals: those with pin = block wait for one",
    blank={},
    shared="settings",
    earlier=Earlier("mcp.db", _read_earlier),
)


@dataclass(frozen=True, slots=True)
class StoredServer:
    """The declarations of a server at its last run.

    Attributes:
        peer: era, version, capabilities, instructions: the fields of `ServerInfo`.
        declarations: entries of its lists, by kind; see `KINDS`.
    """

    peer: Mapping[str, Any] = field(default_factory=dict)
    declarations: Mapping[str, list[Any]] = field(default_factory=dict)


class MountManifest(Fingerprints):
    """The mounts in a store: declarations and fingerprints."""

    kind = MOUNTS

    def __init__(self, store: Store | None = None, approved: Callable[[str], object] = lambda source: None) -> None:
        self._servers: dict[tuple[str, str], Mapping[str, Any]] = {}  # by mount and command
        super().__init__(store, approved)

    def load(self, mount: str, command: str) -> StoredServer | None:
        """Returns the declarations of a server; None if none are stored, or the row is damaged.

        Args:
            command: the digest of its command line (`MountEntry.command_digest`).
        """
        with self._guard:
            fields = self._servers.get((mount, command))
        return StoredServer(fields["peer"], fields["declarations"]) if fields else None

    def save(self, mount: str, command: str, remembered: StoredServer) -> None:
        """Persists the declarations of a server.

        Raises:
            WriteFailed: they could not be written; the earlier ones stay.
        """
        fields = {"peer": dict(remembered.peer), "declarations": dict(remembered.declarations), "saved": time.time()}
        with self._guard:
            servers = {**self._servers, (mount, command): fields}
            of_mount = sorted((key for key in servers if key[0] == mount), key=lambda key: -servers[key]["saved"])
            stale = of_mount[MAX_COMMANDS:]
            subjects = [json.dumps([*key, subject]) for key in stale for subject in self._known.get(key, ())]
            removed = [*subjects, *(json.dumps(key) for key in stale)]
            self._store.write(self.kind, {json.dumps([mount, command]): fields}, removed)
            for key in stale:
                del servers[key]
                self._known.pop(key, None)
            self._servers = servers

    def is_new(self, mount: str, command: str) -> bool:
        """Tells whether a server without fingerprints is new; it is not after rows were lost."""
        return not self.was_damaged and self.load(mount, command) is None

    def _read(self, key: tuple[str, ...], fields: Mapping[str, Any]) -> None:
        if len(key) != 2:
            super()._read(key, fields)
        elif fields:  # not damaged
            self._servers[key[0], key[1]] = fields
