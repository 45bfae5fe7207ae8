"""Explains step by step why a tool is listed and can be called, or not.

Each step uses the part that decides for calls: the registry, the access rules, the scopes of an identity, the tool's
handlers. The verdict is that of `CallAdmission.decide`.
"""

from __future__ import annotations

import difflib
import re
import shlex
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from toolbus.bus.access.identity import OBSERVER, Identity, Principal
from toolbus.bus.calls.refusals import Refused
from toolbus.bus.catalog.entry import Entry, has_room, is_operators
from toolbus.bus.catalog.policy import EVERYONE
from toolbus.bus.core import Core
from toolbus.bus.operators.admin_tools import session_state_of
from toolbus.bus.streams.catalog_messages import best_state
from toolbus.common.text import list_names, quote
from toolbus.errors import InvalidRequest, NotPermitted, UnknownRole
from toolbus.protocol.tool import Tool
from toolbus.sdk import llm_tool
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

MAX_SIMILAR = 3
MAX_NOTICES = 3  # of sources, about the name

# A step: its name, whether the call passes it (None: it decides nothing), and why.
Step = tuple[str, bool | None, str]


@runtime_checkable
class Exporter(Protocol):
    """Tells how the formats of providers express a tool."""

    def exported(self, tool: Tool, dialect: str) -> tuple[bool, str]:
        """Tells whether a dialect can express a tool, and what a model sees of it or why it sees nothing."""


@runtime_checkable
class Explaining(Protocol):
    """Adds steps to a call, and explains them."""

    def explain(self, entry: Entry) -> Iterable[Step]:
        """Yields the steps of calls of a tool."""


