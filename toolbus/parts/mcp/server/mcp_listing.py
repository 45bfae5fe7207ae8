"""Lists tools for MCP clients through their profile, in pages whose text is cached.

What a client sees depends on its profile and on its identity's scopes, never on its connection. Texts are cached for
each revision of the catalog, and those of single tools across revisions, so that a change costs only what changed.
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import itertools
import logging
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from toolbus.bus.access.identity import Identity, Principal, Scopes
from toolbus.bus.catalog.entry import Block, Entry, ToolListing
from toolbus.bus.core import Core
from toolbus.bus.keys.seal import BrokenSeal, Sealer
from toolbus.bus.storage.store import Earlier, Kind, Store, WriteFailed, read_state
from toolbus.common.newest import NewestCache
from toolbus.errors import UnknownRole
from toolbus.parts.mcp.features import features_of
from toolbus.parts.mcp.messages import headers
from toolbus.parts.mcp.messages.hops import with_hop
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError
from toolbus.parts.mcp.messages.tools import write_declaration
from toolbus.parts.mcp.server.mcp_request import META_OF_RESULT, encode
from toolbus.parts.mcp.settings import Profile
from toolbus.parts.models.dialects.schemas.losses import Inexpressible, LossReport
from toolbus.parts.models.dialects.schemas.root import COMBINING, plain_root
from toolbus.protocol.limits import MIB
from toolbus.protocol.tool import Tool

# A tool's name on the bus is ``NAME`` or ``SOURCE:NAME``; models and clients accept neither a colon nor more than 64
# characters, of which clients use some themselves. A name belongs to its first tool forever, also while the tool is not
# offered and after a restart: otherwise a model with an old conversation would call another tool than it knows.

log = logging.getLogger("toolbus.mcp")

NAMES = Kind(  # by profile, `_NUMBER` and number: by its name towards clients the name of a tool on the bus
    "mcp_names",
    needed=False,
    without="start without the names of tools towards MCP clients, so tools may get other names",
    synced=True,
    earlier=Earlier("mcp-names.json", lambda path: _read_earlier(path)),
)
MAX_NAMES = 200_000  # of all profiles; beyond it, names of tools that are not offered are removed, oldest first
ROW_NAMES = 1_000  # a new name is written in a row of its own, with others that came with it
MAX_ROWS = 200  # besides full ones, before they are written anew as full ones
_NUMBER = "\n"  # stands in a key between a profile and the number of the row; earlier releases wrote a profile alone
_HASH_LENGTH = 8
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_-]")


class ToolNames:
    """The names of the tools of all profiles.

    Args:
        store: None: a restart loses the names.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store = store or Store.of(None)
        self._listed: dict[tuple[str, str], str] = {}  # the name on the bus by profile and wire name, oldest first
        self._wire: dict[tuple[str, str], str] = {}  # the current wire name by profile and name on the bus
        self._missing: set[tuple[str, str]] = set()  # profile and name on the bus of tools not seen since the start
        self.unsaved = False  # whether names are not persisted yet
        self._naming = threading.Lock()  # one name is given at a time
        self._added: list[tuple[str, str, str]] = []  # profile, wire name and name on the bus of those to be persisted
        rows = self._store.load(NAMES)
        self._rows = sorted(rows, key=lambda row: int(row.partition(_NUMBER)[2] or -1))  # oldest first
        self._next = 1 + max((int(row.partition(_NUMBER)[2] or -1) for row in rows), default=-1)
        # The profiles that had names before the start.
        self._earlier = frozenset(row.partition(_NUMBER)[0] for row in rows)
        for row in self._rows:
            profile = row.partition(_NUMBER)[0]
            for wire, name in rows[row].items():
                self._put(profile, name, wire)
                self._missing.add((profile, name))

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
            with self._naming:
                wire = self._wire.get((profile.name, name))
                if wire is None or len(wire) > profile.longest_name:
                    wire = self._new(profile, name, bare_name if source in profile.bare else name)
        return wire

    def listed_as(self, profile: Profile, wire: str) -> str | None:
        """Returns the name on the bus for a name towards clients; None if no tool had that name."""
        return self._listed.get((profile.name, wire))

    def had_names(self, profile: Profile) -> bool:
        """Tells whether a profile had names before the start of this bus."""
        return profile.name in self._earlier

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
        added, self._added = self._added, []
        deleted: list[str] = []
        if len(self._listed) > MAX_NAMES or len(self._rows) > MAX_ROWS + len(self._listed) // ROW_NAMES:
            if len(self._listed) > MAX_NAMES:
                self._forget(set(offered))
            added, deleted = [(*key, name) for key, name in [*self._listed.items()]], self._rows
        by_profile: dict[str, list[tuple[str, str]]] = {}
        for profile, wire, name in added:
            by_profile.setdefault(profile, []).append((wire, name))
        rows: dict[str, dict[str, str]] = {}
        for profile, names in by_profile.items():
            for start in range(0, len(names), ROW_NAMES):
                rows[f"{profile}{_NUMBER}{self._next}"] = dict(names[start : start + ROW_NAMES])
                self._next += 1
        try:
            self._store.write(NAMES, rows, deleted)
        except WriteFailed as error:
            self._added, self.unsaved = [*added, *self._added], True
            log.warning("names of tools could not be persisted in %s: %s", self._store.place, error)
        else:
            self._rows = [*(() if deleted else self._rows), *rows]

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
        self._added.append((profile.name, wire, name))
        self.unsaved = True
        return wire

    def _put(self, profile: str, name: str, wire: str) -> None:
        self._wire[profile, name] = wire
        self._listed[profile, wire] = name


