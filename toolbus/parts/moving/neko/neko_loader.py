"""Loads plugins of N.E.K.O. for ``toolbus run``: `NekoLoader`.

A file is one if it defines a plugin class; a folder if it has a plugin.toml, and is imported as its package. ``import
plugin.sdk`` finds toolbus from then on.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from toolbus.errors import SetupError
from toolbus.parts.moving.neko.entries import describe_unused, offer_entries
from toolbus.parts.moving.neko.plugin_base import MARK, NekoPluginBase, tools_of
from toolbus.parts.moving.neko.plugin_context import PluginContext
from toolbus.parts.moving.neko.plugin_folder import (
    MANIFEST,
    is_plugin_folder,
    plugin_class,
    plugin_folders,
    read_manifest,
    use_sdk,
    wanted_folders,
)
from toolbus.parts.moving.neko.plugin_logger import plugin_logger
from toolbus.processes.loader import FoundPlugins, LoadedPlugin, Loader, distinct, explain, safe_id, source_in
from toolbus.protocol.tool import plugin_source

log = logging.getLogger("toolbus.neko.neko_loader")


class NekoLoader(Loader):
    """Loads files with a plugin class, and folders with a plugin.toml."""

    sign = MANIFEST

    def find(self, folder: Path) -> FoundPlugins | None:
        folders = plugin_folders(folder)
        if not folders:
            return None
        enabled = wanted_folders(folder, folders)
        if not enabled:
            raise SetupError(f"every plugin in {folder} is disabled: name the folder of one")
        return FoundPlugins(
            enabled,
            [
                f"{each} is not run, since its plugin.toml says enabled = false: name it to run it"
                for each in folders
                if each not in enabled
            ],
        )

    def prepare(self) -> Callable[[], None]:
        return use_sdk()

    def load_file(self, file: Path, module: ModuleType, *, entries: bool) -> LoadedPlugin | None:
        cls = _plugin_class(file, module)
        return None if cls is None else _with_entries(_of_class(file, module, cls), entries)

    def load_folder(self, folder: Path, *, entries: bool) -> LoadedPlugin | None:
        return _with_entries(_of_folder(folder), entries) if is_plugin_folder(folder) else None


def _with_entries(loaded: LoadedPlugin, entries: bool) -> LoadedPlugin:
    """Offers a plugin object's entries if ``entries``, and logs which of its methods are never called."""
    plugin = loaded.owner
    assert isinstance(plugin, NekoPluginBase)  # made below
    if entries:
        offer_entries(plugin)
    used = {getattr(each.handler, "__name__", "") for each in tools_of(plugin)}
    if text := describe_unused(plugin, used):
        log.warning("%s: %s", plugin.plugin_id, text)
    return loaded


def _of_folder(folder: Path) -> LoadedPlugin:
    manifest = read_manifest(folder)
    undo = use_sdk(manifest.package, folder, manifest.id)
    added = str(folder) not in sys.path
    if added:
        sys.path.append(str(folder))  # behind the standard library: a package's module may be called types.py
    try:
        module, cls = plugin_class(manifest)
        plugin = _made(folder, cls, manifest.context())
        source = plugin_source(manifest.id)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as problem:
        undo()
        if added:
            sys.path.remove(str(folder))
        if isinstance(problem, SetupError):
            raise
        raise SetupError(explain(folder, problem)) from problem
    return LoadedPlugin(folder, source, None, plugin, tools_of(plugin), module)


def _plugin_class(file: Path, module: ModuleType) -> type[NekoPluginBase] | None:
    """Returns the file's plugin class: its own before imported ones, decorated before plain, derived before base."""
    candidates = distinct(
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


def _of_class(file: Path, module: ModuleType, cls: type[NekoPluginBase]) -> LoadedPlugin:
    named: list[object] = [
        vars(cls).get(MARK),
        *(inspect.getattr_static(cls, each, "") for each in ("plugin_id", "id")),
    ]
    plugin_id = next((each for each in named if isinstance(each, str) and each), safe_id(file.stem))
    source = source_in(file, plugin_id)
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
        raise SetupError(explain(path, problem, f"started: {cls.__name__}()")) from problem
    return plugin


def _takes_one(cls: type) -> bool:
    """Tells whether a constructor takes a `ctx`; some authors write one without."""
    try:
        inspect.signature(cls).bind(None)
    except TypeError:
        return False
    return True
