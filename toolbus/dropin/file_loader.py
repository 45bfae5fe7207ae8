"""Loads the files of a folder and says what they offer, and what became of those that could not be loaded.

Files load in order, those whose names begin with `_` first, then by name; these helpers can be imported by every later
file (`import _common`, `from _common import x`) and by nobody else: the path and the modules of the program stay as
they are. A file loads as a whole or not at all, and whatever it does while it loads, the next one is loaded.
"""

from __future__ import annotations

import builtins
import importlib.util
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from toolbus.dropin.file_declarations import decorated, offered, register_tool, registered, specs_of
from toolbus.dropin.file_grants import FILE
from toolbus.dropin.file_result import unknown_tool
from toolbus.dropin.manifest import Manifest, load_manifest
from toolbus.errors import SetupError, ToolBusError
from toolbus.functions.runner import RunSync, run_handler
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import ToolSpec
from toolbus.tool import Result

log = logging.getLogger(__name__)

Guard: TypeAlias = Callable[[str], AbstractContextManager[object]]

_PREFIX = "toolbus_dropin_"  # of the modules' names
_MAX_TEXT = 500  # characters of what an exception says


@dataclass(frozen=True, slots=True)
class FileProblem:
    """What somebody should know about a file.

    Attributes:
        file: its name; the manifest's, or the folder's, where that is at fault.
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
        problems: what could not be loaded, and why; in the order of the files.
    """

    specs: tuple[ToolSpec, ...] = ()
    problems: tuple[FileProblem, ...] = ()

    def get(self, name: str) -> ToolSpec | None:
        """Returns a tool; None where there is none of that name."""
        return next((spec for spec in self.specs if spec.tool.name == name), None)

    async def call(self, name: str, arguments: Mapping[str, Any] | str, scope: ToolScope, run_sync: RunSync) -> Result:
        """Runs a tool once, without a bus, so without a check of the arguments. Never raises, as `run_handler`."""
        spec = self.get(name)
        return unknown_tool(name) if spec is None else await run_handler(spec, arguments, scope, run_sync)


def load_folder(folder: Path, *, require_manifest: bool = False) -> Loaded:
    """Loads every file of a folder that its manifest allows, all into this process and whatever their grants.

    Args:
        require_manifest: a folder without a manifest loads nothing.
    """
    try:
        manifest = load_manifest(folder, require=require_manifest)
        files = tool_files(folder)
    except SetupError as problem:
        log.warning("%s", problem)
        return Loaded(problems=(FileProblem(FILE, str(problem)),))
    except OSError as problem:
        log.warning("cannot list %s: %s", folder, problem.strerror)
        return Loaded(problems=(FileProblem(str(folder), f"cannot be listed: {problem.strerror}: create it"),))
    loaded = load_files(folder, [file for file in files if manifest.allows(file)])
    return Loaded(loaded.specs, (*not_loaded(files, manifest), *loaded.problems))


def tool_files(folder: Path) -> list[str]:
    """Returns the names of a folder's files in the order in which they load.

    Raises:
        OSError: the folder cannot be listed.
    """
    names = [path.name for path in folder.iterdir() if path.suffix == ".py" and not path.name.startswith(".")]
    return sorted(set(names) - {"__init__.py"}, key=load_order)


def load_order(file: str) -> tuple[bool, str]:
    """Returns what files are sorted by: helpers first, then by name."""
    return (not is_shared(file), file)


def is_shared(file: str) -> bool:
    """Tells whether a file is for the others to import."""
    return file.startswith("_")


def not_loaded(files: Iterable[str], manifest: Manifest) -> list[FileProblem]:
    """Returns what the allow list keeps from being loaded, and what it names that is not there."""
    found = list(files)
    stray = [FileProblem(file, f"is not on the allow list of {FILE}: add it there") for file in found]
    missing = [
        FileProblem(file, f"is on the allow list of {FILE}, but not in the folder: check the name")
        for file in manifest.allow or ()
        if file not in found
    ]
    return [each for each in stray if not manifest.allows(each.file)] + missing


def load_files(
    folder: Path,
    files: Sequence[str],
    *,
    offering: Iterable[str] | None = None,
    guard: Guard = nullcontext,
) -> Loaded:
    """Loads files of a folder in the given order.

    What a file does is its own: SystemExit and KeyboardInterrupt end its loading and nothing else, so Ctrl-C while a
    file hangs skips that file.

    Args:
        offering: those whose tools are wanted; None means all. The others are loaded for them to import.
        guard: given a file's name, put round it while it runs; an exception of it skips the file.
    """
    loading = _Loading(folder, files, guard)
    wanted = set(files if offering is None else offering)
    for file in files:
        loading.load(file, file in wanted)
    return Loaded(tuple(loading.specs.values()), tuple(loading.problems))


