"""Loads the plugin of a file or folder, and finds what ``toolbus run`` runs of a path: `Loader`.

A file can be a plugin in three ways, tried in this order: it makes a `Plugin`, a loader knows a class in it, or it has
functions with `llm_tool`. The file is imported as a module of its own. Which folders are plugins is for the loaders to
say. The parts bring them along (`Part.loaders`), and this file imports none. Every failure is a `SetupError` that names
the file, the problem and how to fix it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from toolbus.common.part import HOW_TO_INSTALL, Part, load, parts
from toolbus.errors import SetupError, ToolBusError
from toolbus.functions.tool_spec import ToolSet, ToolSpec, meta_of, spec_of
from toolbus.processes.program_starter import MODULE_VARIABLE
from toolbus.protocol.tool import plugin_source

if TYPE_CHECKING:  # the process of a plugin needs neither to start, and grpc comes with the second
    from toolbus.processes.supervisor import PluginReport, RestartPolicy
    from toolbus.sdk.bus_address import BusAddress
    from toolbus.sdk.credential import Credential
    from toolbus.sdk.plugin_client import PluginObject

log = logging.getLogger("toolbus.sdk.loader")

# Files whose part of a traceback does not help the author: those that only lead to the import.
_NOT_THE_AUTHORS = (__file__, str(Path(__file__).parent.parent / "parts"), importlib.__file__, "<frozen")
_FRAMES = 4  # of the author's traceback: enough to see the line and its callers


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """The plugin of a file or folder.

    Attributes:
        path: the file or folder.
        source: whose tools these are.
        plugin: a `Plugin` that the file made, with its own tools; None if it made none.
        owner: the object whose methods the tools are; None if they are functions, or `plugin` has them.
        tools: the live set of tools; None if `plugin` has them.
        module: the imported file.
    """

    path: Path
    source: str
    plugin: Any
    owner: PluginObject | None
    tools: ToolSet | None
    module: ModuleType


@dataclass(frozen=True, slots=True)
class FoundPlugins:
    """The plugins in a folder.

    Attributes:
        paths: the files or folders that run, each in a process of its own.
        notes: for the operator, one sentence each: which ones do not run, and why.
    """

    paths: Sequence[Path]
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How ``toolbus run`` has a loader run plugins.

    Attributes:
        address: of the bus.
        credential: for a bus on another machine; None for one that needs none.
        emit: takes what happens to the plugins, and their output.
        restarts: when a process that died is started again.
        stop_seconds: how long plugins may take to finish their calls.
        require_manifest: whether a folder without a `_manifest.json` loads nothing.
        secrets: a file of variables for tools that a `_manifest.json` grants them; None without one.
    """

    address: BusAddress
    credential: Credential | None
    emit: Callable[[PluginReport], None]
    restarts: RestartPolicy
    stop_seconds: float
    require_manifest: bool
    secrets: Path | None = None


class Running(Protocol):
    """Plugins that run. A `Supervisor` is one."""

    async def run(self) -> bool:
        """Runs them until `stop`, or until all have ended; returns whether none was given up."""

    def stop(self) -> None:
        """Shuts all down gracefully; the second call kills them."""

    def restart(self, name: str) -> None:
        """Restarts one.

        Raises:
            InvalidRequest: there is no plugin of that name.
        """

    def stop_plugin(self, name: str) -> None:
        """Shuts one down gracefully.

        Raises:
            InvalidRequest: there is no plugin of that name, or plugins of this kind are not stopped one by one.
        """


class OwnRun(Protocol):
    """Paths that a loader runs itself, in place of a process for each plugin."""

    def start(self, options: RunOptions) -> Running:
        """Returns what runs them; nothing runs before its `run`.

        Raises:
            SetupError: they cannot run on this bus, or on this machine.
        """

    def as_stored(self, report: PluginReport) -> PluginReport:
        """Returns the report under whose name `toolbus logs` shows it."""


