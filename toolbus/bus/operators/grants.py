"""What operators permit while the bus is running: put in force at once, told to whom it concerns, and written down.

Two things are permitted: users may call (rules by tool, role and source), and sources may offer (the right ``tools``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.bus.catalog.policy import AccessRules, Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.operators.grants_file import GrantsFile
from toolbus.bus.signals import Signals
from toolbus.bus.streams.presence import Presence
from toolbus.errors import InvalidRequest
from toolbus.tool import is_source

TOOLS = "tools"  # the one right that a source may have or lack: to offer tools


class Grants:
    """The rules of one bus as operators change them."""

    def __init__(
        self, registry: Registry, policy: Policy, view: CatalogView, presence: Presence, signals: Signals
    ) -> None:
        self._registry = registry
        self._policy = policy
        self._view = view
        self._presence = presence
        self._signals = signals
        self._file: GrantsFile | None = None  # None: what is permitted ends with the bus

    def keep_in(self, directory: Path, rules: AccessRules) -> None:
        """Puts back what was permitted before, over the rules of the configuration, and keeps what comes.

        Raises:
            SetupError: what was kept cannot be read.
        """
        self._file = GrantsFile(directory, self._policy.denied)
        self._view.permit(self._file.over(rules))
        for source, silenced in self._file.silenced.items():
            (self._policy.deny if silenced else self._policy.grant)(source)

    @property
    def silenced(self) -> frozenset[str]:
        """The sources that may not offer tools."""
        return self._policy.denied

    def permit(self, kind: str, name: str, users: Sequence[str] | None) -> None:
        """Says which users may call a tool, or the tools of a role or source.

        Args:
            kind: ``tools``, ``roles`` or ``sources``.
            users: ``*`` is everyone, nobody where it is empty; None takes the rule away.

        Raises:
            InvalidRequest: naming what breaks a rule.
            NotKept: it is in force, but could not be written down.
        """
        self._view.revise(lambda rules: rules.changed(kind, name, users))
        self._signals.catalog_changed()
        if self._file is not None:
            self._file.keep(kind, name, None if users is None else list(users))

    def grant(self, source: str, right: str = TOOLS) -> None:
        """Lets a source offer tools. Its sessions are told, and offer theirs again; callback tools register anew.

        Raises:
            InvalidRequest: there is no such right or source.
            NotKept: it is in force, but could not be written down.
        """
        self._check(source, right)
        if self._policy.grant(source):
            self._presence.permission_changed(source, right, granted=True)
        self._keep(source, False)

    def revoke(self, source: str, right: str = TOOLS) -> int:
        """Forbids a source to offer tools: those that it has are withdrawn at once. Its sessions stay, and are told.

        Returns:
            How many tools were withdrawn, each counted once per role.

        Raises:
            InvalidRequest: there is no such right or source.
            NotKept: it is in force, but could not be written down.
        """
        self._check(source, right)
        changed = self._policy.deny(source, self._open_names(source))
        count = self._presence.permission_changed(source, right, granted=False) if changed else 0
        self._signals.catalog_changed()  # so that withdrawn callback tools do not come back with a restart
        self._keep(source, True)
        return count

    def _open_names(self, source: str) -> set[str]:
        """Returns the names that a source's tools answer to, without those that are above some access level."""
        entries = self._registry.offered_by(source)
        return {name for entry in entries if not entry.min_level for name in (entry.name, entry.bare_name)}

    def _check(self, source: str, right: str) -> None:
        if right != TOOLS:
            raise InvalidRequest(f"there is no right {right[:80]!r}: there is {TOOLS!r}, to offer tools")
        if not is_source(source) or source == BUS_SOURCE:
            raise InvalidRequest(
                f"source {source[:80]!r} is none that offers tools: name one of 1 to 128 of [A-Za-z0-9_.:-]"
            )

    def _keep(self, source: str, silenced: bool) -> None:
        if self._file is not None:
            self._file.keep_silenced(source, silenced)