class _Loading:
    """Files on their way in.

    Attributes:
        specs: the tools so far, by name, in the order of first registration.
        problems: what went wrong so far.
    """

    def __init__(self, folder: Path, files: Iterable[str], guard: Guard) -> None:
        self.specs: dict[str, ToolSpec] = {}
        self.problems: list[FileProblem] = []
        self._folder = folder.absolute()
        self._guard = guard
        self._from: dict[str, str] = {}  # the file that each tool is from
        # Helpers by stem, None where one has not been loaded.
        self._shared: dict[str, ModuleType | None] = {_stem(file): None for file in files if is_shared(file)}
        self._functions: list[Any] = []  # decorated functions that were seen: an import of one is no tool of its own
        self._prefix = _free_prefix()

    def load(self, file: str, wanted: bool) -> None:
        """Loads one file; a helper becomes importable, and a wanted one's tools are added."""
        collected: list[ToolSpec] = []
        token = registered.set(collected)
        try:
            with self._guard(file):
                module = self._run(file)
            own = self._own(file, module, collected)
        except BaseException as problem:
            sys.modules.pop(self._module_name(file), None)
            self._skip(file, problem)
            return
        finally:
            registered.reset(token)
        if is_shared(file):
            self._shared[_stem(file)] = module
        if not own:
            log.debug("%s registers no tool", file)
        for spec in own if wanted else ():
            self._add(file, spec)

    def _run(self, file: str) -> ModuleType:
        """Runs a file as a module of a name that nobody else has; nothing is written beside it."""
        path = self._folder / file
        if not path.is_file():
            raise SetupError("is no file that can be read: a folder, a pipe or a link to nowhere")
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        spec = importlib.util.spec_from_file_location(self._module_name(file), path)
        assert spec is not None  # every name that ends in .py has a loader
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

    def _own(self, file: str, module: ModuleType, collected: list[ToolSpec]) -> list[ToolSpec]:
        """Returns a file's tools, without the decorated functions that it imported from another file."""
        own = [offered(spec, file, module) for spec in (*collected, *specs_of(module, self._functions))]
        self._functions += decorated(module)
        return own

    def _import(self, name: str, *how: Any, **more: Any) -> Any:
        """Does what `import` does in the files of the folder: its helpers first."""
        if name not in self._shared:
            return builtins.__import__(name, *how, **more)
        module = self._shared[name]
        if module is None:
            raise ImportError(f"{name}.py is not loaded: it failed, or its name comes after that of this file")
        return module

    def _add(self, file: str, spec: ToolSpec) -> None:
        name = spec.tool.name
        if name in self.specs:
            log.warning('tool "%s" registered twice (later wins)', name)
            reason = f'tool "{name}" registered twice (later wins): before in {self._from[name]}. Rename one of them'
            self.problems.append(FileProblem(file, reason, skipped=False))
        self.specs[name] = spec
        self._from[name] = file

    def _skip(self, file: str, problem: BaseException) -> None:
        reason = _reason(self._folder / file, problem)
        log.warning("failed to load %s: %s", _shown(file), reason)
        self.problems.append(FileProblem(_shown(file), reason))


def _stem(file: str) -> str:
    return file.removesuffix(".py")


def _free_prefix() -> str:
    """Returns what the modules' names begin with; a folder that is loaded again gets other modules."""
    used = [name.removeprefix(_PREFIX).partition("_")[0] for name in list(sys.modules) if name.startswith(_PREFIX)]
    return f"{_PREFIX}{1 + max(map(int, filter(str.isdigit, used)), default=0)}_"


def _reason(path: Path, problem: BaseException) -> str:
    """Says in one line what went wrong, where in the file, and what to do where that is known."""
    kind = "" if isinstance(problem, ToolBusError) else type(problem).__name__
    try:
        told = str(problem.msg if isinstance(problem, SyntaxError) else problem)
    except BaseException:  # an exception whose own text raises
        told = ""
    line = _line(path, problem)
    said = " ".join(_shown(": ".join(filter(None, (kind, told)))).split())
    said = said if len(said) <= _MAX_TEXT else said[: _MAX_TEXT - 1] + "…"
    return said + (f" (line {line})" if line else "") + _cure(problem)


def _line(path: Path, problem: BaseException) -> int | None:
    if isinstance(problem, SyntaxError) and problem.filename == str(path):
        return problem.lineno
    frames = traceback.walk_tb(problem.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == str(path)]
    return lines[-1] if lines else None


def _cure(problem: BaseException) -> str:
    if isinstance(problem, SystemExit | KeyboardInterrupt):
        return ': it ends the process while it is loaded: guard that part with `if __name__ == "__main__":`'
    if isinstance(problem, ModuleNotFoundError):
        return f": install {problem.name}, or begin its name with '_' if it is a file of this folder"
    return ""


def _shown(text: str) -> str:
    """Returns a text that can be logged: file names need not be UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