class Loader(Protocol):
    """Reads one kind of files and folders as plugins.

    Derive from it, and override what the kind needs: each method says by default that nothing is of this kind. An
    object is made without arguments, in `toolbus run` and in the process of each plugin, so import at the top of its
    file only what both need.

    Attributes:
        sign: the file that makes a folder one of these, for error texts; empty if no folder is a plugin of this kind.
    """

    sign: ClassVar[str] = ""

    def find(self, folder: Path) -> FoundPlugins | None:
        """Returns the plugins in a folder, which may be one itself; None if it is not of this kind. Imports none.

        Raises:
            SetupError: it is of this kind, and nothing of it runs.
        """
        return None

    def take(self, paths: Sequence[Path], rest: Sequence[Path], options: Collection[str]) -> OwnRun | None:
        """Returns a run of all that `toolbus run` names, by this loader itself; None if they are not of this kind.

        Args:
            paths: the files and folders; each exists.
            rest: the folders among them in which no loader finds plugins.
            options: those that are given and are for plugins with a process each, as ``--exec``.

        Raises:
            SetupError: some are of this kind and others are not, or an option does not go with it.
        """
        return None

    def prepare(self) -> Callable[[], None]:
        """Prepares this process for the import of a file; returns a function that undoes it if that fails."""
        return lambda: None

    def load_file(self, file: Path, module: ModuleType, *, entries: bool) -> LoadedPlugin | None:
        """Returns the plugin of an imported file that makes no `Plugin`; None if it has none of this kind.

        Args:
            entries: whether methods that no model sees in their own system are tools too (``--entries``).

        Raises:
            SetupError: it has several, or its plugin cannot be made.
        """
        return None

    def load_folder(self, folder: Path, *, entries: bool) -> LoadedPlugin | None:
        """Returns the plugin of a folder; None if it is not of this kind.

        Raises:
            SetupError: it is of this kind and cannot be loaded.
        """
        return None


def loaders() -> list[Loader]:
    """Returns the loaders of the parts that are installed, in the order of the parts."""
    return [load(home)() for part in parts() if part.loaders and _is_there(part) for home in part.loaders]


def _is_there(part: Part) -> bool:
    """Tells whether a part's own folder is there: a loader uses no other part, also where others of its part do."""
    return importlib.util.find_spec(f"toolbus.parts.{part.name}") is not None


def missing_loaders() -> str:
    """Returns which parts with loaders are not installed, as the end of an error text; empty if none is missing."""
    missing = [part.name for part in parts() if part.loaders and not _is_there(part)]
    if not missing:
        return ""
    return f"; this installation of toolbus lacks its part {' and '.join(map(repr, missing))}: {HOW_TO_INSTALL}"


def load_plugin(path: str | Path, *, entries: bool = False, known: Sequence[Loader] | None = None) -> LoadedPlugin:
    """Imports a file, or has a loader import a folder, and returns its plugin.

    The folder is added to `sys.path` and stays there: a plugin may import the modules beside it at any time.

    Args:
        entries: see `Loader.load_file`.
        known: the loaders; None means those of the parts that are installed.

    Raises:
        SetupError: there is no such file, its import raised, it has no plugin or several, or an id breaks its rule.
    """
    file = Path(path).expanduser().resolve()
    known = loaders() if known is None else known
    if file.is_dir():
        for loader in known:
            if (loaded := loader.load_folder(file, entries=entries)) is not None:
                return loaded
        signs = " or ".join(each.sign for each in known if each.sign) or "a sign of a plugin"
        raise SetupError(f"{file} is a folder without {signs}: name the plugin's file in it{missing_loaders()}")
    if not file.is_file():
        raise SetupError(f"{file} does not exist: check the path")
    undo = [loader.prepare() for loader in known]
    try:
        return _load_file(file, known, entries)
    except BaseException:
        for each in undo:
            each()
        raise


def _load_file(file: Path, known: Sequence[Loader], entries: bool) -> LoadedPlugin:
    module = _import(file)
    own = distinct([each for each in vars(module).values() if _is_plugin(each)])
    if own:
        if len(own) > 1:
            raise SetupError(f"{file} makes {len(own)} Plugin objects: a file is one plugin, give each its own file")
        return LoadedPlugin(file, str(own[0].source), own[0], None, None, module)
    functions = _functions(file, module)
    for loader in known:
        if (loaded := loader.load_file(file, module, entries=entries)) is not None:
            if functions:
                names = ", ".join(each.tool.name for each in functions)
                what = type(loaded.owner).__name__
                log.warning("%s: its plugin is %s, so these tool functions are not offered: %s", file, what, names)
            return loaded
    if functions:
        return _bare(file, module, functions)
    raise SetupError(
        f"{file} holds no plugin: make a Plugin, decorate a class that derives from NekoPluginBase with @plugin, or "
        f"put @llm_tool above a function (all from toolbus.sdk){missing_loaders()}"
    )


