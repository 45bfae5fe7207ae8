"""Offers the bus's own tools, of source ``toolbus``: drain, records of calls, counts, roles, permissions, search.

They are called over Invoke like any other tool, listed only in a listing of that source, and never exported to models.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from toolbus.bus.access.principal import principal_of
from toolbus.bus.calls.call_records import RecordBatch, RecordFilter
from toolbus.bus.catalog.policy import TOOLS
from toolbus.bus.core import Core
from toolbus.bus.metrics.call_counts import outcome_of
from toolbus.bus.operators.grants import Grants
from toolbus.bus.operators.introspection import Introspection
from toolbus.bus.tasks.task import shown_owner
from toolbus.errors import InvalidRequest
from toolbus.sdk import ToolScope, llm_tool
from toolbus.search_tool import SEARCH_TOOLS, search_arguments, search_tool
from toolbus.text import quote
from toolbus.tool import level_of

DRAIN_SECONDS = 30.0
MAX_WAIT_SECONDS = 60.0  # for a new record
# The description of a tool loop's own search promises that found tools can be added; this one's host may not do that.
SEARCH_DESCRIPTION = (
    "Find tools by what they do, best first. Call this when the task needs something that none of your tools does. "
    "Do NOT call it when one of your tools fits, nor to look up facts, files or web pages: it finds tools. "
    "A tool that it found can be called by its name only if your host offers it to you; if it does not, tell the user "
    "which tool is missing. If no result fits, there is no such tool: try other words once, then say that you cannot "
    "do it. Never invent a tool."
)


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
        self._registry = core.registry
        self._presence = core.presence
        self._records = core.records
        self._view = core.view
        self._grants = grants
        self._audit = core.audit
        self._introspection = Introspection(core.presence, core.records, core.view)
        self._indexes = core.indexes
        # The schema names the modes of this bus. The arguments are checked by the search itself, whose errors say
        # how a missing mode is installed.
        declare = llm_tool(
            name=SEARCH_TOOLS,
            description=SEARCH_DESCRIPTION,
            parameters=search_tool(core.indexes.modes).parameters,
            validate=False,
        )
        self.search_tools = declare(functools.partial(self._search_tools))

    def tools(self) -> list[Callable[..., Any]]:
        """The methods that are tools."""
        return [
            *(self.drain, self.calls, self.cancel_call, self.all_tasks, self.stats),
            *(self.role_add, self.role_remove),
            *(self.permit, self.permissions, self.grant, self.revoke, self.search_tools, self._introspection.this_bus),
        ]

    @llm_tool(description="Asks a source's sessions to finish their calls and leave; without a source, the whole bus.")
    async def drain(self, scope: ToolScope, source: str = "", grace_seconds: float = DRAIN_SECONDS) -> dict[str, Any]:
        """Drains a source or the bus."""
        with self._audit.operation("drain", principal_of(scope), target=source):
            if source:
                sessions = self._presence.drain_source(source, grace_seconds, time.monotonic())
            else:
                sessions = len(self._presence.sessions)
                asyncio.get_running_loop().call_soon(self._core.request_stop)  # after this call has been answered
        return {"source": source, "sessions": sessions}

    @llm_tool(description="Lists the background tasks of all users and programs, newest first, without contents.")
    async def all_tasks(self, task_id: str = "", limit: int = 200) -> dict[str, Any]:
        """Lists the tasks of all owners, with owner and state; only the owner sees errors and progress.

        Args:
            task_id: only this one.
            limit: at most this many.
        """
        tasks = [task for task in self._core.tasks.list_tasks(None) if task_id in ("", task.task_id)]
        now = self._core.tasks.now()
        lines = [task.described(now) | shown_owner(task.owner) for task in tasks[: max(0, limit)]]
        for line in lines:
            for content in ("error", "progress"):
                line.pop(content, None)
        return {"count": len(tasks), "tasks": lines}

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
        return not (follow and self._core.dispatcher.in_flight.oldest(1)) or len(batch.records) >= limit

    @llm_tool(description="Cancels a call in flight of any caller; its caller gets the error CANCELLED.")
    async def cancel_call(self, scope: ToolScope, id: str) -> dict[str, Any]:
        """Cancels a call.

        Args:
            id: the bus's own, as in `running` of a digest, or in the log.
        """
        dispatcher = self._core.dispatcher
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
            "refused": {outcome_of(code): count for code, count in sorted(core.metrics.refused.items())},
            "in_flight": core.dispatcher.in_flight.active,
            "stuck": core.dispatcher.in_flight.stuck,
            "held_bytes": core.dispatcher.in_flight.held,
            "tools": self._registry.count_states(),
            "frames": {"in": traffic.frames_in, "out": traffic.frames_out},
            "watchers": core.signals.watching,
            "loop_lag_seconds": round(core.stalls.lag, 6),
            "limits": asdict(core.config.limits),
        }

    @llm_tool(description="Adds a role, for later runs too; it gets every tool that is registered for all roles.")
    async def role_add(self, scope: ToolScope, role: str) -> list[str]:
        """Adds a role."""
        self._core.roles.add(role, principal_of(scope))
        return list(self._registry.roles)

    @llm_tool(description="Removes a role and the tools that it alone has.")
    async def role_remove(self, scope: ToolScope, role: str) -> list[str]:
        """Removes a role."""
        self._core.roles.remove(role, principal_of(scope))
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
            "generation": self._core.policy.generators,
        }

    def _search_tools(self, scope: ToolScope, **arguments: Any) -> dict[str, Any]:
        """Finds tools that the caller may call. Runs on a thread: a new catalog takes a while to be indexed."""
        query, options = search_arguments({name: value for name, value in arguments.items() if value is not None})
        user_id, level = scope.context.user_id, level_of(scope.context.attributes)
        # The revision is read first: a change in between is found by the next search.
        principal = principal_of(scope)
        # The same key as that of a search over HTTP without a role, so that both use one index.
        catalog = (self._view.revision, "", user_id if self._view.permissions else "", level, principal.identity.scopes)
        tools = [listing.tool for listing in self._view.listings(None, user_id, level, principal=principal)]
        index = self._indexes.index_of(catalog, tools)
        return index.search(query, **options)
