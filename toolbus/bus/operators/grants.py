"""Changes permissions while the bus is running: puts them in force at once, notifies sessions, and persists them.

Operators set two kinds: which users may call (rules by tool, role and source), and what sources may do: offer tools
(the permission ``tools``), use the models that hosts lend (``generation``). `grants_file` stores both across restarts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from toolbus.bus.access.identity import PROGRAM, Principal
from toolbus.bus.audit.audit import Audit
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.entry import BUS_SOURCE
from toolbus.bus.catalog.policy import GENERATION, TOOLS, AccessRules, Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.signals import Signals
from toolbus.bus.storage.database import read_state, write_state
from toolbus.bus.streams.presence import Presence
from toolbus.common.text import list_names, quote, shorten
from toolbus.errors import InvalidRequest, NotKept, SetupError
from toolbus.protocol.tool import is_source

# Stores the permissions that operators change at run time: ``permissions.json`` in the data directory.
#
# The file holds only changes to the configuration: by rule a list of users, or null where a rule of the configuration
# was removed; by source whether it may not offer tools. A change back to the configuration is removed from the file.
# A bus does not start with a file that it cannot read: tools that an operator restricted would be open.


FILE = "permissions.json"
SILENCED = "silenced"  # key of the sources that may not offer tools, beside the tables of rules

RuleChanges = dict[str, dict[str, list[str] | None]]  # by table and name the users; None: the rule was removed


class GrantsFile:
    """The file of one data directory. Only the bus that holds the directory's lock may use it.

    Args:
        configured: the sources that may not offer tools by the configuration.

    Attributes:
        denied: by source whether an operator denied it to offer tools.
        generation: by source whether it may use models that hosts lend.
    """

    def __init__(self, directory: Path, configured: frozenset[str] = frozenset()) -> None:
        self._path = directory / FILE
        self._changes: RuleChanges = {}  # as in the file
        self.denied: dict[str, bool] = {}
        self.generation: dict[str, bool] = {}
        self._configured = configured
        self._rules = AccessRules()  # of the configuration

    def apply(self, rules: AccessRules) -> AccessRules:
        """Reads the file. Returns the rules of the configuration with its changes applied.

        Raises:
            SetupError: the file cannot be read, another user could have written it, or it holds something else.
        """
        self._rules = rules
        try:
            self._changes = read_state(self._path)
            self.denied = _check_sources(SILENCED, self._changes.pop(SILENCED, {}))
            self.generation = _check_sources(GENERATION, self._changes.pop(GENERATION, {}))
            for kind, table in self._changes.items():
                for name, users in table.items():
                    rules = rules.changed(kind, name, users)
        except FileNotFoundError:
            return rules
        except OSError as error:
            raise SetupError(f"cannot read {self._path}: {error.strerror}: let this user read it") from error
        except (ValueError, AttributeError, TypeError, InvalidRequest) as error:
            raise SetupError(
                f"{self._path} is damaged ({error}): restore it, or move it away to go back to the permissions of "
                "the configuration"
            ) from error
        return rules

    def save_rule(self, kind: str, name: str, users: list[str] | None) -> None:
        """Stores a rule; None says that it was removed.

        Raises:
            NotKept: the file could not be written.
        """
        self._save({**self._changes, kind: {**self._changes.get(kind, {}), name: users}}, self.denied, self.generation)

    def save_source(self, source: str, denied: bool) -> None:
        """Stores whether a source may not offer tools.

        Raises:
            NotKept: the file could not be written.
        """
        self._save(self._changes, {**self.denied, source: denied}, self.generation)

    def save_generation(self, source: str, granted: bool) -> None:
        """Stores whether a source may use the models that hosts lend.

        Raises:
            NotKept: the file could not be written.
        """
        self._save(self._changes, self.denied, {**self.generation, source: granted})

    def _save(self, changes: RuleChanges, denied: dict[str, bool], generation: dict[str, bool]) -> None:
        changes = {kind: needed for kind, table in changes.items() if (needed := self._needed(kind, table))}
        denied = {source: each for source, each in denied.items() if each or source in self._configured}
        if (changes, denied, generation) == (self._changes, self.denied, self.generation):
            return
        sources = {key: table for key, table in ((SILENCED, denied), (GENERATION, generation)) if table}
        content = {**changes, **sources}
        try:
            write_state(self._path, content)
        except OSError as error:
            raise NotKept(
                f"the permission is in force, but could not be written to {self._path} ({error.strerror}), so it ends "
                "with this bus: make the file and its directory writable, then set it again"
            ) from error
        self._changes, self.denied, self.generation = changes, denied, generation

    def _needed(self, kind: str, table: dict[str, list[str] | None]) -> dict[str, list[str] | None]:
        """Returns a table without removed rules that the configuration does not have either."""
        configured = getattr(self._rules, kind)
        return {name: users for name, users in table.items() if users is not None or name in configured}


def _check_sources(key: str, value: object) -> dict[str, bool]:
    if not isinstance(value, dict) or not all(type(each) is bool for each in value.values()):
        raise InvalidRequest(f"{key} is {shorten(repr(value))}, it must map sources to true or false")
    return value


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