def _read_earlier(path: Path) -> dict[str, dict[str, str]]:
    tables = read_state(path)
    return {profile: {wire: str(name) for wire, name in names.items()} for profile, names in tables.items()}


MAX_PAGE_BYTES = 2 * MIB  # some clients ask for the first page only, so nearly every list is one page
TTL_MS = 1_000  # how long a modern client may cache a list; one that listens gets a notification sooner
MAX_CATALOGS = 256  # in the cache: one for each profile, era and scope
MAX_TEXTS = 500_000  # of single tools in the cache
MANY = 2_000  # entries of the bus's catalog: with more, lists are built on a thread
_DIGESTS = 1 << 256
CURSOR = "cursor"  # the purpose of a sealed cursor


@dataclass(frozen=True, slots=True)
class TargetTool:
    """The tool of a client's call.

    Attributes:
        name: on the bus.
        tool: its current declaration.
        marked: the arguments that a modern client repeats in headers, by the header's name after `Mcp-Param-`.
    """

    name: str
    tool: Tool
    marked: dict[str, tuple[str, ...]]


class Pages:
    """A list in pages of at most `MAX_PAGE_BYTES`.

    A list of several pages is in the order of names, and a cursor is the last name of a page. So a cursor keeps its
    place whatever is added and removed meanwhile, and the bus stores nothing for it.

    Args:
        texts: the entries as JSON text, by their names.
        names: the same names in order, where they are known.
    """

    def __init__(self, texts: Mapping[str, bytes], names: list[str] | None = None) -> None:
        self.texts = texts
        self.names = sorted(texts) if names is None else names
        size = sum(map(len, texts.values())) + len(texts)
        is_one = size <= MAX_PAGE_BYTES
        self._first = (b",".join(texts.values()), None) if is_one else self._page(None)

    def page(self, after: str | None) -> tuple[bytes, str | None]:
        """Returns the entries after a name as JSON text without the brackets, and the page's last name.

        The name is None on the last page.
        """
        return self._first if after is None else self._page(after)

    def _page(self, after: str | None) -> tuple[bytes, str | None]:
        texts, size = list[bytes](), 0
        begin = 0 if after is None else bisect.bisect_right(self.names, after)
        for number in range(begin, len(self.names)):
            text = self.texts[self.names[number]]
            size += len(text) + 1
            if size > MAX_PAGE_BYTES and texts:
                return b",".join(texts), self.names[number - 1]
            texts.append(text)
        return b",".join(texts), None


