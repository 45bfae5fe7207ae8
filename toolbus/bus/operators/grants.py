"""Changes permissions while the bus is running: puts them in force at once, notifies sessions, and persists them.

Operators set two kinds: which users may call (rules by tool, role and source), and what sources may do: offer tools
(the permission ``tools``), use the models that hosts lend (``generation``). Both are stored across restarts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolbus.bus.access.identity import PROGRAM, Principal
from toolbus.bus.audit import Audit
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.entry import BUS_SOURCE
from toolbus.bus.catalog.policy import GENERATION, TOOLS, AccessRules, Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.signals import Signals
from toolbus.bus.storage.store import Earlier, Kind, Store, WriteFailed, read_state
from toolbus.bus.streams.presence import Presence
from toolbus.common.text import list_names, quote, shorten
from toolbus.errors import InvalidRequest
from toolbus.protocol.tool import is_source

# The store holds only changes to the configuration: by rule a list of users, or null where a rule of the configuration
# was removed; by source whether it may not offer tools. A change back to the configuration is removed from the store.
# A bus does not start with permissions that it cannot read: tools that an operator restricted would be open.

SILENCED = "silenced"  # the table of sources that may not offer tools, next to the tables of rules

PERMISSIONS = Kind(  # by table and name: users, or null where a rule was removed; of a source a boolean
    "permissions",
    needed=True,
    without="go back to the permissions of the configuration",
    synced=True,
    shared="settings",
    earlier=Earlier("permissions.json", lambda path: _read_earlier(path)),
)


class StoredGrants:
    """The changes of one bus.

    Args:
        configured: the sources that may not offer tools by the configuration.

    Raises:
        SetupError: from the constructor; what is stored is damaged.

    Attributes:
        rules: those of the configuration, with the changes applied.
        denied: by source whether an operator denied it to offer tools.
        generation: by source whether it may use models that hosts lend.
    """

    def __init__(self, store: Store, rules: AccessRules, configured: frozenset[str]) -> None:
        self._store = store
        self._configured = configured
        self._rules = rules  # of the configuration
        self._rows = store.load(PERMISSIONS)
        try:
            self.rules, self.denied, self.generation = _read(self._rows, rules)
        except (ValueError, AttributeError, TypeError, InvalidRequest) as error:
            raise store.damaged(PERMISSIONS, error) from error

    def save(self, table: str, name: str, value: list[str] | bool | None) -> None:
        """Stores a change; None says that a rule was removed.

        Raises:
            NotKept: it could not be written.
        """
        needed = {
            key: each for key, each in {**self._rows, _key(table, name): value}.items() if self._is_needed(key, each)
        }
        changed = {key: each for key, each in needed.items() if key not in self._rows or self._rows[key] != each}
        try:
            self._store.write(PERMISSIONS, changed, self._rows.keys() - needed.keys())
        except WriteFailed as error:
            raise error.of("permission") from error
        self._rows = needed

    def _is_needed(self, key: str, value: object) -> bool:
        """Tells whether a change has to be stored: not a removed rule that the configuration does not have either."""
        table, name = json.loads(key)
        if table == SILENCED:
            return bool(value) or name in self._configured
        return table == GENERATION or value is not None or name in getattr(self._rules, table)


def _key(table: str, name: str) -> str:
    return json.dumps([table, name])


def _read(rows: Mapping[str, Any], rules: AccessRules) -> tuple[AccessRules, dict[str, bool], dict[str, bool]]:
    """Returns rules with the changes of the stored rows applied, and by source the two permissions.

    Raises:
        ValueError, TypeError, AttributeError, InvalidRequest: a row is none.
    """
    sources: dict[str, dict[str, bool]] = {SILENCED: {}, GENERATION: {}}
    for key, value in rows.items():
        table, name = json.loads(key)
        if table not in sources:
            rules = rules.changed(table, name, value)
        elif type(value) is bool:
            sources[table][name] = value
        else:
            raise InvalidRequest(f"{table} has {shorten(repr(value))}, it must map sources to true or false")
    return rules, sources[SILENCED], sources[GENERATION]


def _read_earlier(path: Path) -> Mapping[str, Any]:
    tables = read_state(path)
    rows = {_key(table, name): value for table, values in tables.items() for name, value in values.items()}
    _read(rows, AccessRules())
    return rows


class Grants:
    """The permissions of one bus as operators change them."""

    def __init__(
        self, registry: Registry, policy: Policy, view: CatalogView, presence: Presence, signals: Signals, audit: Audit
    ) -> None:
        self._registry = registry
        self._audit = audit
        self._policy = policy
        self._view = view
        self._presence = presence
        self._signals = signals
        self._configured = policy.denied
        self._store = Store.of(None)  # until `persist_in`
        self._stored: StoredGrants | None = None  # None until `persist_in`

    def persist_in(self, store: Store, rules: AccessRules) -> None:
        """Restores earlier changes over the rules of the configuration, and persists further changes.

        Raises:
            SetupError: the stored changes cannot be read.
        """
        self._store = store
        store.on_change(PERMISSIONS, lambda: self._restore(store, rules))
        self._restore(store, rules)

    def _restore(self, store: Store, rules: AccessRules) -> None:
        """Puts into force what is stored: at the start, and after another bus changed it."""
        self._stored = StoredGrants(store, rules, self._configured)
        self._view.permit(self._stored.rules)
        for source in self._policy.denied | self._stored.denied.keys():
            self._decide(source, TOOLS, granted=not self._stored.denied.get(source, source in self._configured))
        for source, granted in self._stored.generation.items():
            self._decide(source, GENERATION, granted=granted)
        self._signals.catalog_changed()

    @property
    def silenced(self) -> frozenset[str]:
        """The sources that may not offer tools."""
        return self._policy.denied

    def permit(self, kind: str, name: str, users: Sequence[str] | None, principal: Principal = PROGRAM) -> None:
        """Sets which users may call a tool, or the tools of a role or source.

        Args:
            kind: ``tools``, ``roles`` or ``sources``.
            users: ``*`` is everyone; empty means that no user may; None removes the rule.
            principal: who does it, for the audit.

        Raises:
            InvalidRequest: kind, name or a user breaks a rule.
            NotKept: it is in force, but could not be persisted.
            NotAudited: the audit could not be written, so nothing was changed.
        """
        self._store.check(PERMISSIONS)
        rule = "rule removed" if users is None else f"users: {list_names(users)}"
        with self._audit.operation("permit", principal, target=f"{kind} {name}", why=rule):
            self._view.revise(lambda rules: rules.changed(kind, name, users))
            self._signals.catalog_changed()
            self._save(kind, name, None if users is None else list(users))

    def grant(self, source: str, permission: str = TOOLS, principal: Principal = PROGRAM) -> None:
        """Gives a source a permission: to offer ``tools``, or ``generation``. Its sessions are notified.

        Plugins then offer their tools again; callback tools have to register.

        Raises:
            InvalidRequest: the permission does not exist, or the source cannot offer tools.
            NotKept: it is in force, but could not be persisted.
            NotAudited: the audit could not be written, so nothing was changed.
        """
        self._check(source, permission)
        with self._audit.operation("grant", principal, target=source, why=permission):
            self._set(source, permission, granted=True)

    def revoke(self, source: str, permission: str = TOOLS, principal: Principal = PROGRAM) -> int:
        """Takes a permission from a source. Its sessions stay and are notified; ``tools`` withdraws its tools.

        Returns:
            How many tools were withdrawn, each counted once per role; raises as `grant`.
        """
        self._check(source, permission)
        with self._audit.operation("revoke", principal, target=source, why=permission):
            return self._set(source, permission, granted=False)

    def _set(self, source: str, permission: str, *, granted: bool) -> int:
        count = self._decide(source, permission, granted=granted)
        self._signals.catalog_changed()  # so that withdrawn callback tools do not come back after a restart
        self._save(*((GENERATION, source, granted) if permission == GENERATION else (SILENCED, source, not granted)))
        return count

    def _decide(self, source: str, permission: str, *, granted: bool) -> int:
        """Puts a decision into force; returns how many tools it withdrew."""
        if permission == TOOLS:
            changed = self._policy.grant(source) if granted else self._policy.deny(source, self._open_names(source))
        elif changed := self._policy.decide_generation(source, granted):
            self._view.generation_changed()
        return self._presence.permission_changed(source, permission, granted=granted) if changed else 0

    def _open_names(self, source: str) -> set[str]:
        """Returns the names of a source's tools, without those that require an access level."""
        entries = self._registry.offered_by(source)
        return {name for entry in entries if not entry.min_level for name in (entry.name, entry.bare_name)}

    def _check(self, source: str, permission: str) -> None:
        if permission not in (TOOLS, GENERATION):
            raise InvalidRequest(
                f"permission {quote(permission)} does not exist: use {TOOLS!r}, to offer tools, or {GENERATION!r}, to "
                "use the models that hosts lend"
            )
        if source == BUS_SOURCE:
            raise InvalidRequest(f"source {source!r} is the bus's own: name a plugin's source")
        if not is_source(source):
            raise InvalidRequest(
                f"source {quote(source)} breaks the rule [A-Za-z0-9_.:-]{{1,128}}: name the source of a plugin"
            )
        self._store.check(PERMISSIONS)

    def _save(self, table: str, name: str, value: list[str] | bool | None) -> None:
        if self._stored is not None:
            self._stored.save(table, name, value)
