"""Loads the plugin of a Python file or of a folder with a plugin.toml, for ``toolbus run``.

A file can be a plugin in three ways, tried in this order: it makes a `Plugin`, it defines a class as N.E.K.O. plugins
do, or it has functions with `llm_tool`. The file is imported as a module of its own; a folder is a plugin of N.E.K.O.
and imported as its package. ``import plugin.sdk`` finds toolbus from then on. Every failure is a `SetupError` that
names the file, the problem and how to fix it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import logging
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from toolbus.errors import SetupError, ToolBusError
from toolbus.functions.tool_spec import ToolSet, ToolSpec, meta_of, spec_of
from toolbus.parts.moving.neko import plugin_base
from toolbus.parts.moving.neko.entries import describe_unused, offer_entries
from toolbus.parts.moving.neko.plugin_base import MARK, NekoPluginBase, safe_id, source_of, tools_of
from toolbus.parts.moving.neko.plugin_context import PluginContext
from toolbus.parts.moving.neko.plugin_folder import MANIFEST, is_plugin_folder, plugin_class, read_manifest, use_sdk
from toolbus.parts.moving.neko.plugin_logger import plugin_logger
from toolbus.parts.moving.neko.sdk_errors import ModuleNotProvided

log = logging.getLogger(__name__)

# Files whose part of a traceback does not help the author: those that only lead to the import.
_NOT_THE_AUTHORS = (__file__, str(Path(plugin_base.__file__).parent), importlib.__file__, "<frozen")
_FRAMES = 4  # of the author's traceback: enough to see the line and its callers


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """The plugin of a file or folder: either `plugin` or `neko` is set, or neither if it only has functions.

    Attributes:
        path: the file or folder.
        source: whose tools these are.
        plugin: a `Plugin` that the file made, with its own tools.
        neko: an instance of the file's plugin class.
        tools: the live set of tools; None if `plugin` has them.
        module: the imported file.
    """

    path: Path
    source: str
    plugin: Any
    neko: NekoPluginBase | None
    tools: ToolSet | None
    module: ModuleType


def load_plugin(path: str | Path, *, entries: bool = False) -> LoadedPlugin:
    """Imports a file, or the package of a folder with a plugin.toml, and returns its plugin.

    The folder is added to `sys.path` and stays there: a plugin may import the modules beside it at any time.

    Args:
        entries: whether methods with `plugin_entry` are tools too.

    Raises:
        SetupError: there is no such file, its import raised, it has no plugin or several, or an id breaks its rule.
    """
    file = Path(path).expanduser().resolve()
    if file.is_dir():
        return _with_entries(_load_folder(file), entries)
    if not file.is_file():
        raise SetupError(f"{file} does not exist: check the path")
    undo = use_sdk()
    try:
        return _with_entries(_load_file(file), entries)
    except BaseException:
        undo()
        raise


def _with_entries(loaded: LoadedPlugin, entries: bool) -> LoadedPlugin:
    """Offers a plugin object's entries if ``entries``, and logs which of its methods are never called."""
    if loaded.neko is not None:
        if entries:
            offer_entries(loaded.neko)
        used = {getattr(each.handler, "__name__", "") for each in tools_of(loaded.neko)}
        if text := describe_unused(loaded.neko, used):
            log.warning("%s: %s", loaded.neko.plugin_id, text)
    return loaded


def _load_file(file: Path) -> LoadedPlugin:
    module = _import(file)
    own = _distinct([each for each in vars(module).values() if _is_plugin(each)])
    if own:
        if len(own) > 1:
            raise SetupError(f"{file} makes {len(own)} Plugin objects: a file is one plugin, give each its own file")
        return LoadedPlugin(file, str(own[0].source), own[0], None, None, module)
    cls = _plugin_class(file, module)
    functions = _functions(file, module)
    if cls is not None:
        if functions:
            names = ", ".join(each.tool.name for each in functions)
            log.warning("%s: its plugin is %s, so these tool functions are not offered: %s", file, cls.__name__, names)
        return _neko(file, module, cls)
    if functions:
        return _bare(file, module, functions)
    raise SetupError(
        f"{file} holds no plugin: make a Plugin, decorate a class that derives from NekoPluginBase with @plugin, or "
        "put @llm_tool above a function (all from toolbus.sdk)"
    )


def _load_folder(folder: Path) -> LoadedPlugin:
    if not is_plugin_folder(folder):
        raise SetupError(f"{folder} is a folder without {MANIFEST}: name the plugin's file in it")
    manifest = read_manifest(folder)
    undo = use_sdk(manifest.package, folder)
    added = str(folder) not in sys.path
    if added:
        sys.path.append(str(folder))  # behind the standard library: a package's module may be called types.py
    try:
        module, cls = plugin_class(manifest)
        plugin = _made(folder, cls, manifest.context())
        source = source_of(manifest.id)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as problem:
        undo()
        if added:
            sys.path.remove(str(folder))
        if isinstance(problem, SetupError):
            raise
        raise SetupError(_import_text(folder, problem)) from problem
    return LoadedPlugin(folder, source, None, plugin, tools_of(plugin), module)


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
    try:
        loader.exec_module(module)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as problem:
        del sys.modules[name]
        if added:
            sys.path.remove(folder)
        raise SetupError(_import_text(file, problem)) from problem
    return module


