"""Parses ``toolbus run --exec NAME=COMMAND``, a program that runs as a plugin, and finds its file.

A command is split into words as a shell does it, and no shell runs it.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from toolbus.errors import SetupError
from toolbus.text import quote
from toolbus.tool import SOURCE

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
