"""Translates the catalog from and to protobuf: reads declared tools, writes listings and changes.

The registry knows records only; this module is where they become messages of the wire.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence

from toolbus.bus.access.identity import Principal
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.changes import CatalogChanges, ChangeOutcome
from toolbus.bus.catalog.entry import HOST_SOURCE, Entry, Handler, ToolListing, is_operators
from toolbus.bus.streams.refused_tools import fitting
from toolbus.common.text import quote
from toolbus.errors import InvalidRequest
from toolbus.protocol.tool import KIB, MIB, level_of
from toolbus.v1 import tool_bus_service_pb2 as wire

PAGE_BYTES = 3 * MIB  # below the 4 MiB that a default gRPC client receives
MAX_WAITING_SHOWN = 1_000  # tools that wait for a role, in one message
PAGE_TOOLS, FEW_TOOLS = 1_000, 10_000  # in a page, 20 ms of the loop; in a catalog whose pages have any number
EVENT_BYTES = 512 * KIB  # so that a full list shares frames with calls
_BEST_FIRST = (
    wire.SESSION_STATE_LIVE,
    wire.SESSION_STATE_SUSPECT,
    wire.SESSION_STATE_DRAINING,
    wire.SESSION_STATE_UNCONFIRMED,
    wire.SESSION_STATE_OFFLINE,
)
NO_CALLS = {wire.SESSION_STATE_UNCONFIRMED, wire.SESSION_STATE_OFFLINE}  # states in which a handler takes no call


def registered(*outcomes: ChangeOutcome) -> wire.RegisterResponse:
    """Builds the response of Register from the outcomes of its steps."""
    return wire.RegisterResponse(
        registered=[name for outcome in outcomes for name in outcome.names],
        affected_roles=dict.fromkeys(role for outcome in outcomes for role in outcome.roles),
        failed_roles=[
            wire.FailedRole(role=role, tool=tool, error=error)
            for outcome in outcomes
            for role, tool, error in outcome.failed
        ],
        ok=all(outcome.accepted for outcome in outcomes),
        waiting=waiting_to_wire([each for outcome in outcomes for each in outcome.waiting]),
    )


def waiting_to_wire(waiting: Sequence[tuple[str, str]], receives_bytes: int = 4 * MIB) -> list[wire.WaitingTool]:
    """Returns tools that wait for a role, (name, role), for one message: the first of them.

    Args:
        receives_bytes: the largest message that the receiver takes; an eighth of it is used at most.
    """
    shown = waiting[:MAX_WAITING_SHOWN]
    return fitting((wire.WaitingTool(name=name, role=role) for name, role in shown), receives_bytes // 8)


def unregistered(name: str, outcome: ChangeOutcome) -> wire.UnregisterResponse:
    """Builds the response of Unregister."""
    removed = bool(outcome.names or outcome.forgotten)
    return wire.UnregisterResponse(removed=removed, name=name, affected_roles=outcome.roles, ok=True)


def cleared(source: str, outcome: ChangeOutcome) -> wire.ClearResponse:
    """Builds the response of Clear."""
    return wire.ClearResponse(removed=outcome.count, source=source, affected_roles=outcome.roles, ok=True)


def list_tools(
    request: wire.ListRequest, view: CatalogView, principal: Principal, *, page_bytes: int = PAGE_BYTES
) -> wire.ListResponse:
    """Builds one page of the response of List.

    Raises:
        UnknownRole: the role is not configured.
        InvalidRequest: the page_token is invalid.
    """
    revision = view.revision
    response = wire.ListResponse(revision=revision)
    if request.if_revision and request.if_revision == revision:
        return response
    start = _page_start(request.page_token)
    waiting: frozenset[Entry] = frozenset()
    if is_operators(request.source):
        listings = view.own(principal, request.source)
    else:
        listings, waiting = _listings(request, view, principal)
        if request.source == HOST_SOURCE:
            listings = (*listings, *view.lent(principal))
    size, names, most = 0, frozenset(request.names), PAGE_TOOLS if len(listings) > FEW_TOOLS else FEW_TOOLS
    # By position in the catalog, not by index: tools may be withdrawn between two pages.
    begin = bisect.bisect_left(listings, start, key=lambda listing: listing.place) if start else 0
    for listing in itertools.islice(listings, begin, None):
        if (request.source and request.source != listing.source) or (names and listing.tool.name not in names):
            continue
        item = listed(listing)
        if listing.entry in waiting:
            item.session_state = wire.SESSION_STATE_WAITING
        size += item.ByteSize() + 8
        if (size > page_bytes and response.tools) or len(response.tools) == most:
            response.next_page_token = str(listing.place)
            break
        response.tools.append(item)
    return response


def _listings(
    request: wire.ListRequest, view: CatalogView, principal: Principal
) -> tuple[tuple[ToolListing, ...], frozenset[Entry]]:
    """Returns the listings that a List shows, by places, and the entries of those that wait for a role.

    Raises:
        UnknownRole: the role is not configured, and nothing that the caller may see waits for it.
    """
    role, user_id, level = request.role or None, request.context.user_id, level_of(request.context.attributes)
    waiting = view.waiting(role, user_id, level, principal=principal) if request.include_offline else ()
    if waiting and role is not None:
        return waiting, frozenset(each.entry for each in waiting)
    names, offline = request.names or None, request.include_offline
    listings = view.listings(role, user_id, level, principal=principal, include_offline=offline, names=names)
    if not waiting:
        return listings, frozenset()
    every = sorted((*listings, *waiting), key=lambda listing: listing.place)
    return tuple(every), frozenset(each.entry for each in waiting)


def listed(listing: ToolListing) -> wire.ListedTool:
    """Builds the message of a listing, with its current state."""
    entry = listing.entry
    handlers = entry.handlers()
    stuck = sum(handler.stuck for handler in handlers)
    return wire.ListedTool(
        tool=listing.tool.to_wire(),
        source=listing.source,
        session_state=best_state(handlers),  # type: ignore[arg-type]  # protoc's enum types are ints
        roles=listing.roles,
        schema_hash=listing.tool.schema_hash,
        last_error=entry.last_error if entry.current is None else "",
        sessions=sum(handler.session_state not in NO_CALLS for handler in handlers),
        in_flight=sum(len(handler.pending) for handler in handlers) - stuck,
        stuck=stuck,
        warnings=entry.all_warnings,
        repeatable=listing.tool.repeatable,
    )


def best_state(handlers: Iterable[Handler]) -> int:
    """Returns the best state of some handlers; OFFLINE without handlers."""
    states = {handler.session_state for handler in handlers}
    return next((state for state in _BEST_FIRST if state in states), wire.SESSION_STATE_OFFLINE)


def changes(missed: CatalogChanges) -> Iterator[wire.Event]:
    """Builds the events of the changes that a watcher missed, small enough to share frames with calls."""
    event = wire.Event()
    change = event.catalog
    change.revision, change.full = missed.revision, missed.full
    size = 0
    for field, listings in (("added", missed.added), ("changed", missed.changed)):
        for listing in listings:
            item = listed(listing)
            size += item.ByteSize()
            if size > EVENT_BYTES:
                yield event
                event = wire.Event()
                change = event.catalog
                change.revision = missed.revision
                size = item.ByteSize()
            getattr(change, field).append(item)
    change.removed.extend(wire.ToolRef(name=name, source=source) for name, source in missed.removed)
    yield event


def _page_start(token: str) -> int:
    if not token:
        return 0
    if not token.isascii() or not token.isdecimal() or len(token) > 18:
        raise InvalidRequest(f"page_token {quote(token, 40)} is invalid: pass ListResponse.next_page_token unchanged")
    return int(token)
