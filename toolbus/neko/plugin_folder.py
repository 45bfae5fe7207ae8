"""Reads a folder of a N.E.K.O. plugin: its plugin.toml, and the plugin class that its package defines.

``[plugin]`` has `id`, `entry` (``module.path:Class``) and `name`; every other section is the plugin's configuration. A
``config.example.toml`` beside it has defaults. The module path of an entry begins with
``plugin.plugins.NAME``, or with the folder's own name, or is a module in the folder.
"""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from toolbus.errors import SetupError
from toolbus.neko.plugin_base import NekoPluginBase, source_of
from toolbus.neko.plugin_config import merge
from toolbus.neko.plugin_context import PluginContext
from toolbus.neko.plugin_logger import plugin_logger
from toolbus.neko.sdk_finder import PLUGINS

MANIFEST = "plugin.toml"
EXAMPLE = "config.example.toml"  # the defaults of newer plugins
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_OTHER_TYPES = {
    "extension": "it runs inside another plugin: copy its methods with @llm_tool into that one",
    "adapter": "it turns another protocol into entries: offer the functions as tools of a plugin",
}


@dataclass(frozen=True, slots=True)
class PluginManifest:
    """The parsed plugin.toml of a folder.

    Attributes:
        folder: the plugin's.
        id: the plugin's id.
        name: for people.
        module: of its class, as Python imports it here: below ``plugin.plugins``.
        class_name: its class.
        values: the whole file.
    """

    folder: Path
    id: str
    name: str
    module: str
    class_name: str
    values: Mapping[str, Any]

    @property
    def package(self) -> str:
        """The name of its package in ``plugin.plugins``."""
        return self.module.split(".")[2]

    def context(self) -> PluginContext:
        """Returns the argument of the plugin's constructor."""
        return PluginContext(self.id, plugin_logger(self.id), self.folder, self.values)


def is_plugin_folder(path: Path) -> bool:
    """Tells whether a path is the folder of a plugin."""
    return (path / MANIFEST).is_file()


def plugin_folders(path: Path) -> list[Path]:
    """Returns the folders of the plugins in a folder, in the order of their names; it may be one itself."""
    if is_plugin_folder(path):
        return [path]
    return sorted(each for each in path.iterdir() if not each.name.startswith((".", "_")) and is_plugin_folder(each))


def wanted_folders(path: Path, folders: Sequence[Path]) -> list[Path]:
    """Returns those of `plugin_folders` that run: the one that `path` names, else those that are not disabled.

    A folder whose plugin.toml cannot be read is included: its own process reports why.
    """
    return [each for each in folders if each == path or not _is_disabled(each)]


def read_manifest(folder: Path) -> PluginManifest:
    """Reads the plugin.toml of a folder.

    Raises:
        SetupError: it cannot be read, or lacks a value.
    """
    folder = folder.resolve()
    file = folder / MANIFEST
    values = _read(file)
    if (folder / EXAMPLE).is_file():
        values = merge({key: value for key, value in _read(folder / EXAMPLE).items() if key != "plugin"}, values)
    plugin = values.get("plugin")
    if not isinstance(plugin, dict):
        raise SetupError(f"{file} has no section [plugin]: write one, with id and entry")
    kind = plugin.get("type")
    if kind in _OTHER_TYPES:
        raise SetupError(f"{file}: a plugin of type {kind!r} cannot run alone, since {_OTHER_TYPES[kind]}")
    plugin_id, entry = (_text(file, plugin, key) for key in ("id", "entry"))
    try:
        source_of(plugin_id)
    except SetupError as problem:
        raise SetupError(f"{file}: {problem}") from None
    module, _, class_name = (each.strip() for each in entry.partition(":"))
    parts = module.split(".")
    if not class_name.isidentifier() or not all(each.replace("-", "_").isidentifier() for each in parts):
        raise SetupError(
            f'{file}: entry {entry!r} is not a module and a class: write it as "plugin.plugins.{folder.name}:MyPlugin"'
        )
    name = str(plugin.get("name") or plugin_id)
    return PluginManifest(folder, plugin_id, name, _module(folder, parts), class_name, values)


def plugin_class(manifest: PluginManifest) -> tuple[ModuleType, type[NekoPluginBase]]:
    """Imports a plugin's module and returns it and its class; an exception of the import passes through.

    Raises:
        SetupError: the module has no such class, or one that is not a plugin's.
    """
    module = importlib.import_module(manifest.module)
    cls = getattr(module, manifest.class_name, None)
    if isinstance(cls, type) and issubclass(cls, NekoPluginBase):
        return module, cls
    there = [name for name, each in vars(module).items() if inspect.isclass(each) and issubclass(each, NekoPluginBase)]
    names = ", ".join(name for name in there if name != NekoPluginBase.__name__) or "none"
    raise SetupError(
        f"{manifest.folder / MANIFEST}: entry names {manifest.class_name!r}, which is not a class that derives from "
        f"NekoPluginBase; {manifest.module} has: {names}"
    )


def _is_disabled(folder: Path) -> bool:
    try:
        runtime = _read(folder / MANIFEST).get("plugin_runtime")
    except SetupError:
        return False
    return isinstance(runtime, dict) and runtime.get("enabled") is False


def _module(folder: Path, parts: list[str]) -> str:
    """Returns the name under which an entry's module is imported: always in a package, for its relative imports."""
    prefix = PLUGINS.split(".")
    if parts[:2] == prefix and len(parts) > 2:
        return ".".join(parts)
    in_folder = (folder / parts[0]).is_dir() or (folder / f"{parts[0]}.py").is_file()
    if not in_folder:  # its first part is the folder's name in N.E.K.O., which may differ from the one here
        return ".".join([*prefix, *parts])
    name = re.sub(r"\W", "_", folder.name)
    return ".".join([*prefix, name if _IDENTIFIER.fullmatch(name) else f"plugin_{name}", *parts])


def _text(file: Path, section: Mapping[str, Any], key: str) -> str:
    value = section.get(key)
    if not isinstance(value, str) or not value.strip():
        raise SetupError(f"{file}: [plugin] needs {key}, a text that is not empty, not {value!r:.80}")
    return value.strip()


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            return tomllib.load(opened)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise SetupError(f"{file} cannot be read: {problem}; correct it and start again") from None
