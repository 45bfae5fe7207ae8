"""Stores the permissions that operators change at run time: ``permissions.json`` in the data directory.

The file holds only changes to the configuration: by rule a list of users, or null where a rule of the configuration was
removed; by source whether it may not offer tools. A change back to the configuration is removed from the file. A bus
does not start with a file that it cannot read: tools that an operator restricted would be open.
"""

from __future__ import annotations

from pathlib import Path

from toolbus.bus.catalog.policy import GENERATION, AccessRules
from toolbus.bus.storage.state_file import read_state, write_state
from toolbus.errors import InvalidRequest, NotKept, SetupError
from toolbus.text import shorten

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
