"""Offers introspection of the bus as a tool: the plugins, tools, ended calls and counts that the user may see.

Tools that show the state of the bus to users call it, such as `examples/dropin/this_host.py`. Users see the tools that
they may call and the calls that were made for them; operators see everything.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any, Literal

from toolbus.bus.access.identity import Identity
from toolbus.bus.access.principal import principal_of
from toolbus.bus.calls.call_records import CallRecords, RecordFilter
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.entry import ToolListing
from toolbus.bus.catalog.handler import Handler
from toolbus.bus.operators.source_states import session_state_of
from toolbus.bus.streams.catalog_messages import NO_CALLS
from toolbus.bus.streams.presence import Presence
from toolbus.bus.streams.refused_tools import Refusal, SessionRefusals
from toolbus.sdk import ToolScope, llm_tool
from toolbus.tool import HINTS, level_of
from toolbus.v1 import tool_bus_service_pb2 as wire

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
            return [_refused(*each) for each in refused.listed(_ALL, principal_of(scope).identity)[:MAX_ROWS]]
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
        listings = self._view.listings(
            None, context.user_id, level_of(context.attributes), principal=principal, include_offline=True
        )
        named = [each for each in self._view.named([name], listings) if source in ("", each.source)]
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
        "read_only": bool(tool.annotations.read_only),
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


def _refused(source: str, refusal: Refusal) -> Row:
    return {"name": refusal.name, "source": source, "role": refusal.role, "error": refusal.error}


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
