"""Changes permissions while the bus is running: puts them in force at once, notifies sessions, and persists them.

Operators set two kinds: which users may call (rules by tool, role and source), and what sources may do: offer tools
(the permission ``tools``), use the models that hosts lend (``generation``). `grants_file` stores both across restarts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from toolbus.bus.access.principal import PROGRAM, Principal
from toolbus.bus.audit.audit import Audit
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.bus.catalog.policy import GENERATION, TOOLS, AccessRules, Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.operators.grants_file import GrantsFile
from toolbus.bus.signals import Signals
from toolbus.bus.streams.presence import Presence
from toolbus.errors import InvalidRequest
from toolbus.text import list_names, quote
from toolbus.tool import is_source


class Grants:
    """The permissions of one bus as operators change them."""

    def __init__(
        self,
        registry: Registry,
        policy: Policy,
        view: CatalogView,
        presence: Presence,
        signals: Signals,
        audit: Audit,
    ) -> None:
        self._registry = registry
        self._audit = audit
        self._policy = policy
        self._view = view
        self._presence = presence
        self._signals = signals
        self._file: GrantsFile | None = None  # None: changes end with the bus

    def persist_in(self, directory: Path, rules: AccessRules) -> None:
        """Restores earlier changes over the rules of the configuration, and persists further changes.

        Raises:
            SetupError: the stored changes cannot be read.
        """
        self._file = GrantsFile(directory, self._policy.denied)
        self._view.permit(self._file.apply(rules))
        for source, denied in self._file.denied.items():
            (self._policy.deny if denied else self._policy.grant)(source)
        for source, granted in self._file.generation.items():
            self._policy.decide_generation(source, granted)

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
        rule = "rule removed" if users is None else f"users: {list_names(users)}"
        with self._audit.operation("permit", principal, target=f"{kind} {name}", why=rule):
            self._view.revise(lambda rules: rules.changed(kind, name, users))
            self._signals.catalog_changed()
            if self._file is not None:
                self._file.save_rule(kind, name, None if users is None else list(users))

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
            if permission == GENERATION:
                self._decide_generation(source, granted=True)
                return
            if self._policy.grant(source):
                self._presence.permission_changed(source, permission, granted=True)
            self._save(source, False)

    def revoke(self, source: str, permission: str = TOOLS, principal: Principal = PROGRAM) -> int:
        """Takes a permission from a source. Its sessions stay and are notified; ``tools`` withdraws its tools.

        Returns:
            How many tools were withdrawn, each counted once per role.

        Raises:
            InvalidRequest: the permission does not exist, or the source cannot offer tools.
            NotKept: it is in force, but could not be persisted.
            NotAudited: the audit could not be written, so nothing was changed.
        """
        self._check(source, permission)
        with self._audit.operation("revoke", principal, target=source, why=permission):
            if permission == GENERATION:
                self._decide_generation(source, granted=False)
                return 0
            changed = self._policy.deny(source, self._open_names(source))
            count = self._presence.permission_changed(source, permission, granted=False) if changed else 0
            self._signals.catalog_changed()  # so that withdrawn callback tools do not come back after a restart
            self._save(source, True)
        return count

    def _decide_generation(self, source: str, *, granted: bool) -> None:
        if self._policy.decide_generation(source, granted):
            self._view.generation_changed()
            self._presence.permission_changed(source, GENERATION, granted=granted)
        if self._file is not None:
            self._file.save_generation(source, granted)

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

    def _save(self, source: str, denied: bool) -> None:
        if self._file is not None:
            self._file.save_source(source, denied)
