"""What operators permitted while a bus was running, kept across restarts: one small JSON file.

It holds only what was said at run time, over the rules of the configuration: a list of users, or null where a rule of
the configuration was taken away, and of sources whether they may offer tools. What was taken back and leaves things as
they are configured says nothing any more, and goes. A file that cannot be read stops the bus from starting: without it,
tools would be open that somebody closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path

from toolbus.bus.catalog.policy import AccessRules
from toolbus.errors import InvalidRequest, NotKept, SetupError

FILE = "permissions.json"
SILENCED = "silenced"  # beside the tables of rules: by source whether it may not offer tools

Said = dict[str, dict[str, list[str] | None]]


class GrantsFile:
    """The file of one data directory. Only the bus that holds the directory's lock may use it.

    Args:
        configured: the sources that the configuration forbids to offer tools.
    """

    def __init__(self, directory: Path, configured: frozenset[str] = frozenset()) -> None:
        self._path = directory / FILE
        self._said: Said = {}  # by table and name, as in the file
        self.silenced: dict[str, bool] = {}  # by source, what was said last
        self._configured = configured
        self._rules = AccessRules()  # of the configuration

    def over(self, rules: AccessRules) -> AccessRules:
        """Returns the rules of the configuration with what was said at run time put over them.

        Raises:
            SetupError: the file cannot be read, or holds something else.
        """
        self._rules = rules
        try:
            self._said = json.loads(self._path.read_text("utf-8"))
            self.silenced = _silenced(self._said.pop(SILENCED, {}))
            for kind, table in self._said.items():
                for name, users in table.items():
                    rules = rules.changed(kind, name, users)
        except FileNotFoundError:
            return rules
        except OSError as problem:
            raise SetupError(f"cannot read {self._path}: {problem.strerror}: let this user read it") from problem
        except (ValueError, AttributeError, TypeError, InvalidRequest) as problem:
            raise SetupError(
                f"{self._path} is damaged ({problem}): restore it, or move it away to go back to the permissions of "
                "the configuration"
            ) from problem
        return rules

    def keep(self, kind: str, name: str, users: list[str] | None) -> None:
        """Writes down one rule more, or one changed; None says that it was taken away.

        Raises:
            NotKept: it could not be written.
        """
        self._keep({**self._said, kind: {**self._said.get(kind, {}), name: users}}, self.silenced)

    def keep_silenced(self, source: str, silenced: bool) -> None:
        """Writes down whether a source may not offer tools.

        Raises:
            NotKept: it could not be written.
        """
        self._keep(self._said, {**self.silenced, source: silenced})

    def _keep(self, said: Said, silenced: dict[str, bool]) -> None:
        said = {kind: still for kind, table in said.items() if (still := self._telling(kind, table))}
        silenced = {source: each for source, each in silenced.items() if each or source in self._configured}
        if (said, silenced) == (self._said, self.silenced):
            return
        written = {**said, SILENCED: silenced} if silenced else said
        try:
            self._write(json.dumps(written, ensure_ascii=False, indent=1))
        except OSError as problem:
            raise NotKept(
                f"the permission is in force, but could not be written to {self._path} ({problem.strerror}), so it "
                "ends with this bus"
            ) from problem
        self._said, self.silenced = said, silenced

    def _telling(self, kind: str, table: dict[str, list[str] | None]) -> dict[str, list[str] | None]:
        """Returns what a table still says: that a rule is none says nothing where none is configured."""
        configured = getattr(self._rules, kind)
        return {name: users for name, users in table.items() if users is not None or name in configured}

    def _write(self, text: str) -> None:
        """Replaces the file in one step, for its owner alone."""
        handle, name = tempfile.mkstemp(prefix=FILE, dir=self._path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def _silenced(said: object) -> dict[str, bool]:
    if not isinstance(said, dict) or not all(type(each) is bool for each in said.values()):
        raise InvalidRequest(f"{SILENCED} is {said!r:.80}, it must be a table of sources to true or false")
    return said
