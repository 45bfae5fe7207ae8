"""Decides what each plugin of one ``toolbus run`` is started with: its environment, its secrets and its token.

Each plugin gets the secrets of its own table, and a token that binds its own sources only. docs/about/security.md says
what this keeps from the other plugins of the run, and what it does not.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from toolbus.processes.child_environment import (
    NEVER_PASSED_ON,
    PLUGIN,
    mentioned_variables,
    requested_variables,
    token_of,
)
from toolbus.processes.secrets_file import read_secrets
from toolbus.processes.supervised_plugin import Command, PluginReport, ReportKind
from toolbus.processes.supervisor import plugin_name, plugin_names
from toolbus.text import quote


def plugin_commands(
    files: Sequence[Path],
    environment: Mapping[str, str],
    requests: Sequence[str],
    secrets_file: Path | None,
    emit: Callable[[PluginReport], None],
    credential: Path | None = None,
) -> dict[str, Command]:
    """Returns the command of each plugin file, by the plugin's name.

    Args:
        environment: the operator's. A TOOLBUS_TOKEN in it makes the plugins' tokens the same in every run.
        requests: variables that every plugin gets besides the usual ones, see `requested_variables`.
        secrets_file: None means that no plugin has secrets.
        emit: takes a report for each variable that a plugin reads and does not get.
        credential: the file of a credential for the plugins that have none among their secrets.

    Raises:
        SetupError: a request or the file of secrets is refused.
    """
    passed_on = PLUGIN.choose(environment) | requested_variables(requests, environment)
    tables = _tables(files)
    known = read_secrets(secrets_file, list(dict.fromkeys(tables))) if secrets_file is not None else {}
    # No other program can attach as the source of a plugin while it runs, restarts included, nor can another plugin:
    # only processes of the same file have the same token.
    secret = environment.get("TOOLBUS_TOKEN") or secrets.token_hex(16)
    shared = {"TOOLBUS_CREDENTIAL": str(credential.resolve())} if credential is not None else {}
    commands = {}
    for name, table, file in zip(plugin_names(files), tables, files, strict=True):
        own = {"TOOLBUS_TOKEN": token_of(secret, str(file.resolve())), **shared, **known.get(table, {})}
        reads = mentioned_variables(file) | {"TOOLBUS_CREDENTIAL"}  # which the SDK reads
        for variable in sorted((reads & environment.keys()) - passed_on.keys() - own.keys()):
            emit(PluginReport(name, ReportKind.OUTPUT, _explain(variable, table), "stderr"))
        commands[name] = Command.of_file(file, passed_on, own)
    return commands


def _tables(files: Sequence[Path]) -> list[str]:
    """Returns the name of each file's table: `plugin_name`, or the plugin's name where another file has the same."""
    names: dict[Path, str] = {}  # of each file, without the numbers of further processes
    for name, file in zip(plugin_names(files), files, strict=True):
        names.setdefault(file.resolve(), name)
    counts = Counter(plugin_name(file) for file in names)
    return [name if counts[name := plugin_name(file)] == 1 else names[file.resolve()] for file in files]


def _explain(variable: str, table: str) -> str:
    """Returns why a plugin does not get a variable, and how it can."""
    ways = [] if variable in NEVER_PASSED_ON else [f"add --env {variable}"]
    if variable == "TOOLBUS_CREDENTIAL":
        ways.append("name it with --credential for all of them")
    key = table if table.replace("-", "").replace("_", "").isalnum() and table.isascii() else quote(table)
    ways.append(f"set it below [{key}] in a file that --secrets names")
    return f"reads {variable}, which is set here but not handed on to plugins: {', or '.join(ways)}"