def open_cursor(sealer: Sealer, cursor: str, *bound: str) -> str:
    """Returns the name in a cursor.

    Raises:
        RpcError: the cursor is not from this server, or of another list.
    """
    try:
        return sealer.open(cursor, *bound).decode("utf-8", "surrogatepass")
    except BrokenSeal:
        raise RpcError(McpCode.INVALID_PARAMS, "cursor is not from this server: list from the start") from None


def seal_cursor(sealer: Sealer, name: str, *bound: str) -> str:
    """Returns the cursor for the page after a name."""
    return sealer.seal(name.encode("utf-8", "surrogatepass"), *bound)


@dataclass(frozen=True, slots=True)
class Catalog:
    """The tools that clients of a profile see at one revision.

    Attributes:
        revision: of the bus's catalog.
        listings: the tools in their order, by name towards clients.
        pages: the list in pages.
        total: the sum of the digests of its texts: a change takes one away and adds one.
        blocks: of the bus's catalog, as they were listed.
        contested: names that several listings would have.
    """

    revision: int
    listings: dict[str, ToolListing]
    pages: Pages
    total: int
    blocks: tuple[Block, ...]
    contested: frozenset[str]

    @property
    def digest(self) -> bytes:
        return (self.total % _DIGESTS).to_bytes(32, "big")