class Explainer:
    """The explanations of one bus."""

    def __init__(self, core: Core) -> None:
        self._core = core

    @llm_tool(
        description="Says step by step why a tool is or is not seen and callable for a user, role, access level, "
        "identity or dialect.",
        read_only=True,
    )
    def explain(
        self, tool: str, user: str = "", role: str = "", level: int = 0, dialect: str = "", identity: str = ""
    ) -> dict[str, Any]:
        """Explains the way of a call.

        Args:
            tool: its name as in a listing, or the bare name of a qualified tool.
            user: for whom the call would be made; "" for none.
            role: where it would be called; "" for all roles, in order.
            level: the user's access level.
            dialect: the format of a provider, whose name and losses are added; "" for none.
            identity: of a peer of another machine, by its name in keys.toml; "" for a program of this machine.

        Returns:
            ``callable``; ``verdict``, the error that a call would get or where it would run; ``steps``, each with
            ``step``, ``passed`` (null where it decides nothing) and ``why``.
        """
        call = pb.ToolCall(name=tool, role=role)
        call.context.user_id, call.context.attributes["level"] = user, str(level)
        principal = self._principal(identity)
        find, can_call = self._core.catalog.registry.find, False
        try:
            entry = find(tool, role)
        except UnknownRole:
            entry = find(tool)
        try:
            entry = self._core.calls.dispatcher.admission.decide(principal, call, time.monotonic())
        except Refused as refused:
            verdict = f"{refused.error.code.name}: {refused}"
        else:
            verdict, can_call = f"a call reaches {entry.name!r} of source {entry.source!r}", self._core.takes_calls
        steps = [*self._registered(tool, role, entry)]
        if entry is not None:
            steps += self._may_call(principal, entry, user, level)
            steps += self._reachable(entry)
            for each in self._core.rooms.providers(Explaining):
                steps += each.explain(entry)
            if dialect:
                steps.append(self._exported(entry, dialect))
        return {
            "tool": tool,
            "callable": can_call,
            "verdict": verdict if self._core.takes_calls else "UNAVAILABLE: the bus is draining and takes no new calls",
            "steps": [{"step": step, "passed": passed, "why": why} for step, passed, why in steps],
        }

    def _exported(self, entry: Entry, dialect: str) -> Step:
        exporter = self._core.rooms.provider(Exporter)
        if exporter is None:
            raise InvalidRequest(f"dialect is {quote(dialect)}, and this bus was made without dialects: leave it empty")
        passed, why = exporter.exported(entry.tool.renamed(entry.name), dialect)
        return "dialect", passed, why

    def _principal(self, name: str) -> Principal:
        if not name:
            return OBSERVER
        identities = self._core.sessions.keyring.identities if self._core.sessions.keyring is not None else {}
        if name not in identities:
            have = list_names(identities) or "no identity"
            raise InvalidRequest(f"identity {quote(name)} does not exist: keys.toml has {have}")
        return Principal(identity=Identity(name, identities[name]))

    def _registered(self, name: str, role: str, entry: Entry | None) -> Iterator[Step]:
        registry, policy = self._core.catalog.registry, self._core.catalog.policy
        if role:
            known = role in registry.roles
            have = f"the bus has {list_names(registry.roles)}"
            yield "role", known, f"{quote(role)} is configured" if known else f"{quote(role)} does not exist: {have}"
        if entry is not None:
            roles = [other.table.role for other in registry.entries_of(entry.source, entry.bare_name)]
            where = f" for {list_names(filter(None, roles))}" if any(roles) else ""
            yield "registered", True, f"source {entry.source!r} has registered {entry.name!r}{where}"
            return
        refused = self._core.sessions.presence.review.refused.find(name)
        if refused is not None:
            source, why = refused
            yield "registered", False, f"source {source!r} declares it, but the bus refused it: {why}"
            return
        for listing in self._core.catalog.registry.waiting():
            if name in (listing.tool.name, listing.entry.bare_name):
                awaited = listing.entry.table.role
                why = (
                    f"has it for role {awaited!r}, which does not exist: `toolbus call toolbus:role_add "
                    f"{shlex.quote(f'role={awaited}')}`"
                )
                yield "registered", False, f"source {listing.source!r} {why}"
                return
        withdrawn = policy.withdrawn_from(name)
        if withdrawn is not None:
            text = f"source {withdrawn!r} may not offer tools: `toolbus access grant {withdrawn}` lets it"
            yield "registered", False, text
            return
        names = dict.fromkeys(listing.tool.name for listing in registry.listings(None, include_offline=True))
        similar = difflib.get_close_matches(name, names, MAX_SIMILAR, cutoff=0.5)
        near = f"; similar names: {list_names(similar)}" if similar else ""
        where = f" in role {quote(role)}" if role else ""
        notices = "".join(f"; source {source!r} reports: {text}" for source, text in self._notices_about(name))
        yield "registered", False, f"no source has registered {quote(name)}{where}{near}{notices}"

    def _notices_about(self, name: str) -> list[tuple[str, str]]:
        """Returns the notices that name a tool, or a file of that name that was skipped, each with its source."""
        named = re.compile(rf"(?<![\w.-]){re.escape(name.rpartition(':')[2])}(?![\w-])")
        return [pair for pair in self._core.sessions.presence.notices() if named.search(pair[1])][:MAX_NOTICES]

    def _may_call(self, principal: Principal, entry: Entry, user: str, level: int) -> Iterator[Step]:
        identity, policy = principal.identity, self._core.catalog.policy
        if is_operators(entry.source):
            denial = policy.denial(principal, entry)
            yield "administers", denial is None, denial or "it is a tool for operators, and the caller may use it"
            return
        if identity.scopes is not None:
            names = entry.name, entry.bare_name, entry.source, entry.table.role
            reaches = identity.scopes.reaches(*names)
            scopes = f"the scopes of {identity.name!r} {'include' if reaches else 'do not include'} it"
            yield "identity", reaches, scopes if reaches else f"{scopes}: change call, never or roles in keys.toml"
            try:
                identity.check_claims(user, level)
            except NotPermitted as denial:
                yield "claims", False, str(denial)
        enough = level >= entry.min_level
        yield "level", enough, f"it needs access level {entry.min_level}, the user has {level}"
        rules = policy.permissions.rules_for(entry)
        if not rules:
            yield "users", True, "no rule restricts its users"
        for kind, name, users in rules:
            passes = EVERYONE in users or user in users
            open_to = "everyone" if EVERYONE in users else list_names(sorted(users)) or "no user"
            who = quote(user) if user else "a call without a user"
            text = f"{kind[:-1]} {quote(name)} is open to {open_to}"
            refusal = f"{text}, not to {who}: see `toolbus access permit {kind}`"
            yield f"rule {kind}", passes, text if passes else refusal

    def _reachable(self, entry: Entry) -> Iterator[Step]:
        handlers = entry.handlers()
        if entry.current is None:
            why = f": {entry.last_error}" if entry.last_error else ""
            unconfirmed = best_state(handlers) == wire.SESSION_STATE_UNCONFIRMED
            where = "its plugin has not shown yet that it is there" if unconfirmed else "its plugin is not reachable"
            yield "online", False, f"{where}{why}"
            return
        state = session_state_of(handlers)
        room = sum(has_room(handler) for handler in handlers)
        in_flight = sum(len(handler.pending) for handler in handlers)
        most = sum(handler.max_in_flight for handler in handlers)
        yield "online", state == "live", f"{state}, offered by {len(handlers)} session{'s'[: len(handlers) != 1]}"
        yield "room", room > 0, f"{in_flight} of {most} calls are in flight"
        validated = entry.current.checker is not None
        yield "arguments", None, f"are {'validated against its schema' if validated else 'not validated'}"
