"""Loads the files of a folder, and reports which tools they offer and which files could not be loaded.

Files load in order: those whose names begin with `_` first, then by name. These helpers can be imported by every later
file (`import _common`, `from _common import x`) and by no other module: the path and the modules of the program stay as
they are. A file loads as a whole or not at all, and whatever it does while it loads, the next one is loaded.
"""

from __future__ import annotations

import builtins
import importlib.util
import json
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

from toolbus.common.text import list_names, shorten
from toolbus.errors import SetupError, ToolBusError
from toolbus.functions.runner import RunSync, run_handler
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import ToolSpec
from toolbus.parts.dropin.file_declarations import decorated, offered, register_tool, registered, specs_of
from toolbus.parts.dropin.file_result import unknown_tool
from toolbus.parts.dropin.manifest import EXTENSION, FILE, Manifest, load_manifest
from toolbus.protocol.tool import Result

log = logging.getLogger("toolbus.dropin.file_loader")

Guard: TypeAlias = Callable[[str], AbstractContextManager[object]]

SUFFIXES = (".py", ".js")  # of tool files
_MAX_MANIFEST = 1 << 20  # bytes of it
_PREFIX = "toolbus_dropin_"  # of the modules' names
_NOT_HERE = "is JavaScript, which runs in a process of its own: use `toolbus run` or --tools-dir"
_MAX_ERROR = 500  # characters of the text of an exception


