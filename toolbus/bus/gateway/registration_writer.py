"""Writes changed registrations by callback URL to the store.

It writes the registry's state of a handler. A failed write is retried with the next change, and when the bus stops.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from toolbus.bus.catalog.registry import Registry
from toolbus.bus.gateway.callback_handler import CallbackHandler, Origin
from toolbus.bus.gateway.registration_restore import ABSENT
from toolbus.bus.storage.registration_store import RegistrationStore, StoredRegistration
from toolbus.errors import NotKept
from toolbus.limits import Timings

log = logging.getLogger("toolbus.callbacks")


class RegistrationWriter:
    """Writes the registrations of one bus.

    Args:
        store: None: nothing is written.
        left: called with each handler that offers nothing any more.
    """

    def __init__(
        self,
        registry: Registry,
        store: RegistrationStore | None,
        timings: Timings,
        left: Callable[[CallbackHandler], None],
    ) -> None:
        self._registry = registry
        self._store = store
        self._timings = timings
        self._left = left
        self._unsaved: dict[CallbackHandler, None] = {}  # whose last write failed
        self._retry_at = 0.0  # when the next change may retry that, by the monotonic clock
        self._roles = registry.roles  # as of the last `persist`

    def __repr__(self) -> str:
        return f"<RegistrationWriter unsaved={len(self._unsaved)}>"

    def persist(self, handlers: Iterable[CallbackHandler], *, strict: bool = False) -> None:
        """Persists all changes since the last time.

        Args:
            handlers: all of the bus.
            strict: whether a failed write is an error; else it is logged and retried later.

        Raises:
            NotKept: see strict.
        """
        changed = [each for each in self._registry.take_unsaved() if isinstance(each, CallbackHandler)]
        if self._roles != self._registry.roles:
            if not set(self._roles) <= set(self._registry.roles):  # a stored place may name a role that was removed
                changed = [*handlers, *changed]
            self._roles = self._registry.roles
        if changed or (self._unsaved and (strict or time.monotonic() >= self._retry_at)):
            self.write(changed, strict=strict)

    def retry(self, handlers: Iterable[CallbackHandler]) -> None:
        """Retries failed writes at once."""
        self._retry_at = 0.0
        self.persist(handlers)

    def write(self, handlers: Iterable[CallbackHandler], removed: Iterable[str] = (), *, strict: bool = False) -> None:
        """Writes handlers as they are now, and deletes keys.

        Args:
            strict: as of `persist`.

        Raises:
            NotKept: see strict.
        """
        changed: list[StoredRegistration] = []
        dropped = list(removed)
        unsaved = {**self._unsaved, **dict.fromkeys(handlers)}
        for handler in unsaved:
            if self._registry.places(handler):
                changed.append(self._to_record(handler))
            else:
                dropped.append(handler.key)
                self._left(handler)
        if self._store is None:
            return
        try:
            self._store.apply(changed, dropped)
            self._unsaved.clear()
        except Exception as error:
            self._unsaved, self._retry_at = unsaved, time.monotonic() + self._timings.store_retry_seconds
            log.error("cannot persist registrations tools=%d why=%s", len(unsaved), error)
            if strict:
                raise NotKept(
                    f"the change could not be written down ({error}): it is in force until the bus stops. Make the "
                    "data directory writable, then retry"
                ) from error

    def save_answers(self, origins: Iterable[Origin], when: float) -> bool:
        """Persists when origins last answered. Returns whether it was written.

        Args:
            when: in seconds since the epoch.
        """
        if self._store is None:
            return True
        try:
            self._store.save_answers([handler.key for origin in origins for handler in origin.handlers], when)
        except Exception as error:
            log.error("cannot persist which callback URLs answered why=%s", error)
            return False
        return True

    def save_listener(self, origin: Origin) -> None:
        """Persists the plugin's listening socket, for the tools that it registered in this run."""
        if not (listener := origin.listener()):
            return
        moved = [each for each in origin.handlers if not each.is_restored and each.listener != listener]
        for handler in moved:
            handler.listener = listener
        if moved:
            self.write(moved)

    def places(self, handler: CallbackHandler) -> tuple[tuple[str | None, int], ...]:
        """Returns the places of a handler's tools, as they are stored."""
        places = dict(self._registry.places(handler))
        if None in places:  # else a role without a place would pass for a new role at the next start
            for role in self._registry.known_roles:
                places.setdefault(role, ABSENT)
        return tuple(places.items())

    def _to_record(self, handler: CallbackHandler) -> StoredRegistration:
        return StoredRegistration(
            key=handler.key,
            source=handler.source,
            tool=handler.offered.declared,
            callback_url=handler.target.text,
            checked=handler.offered.checker is not None,
            offers=self.places(handler),
            answered_at=handler.origin.answered_at,
            listener=handler.listener,
            secret=handler.secret,
        )
