"""Defines the rules of one system, and applies them to a path."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toolbus.parts.moving.check.source_file import Effect, Finding, SourceFile, read_source

Rule = Callable[[SourceFile], Iterable[Finding]]
FolderRule = Callable[[Path], Iterable[Finding]]

_SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv", "data"}  # besides folders that begin with a dot
_TESTS = re.compile(r"(^|/)(tests?/|test_[^/]*$|conftest\.py$)")  # a plugin runs without them


@dataclass(frozen=True, slots=True)
class System:
    """A system that code comes from.

    Attributes:
        name: its name for ``--from``.
        title: its name, for people.
        rules: for the files with a suffix, such as ``.py``.
        folder_rules: for each folder that `roots` finds.
        roots: what of a checked folder is one plugin or one folder of tools; by default the folder itself.
    """

    name: str
    title: str
    rules: Mapping[str, Sequence[Rule]]
    folder_rules: Sequence[FolderRule] = ()
    roots: Callable[[Path], Sequence[Path]] = field(default=lambda path: [path])


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check.

    Attributes:
        findings: in the order of files and lines.
        files: how many files were read.
    """

    findings: tuple[Finding, ...]
    files: int

    @property
    def runs(self) -> bool:
        """Whether nothing has to be changed."""
        return not any(each.effect is Effect.STOPS for each in self.findings)


def check(path: Path, system: System) -> Report:
    """Applies a system's rules to a file, or to all files in a folder; runs nothing of them."""
    roots = system.roots(path) if path.is_dir() else [path]
    found: list[Finding] = []
    count = 0
    for root in roots:
        folder = root if root.is_dir() else root.parent
        if root.is_dir():
            found += [each for rule in system.folder_rules for each in rule(root)]
        for file in _files(root):
            if rules := system.rules.get(file.suffix):
                count += 1
                found += _check_file(file, folder, rules)
    unique = dict.fromkeys(found)
    return Report(tuple(sorted(unique, key=lambda each: (str(each.path), each.line))), count)


def _check_file(file: Path, root: Path, rules: Sequence[Rule]) -> Iterator[Finding]:
    source = read_source(file, root)
    if isinstance(source, Finding):
        yield source
        return
    for rule in rules:
        try:
            yield from rule(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
            line = getattr(problem, "lineno", 0) or 0
            reason = getattr(problem, "msg", "") or str(problem)
            yield Finding(file, line, Effect.STOPS, f"is not valid: {reason}", "Correct the file: it cannot be read.")
            return


def _files(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        yield root
        return
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(each for each in folders if each not in _SKIPPED and not each.startswith("."))
        for name in sorted(files):
            file = Path(folder, name)
            if not _TESTS.search(str(file.relative_to(root))):
                yield file
