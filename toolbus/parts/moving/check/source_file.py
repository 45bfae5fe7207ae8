"""Reads one file of the checked code and answers what rules ask about it; applies the rules of a system to a path.

Nothing in the checked code is run. Schemas that are written in Python code are read as the bus will read them.
"""

from __future__ import annotations

import ast
import enum
import importlib.util
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from toolbus.protocol.json_schema import SchemaFault, normal_form

# Defines the findings of a check.


class Effect(enum.Enum):
    """What a finding means for the code that is checked."""

    STOPS = "stops"  # it does not start, or a call fails at this place: it has to be changed
    DIFFERS = "differs"  # it runs, but behaves in another way than in its own system
    NOTE = "note"  # it runs as in its own system; the operator has to know something


@dataclass(frozen=True, slots=True)
class Finding:
    """One place where something differs.

    Attributes:
        path: the file or folder.
        line: its line, from 1; 0 means the whole of it.
        effect: what it means.
        what: the fact, as a sentence without a full stop.
        remedy: what to do, as a sentence; empty where nothing has to be done.
    """

    path: Path
    line: int
    effect: Effect
    what: str
    remedy: str = ""


MAX_BYTES = 4 * 1024 * 1024  # of a file: more than anyone writes by hand
_OPTIONAL = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


@dataclass(frozen=True, slots=True)
class Import:
    """A name that a Python file imports.

    Attributes:
        line: where.
        module: the module, absolute; for a relative import with its dots.
        name: the name that is taken from the module; empty for the module itself.
        optional: whether the code goes on without it: it stands in a ``try`` that catches ImportError.
    """

    line: int
    module: str
    name: str
    optional: bool


class SourceFile:
    """A file of the checked code.

    Args:
        path: the file.
        root: the folder that is checked: what it has is not missing.
        text: the file's.
    """

    def __init__(self, path: Path, root: Path, text: str) -> None:
        self.path = path
        self.root = root
        self.text = text

    def __repr__(self) -> str:
        return f"<SourceFile {self.path}>"

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax of a Python file.

        Raises:
            SyntaxError, ValueError: it is not Python.
        """
        return ast.parse(self.text, str(self.path))

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Everything that a Python file imports, in functions too."""
        return tuple(_imports(self.tree, False))

    def finding(self, where: ast.AST | int, effect: Effect, what: str, remedy: str = "") -> Finding:
        """Returns a finding in this file, at a node or a line."""
        line = where if isinstance(where, int) else int(getattr(where, "lineno", 0))
        return Finding(self.path, line, effect, what, remedy)

    def missing(self, where: ast.AST | int, what: str, remedy: str, *, optional: bool) -> Finding:
        """Returns the finding of something that is not here: the code stops, unless it goes on without it."""
        if optional:
            return self.finding(where, Effect.DIFFERS, f"{what}; the code goes on without it", remedy)
        return self.finding(where, Effect.STOPS, what, remedy)

    def brings(self, imported: Import) -> bool:
        """Tells whether the checked code has a module that is imported, beside this file or at its root.

        A folder without `__init__.py` counts only if the file in it that is imported exists.
        """
        names = [*imported.module.split("."), *([imported.name] if imported.name not in ("", "*") else [])]
        return any(_has_module(folder, names) for folder in (self.path.parent, self.root))

    def classes(self, *bases: str) -> Iterator[ast.ClassDef]:
        """Yields the classes that derive from a class whose name ends in one of these."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef) and any(dotted(base).endswith(bases) for base in node.bases):
                yield node


def read_source(path: Path, root: Path) -> SourceFile | Finding:
    """Returns a file, or the finding that it cannot be read."""
    try:
        if not path.is_file():  # reading a pipe would block
            return Finding(path, 0, Effect.NOTE, "is not checked: it is not a regular file")
        if path.stat().st_size > MAX_BYTES:
            return Finding(path, 0, Effect.NOTE, f"is not checked: it has more than {MAX_BYTES} bytes")
        return SourceFile(path, root, path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as problem:
        return Finding(path, 0, Effect.STOPS, f"cannot be read: {problem}", "Correct it: Python cannot read it either.")


def _has_module(folder: Path, names: list[str]) -> bool:
    for name in names:
        folder /= name
        if folder.with_name(f"{name}.py").is_file() or (folder / "__init__.py").is_file():
            return True
        if not folder.is_dir():
            return False
    return False


def is_installed(module: str) -> bool:
    """Tells whether a module is installed; looks for it, and imports nothing."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def dotted(node: ast.AST) -> str:
    """Returns a name with its dots, ``self.config.get``; what is called or indexed counts as what it is made of."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=owner, attr=name):
            return f"{dotted(owner)}.{name}"
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return dotted(inner)
    return ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Returns the value of a keyword of a call; None where it has none."""
    return next((each.value for each in call.keywords if each.arg == name), None)


def constant(node: ast.expr | None) -> object:
    """Returns a value that is written as it is; None for anything else."""
    return node.value if isinstance(node, ast.Constant) else None


def _imports(node: ast.AST, optional: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(node.lineno, alias.name, "", optional) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        yield from (Import(node.lineno, module, alias.name, optional) for alias in node.names)
    elif isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING"):
        return  # never imported
    elif isinstance(node, ast.Try):
        caught = optional or any(_catches(handler, _OPTIONAL) for handler in node.handlers)
        for guarded in node.body:
            yield from _imports(guarded, caught)
        for other in (*node.handlers, *node.orelse, *node.finalbody):
            yield from _imports(other, optional)
    else:
        for each in ast.iter_child_nodes(node):
            yield from _imports(each, optional)


def _catches(handler: ast.ExceptHandler, names: Collection[str]) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(dotted(kind) in names for kind in kinds)


def tried(tree: ast.AST, names: Collection[str]) -> set[int]:
    """Returns the ids of the nodes in the body of a ``try`` that catches one of these exceptions and raises nothing."""
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        and any(
            _catches(each, names) and not any(isinstance(inner, ast.Raise) for inner in ast.walk(each))
            for each in node.handlers
        )
        for part in node.body
        for inner in ast.walk(part)
    }


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


_KEYS = ("parameters", "TOOL_PARAMETERS")
_REMEDY = "Correct the schema: until then the other tools are offered, and this one is not."


def schemas(source: SourceFile) -> Iterator[Finding]:
    """Yields what the bus refuses, or reads otherwise than it is written; leaves out schemas that are computed."""
    for node in ast.walk(source.tree):
        for key, value in _named_values(node):
            if key not in _KEYS or not isinstance(value, ast.Dict):
                continue
            try:
                form = normal_form(ast.literal_eval(value))
            except SchemaFault as fault:
                yield source.finding(value, Effect.STOPS, f"the bus refuses the tool: {fault}", _REMEDY)
            except (ValueError, TypeError, AttributeError):
                continue
            else:
                for warning in form.warnings:
                    yield source.finding(value, Effect.NOTE, warning)


def _named_values(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yields what a node gives a name: a keyword, a variable or a key of a dictionary."""
    match node:
        case ast.keyword(arg=str(name), value=value):
            yield name, value
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield name, value
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield name, value
        case ast.Dict(keys=keys, values=values):
            for each, value in zip(keys, values, strict=True):
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield each.value, value
