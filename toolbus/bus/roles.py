"""Adds and removes roles while the bus runs, persists them, and adopts roles that programs name where that is allowed.

The roles of the configuration come first, then these, in the order in which they came. The store holds the roles that
were added or adopted here; a role that only the configuration names ends with that configuration.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal

from toolbus.bus.access.identity import PROGRAM, Principal
from toolbus.bus.audit import BUS, Audit
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.config import Config
from toolbus.bus.storage.store import Earlier, Kind, Store, WriteFailed, read_state
from toolbus.common.text import quote
from toolbus.errors import InvalidRequest, NotAudited, NotKept
from toolbus.protocol.tool import MAX_ROLE, is_role

log = logging.getLogger("toolbus.roles")

Origin = Literal["operator", "first-use", "upstream"]

ROLES = Kind(  # by role, how it came
    "roles",
    needed=True,
    without="start with the roles of the configuration",
    synced=True,
    shared="settings",
    earlier=Earlier("roles.json", lambda path: dict(map(_read, read_state(path)["roles"]))),
)


class Roles:
    """The roles of one bus as they change at run time.

    Args:
        changed: called after the catalog has changed.
    """

    def __init__(self, registry: Registry, config: Config, audit: Audit, changed: Callable[[], None]) -> None:
        self._registry = registry
        self._configured = config.roles
        self._adopts = config.adopt_roles
        self._limit = config.limits.unconfigured_roles
        self._audit = audit
        self._changed = changed
        self._store: Store | None = None  # None until it is open
        self._stored: dict[str, Origin] = {}  # the roles in the store
        self._added: dict[str, Origin] = {}  # by role, how it came; in the order in which they came
        self._was_full = False  # whether it was logged that no further role is adopted

    def __repr__(self) -> str:
        return f"<Roles {', '.join(self._registry.roles)} added={len(self._added)} adopts={self._adopts}>"

    def open(self, store: Store) -> None:
        """Restores the roles of earlier runs, and persists changes from now on. Does nothing the second time.

        Raises:
            SetupError: they are damaged.
        """
        if self._store is None:
            self._restore(store)
            self._store = store
            store.on_change(ROLES, lambda: self._restore(store))

    def _restore(self, store: Store) -> None:
        """Adds and removes roles as the store says: at the start, and after another bus changed them."""
        try:
            before, self._stored = self._stored, dict(map(_read, store.load(ROLES).items()))
        except ValueError as error:
            raise store.damaged(ROLES, error) from None
        for role in [role for role in self._added if role in before and role not in self._stored]:
            del self._added[role]
            if role in self._registry.roles:
                self._registry.remove_role(role)
        self._added = {**self._stored, **self._added}
        for role in self._stored:
            self._registry.add_role(role)
        self._changed()

    # -- by operators ----------------------------------------------------------------------------------------------

    def add(self, role: str, principal: Principal = PROGRAM) -> None:
        """Adds a role, for later runs too; it gets every tool that was registered for all roles.

        Raises:
            InvalidRequest: the name breaks a rule.
            NotKept: it is added, but could not be persisted.
            NotAudited: the audit could not be written, so nothing was changed.
        """
        if not is_role(role):
            raise InvalidRequest(
                f"role {quote(role)} is not the name of a role: give it 1 to {MAX_ROLE} printable characters, without "
                "blanks at its ends"
            )
        self._check()
        with self._audit.operation("role", principal, target=role, why="added"):
            self._registry.add_role(role)
            self._changed()
            if role not in self._configured:
                self._added[role] = "operator"
                self._save(role)

    def remove(self, role: str, principal: Principal = PROGRAM) -> None:
        """Removes a role. One of the configuration is back when the bus starts again.

        Raises:
            UnknownRole: the role does not exist.
            NotKept: it is removed, but that could not be persisted.
            NotAudited: the audit could not be written, so nothing was changed.
        """
        self._check()
        with self._audit.operation("role", principal, target=role, why="removed"):
            self._registry.remove_role(role)
            self._changed()
            if self._added.pop(role, None) is not None:
                self._save(role)

    # -- adopted ---------------------------------------------------------------------------------------------------

    def first_use(self, role: str, principal: Principal) -> bool:
        """Adopts a role that a registration names, where the configuration allows it. Returns whether it exists now.

        Raises:
            NotAudited: the audit could not be written, so nothing was changed.
        """
        return role in self._registry.roles or (
            self._adopts == "first-use" and self._adopt(role, "first-use", principal)
        )

    def from_upstream(self, roles: Iterable[str]) -> None:
        """Adopts the roles of a main server, where the configuration allows it; a failure is retried next time."""
        if self._adopts == "off":
            return
        for role in roles:
            if role not in self._registry.roles:
                with contextlib.suppress(NotAudited):  # the audit has logged why
                    self._adopt(role, "upstream", BUS)

    def _adopt(self, role: str, origin: Origin, principal: Principal) -> bool:
        if not is_role(role):
            return False
        if sum(each != "operator" for each in self._added.values()) >= self._limit:
            if not self._was_full:
                log.warning(
                    "not adopted role=%r: %d roles are adopted, as many as the limit unconfigured_roles; add it with "
                    "`toolbus call toolbus:role_add`", role, self._limit,
                )  # fmt: skip
            self._was_full = True
            return False
        with self._audit.operation("role", principal, target=role, why=f"adopted: {origin}"):
            self._registry.add_role(role)
        self._added[role] = origin
        log.info("adopted role=%r of source=%r (%s)", role, principal.source, origin)
        self._changed()
        try:
            self._save(role)
        except NotKept as error:
            log.error("%s", error)
        return True

    def _check(self) -> None:
        if self._store is not None:
            self._store.check(ROLES)

    def _save(self, role: str) -> None:
        if self._store is None:
            return
        changed = {each: origin for each, origin in self._added.items() if self._stored.get(each) != origin}
        try:  # all that changed: the last write may have failed
            self._store.write(ROLES, changed, () if role in self._added else (role,))
            self._stored = dict(self._added)
        except WriteFailed as error:
            raise error.of("role") from error


def _read(row: Any) -> tuple[str, Origin]:
    """Reads a role and how it came.

    Raises:
        ValueError: it is not one.
    """
    match tuple(row):
        case (str(role), ("operator" | "first-use" | "upstream") as origin) if is_role(role):
            return role, origin
    raise ValueError(f"{row!r} is not a role and how it came")
