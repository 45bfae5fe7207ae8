"""Restores callback tools after a restart: offers them again, in their places and roles, as they were persisted.

Restored tools are suspended and unconfirmed until `Callbacks` knows that their plugin listens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from toolbus.bus.callback_url import CallbackUrl, parse_callback_url
from toolbus.bus.catalog.compiled_tool import CompiledTool, compile_tools, unchecked
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.gateway.callback_handler import CallbackHandler
from toolbus.bus.pins.pins import Pins
from toolbus.bus.storage.registration_store import StoredRegistration
from toolbus.errors import InvalidTool
from toolbus.limits import Limits
from toolbus.text import clean_line

log = logging.getLogger("toolbus.callbacks")

UNCONFIRMED = (
    "the bus has restarted, and the plugin has not shown yet that it is there and still has the tool: let it register "
    "again"
)
ABSENT = -1  # as a place: the role existed, and a tool for all roles was not in it

MakeHandler = Callable[[str, CompiledTool, CallbackUrl, str, float], CallbackHandler]


def only_approved(records: Iterable[StoredRegistration], pins: Pins) -> list[StoredRegistration]:
    """Returns persisted tools without those that wait for an approval, since their sources are pinned to block now."""
    stored = list(records)
    waiting = {
        source: pins.review(source, [each.tool for each in stored if each.source == source], accepted=True)
        for source in {each.source for each in stored if pins.pin_of(each.source)}
    }
    approved = []
    for record in stored:
        why = waiting.get(record.source, {}).get((record.tool.name, record.tool.role or ""))
        if why:
            log.warning("dropped persisted tool=%r source=%r why=%s", record.tool.name, record.source, clean_line(why))
        else:
            approved.append(record)
    return approved


def restore_handlers(
    records: Iterable[StoredRegistration], registry: Registry, limits: Limits, make_handler: MakeHandler
) -> dict[str, CallbackHandler]:
    """Offers persisted tools again, suspended. Returns their handlers by key; tools that are invalid now are left out.

    Args:
        make_handler: makes a handler of source, tool, URL, key and the time of the last answer.
    """
    by_key = {record.key: record for record in records}
    for role in dict.fromkeys(role for record in by_key.values() for role, _ in record.offers):
        if role is not None:
            registry.reserve(role)
    handlers: dict[str, CallbackHandler] = {}
    places: list[tuple[int, str | None, CallbackHandler]] = []
    for record in by_key.values():
        try:
            target = parse_callback_url(record.callback_url)
            # A tool that came by gRPC is checked, or says that it is not.
            by_rest = not record.checked and record.tool.validate is None
            tool = unchecked(record.tool, limits) if by_rest else compile_tools([record.tool], limits)[0]
        except (ValueError, InvalidTool) as error:  # a rule is stricter than when it was registered
            why = clean_line(str(error))
            log.warning("dropped persisted tool=%r source=%r why=%s", record.tool.name, record.source, why)
            continue
        handler = make_handler(record.source, tool, target, record.key, record.answered_at)
        handler.origin.online = handler.is_confirmed = False
        handler.is_restored = True
        handler.listener, handler.secret = record.listener, record.secret
        handlers[record.key] = handler
        offers = dict(record.offers)
        if None in offers:  # REST-12: also for roles that are new since
            offers = {**dict.fromkeys(registry.known_roles, offers[None]), **offers}
        places += [(place, role, handler) for role, place in offers.items() if place != ABSENT]
    _register(places, registry)
    if by_key:
        origins = {handler.origin for handler in handlers.values()}
        log.info("restored tools=%d origins=%d", len(handlers), len(origins))
        for role in set(registry.known_roles) - set(registry.roles):
            log.warning("tools wait for role=%r, which is not configured: add it with --role", role)
    return handlers


def _register(places: list[tuple[int, str | None, CallbackHandler]], registry: Registry) -> None:
    for _, role, handler in sorted(places, key=lambda item: item[0]):
        for _, name, error in registry.register(handler, [handler.offered], roles=[role]).failed:
            why = clean_line(error)
            log.warning("not restored tool=%r source=%r role=%r why=%s", name, handler.source, role or "", why)
    registry.suspend([handler for _, _, handler in places], UNCONFIRMED)
