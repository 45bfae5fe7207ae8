"""Adds and removes roles while the bus runs, persists them, and adopts roles that programs name where that is allowed.

The roles of the configuration come first, then these, in the order in which they came. The file holds the roles that
were added or adopted here; a role that only the configuration names ends with that configuration.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from toolbus.bus.access.identity import PROGRAM, Principal
from toolbus.bus.audit.audit import BUS, Audit
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.config import Config
from toolbus.bus.storage.database import read_state, write_state
from toolbus.common.text import quote
from toolbus.errors import InvalidRequest, NotAudited, NotKept, SetupError
from toolbus.protocol.tool import MAX_ROLE, is_role

log = logging.getLogger("toolbus.roles")

FILE = "roles.json"

Origin = Literal["operator", "first-use", "upstream"]


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
        self._path: Path | None = None  # None: changes end with the bus
        self._added: dict[str, Origin] = {}  # by role, how it came; in the order in which they came
        self._was_full = False  # whether it was logged that no further role is adopted

    def __repr__(self) -> str:
        return f"<Roles {', '.join(self._registry.roles)} added={len(self._added)} adopts={self._adopts}>"

    def open(self, directory: Path) -> None:
        """Restores the roles of earlier runs, and persists changes from now on. Does nothing the second time.

        Raises:
            SetupError: the file cannot be read, another user could have written it, or it holds something else.
        """
        if self._path is not None:
            return
        path = directory / FILE
        try:
            stored: dict[str, Origin] = dict(map(_read, read_state(path)["roles"]))
        except FileNotFoundError:
            stored = {}
        except OSError as error:
            raise SetupError(f"cannot read {path}: {error.strerror}: let this user read it") from error
        except (ValueError, TypeError, KeyError) as error:
            raise SetupError(
                f"{path} is damaged ({error}): restore it, or move it away to start with the roles of the configuration"
            ) from error
        self._path = path
        self._added = {**stored, **self._added}
        for role in stored:
            self._registry.add_role(role)

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
        with self._audit.operation("role", principal, target=role, why="added"):
            self._registry.add_role(role)
            self._changed()
            if role not in self._configured:
                self._added[role] = "operator"
                self._save()

    def remove(self, role: str, principal: Principal = PROGRAM) -> None:
        """Removes a role. One of the configuration is back when the bus starts again.

        Raises:
            UnknownRole: the role does not exist.
            NotKept: it is removed, but that could not be persisted.
            NotAudited: the audit could not be written, so nothing was changed.
        """
        with self._audit.operation("role", principal, target=role, why="removed"):
            self._registry.remove_role(role)
            self._changed()
            if self._added.pop(role, None) is not None:
                self._save()

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
            self._save()
        except NotKept as error:
            log.error("%s", error)
        return True

    def _save(self) -> None:
        if self._path is None:
            return
        try:
            write_state(self._path, {"roles": [list(each) for each in self._added.items()]})
        except OSError as error:
            raise NotKept(
                f"the role is changed, but that could not be written to {self._path} ({error.strerror}), so it ends "
                "with this bus: make the file and its directory writable, then do it again"
            ) from error


def _read(row: object) -> tuple[str, Origin]:
    """Reads a row of the file.

    Raises:
        ValueError: it is not one.
    """
    match row:
        case [str(role), ("operator" | "first-use" | "upstream") as origin] if is_role(role):
            return role, origin
    raise ValueError(f"{row!r} is not a role and how it came")
