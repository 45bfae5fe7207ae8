"""Makes the command of each plugin of one ``toolbus run``: its program, environment, secrets and token.

Each plugin gets the secrets of its own table, and a token that binds its own sources only. docs/about/security.md says
how far this protects a plugin from the others of the run.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from toolbus.errors import SetupError
from toolbus.processes.child_environment import (
    NEVER_PASSED_ON,
    PLUGIN,
    mentioned_variables,
    requested_variables,
    token_of,
)
from toolbus.processes.plugin_program import PluginProgram
from toolbus.processes.secrets_file import read_secrets
from toolbus.processes.supervised_plugin import Command, PluginReport, ReportKind
from toolbus.processes.supervisor import plugin_name, plugin_names
from toolbus.sdk.bus_address import ADDRESS
from toolbus.sdk.credential import Credential
from toolbus.text import quote


def plugin_commands(
    plugins: Sequence[Path | PluginProgram],
    environment: Mapping[str, str],
    requests: Sequence[str],
    secrets_file: Path | None,
    emit: Callable[[PluginReport], None],
    credential: Path | None = None,
) -> dict[str, Command]:
    """Returns the command of each plugin, by the plugin's name.

    Args:
        plugins: files and folders, and programs in any language.
        environment: the operator's. A TOOLBUS_TOKEN in it makes the plugins' tokens the same in every run.
        requests: further variables for every plugin, see `requested_variables`.
        secrets_file: None means that no plugin has secrets.
        emit: takes a report for each variable that a plugin reads and does not get.
        credential: the credential file of the plugins whose secrets name no other.

    Raises:
        SetupError: a request, the file of secrets or a program is refused.
    """
    usual, requested = PLUGIN.choose(environment), requested_variables(requests, environment)
    passed_on = usual | requested
    files = [each for each in plugins if isinstance(each, Path)]
    programs = [each for each in plugins if isinstance(each, PluginProgram)]
    names, tables = plugin_names(files), _tables(files)
    _check_names([*names, *tables], programs)
    owners = [*(str(each.resolve()) for each in files), *(f"--exec {each.name}" for each in programs)]
    names += [each.name for each in programs]
    tables += [each.name for each in programs]
    known = read_secrets(secrets_file, list(dict.fromkeys(tables))) if secrets_file is not None else {}
    # While a plugin runs, restarts included, no other program and no other plugin can attach as its source: only
    # processes of the same file, or of the same name, have the same token.
    secret = environment.get("TOOLBUS_TOKEN") or secrets.token_hex(16)
    shared = {"TOOLBUS_CREDENTIAL": str(credential.resolve())} if credential is not None else {}
    commands = {}
    ordered: list[Path | PluginProgram] = [*files, *programs]
    for name, table, owner, plugin in zip(names, tables, owners, ordered, strict=True):
        own = {"TOOLBUS_TOKEN": token_of(secret, owner), **shared, **known.get(table, {})}
        reads = {"TOOLBUS_CREDENTIAL"}  # every client library for other machines reads it
        if isinstance(plugin, Path):
            reads |= mentioned_variables(plugin)
        for variable in sorted((reads & environment.keys()) - passed_on.keys() - own.keys()):
            emit(PluginReport(name, ReportKind.OUTPUT, _explain(variable, table), "stderr"))
        if isinstance(plugin, Path):
            commands[name] = Command.of_file(plugin, passed_on, own)
        else:
            variables = _bus_address(own) | _without_quiet(usual) | requested | own
            commands[name] = Command.of_program(plugin.find(variables), plugin.words, variables)
    return commands


def _check_names(taken: Sequence[str], programs: Sequence[PluginProgram]) -> None:
    """Raises SetupError if two plugins have one name."""
    names = set(taken)
    for program in programs:
        if program.name in names:
            raise SetupError(
                f"--exec {program.name}: two plugins of this run have the name {quote(program.name)}: "
                "write another name before ="
            )
        names.add(program.name)


def _without_quiet(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns variables without the one that silences gRPC, which the command line sets for itself and for files."""
    return {name: value for name, value in variables.items() if (name, value) != ("GRPC_VERBOSITY", "NONE")}


def _bus_address(own: Mapping[str, str]) -> dict[str, str]:
    """Returns the address of the bus for a program, which need not know the defaults of the SDK."""
    credential = own.get("TOOLBUS_CREDENTIAL")
    return {"TOOLBUS_ADDRESS": (Credential.read(credential).address if credential else "") or ADDRESS}


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
    return f"reads {variable}, which is set here but not passed on to plugins: {', or '.join(ways)}"
