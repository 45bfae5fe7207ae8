"""Offers the declarations of a mounted server in the catalog, and stores them for the next start.

A mount is a source, and its tools are always listed as `MOUNT:TOOL`. Only changes reach the catalog.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from toolbus.bus.catalog.schema import compile_output_schema
from toolbus.bus.core import Core
from toolbus.bus.pins import pins
from toolbus.common.text import list_names
from toolbus.parts.mcp.client.declarations import Declared, Left, tools_of
from toolbus.parts.mcp.client.mcp_connection import ServerInfo
from toolbus.parts.mcp.client.mount_entry import MountEntry
from toolbus.parts.mcp.client.mount_features import MountFeatures
from toolbus.parts.mcp.client.mount_handler import MountHandler
from toolbus.parts.mcp.client.mount_manifest import MountManifest, StoredServer
from toolbus.parts.mcp.client.server_lists import ServerLists
from toolbus.parts.mcp.messages.headers import marked

log = logging.getLogger("toolbus.mounts")


class MountOffer:
    """The offer of one mount.

    Attributes:
        lists: the declarations of the server, by kind.
        declared: the tools that the bus offers for them.
        changed: subjects that differ from the trusted ones.
    """

    def __init__(
        self,
        entry: MountEntry,
        handler: MountHandler,
        features: MountFeatures,
        manifest: MountManifest,
        core: Core,
    ) -> None:
        self.features = features
        self.lists: Mapping[str, list[Any]] = {}
        self.declared = Declared()
        self.changed: tuple[str, ...] = ()
        self._entry = entry
        self._handler = handler
        self._manifest = manifest
        self._core = core
        self._peer: ServerInfo | None = None  # None before the first handshake
        self._offered: tuple[object, ...] | None = None  # the tools and blocked subjects in the catalog; None: none
        self._notices: dict[str, tuple[str, ...]] = {}  # about its lists, by method
        self._broken: dict[str, str] = {}  # why the output schema of a tool is not offered, by our name
        self._may_offer = True  # whether the source had permission when its tools were last offered

    def __repr__(self) -> str:
        return f"<MountOffer {self._entry.name} tools={self.tools}>"

    @property
    def tools(self) -> int:
        """How many tools are offered."""
        return len(self.declared.compiled)

    @property
    def why_degraded(self) -> str:
        """Why not all tools of the server are offered; "" if all are."""
        left = self.declared.left
        if left:
            return (
                f"{len(left)} tools are not offered: {list_names(f'{each.name} ({each.reason})' for each in left[:3])}"
            )
        if self.changed:
            return f"changed since it was trusted: {list_names(self.changed)}"
        return ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with the server, for operators."""
        return (
            *(f"{method}: {notice}" for method, notices in self._notices.items() for notice in notices),
            *self._broken.values(),
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
            except sqlite3.Error as error:
                log.error("the declarations of mount %s could not be stored: %s", entry.name, error)

    async def review_again(self) -> None:
        """Offers the same declarations again, after an approval."""
        if self._peer is not None:
            self._put(self._peer, self.lists)

    def permission_changed(self) -> None:
        """Offers or withdraws the tools if the source's permission to offer tools has changed."""
        if self._peer is None or self._offered is None:
            return
        if self._may_offer != self._core.policy.may_offer(self._entry.name):
            self._put(self._peer, self.lists)

    def withdraw(self) -> None:
        """Withdraws everything at once."""
        self._offered = None
        self._core.registry.withdraw(self._handler)
        self._core.features.remove(self._entry.name)
        self._announce()

    def take_offline(self, why: str) -> None:
        """Takes the tools offline; they hold their places for the grace period."""
        self._offered = None
        self._core.registry.lose(self._handler, why, time.monotonic())
        self._core.features.remove(self._entry.name)
        self._announce()

    def _put(self, peer: ServerInfo, lists: Mapping[str, list[Any]], *, trusts_first: bool = True) -> None:
        entry = self._entry
        tools = lists.get("tools", [])
        blocked = self._review(peer, lists, trusts_first=trusts_first)
        self._peer, self.lists = peer, lists
        self._may_offer = self._core.policy.may_offer(entry.name)
        if not self._may_offer:
            self.declared = Declared(left=(Left("all", f"source {entry.name!r} may not offer tools: grant it"),))
            tools = []
        key = (tools, blocked, frozenset(self._broken))
        if self._offered is None or self._offered != key:
            self.declared = tools_of(entry, tools, self._core.limits, blocked, self._broken) if tools else self.declared
            self._register()
            self._offered = key
        prompts = [each for each in lists.get("prompts", ()) if _prompt_subject(each) not in blocked]
        moved = self.features.declare(peer.can, {**lists, "prompts": prompts})
        has_instructions = entry.instructions and pins.INSTRUCTIONS not in blocked
        self.features.instructions = peer.instructions if has_instructions else ""
        has_any = self.features.capabilities or self.features.instructions
        if has_any and self.features not in self._core.features.providers:
            self._core.features.add(self.features)
        else:
            for kind in moved:
                self._core.features.changed("prompts" if kind == "prompts" else "resources")

    def _register(self) -> None:
        declared = self.declared
        self._handler.names = dict(declared.server_names)
        self._handler.param_names = _marked(declared)
        self._handler.output_checkers = {
            each.tool.name: compile_output_schema(each.tool.output_schema_json, self._core.limits)
            for each in declared.compiled
            if each.tool.output_schema_json
        }
        outcome = self._core.registry.register(self._handler, declared.compiled, qualified=True, declare=True)
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
        tools, prompts = (
            [each for each in lists.get(kind, ()) if isinstance(each, dict)] for kind in ("tools", "prompts")
        )
        seen = pins.subjects_of(tools, prompts, peer.instructions)
        known = self._manifest.fingerprints(entry.name, entry.command_digest)
        review = pins.review(known, seen, entry.pin, trusts_first=trusts_first)
        if review.pinned != known:
            try:
                self._manifest.save_fingerprints(entry.name, entry.command_digest, review.pinned)
            except sqlite3.Error as error:
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