class Listings:
    """The catalogs of all profiles.

    Attributes:
        bus_id: names the bus in the paths of its tools.
    """

    def __init__(self, core: Core, names: ToolNames, sealer: Sealer) -> None:
        self.bus_id = features_of(core).bus_id
        self._core = core
        self._names = names
        self._sealer = sealer
        self._catalogs: NewestCache[tuple[str, bool, Scopes | None], Catalog] = NewestCache(MAX_CATALOGS)
        # Texts of single tools, by profile, name towards clients and era.
        self._texts: dict[tuple[str, str, bool], tuple[Tool, bytes]] = {}
        self._targets: dict[tuple[str, str, Scopes | None], TargetTool | None] = {}  # of the revision below
        self._targets_at = 0

    def __repr__(self) -> str:
        return f"<Listings catalogs={len(self._catalogs)}>"

    def catalog(self, profile: Profile, identity: Identity, *, modern: bool) -> Catalog:
        """Returns the catalog of a profile's clients at the current revision."""
        key = (profile.name, modern, identity.scopes)
        catalog = self._catalogs.get(key)
        if catalog is None or catalog.revision != self._core.catalog.view.revision:
            catalog = self._catalogs[key] = self._build(profile, identity, modern, catalog)
        return catalog

    async def refresh(self, profile: Profile, identity: Identity, *, modern: bool) -> None:
        """Builds the catalog on a thread, where it is large: it would hold the loop."""
        key = (profile.name, modern, identity.scopes)
        catalog = self._catalogs.get(key)
        is_old = catalog is None or catalog.revision != self._core.catalog.view.revision
        if is_old and self._core.catalog.registry.size > MANY:
            self._catalogs[key] = await asyncio.to_thread(self._build, profile, identity, modern, catalog)

    def page(self, profile: Profile, identity: Identity, *, modern: bool, cursor: str | None) -> bytes:
        """Returns the result of `tools/list` as text.

        Raises:
            RpcError: the cursor is not from this server.
        """
        after = None if cursor is None else open_cursor(self._sealer, cursor, CURSOR, profile.name)
        tools, last = self.catalog(profile, identity, modern=modern).pages.page(after)
        following = None if last is None else seal_cursor(self._sealer, last, CURSOR, profile.name)
        private = bool(profile.user or profile.level or identity.scopes is not None)
        return page_of(tools, modern=modern, private=private, following=following)

    def find(self, profile: Profile, identity: Identity, wire: str) -> TargetTool | None:
        """Returns the tool of a name towards clients; None if the client sees no such tool."""
        revision = self._core.catalog.view.revision
        if self._targets_at != revision:
            self._targets.clear()
            self._targets_at = revision
        key = (profile.name, wire, identity.scopes)
        try:
            return self._targets[key]
        except KeyError:
            target = self._find(profile, identity, wire)
            if target is not None:  # else clients could fill the memory with unknown names
                self._targets[key] = target
            return target

    def _find(self, profile: Profile, identity: Identity, wire: str) -> TargetTool | None:
        name = self._names.listed_as(profile, wire)
        if name is None:
            self.catalog(profile, identity, modern=True)  # assigns names to its tools
            name = self._names.listed_as(profile, wire)
        try:
            entry = self._core.catalog.registry.find(name, profile.role) if name is not None else None
        except UnknownRole:
            entry = None
        if entry is None or not profile.has(entry.name, entry.bare_name, entry.source):
            return None
        if self._core.catalog.policy.hides(Principal(profile.source, identity=identity), entry, profile.level):
            return None
        return TargetTool(entry.name, entry.tool, _marked(entry.tool))

    def offered(self) -> Iterable[tuple[str, str]]:
        """Yields profile and name on the bus of each listed tool."""
        for (profile, _, _), catalog in [*self._catalogs.items()]:  # copied in one step: on a thread
            for listing in catalog.listings.values():
                yield profile, listing.tool.name

    def _build(self, profile: Profile, identity: Identity, modern: bool, before: Catalog | None) -> Catalog:
        """Returns the catalog as it is now: what it was before with what has changed since, where that is little."""
        revision = self._core.catalog.view.revision  # read first: a change meanwhile raises it
        blocks = self._blocks(profile, identity)
        catalog = self._changed(profile, modern, revision, blocks, before) if before is not None else None
        if catalog is not None:
            return catalog
        shown: dict[str, ToolListing] = {}
        contested: set[str] = set()
        for wire, listing in self._shown(profile, itertools.chain.from_iterable(blocks)):
            if wire in shown:
                contested.add(wire)
            if wire not in shown or self._answers(profile, listing):
                shown[wire] = listing
        texts = {wire: self._text((profile.name, wire, modern), each.tool) for wire, each in shown.items()}
        total = sum(map(_digest, texts.values()))
        return Catalog(revision, shown, Pages(texts), total, blocks, frozenset(contested))

    def _changed(
        self, profile: Profile, modern: bool, revision: int, blocks: tuple[Block, ...], before: Catalog
    ) -> Catalog | None:
        """Returns a catalog with what has changed; None where it has to be built as a whole."""
        known, now = set(map(id, before.blocks)), set(map(id, blocks))
        added = [block for block in blocks if id(block) not in known]
        if 2 * len(added) > len(blocks) or profile.administers:
            return None
        # Only at the end of the list may a name be new.
        last = max((block[-1].place for block in before.blocks), default=-1)
        removed: dict[str, ToolListing] = {}
        for listing in itertools.chain.from_iterable(block for block in before.blocks if id(block) not in now):
            name, bare_name = listing.tool.name, listing.entry.bare_name
            if profile.has(name, bare_name, listing.source):
                wire = self._names.name_of(profile, name, bare_name, listing.source)
                if before.listings.get(wire) is listing:
                    removed[wire] = listing
        shown, texts, names = before.listings.copy(), {**before.pages.texts}, before.pages.names.copy()
        total = before.total
        for wire, listing in self._shown(profile, itertools.chain.from_iterable(added)):
            is_known = removed.pop(wire, None) is not None
            if wire in before.contested or (not is_known and (wire in shown or listing.place <= last)):
                return None
            text = self._text((profile.name, wire, modern), listing.tool)
            total += _digest(text) - (_digest(texts[wire]) if is_known else 0)
            shown[wire], texts[wire] = listing, text
            if not is_known:
                bisect.insort(names, wire)
        for wire in removed:
            if wire in before.contested:
                return None
            total -= _digest(texts.pop(wire))
            del shown[wire], names[bisect.bisect_left(names, wire)]
        return Catalog(revision, shown, Pages(texts, names), total, blocks, before.contested)

    def _blocks(self, profile: Profile, identity: Identity) -> tuple[Block, ...]:
        principal = Principal(profile.source, is_admin=profile.administers, identity=identity)
        view, role = self._core.catalog.view, profile.role or None
        try:
            blocks = view.listed(role, profile.user, profile.level, principal=principal, include_offline=True).blocks
        except UnknownRole:
            return ()
        own = view.own(principal) if profile.administers else ()
        return (*blocks, own) if own else blocks

    def _shown(self, profile: Profile, listings: Iterable[ToolListing]) -> Iterator[tuple[str, ToolListing]]:
        """Yields those of some listings that a profile has, by their names towards clients."""
        for listing in listings:
            name, bare_name = listing.tool.name, listing.entry.bare_name
            if profile.has(name, bare_name, listing.source) and any(map(_is_there, listing.entries)):
                yield self._names.name_of(profile, name, bare_name, listing.source), listing

    def _answers(self, profile: Profile, listing: ToolListing) -> bool:
        """Tells whether a call without a role reaches this listing, if several roles have a tool of its name."""
        return self._core.catalog.registry.find(listing.tool.name, profile.role) in listing.entries

    def _text(self, key: tuple[str, str, bool], tool: Tool) -> bytes:
        cached = self._texts.get(key)
        if cached is None or cached[0] is not tool:
            if len(self._texts) >= MAX_TEXTS:
                self._texts.clear()
            _, wire, modern = key
            cached = self._texts[key] = (tool, encode(declare(wire, tool, self.bus_id, modern=modern)))
        return cached[1]


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest(), "big")


