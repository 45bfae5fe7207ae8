"""Offers in the catalog what a mounted server declares, and remembers it for the next time.

A mount is a source, and its tools are always listed as `MOUNT:TOOL`. Only what differs from before reaches the catalog.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolbus.bus.core import Core
from toolbus.bus.mcp_client.declarations import Declared, Left, tools_of
from toolbus.bus.mcp_client.mcp_connection import ServerInfo
from toolbus.bus.mcp_client.mount_entry import MountEntry
from toolbus.bus.mcp_client.mount_features import MountFeatures
from toolbus.bus.mcp_client.mount_handler import MountHandler
from toolbus.bus.mcp_client.mount_manifest import MountManifest, Remembered
from toolbus.bus.pins import fingerprints
from toolbus.mcp.headers import marked
from toolbus.text import list_names

log = logging.getLogger("toolbus.mounts")


class MountOffer:
    """What one mount offers.

    Attributes:
        lists: what the server declares, by kind.
        declared: what of it are tools of the bus.
        changed: subjects that differ from what is trusted.
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
        self._peer: ServerInfo | None = None  # None until the server is known
        self._offered: tuple[object, ...] | None = None  # what the catalog has, to be compared; None: nothing
        self._may_offer = True  # whether the source had the right when its tools were offered the last time

    def __repr__(self) -> str:
        return f"<MountOffer {self._entry.name} tools={self.tools}>"

    @property
    def tools(self) -> int:
        """How many tools are offered."""
        return len(self.declared.compiled)

    @property
    def why_degraded(self) -> str:
        """Why not all that the server declares is offered; "" where all is."""
        left = self.declared.left
        if left:
            return (
                f"{len(left)} tools are not offered: {list_names(f'{each.name} ({each.reason})' for each in left[:3])}"
            )
        if self.changed:
            return f"changed since it was trusted: {list_names(self.changed)}"
        return ""

    def restore(self) -> ServerInfo | None:
        """Offers what the server declared the last time. Returns what it said of itself; None: it is not known."""
        entry = self._entry
        remembered = self._manifest.load(entry.name, entry.command_digest)
        if remembered is None:
            return None
        peer = _read_peer(remembered.peer)
        if peer is not None:
            self._put(peer, dict(remembered.declarations))
        return peer

    async def take(self, peer: ServerInfo, lists: Mapping[str, list[Any]]) -> None:
        """Offers what the server declares now, and remembers it."""
        entry = self._entry
        same = self._peer == peer and self.lists == lists
        is_new = self._manifest.is_new(entry.name, entry.command_digest)
        self._put(peer, lists, trusts_first=is_new)
        if not same or is_new:
            remembered = Remembered(_written_peer(peer), {kind: list(entries) for kind, entries in lists.items()})
            try:
                await asyncio.to_thread(self._manifest.save, entry.name, entry.command_digest, remembered)
            except sqlite3.Error as error:
                log.error("what mount %s declares could not be stored: %s", entry.name, error)

    async def review_again(self) -> None:
        """Offers the same declarations by what is trusted now."""
        if self._peer is not None:
            self._put(self._peer, self.lists)

    def right_changed(self) -> None:
        """Offers the tools again, or none of them, if the source's right to offer tools is another one now."""
        if self._peer is None or self._offered is None:
            return
        if self._may_offer != self._core.policy.may_offer(self._entry.name):
            self._put(self._peer, self.lists)

    def withdraw(self) -> None:
        """Withdraws all of it at once."""
        self._offered = None
        self._core.registry.withdraw(self._handler)
        self._core.features.remove(self._entry.name)
        self._announce()

    def take_offline(self, why: str) -> None:
        """Takes the tools offline; they keep their places for the grace period."""
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
            self.declared = Declared(left=(Left("all", f"source {entry.name!r} may offer no tools: grant it"),))
            tools = []
        key = (tools, blocked)
        if self._offered is None or self._offered != key:
            self.declared = tools_of(entry, tools, self._core.limits, blocked) if tools else self.declared
            self._register()
            self._offered = key
        prompts = [each for each in lists.get("prompts", ()) if _prompt_subject(each) not in blocked]
        moved = self.features.declare(peer.can, {**lists, "prompts": prompts})
        hands_on = entry.instructions and fingerprints.INSTRUCTIONS not in blocked
        self.features.instructions = peer.instructions if hands_on else ""
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
        outcome = self._core.registry.register(self._handler, declared.compiled, qualified=True, declare=True)
        if outcome.failed:
            left = (*declared.left, *(Left(name, why) for _, name, why in outcome.failed))
            self.declared = replace(declared, left=left)
        self._announce()

    def _announce(self) -> None:
        self._core.signals.catalog_changed()
        self._core.signals.source_changed(self._entry.name)

    def _review(self, peer: ServerInfo, lists: Mapping[str, list[Any]], *, trusts_first: bool) -> frozenset[str]:
        """Compares with what is trusted. Returns the subjects that must not be offered."""
        entry = self._entry
        tools, prompts = (
            [each for each in lists.get(kind, ()) if isinstance(each, dict)] for kind in ("tools", "prompts")
        )
        seen = fingerprints.subjects_of(tools, prompts, peer.instructions)
        known = self._manifest.fingerprints(entry.name, entry.command_digest)
        review = fingerprints.review(known, seen, entry.pin, trusts_first=trusts_first)
        if review.pinned != known:
            try:
                self._manifest.save_fingerprints(entry.name, entry.command_digest, review.pinned)
            except sqlite3.Error as error:
                log.error("what is trusted of mount %s could not be stored: %s", entry.name, error)
        if review.news:
            subjects = list_names(review.news)
            name = entry.name
            log.warning("mount %s: %s changed since it was trusted: see `toolbus mounts %s`", name, subjects, name)
            self._core.audit.record("change", target=name, why=subjects, source=name)
        self.changed = tuple(fingerprints.pending({subject: review.pinned[subject] for subject in seen}))
        return review.blocked


def _prompt_subject(declaration: object) -> str:
    return fingerprints.prompt_subject(str(declaration.get("name"))) if isinstance(declaration, dict) else ""


def _marked(declared: Declared) -> dict[str, Mapping[str, tuple[str, ...]]]:
    """Returns which arguments of which tools go into headers; a tool whose marks break the rules has none."""
    names: dict[str, Mapping[str, tuple[str, ...]]] = {}
    for item in declared.compiled:
        if "x-mcp-header" in item.declared.parameters_json:
            try:
                names[item.tool.name] = marked(item.declared.parameters)
            except ValueError as error:
                log.warning("tool %s: %s", item.tool.name, error)
    return names


def _written_peer(peer: ServerInfo) -> dict[str, Any]:
    return {
        "modern": peer.modern,
        "version": peer.version,
        "capabilities": dict(peer.capabilities),
        "info": dict(peer.info),
        "instructions": peer.instructions,
    }


def _read_peer(written: Mapping[str, Any]) -> ServerInfo | None:
    try:
        return ServerInfo(**written)
    except TypeError:  # of another version of the bus
        return None