def _import_text(file: Path, problem: BaseException, step: str = "imported") -> str:
    """Returns why a file could not be imported, or another step failed, with the author's part of the traceback."""
    trace = traceback.TracebackException.from_exception(problem, compact=True)
    frames = [each for each in trace.stack if not each.filename.startswith(_NOT_THE_AUTHORS)]
    lines = traceback.StackSummary.from_list(frames[-_FRAMES:]).format()
    shown = "".join([*lines, *trace.format_exception_only()]).rstrip()
    fix = "correct it and start again"
    if isinstance(problem, ModuleNotFoundError):
        fix = f"install {problem.name}, or put it beside the file"
        if isinstance(problem, ModuleNotProvided):
            fix = problem.absence.remedy[0].lower() + problem.absence.remedy[1:].rstrip(".")
    elif isinstance(problem, SystemExit):
        fix = 'it ends the process while it is imported: guard that part with `if __name__ == "__main__":`'
    return f"{file} could not be {step}: {fix}\n{shown}"


def _is_plugin(value: object) -> bool:
    return not isinstance(value, type) and getattr(value, "__toolbus_plugin__", False) is True


def _distinct(values: list[Any]) -> list[Any]:
    return list({id(each): each for each in values}.values())


def _plugin_class(file: Path, module: ModuleType) -> type[NekoPluginBase] | None:
    """Returns the file's plugin class: its own before imported ones, decorated before plain, derived before base."""
    candidates = _distinct(
        [
            each
            for each in vars(module).values()
            if isinstance(each, type) and issubclass(each, NekoPluginBase) and each is not NekoPluginBase
        ]
    )
    own = [each for each in candidates if each.__module__ == module.__name__]
    candidates = [each for each in own or candidates if MARK in vars(each)] or own
    candidates = [
        each for each in candidates if not any(other is not each and issubclass(other, each) for other in candidates)
    ]
    if len(candidates) > 1:
        names = ", ".join(each.__name__ for each in candidates)
        raise SetupError(f"{file} has several plugin classes ({names}): put @plugin above one, or split the file")
    return candidates[0] if candidates else None


def _functions(file: Path, module: ModuleType) -> list[ToolSpec]:
    candidates = _distinct(
        [each for each in vars(module).values() if inspect.isroutine(each) and meta_of(each) is not None]
    )
    try:
        return [spec_of(each) for each in candidates if not inspect.ismethod(each)]
    except (TypeError, ToolBusError) as problem:
        raise SetupError(f"{file}: {problem}") from problem


def _neko(file: Path, module: ModuleType, cls: type[NekoPluginBase]) -> LoadedPlugin:
    named: list[object] = [
        vars(cls).get(MARK),
        *(inspect.getattr_static(cls, each, "") for each in ("plugin_id", "id")),
    ]
    plugin_id = next((each for each in named if isinstance(each, str) and each), safe_id(file.stem))
    source = _source(file, plugin_id)
    plugin = _made(file, cls, PluginContext(plugin_id, plugin_logger(plugin_id), file.parent))
    return LoadedPlugin(file, source, None, plugin, tools_of(plugin), module)


def _made(path: Path, cls: type[NekoPluginBase], context: PluginContext) -> NekoPluginBase:
    """Returns an object of a plugin class, with its id and its tools."""
    try:
        plugin = cls(context) if _takes_one(cls) else cls()
        tools_of(plugin)
        if not plugin.plugin_id:
            plugin.plugin_id = context.plugin_id
    except Exception as problem:
        raise SetupError(_import_text(path, problem, f"started: {cls.__name__}()")) from problem
    return plugin


def _takes_one(cls: type) -> bool:
    """Tells whether a constructor takes a `ctx`; some authors write one without."""
    try:
        inspect.signature(cls).bind(None)
    except TypeError:
        return False
    return True


def _bare(file: Path, module: ModuleType, functions: list[ToolSpec]) -> LoadedPlugin:
    named = getattr(module, "plugin_id", "")
    tools = ToolSet()
    for spec in functions:
        if not tools.add(spec):
            raise SetupError(f"{file} has two tools named {spec.tool.name!r}: rename one with @llm_tool(name=…)")
    plugin_id = named if isinstance(named, str) and named else safe_id(file.stem)
    return LoadedPlugin(file, _source(file, plugin_id), None, None, tools, module)


def _source(file: Path, plugin_id: str) -> str:
    try:
        return source_of(plugin_id)
    except SetupError as problem:
        raise SetupError(f"{file}: {problem}") from None