def declare(wire: str, tool: Tool, bus_id: str, *, modern: bool) -> dict[str, object]:
    """Returns a tool's declaration for clients of an era, with this bus at the end of its path.

    Up to 2025-11-25 structured output is an object, so a schema of any other type is left out. Anthropic's and OpenAI's
    models refuse all tools of a client for alternatives at the root of one, so legacy clients get what is common to
    them; modern ones get the whole, as SEP-2106 demands.
    """
    declaration = with_hop(write_declaration(wire, tool), bus_id)
    arguments = declaration["inputSchema"]
    if not modern and isinstance(arguments, dict) and any(keyword in arguments for keyword in COMBINING):
        with suppress(Inexpressible):
            declaration["inputSchema"] = plain_root(arguments, LossReport(arguments, tool.name))
    output = declaration.get("outputSchema")
    if output is not None and not modern and not (isinstance(output, dict) and output.get("type") == "object"):
        del declaration["outputSchema"]
    return declaration


def page_of(tools: bytes, *, modern: bool, private: bool, following: str | None = None) -> bytes:
    """Returns the result of `tools/list` as text.

    Args:
        tools: as JSON text, without the brackets.
        private: whether other clients see another list.
        following: the cursor of the next page; None on the last page.
    """
    parts = [b'{"tools":[', tools, b"]"]
    if following is not None:
        parts.append(b',"nextCursor":"%b"' % following.encode())
    if modern:
        scope = b"private" if private else b"public"
        parts.append(b',"resultType":"complete","ttlMs":%d,"cacheScope":"%b","_meta":' % (TTL_MS, scope))
        parts.append(META_OF_RESULT)
    return b"".join([*parts, b"}"])


def _is_there(entry: Entry) -> bool:
    """Tells whether an entry is offered, or offline within its grace period.

    Offline tools stay in the lists, so a plugin's restart changes nothing for clients.
    """
    return entry.current is not None or entry.suspended is None


def _marked(tool: Tool) -> dict[str, tuple[str, ...]]:
    if headers.MARK not in tool.parameters_json:
        return {}
    try:
        return headers.marked(msgspec.json.decode(tool.parameters_json))
    except (ValueError, RecursionError):
        return {}  # clients ignore such a tool, or send no headers for it
