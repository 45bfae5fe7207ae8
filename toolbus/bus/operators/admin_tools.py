"""Offers the bus's own tools, of source ``toolbus``: drain, records of calls, counts, roles, permissions.

They are called over Invoke like any other tool, listed only in a listing of that source, and never exported to models.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from toolbus.bus.access.identity import Identity, principal_of
from toolbus.bus.calls.call_records import CallRecords, RecordBatch, RecordFilter
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.entry import Handler, ToolListing
from toolbus.bus.catalog.policy import TOOLS
from toolbus.bus.core import Core
from toolbus.bus.metrics.call_counts import outcome_of
from toolbus.bus.operators.grants import Grants
from toolbus.bus.streams.catalog_messages import NO_CALLS, best_state
from toolbus.bus.streams.presence import Presence
from toolbus.bus.streams.refused_tools import SessionRefusals
from toolbus.common.text import quote
from toolbus.errors import InvalidRequest
from toolbus.protocol.tool import HINTS, level_of
from toolbus.sdk import ToolScope, llm_tool
from toolbus.v1 import tool_bus_service_pb2 as wire

ATTACHED = "attached"
OFFLINE = "offline"
_NAMES: dict[int, str] = {
    wire.SESSION_STATE_LIVE: ATTACHED,
    wire.SESSION_STATE_SUSPECT: "suspect",
    wire.SESSION_STATE_DRAINING: "draining",
}
STATES = (*_NAMES.values(), OFFLINE)


_SESSION_STATES = {number: name.removeprefix("SESSION_STATE_").lower() for name, number in wire.SessionState.items()}


def session_state_of(handlers: Collection[Handler]) -> str:
    """Returns the best state of some handlers, by its name on the wire."""
    return _SESSION_STATES[best_state(handlers)]  # type: ignore[index]  # protoc's enums are ints


def state_of(*handlers: Handler) -> str:
    """Returns the best state of some handlers."""
    return _NAMES.get(best_state(handlers), OFFLINE)


def handlers_of(core: Core, source: str) -> Sequence[Handler]:
    """Returns the sessions of a source; without any, the handlers of one of its tools."""
    peers = core.sessions.presence.by_source.get(source)
    return list(peers.values()) if peers else core.catalog.registry.some_handlers(source)


# Tools that show the state of the bus to users call it, such as `examples/dropin/this_host.py`. Users see the tools
# that they may call and the calls that were made for them; operators see everything.

OPERATOR_LEVEL = 90  # of users who may see everything, as hosts state it
MAX_ROWS = 10_000
MAX_DECLARATIONS = 10  # tools of one name; each may have a quarter of a megabyte of schema
MAX_DESCRIPTION = 200  # characters: with this many rows a result stays below its limit


_ALL = wire.ListRequest()

Row = dict[str, Any]


class Introspection:
    """The introspection of one bus."""

    def __init__(self, presence: Presence, records: CallRecords, view: CatalogView) -> None:
        self._presence = presence
        self._records = records
        self._view = view
        self._started = time.monotonic()

    @llm_tool(
        description="What runs on this bus, as far as the user of the call may see it: plugins, tools, calls that "
        "ended lately, counts.",
        read_only=True,
        allow_repeat=True,
    )
    def this_bus(
        self,
        scope: ToolScope,
        kind: Literal["plugins", "tools", "restricted", "tool", "refused", "recent_calls", "stats"],
        name: str = "",
        source: str = "",
    ) -> list[Row] | Row:
        """Shows one kind of thing, at most 10,000 rows of it.

        Args:
            kind: `plugins`: source, state, sessions, in_flight; `tools`: name, source, description, read_only;
                `restricted`, for operators: the same of the tools that a call without a user does not reach;
                `tool`: all that the tools of one name declare, with their schemas as JSON text, and for operators the
                warnings about them;
                `refused`, for operators: the tools that the bus refused, name, source, role, error;
                `recent_calls`, newest first: name, source, user_id, outcome, seconds, ended (seconds since the epoch),
                arguments_size, output_size; `stats`: outcomes, and for operators sessions, up_seconds.
            name: of `tool`.
            source: of `tool`; empty means any.
        """
        user_id, level = scope.context.user_id, level_of(scope.context.attributes)
        everything = level >= OPERATOR_LEVEL
        if kind in ("recent_calls", "stats"):
            calls = self._calls(None if everything else user_id, principal_of(scope).identity)
            return self._stats(calls, everything) if kind == "stats" else calls[:MAX_ROWS]
        if kind == "refused":
            refused = self._presence.review.refused if everything else SessionRefusals()
            listed = refused.listed(_ALL, principal_of(scope).identity)[:MAX_ROWS]
            return [{"name": r.name, "source": source, "role": r.role, "error": r.error} for source, r in listed]
        if kind == "tool":
            return self._declarations(name, source, scope, everything)
        if kind == "restricted":
            return [_tool(each) for each in self._restricted(scope, everything)[:MAX_ROWS]]
        listings = self._view.listings(None, user_id, level, principal=principal_of(scope))
        if kind == "tools":
            return [_tool(each) for each in listings[:MAX_ROWS]]
        hosts = tuple(self._presence.by_source) if everything else ()
        return _plugins(listings, hosts, self._presence)[:MAX_ROWS]

    def _restricted(self, scope: ToolScope, everything: bool) -> list[ToolListing]:
        """Returns the tools that a listing without a user lacks, for operators only."""
        if not everything:
            return []
        principal, level = principal_of(scope), level_of(scope.context.attributes)
        listed = {(each.source, each.tool.name) for each in self._view.listings(principal=principal)}
        reached = self._view.listings(None, "", level, principal=replace(principal, may_omit_user=True))
        return [each for each in reached if (each.source, each.tool.name) not in listed]

    def _declarations(self, name: str, source: str, scope: ToolScope, everything: bool) -> list[Row]:
        """Returns the tools of a name, offline ones too; to operators also those that only some users may call."""
        context, principal = scope.context, principal_of(scope)
        if everything:
            principal = replace(principal, may_omit_user=True)
        args = None, context.user_id, level_of(context.attributes)
        found = self._view.listings(*args, principal=principal, include_offline=True, names=[name])
        named = [each for each in found if source in ("", each.source)]
        return [_declaration(each, everything) for each in named[:MAX_DECLARATIONS]]

    def _calls(self, user_id: str | None, identity: Identity) -> list[Row]:
        """Returns the calls for a user, for None of all users; without a user none."""
        if user_id == "":
            return []
        records = self._records.newest(RecordFilter(user_id=user_id or ""), len(self._records))
        return [
            {
                "name": each.name,
                "source": each.source,
                "user_id": each.user_id,
                "outcome": each.outcome,
                "seconds": round(each.seconds, 6),
                "ended": round(self._records.began + each.ended, 3),
                "arguments_size": each.arguments_size,
                "output_size": each.output_size,
            }
            for each in records
            if identity.scopes is None or identity.scopes.reaches_name(each.name, each.source)
        ]

    def _stats(self, calls: Iterable[Row], everything: bool) -> Row:
        if not everything:
            return {"outcomes": dict(Counter(each["outcome"] for each in calls))}
        return {
            "sessions": len(self._presence.sessions),
            "outcomes": self._records.counts(),
            "up_seconds": round(time.monotonic() - self._started, 3),
        }


def _tool(listing: ToolListing) -> Row:
    tool = listing.tool
    return {
        "name": tool.name,
        "source": listing.source,
        "description": tool.description[:MAX_DESCRIPTION],
        "read_only": tool.reads_only,
    }


def _declaration(listing: ToolListing, everything: bool) -> Row:
    tool, entry = listing.tool, listing.entry
    handlers = entry.handlers()
    row: Row = {
        **_tool(listing),
        "description": tool.description,
        "display_name": tool.display_name,
        "roles": list(listing.roles),
        "schema_hash": tool.schema_hash,
        "parameters_json": tool.parameters_json,  # as text: JSON numbers may be larger than a reader's
        "output_schema_json": tool.output_schema_json,
        "timeout_seconds": entry.current.timeout if entry.current is not None else tool.timeout_seconds,
        "hints": {each: value for each in HINTS if (value := getattr(tool.annotations, each)) is not None},
        "hints_trusted": tool.hints_trusted,
        "needs": list(tool.needs),
        "min_level": entry.min_level,
        "state": session_state_of(handlers),
        "sessions": sum(each.session_state not in NO_CALLS for each in handlers),
    }
    if not everything:
        return row
    last_error = entry.last_error if entry.current is None else ""  # why it is offline
    return {**row, "warnings": list(entry.all_warnings), "last_error": last_error}


def _plugins(listings: Iterable[ToolListing], hosts: Iterable[str], presence: Presence) -> list[Row]:
    """Returns a row for each source: those that offer what is listed, then those that only call."""
    handlers: dict[str, dict[Handler, None]] = {}
    for listing in listings:
        of_source = handlers.setdefault(listing.source, {})
        of_source.update(dict.fromkeys(listing.entry.handlers()))
    for source in hosts:
        handlers.setdefault(source, {}).update(dict.fromkeys([*presence.by_source.get(source, {}).values()]))
    return [_plugin(source, of_source) for source, of_source in handlers.items()]


def _plugin(source: str, handlers: Collection[Handler]) -> Row:
    return {
        "source": source,
        "state": session_state_of(handlers),
        "sessions": sum(each.session_state not in NO_CALLS for each in handlers),
        "in_flight": sum(len(each.pending) - each.stuck for each in handlers),
    }


DRAIN_SECONDS = 30.0
MAX_WAIT_SECONDS = 60.0  # for a new record


BATCH_SECONDS = 0.05  # from the next call until the records are read: a follower reads batches
LAST_ANSWER_SECONDS = 0.25  # before the end of a drain: for the last answer to reach a follower
FOLLOW_PAUSE_SECONDS = 0.025  # before each answer to a follower: with 50 calls in each, at most 2,000 calls/s


class AdminTools:
    """Operators' tools of one bus.

    Args:
        grants: where permissions are changed.
    """

    def __init__(self, core: Core, grants: Grants) -> None:
        self._core = core
        self._registry = core.catalog.registry
        self._presence = core.sessions.presence
        self._records = core.calls.records
        self._view = core.catalog.view
        self._grants = grants
        self._audit = core.audit
        self._introspection = Introspection(core.sessions.presence, core.calls.records, core.catalog.view)

    def tools(self) -> list[Callable[..., Any]]:
        """The methods that are tools."""
        return [
            *(self.drain, self.calls, self.cancel_call, self.stats),
            *(self.role_add, self.role_remove),
            *(self.permit, self.permissions, self.grant, self.revoke, self._introspection.this_bus),
        ]

    @llm_tool(description="Asks a source's sessions to finish their calls and leave; without a source, the whole bus.")
    async def drain(self, scope: ToolScope, source: str = "", grace_seconds: float = DRAIN_SECONDS) -> dict[str, Any]:
        """Drains a source or the bus."""
        with self._audit.operation("drain", principal_of(scope), target=source):
            if source:
                sessions = self._presence.drain_source(source, grace_seconds, time.monotonic())
            else:
                sessions = len(self._presence.sessions)
                asyncio.get_running_loop().call_soon(
                    self._core.program.request_stop
                )  # after this call has been answered
        return {"source": source, "sessions": sessions}

    @llm_tool(description="Lists the newest calls, newest first, or with `since` those after a number, oldest first.")
    async def calls(
        self,
        limit: int = 50,
        source: str = "",
        name: str = "",
        caller: str = "",
        user_id: str = "",
        outcome: str = "",
        since: int = -1,
        wait_seconds: float = 0.0,
        follow: bool = False,
    ) -> list[dict[str, Any]] | dict[str, Any]:
        """Lists records of ended calls.

        Args:
            limit: at most this many.
            source: only calls of this source's tools.
            name: only calls of this tool.
            caller: only calls by this source.
            user_id: only calls for this user.
            outcome: only calls that ended so: OK, or a code such as TOOL.
            since: only calls with a higher number.
            wait_seconds: how long to wait for one, at most 60.
            follow: answer with an object: `calls`; `lost`, how many calls after `since` were overwritten before they
                were read, whatever the filters say; `next`, the `since` of the next request.
        """
        record_filter = RecordFilter(source, name, caller, user_id, outcome)
        deadline = time.monotonic() + min(wait_seconds, MAX_WAIT_SECONDS)
        if since > self._records.ended:
            since = 0  # a number of an earlier bus, which has been restarted since
        if follow and since >= 0:
            await asyncio.sleep(FOLLOW_PAUSE_SECONDS)
        while True:
            deadline = min(deadline, self._presence.drain_ends - LAST_ANSWER_SECONDS)
            if since < 0:
                batch = RecordBatch(0, self._records.newest(record_filter, limit), self._records.ended)
            else:
                batch = self._records.batch(record_filter, since, limit)
            if self._is_complete(batch, limit, follow=follow) or time.monotonic() >= deadline:
                break
            if since >= 0 and not batch.records:
                since = batch.position  # calls up to this number need not be read again
            await self._next_call(deadline)
        calls = [record.described(self._records.began) for record in batch.records]
        return {"calls": calls, "lost": batch.lost, "next": batch.position} if follow else calls

    def _is_complete(self, batch: RecordBatch, limit: int, *, follow: bool) -> bool:
        """Tells whether a client that waits for records gets its answer now.

        A client leaves a draining bus with its last answer. So a follower gets one when the last call has ended, or
        shortly before the bus ends those that are left; any other client at once, since it must not delay the drain.
        """
        if not self._presence.draining:
            return bool(batch.records or (batch.lost and follow))
        return not (follow and self._core.calls.dispatcher.in_flight.oldest(1)) or len(batch.records) >= limit

    @llm_tool(description="Cancels a call in flight of any caller; its caller gets the error CANCELLED.")
    async def cancel_call(self, scope: ToolScope, id: str) -> dict[str, Any]:
        """Cancels a call.

        Args:
            id: the bus's own, as in `running` of a digest, or in the log.
        """
        dispatcher = self._core.calls.dispatcher
        call = dispatcher.in_flight.find(id)
        if call is None:
            raise InvalidRequest(f"no call {quote(id)} runs: it has ended, or the id is not the bus's own")
        row = {"id": id, "name": call.entry.name, "source": call.entry.source, "caller": call.caller.source}
        why = f"call {id} of {row['caller']}"
        with self._audit.operation("call.cancel", principal_of(scope), target=row["name"], why=why):
            dispatcher.endings.cancel_for_operator(call, time.monotonic())
        return {**row, "cancelled": True}

    async def _next_call(self, deadline: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._core.signals.next_call()
                await asyncio.sleep(BATCH_SECONDS)

    @llm_tool(description="Shows what the bus has counted since it started, and its limits.")
    async def stats(self) -> dict[str, Any]:
        """Counts sessions, tools, outcomes and the load of now; `/metrics` has the same and more, by tool.

        `limits` are the values in force of all that `[limits]` of the configuration can set, by name.
        """
        core, records, traffic = self._core, self._records, self._presence.traffic
        return {
            "sessions": len(self._presence.sessions),
            "sources": len(self._presence.by_source),
            "revision": self._registry.revision,
            "roles": list(self._registry.roles),
            "late_results": records.late,
            "unowed_results": records.unexpected,
            "outcomes": records.counts(),
            "refused": {outcome_of(code): count for code, count in sorted(core.calls.metrics.refused.items())},
            "in_flight": core.calls.dispatcher.in_flight.active,
            "stuck": core.calls.dispatcher.in_flight.stuck,
            "held_bytes": core.calls.dispatcher.in_flight.held,
            "tools": self._registry.count_states(),
            "frames": {"in": traffic.frames_in, "out": traffic.frames_out},
            "watchers": core.signals.watching,
            "loop_lag_seconds": round(core.program.stalls.lag, 6),
            "limits": asdict(core.config.limits),
        }

    @llm_tool(description="Adds a role, for later runs too; it gets every tool that is registered for all roles.")
    async def role_add(self, scope: ToolScope, role: str) -> list[str]:
        """Adds a role."""
        self._core.catalog.roles.add(role, principal_of(scope))
        return list(self._registry.roles)

    @llm_tool(description="Removes a role and the tools that it alone has.")
    async def role_remove(self, scope: ToolScope, role: str) -> list[str]:
        """Removes a role."""
        self._core.catalog.roles.remove(role, principal_of(scope))
        return list(self._registry.roles)

    @llm_tool(description="Sets which users may call a tool, the tools of a role, or those of a source.")
    async def permit(self, scope: ToolScope, kind: str, name: str, users: list[str] | None = None) -> dict[str, Any]:
        """Sets a rule, at once and across restarts.

        Args:
            kind: tools, roles or sources.
            name: of the tool, role or source.
            users: ids of the users that may call; ["*"] is everyone, [] no user; null removes the rule.

        The answer is the rules in force, with a `note` where no source offers the tool of the rule.
        """
        self._grants.permit(kind, name, users, principal_of(scope))
        tables: dict[str, Any] = {**self._view.permissions.as_tables()}
        if kind == "tools" and users is not None and not self._offers(name):
            tables["note"] = f"no source offers such a tool now: the rule for {quote(name)} applies as soon as one does"
        return tables

    def _offers(self, name: str) -> bool:
        entries = (entry for listing in self._registry.listings() for entry in listing.entries)
        return any(name in (entry.name, entry.bare_name) for entry in entries)

    @llm_tool(
        description="Grants a source a permission: tools, to offer tools, which it has from the start unless the "
        "configuration denies it; or generation, to use the models that hosts lend."
    )
    async def grant(self, scope: ToolScope, source: str, permission: str = TOOLS) -> dict[str, Any]:
        """Grants a source a permission, at once and across restarts."""
        self._grants.grant(source, permission, principal_of(scope))
        return {"source": source, "permission": permission, "granted": True}

    @llm_tool(
        description="Denies a source a permission: tools, to offer tools, which withdraws those that it has; or "
        "generation, to use the models that hosts lend."
    )
    async def revoke(self, scope: ToolScope, source: str, permission: str = TOOLS) -> dict[str, Any]:
        """Denies a source a permission, at once and across restarts."""
        known = source in self._presence.by_source or bool(self._registry.offered_by(source))
        count = self._grants.revoke(source, permission, principal_of(scope))
        answer: dict[str, Any] = {"source": source, "permission": permission, "granted": False, "removed": count}
        if not known and permission == TOOLS:
            answer["note"] = f"source {source!r} is not attached now: it may not offer tools when it attaches"
        return answer

    @llm_tool(
        description="Shows which users may call what (tables of tools, roles and sources), and which sources may not "
        "offer tools."
    )
    async def permissions(self) -> dict[str, Any]:
        """Shows the rules in force."""
        return {
            **self._view.permissions.as_tables(),
            "silenced": sorted(self._grants.silenced),
            "generation": self._core.catalog.policy.generators,
        }