@dataclass(frozen=True, slots=True)
class FileProblem:
    """A problem with a file, for its author.

    Attributes:
        file: its name; that of the manifest or of the folder if the problem is there.
        reason: a sentence.
        skipped: whether the file offers nothing because of it.
    """

    file: str
    reason: str
    skipped: bool = True


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a folder offers.

    Attributes:
        specs: its tools in the order in which their names were first registered.
        problems: with files that could not be loaded or register a name twice, in the order of the files.
        files: that the manifest allows; None where it, or the folder, could not be read.
    """

    specs: tuple[ToolSpec, ...] = ()
    problems: tuple[FileProblem, ...] = ()
    files: tuple[str, ...] | None = None

    def get(self, name: str) -> ToolSpec | None:
        """Returns a tool; None if no tool has that name."""
        return next((spec for spec in self.specs if spec.tool.name == name), None)

    async def call(self, name: str, arguments: Mapping[str, Any] | str, scope: ToolScope, run_sync: RunSync) -> Result:
        """Runs a tool once, without a bus and so without a check of its arguments. Never raises, like `run_handler`."""
        spec = self.get(name)
        return unknown_tool(name) if spec is None else await run_handler(spec, arguments, scope, run_sync)


def load_folder(folder: Path, *, require_manifest: bool = False) -> Loaded:
    """Loads every Python file of a folder that its manifest allows, all into this process, whatever their grants.

    Args:
        require_manifest: a folder without a manifest loads nothing.
    """
    try:
        manifest = load_manifest(folder, require=require_manifest)
        files = tool_files(folder)
    except SetupError as error:
        log.warning("%s", error)
        return Loaded(problems=(FileProblem(FILE, str(error)),))
    except OSError as error:
        log.warning("cannot list %s: %s", folder, error.strerror)
        return Loaded(problems=(FileProblem(str(folder), f"cannot be listed: {error.strerror}: create it"),))
    allowed = tuple(filter(manifest.allows, files))
    loaded = load_files(folder, [file for file in allowed if not is_script(file)])
    scripts = [FileProblem(file, _NOT_HERE) for file in allowed if is_script(file)]
    return Loaded(loaded.specs, (*not_loaded(files, manifest), *loaded.problems, *scripts), allowed)


def tool_files(folder: Path) -> list[str]:
    """Returns the names of a folder's files in the order in which they load.

    A folder in it with a `spindle.json` stands for one file, the entry that is named there: `kb/dist/backend.js`.

    Raises:
        OSError: the folder cannot be listed.
    """
    paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
    names = {path.name for path in paths if path.suffix in SUFFIXES} - {"__init__.py"}
    names |= {f"{path.name}/{extension_entry(path)}" for path in paths if os.path.isfile(path / EXTENSION)}
    return sorted(names, key=load_order)


def extension_entry(folder: Path) -> str:
    """Returns the file of an extension that runs, relative to its folder; the usual one if its manifest names none."""
    entry = extension_manifest(folder).get("entry_backend")
    parts = entry.split("/") if isinstance(entry, str) else []
    plain = all(part and part.isprintable() and not part.startswith(".") and "\\" not in part for part in parts)
    return "/".join(parts) if parts and plain and parts[-1].endswith(".js") else "dist/backend.js"


def extension_manifest(folder: Path) -> dict[str, Any]:
    """Returns the content of a folder's `spindle.json`; empty if it cannot be read."""
    try:
        with (folder / EXTENSION).open("rb") as file:
            manifest = json.loads(file.read(_MAX_MANIFEST))
    except (OSError, ValueError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def load_order(file: str) -> tuple[bool, str]:
    """Returns the sort key of a file: helpers first, then by name."""
    return (not is_shared(file), file)


def is_shared(file: str) -> bool:
    """Tells whether a file is a helper, which the others may import."""
    return file.startswith("_") and "/" not in file


def is_script(file: str) -> bool:
    """Tells whether a file is JavaScript."""
    return file.endswith(".js")


def not_loaded(files: Iterable[str], manifest: Manifest) -> list[FileProblem]:
    """Returns the files that the allow list leaves out, and those on it that do not exist."""
    existing = list(files)
    unlisted = [
        FileProblem(file, f"is not on the allow list of {FILE}: add it there")
        for file in existing
        if not manifest.allows(file)
    ]
    missing = [
        FileProblem(file, f"is on the allow list of {FILE}, but not in the folder: check the name")
        for file in manifest.allow or ()
        if file not in existing
    ]
    return unlisted + missing


def load_files(
    folder: Path,
    files: Sequence[str],
    *,
    offering: Iterable[str] | None = None,
    guard: Guard = nullcontext,
) -> Loaded:
    """Loads files of a folder in the given order.

    No exception of a file reaches the caller: SystemExit and KeyboardInterrupt end its loading and nothing else, so
    Ctrl-C while a file hangs skips that file.

    Args:
        offering: files whose tools are returned; None means all. The others are loaded to be imported.
        guard: given a file's name, entered while the file runs; an exception of it skips the file.
    """
    loading = _Loading(folder, files, guard)
    offered_files = set(files if offering is None else offering)
    for file in files:
        loading.load(file, offers=file in offered_files)
    return Loaded(tuple(loading.specs.values()), tuple(loading.problems))


class _Loading:
    """Files that are being loaded.

    Attributes:
        specs: the tools so far, by name, in the order of first registration.
        problems: those so far.
    """

    def __init__(self, folder: Path, files: Iterable[str], guard: Guard) -> None:
        self.specs: dict[str, ToolSpec] = {}
        self.problems: list[FileProblem] = []
        self._folder = folder.absolute()
        self._guard = guard
        self._origins: dict[str, str] = {}  # the file of each tool
        # Helpers by stem; None for one that is not loaded.
        self._shared: dict[str, ModuleType | None] = {_stem(file): None for file in files if is_shared(file)}
        self._functions: list[Any] = []  # decorated functions so far: an import of one is not a second tool
        self._prefix = _free_prefix()

    def load(self, file: str, *, offers: bool) -> None:
        """Loads one file; a helper becomes importable, and the tools are added if it offers them."""
        collected: list[ToolSpec] = []
        token = registered.set(collected)
        try:
            with self._guard(file):
                module = self._run(file)
            specs = self._specs(file, module, collected)
        except BaseException as error:
            sys.modules.pop(self._module_name(file), None)
            self._skip(file, error)
            return
        finally:
            registered.reset(token)
        if is_shared(file):
            self._shared[_stem(file)] = module
        if not specs and offers and (why := _why_nothing(module, self._folder / file)):
            self.problems.append(FileProblem(_printable(file), why, skipped=False))
        for spec in specs if offers else ():
            self._add(file, spec)

    def _run(self, file: str) -> ModuleType:
        """Runs a file as a module with a unique name; no bytecode is written."""
        path = self._folder / file
        if not path.is_file():
            raise SetupError("is not a readable file: it is a folder, a pipe or a dangling link")
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        spec = importlib.util.spec_from_file_location(self._module_name(file), path)
        assert spec is not None  # each name that ends in .py has a loader
        module = importlib.util.module_from_spec(spec)
        vars(module)["__builtins__"] = {
            **vars(builtins),
            "__import__": self._import,
            "register_tool": register_tool,
            "llm_tool_register": register_tool,
        }
        sys.modules[self._module_name(file)] = module  # dataclasses and type hints look their module up there
        exec(code, vars(module))
        return module

    def _module_name(self, file: str) -> str:
        return f"{self._prefix}{_stem(file)}"

    def _specs(self, file: str, module: ModuleType, collected: list[ToolSpec]) -> list[ToolSpec]:
        """Returns a file's tools, without the decorated functions that it imported from another file."""
        specs = [offered(spec, file, module) for spec in (*collected, *specs_of(module, self._functions))]
        self._functions += decorated(module)
        return specs

    def _import(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Replaces `__import__` in the files of the folder: finds its helpers first."""
        if name not in self._shared:
            return builtins.__import__(name, *arguments, **options)
        module = self._shared[name]
        if module is None:
            raise ImportError(f"{name}.py is not loaded: it failed, or its name comes after that of this file")
        return module

    def _add(self, file: str, spec: ToolSpec) -> None:
        name = spec.tool.name
        if name in self.specs:
            log.warning('tool "%s" registered twice (later wins)', name)
            reason = f'tool "{name}" registered twice (later wins): before in {self._origins[name]}. Rename one of them'
            self.problems.append(FileProblem(file, reason, skipped=False))
        self.specs[name] = spec
        self._origins[name] = file

    def _skip(self, file: str, error: BaseException) -> None:
        reason = _reason(self._folder / file, error)
        log.warning("failed to load %s: %s", _printable(file), reason)
        self.problems.append(FileProblem(_printable(file), reason))


def _why_nothing(module: ModuleType, file: Path) -> str:
    """Returns how a file that offers nothing would offer something; "" where it is a helper by its looks."""
    if is_shared(file.name):
        return ""
    values = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    kinds = {(type(value).__module__.partition(".")[0], type(value).__name__) for value in values.values()}
    if ("toolbus", "Plugin") in kinds:
        return (
            f"is a plugin, so it offers no tools here: run it with `toolbus run {shlex.quote(_printable(str(file)))}`"
        )
    functions = {name: value for name, value in values.items() if isinstance(value, FunctionType)}
    own = [name for name, value in functions.items() if value.__module__ == module.__name__]
    return f"offers no tools: put `@llm_tool` (from toolbus import llm_tool) above {list_names(own)}" if own else ""


def _stem(file: str) -> str:
    return file.removesuffix(".py")


def _free_prefix() -> str:
    """Returns the prefix of the modules' names; a folder that is loaded again gets other modules."""
    used = [name.removeprefix(_PREFIX).partition("_")[0] for name in list(sys.modules) if name.startswith(_PREFIX)]
    return f"{_PREFIX}{1 + max(map(int, filter(str.isdigit, used)), default=0)}_"


def _reason(path: Path, error: BaseException) -> str:
    """Returns one line: what went wrong, where in the file, and how to fix it if that is known."""
    kind = "" if isinstance(error, ToolBusError) else type(error).__name__
    try:
        message = str(error.msg if isinstance(error, SyntaxError) else error)
    except BaseException:  # an exception whose own text raises
        message = ""
    line = _line(path, error)
    text = shorten(" ".join(_printable(": ".join(filter(None, (kind, message)))).split()), _MAX_ERROR)
    return text + (f" (line {line})" if line else "") + _fix(error)


def _line(path: Path, error: BaseException) -> int | None:
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == str(path)]
    return lines[-1] if lines else None


def _fix(error: BaseException) -> str:
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return ': it ends the process while it is loaded: put that part under `if __name__ == "__main__":`'
    if isinstance(error, ModuleNotFoundError) and error.name == "tools":  # Stargazer's package
        return ": write toolbus.tools in place of tools, and declare the file's tools with TOOLS or TOOL_NAME"
    if isinstance(error, ModuleNotFoundError):
        return f": install {error.name}, or begin its name with '_' if it is a file of this folder"
    return ""


def _printable(text: str) -> str:
    """Returns a text that can be logged: names of files may not be UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