def _import(file: Path) -> ModuleType:
    digest = hashlib.sha256(str(file).encode("utf-8", "surrogateescape")).hexdigest()[:8]
    name = f"toolbus_plugin_{safe_id(file.stem).replace('.', '_').replace('-', '_')}_{digest}"
    loader = importlib.machinery.SourceFileLoader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None  # the loader is given
    module = importlib.util.module_from_spec(spec)
    folder = str(file.parent)
    added = sys.path[:1] != [folder]
    if added:
        sys.path.insert(0, folder)
    sys.modules[name] = module  # dataclasses and type hints look their module up there
    os.environ[MODULE_VARIABLE] = f"{name}={file}"
    try:
        loader.exec_module(module)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as problem:
        del sys.modules[name]
        if added:
            sys.path.remove(folder)
        raise SetupError(explain(file, problem)) from problem
    return module


def explain(file: Path, problem: BaseException, step: str = "imported") -> str:
    """Returns why a file could not be imported, or another step failed, with the author's part of the traceback.

    An exception that has a `remedy` of its own, one sentence, says so how it is fixed.
    """
    trace = traceback.TracebackException.from_exception(problem, compact=True)
    frames = [each for each in trace.stack if not each.filename.startswith(_NOT_THE_AUTHORS)]
    lines = traceback.StackSummary.from_list(frames[-_FRAMES:]).format()
    shown = "".join([*lines, *trace.format_exception_only()]).rstrip()
    fix = "correct it and start again"
    remedy = getattr(problem, "remedy", None) if isinstance(problem, ToolBusError) else None
    if isinstance(remedy, str) and remedy:
        fix = remedy[0].lower() + remedy[1:].rstrip(".")
    elif isinstance(problem, ModuleNotFoundError):
        fix = f"install {problem.name}, or put it beside the file{_is_here(problem.name)}{missing_loaders()}"
    elif isinstance(problem, SystemExit):
        fix = 'it ends the process while it is imported: guard that part with `if __name__ == "__main__":`'
    return f"{file} could not be {step}: {fix}\n{shown}"


def _is_here(name: str | None) -> str:
    """Returns how to import a module that is in the working directory, as the end of a sentence; "" for others."""
    here = Path.cwd()
    if not name or importlib.machinery.PathFinder.find_spec(name.partition(".")[0], [str(here)]) is None:
        return ""
    return f": nothing is imported from the working directory, {here}, unless PYTHONPATH names it (--env PYTHONPATH=…)"


def _is_plugin(value: object) -> bool:
    return not isinstance(value, type) and getattr(value, "__toolbus_plugin__", False) is True


def distinct(values: Sequence[Any]) -> list[Any]:
    """Returns the objects of a sequence, each once."""
    return list({id(each): each for each in values}.values())


def _functions(file: Path, module: ModuleType) -> list[ToolSpec]:
    candidates = distinct(
        [each for each in vars(module).values() if inspect.isroutine(each) and meta_of(each) is not None]
    )
    try:
        return [spec_of(each) for each in candidates if not inspect.ismethod(each)]
    except (TypeError, ToolBusError) as problem:
        raise SetupError(f"{file}: {problem}") from problem


def _bare(file: Path, module: ModuleType, functions: list[ToolSpec]) -> LoadedPlugin:
    named = getattr(module, "plugin_id", "")
    tools = ToolSet()
    for spec in functions:
        if not tools.add(spec):
            raise SetupError(f"{file} has two tools named {spec.tool.name!r}: rename one with @llm_tool(name=…)")
    plugin_id = named if isinstance(named, str) and named else safe_id(file.stem)
    return LoadedPlugin(file, source_in(file, plugin_id), None, None, tools, module)


def source_in(file: Path, plugin_id: str) -> str:
    """Returns the source of a plugin id.

    Raises:
        SetupError: the id breaks its rule; the text names the file that has it.
    """
    try:
        return plugin_source(plugin_id)
    except SetupError as problem:
        raise SetupError(f"{file}: {problem}") from None


def safe_id(stem: str) -> str:
    """Returns a plugin id made from a file's name; different names without a usable letter get different ids."""
    cleaned = re.sub(r"[^A-Za-z0-9_.-]", "_", stem)[:100]
    if re.search(r"[A-Za-z0-9]", cleaned):
        return cleaned
    return "plugin_" + stem.encode("utf-8", "surrogatepass").hex()[:64]
