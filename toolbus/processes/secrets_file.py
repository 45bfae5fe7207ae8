"""Reads files with secrets, in TOML: with a table of variables for each plugin, or with variables alone.

No error text shows a value.
"""

from __future__ import annotations

import os
import shlex
import stat
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolbus.errors import SetupError
from toolbus.processes.child_environment import VARIABLE_NAME
from toolbus.text import list_names, nearest, quote


def read_secrets(file: Path, plugins: Sequence[str]) -> dict[str, dict[str, str]]:
    """Returns the variables of each plugin that has a table.

    Args:
        plugins: the names that a table may have.

    Raises:
        SetupError: others may read the file, it belongs to another user, it is not TOML of this form, or a table is of
            an unknown plugin.
    """
    document = _read_document(file)
    known = f"the plugins are {list_names(plugins)}"
    for name, table in document.items():
        if not isinstance(table, dict):
            raise SetupError(f"{file}: {quote(name)} is in no table: put it below [PLUGIN]; {known}")
        if name not in plugins:
            near = nearest(name, plugins)
            guess = f" (did you mean [{near}]?)" if near else ""
            raise SetupError(f"{file}: [{_shown(name)}] is not a plugin of this run{guess}: {known}")
        _check(table, lambda variable, name=name: f"{file}: {quote(variable)} of [{_shown(name)}]")  # type: ignore[misc]
    return document


def read_variables(file: Path) -> dict[str, str]:
    """Returns the variables of a file that has no tables.

    Raises:
        SetupError: others may read the file, it belongs to another user, or it is not TOML of this form.
    """
    document = _read_document(file)
    _check(document, lambda variable: f"{file}: {quote(variable)}")
    return document


def _read_document(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read_private(file))
    except ValueError as error:  # tomllib's own error, or bytes that are not UTF-8
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
        raise SetupError(f"{file} is not TOML: {reason}") from None


def _read_private(file: Path) -> str:
    """Returns the text of a file that only this user can read."""
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            if status.st_uid != os.geteuid():
                raise SetupError(
                    f"{file} belongs to user id {status.st_uid}, and this process is of user id {os.geteuid()}: "
                    f"sudo chown {os.geteuid()} {shlex.quote(str(file))}"
                )
            if stat.S_IMODE(status.st_mode) & 0o077:
                raise SetupError(
                    f"{file} has secrets, and others may read or change it (mode {stat.S_IMODE(status.st_mode):04o}): "
                    f"chmod 600 {shlex.quote(str(file))}"
                )
            return opened.read().decode()
    except OSError as error:
        raise SetupError(f"cannot read {file}: {error.strerror or error}") from None


def _check(table: dict[str, Any], place_of: Callable[[str], str]) -> None:
    for name, value in table.items():
        place = place_of(name)
        if not VARIABLE_NAME.fullmatch(name):
            raise SetupError(f"{place} is not a valid variable name: use letters, digits and _")
        if not isinstance(value, str):
            raise SetupError(f"{place} is not text: put its value in quotes")
        if "\0" in value:
            raise SetupError(f"{place} holds a NUL, which no variable can: remove it")


def _shown(plugin: str) -> str:
    return quote(plugin)[1:-1]
