"""Parses ``toolbus run --exec NAME=COMMAND`` and ``-m MODULE``, programs that run as plugins, and finds their files.

A command is split into words as a shell does it, and no shell runs it.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from toolbus.common.text import quote
from toolbus.errors import SetupError
from toolbus.processes.child_environment import (
    NEVER_PASSED_ON,
    PLUGIN,
    mentioned_variables,
    read_secrets,
    requested_variables,
    token_of,
)
from toolbus.processes.supervisor import Command, PluginReport, ReportKind, plugin_name, plugin_names
from toolbus.protocol.tool import SOURCE
from toolbus.sdk.bus_address import ADDRESS
from toolbus.sdk.credential import Credential

EXAMPLE = '--exec weather="node weather.js"'
_NO_SHELL = "no shell runs the command: where it needs one, write sh -c '…'"
_OF_A_SHELL = frozenset("|&;<>$`*~")


@dataclass(frozen=True, slots=True)
class PluginProgram:
    """A program in any language that runs as a plugin.

    Attributes:
        name: its name in the output, and that of its table of secrets.
        words: the program and its arguments, as they are written.
    """

    name: str
    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``NAME=COMMAND``.

        Raises:
            SetupError: the name or the command breaks a rule.
        """
        name, equals, command = text.partition("=")
        if not equals:
            raise SetupError(f"--exec {quote(text)} has no name: write NAME=COMMAND, as in {EXAMPLE}")
        if not SOURCE.fullmatch(name):
            raise SetupError(
                f"--exec {quote(text)}: the name {quote(name)} breaks the rule [A-Za-z0-9_.:-]{{1,128}}: "
                f"write NAME=COMMAND, as in {EXAMPLE}"
            )
        try:
            words = shlex.split(command)
        except ValueError as error:  # an open quote, or a backslash at the end
            raise SetupError(
                f"--exec {name}: the command {quote(command)} cannot be split into words "
                f"({str(error).rstrip('.').lower()}): close every quote, and write \\\\ for a backslash"
            ) from None
        if not words or not words[0]:
            raise SetupError(f"--exec {name}: the command is empty: write the program after =, as in {EXAMPLE}")
        return cls(name, tuple(words))

    @classmethod
    def of_module(cls, module: str) -> Self:
        """Returns what runs an installed package like ``python -m MODULE``; no code of it runs in this process.

        Raises:
            SetupError: no such package is installed, or it cannot be run.
        """
        package = find_spec(module.partition(".")[0]) if re.fullmatch(r"\w+(\.\w+)*", module) else None
        if package is None:
            raise SetupError(f"-m {quote(module)}: no such package is installed for {sys.executable}: install it there")
        folders = package.submodule_search_locations or () if package.name == module else ()
        if folders and not any(Path(folder, "__main__.py").is_file() for folder in folders):
            raise SetupError(f"-m {module}: the package has no __main__.py: add one that calls plugin.run()")
        runner = (sys.executable, "-P", "-m", "toolbus.processes.plugin_process")  # -P: none of the working directory
        return cls(module, (*runner, "-m", module))

    def find(self, environment: Mapping[str, str]) -> str:
        """Returns the file that is executed.

        Args:
            environment: of the program, with its PATH.

        Raises:
            SetupError: there is no such file, or it cannot be executed.
        """
        program, path = self.words[0], environment.get("PATH", os.defpath)
        if file := shutil.which(program, path=path):
            return file
        raise SetupError(f"--exec {self.name}: {self._problem(program)}")

    def _problem(self, program: str) -> str:
        """Returns why a program was not found, and how to fix it."""
        file = Path(program)
        fix = f"; {_NO_SHELL}" if any(_OF_A_SHELL & set(word) for word in self.words) else ""
        if os.sep not in program:
            near = f"write ./{program} for the file in this directory" if file.is_file() else "install it"
            return f"no program {quote(program)} is in a directory of PATH: {near}, or write its path{fix}"
        if not file.exists():
            return f"{quote(program)} does not exist: check the path, which is relative to {Path.cwd()}{fix}"
        if file.is_dir():
            return f"{quote(program)} is a directory: name the program in it"
        return (
            f"{quote(program)} is not executable: chmod +x {shlex.quote(program)}, or write the program that runs it "
            f"before it, as in {EXAMPLE}"
        )


# Each plugin gets the secrets of its own table, and a token that binds its own sources only. docs/about/security.md
# says how far this protects a plugin from the others of the run.
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
            if usual.get("GRPC_VERBOSITY") == "NONE":  # which the command line sets for itself and for files
                del usual["GRPC_VERBOSITY"]
            variables = _bus_address(own) | usual | requested | own
            commands[name] = Command.of_program(plugin.find(variables), plugin.words, variables)
    return commands


def _check_names(taken: Sequence[str], programs: Sequence[PluginProgram]) -> None:
    """Raises SetupError if two plugins have one name."""
    names = set(taken)
    for program in programs:
        if program.name in names:
            raise SetupError(
                f"two plugins of this run have the name {quote(program.name)}: give one of them another name, "
                f"as in {EXAMPLE}"
            )
        names.add(program.name)


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
