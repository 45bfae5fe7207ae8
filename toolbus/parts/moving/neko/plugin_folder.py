"""Reads a folder of a N.E.K.O. plugin: its plugin.toml, and the plugin class that its package defines.

``[plugin]`` has `id`, `entry` (``module.path:Class``) and `name`; every other section is the plugin's configuration. A
``config.example.toml`` beside it has defaults. The module path of an entry begins with
``plugins.NAME`` or ``plugin.plugins.NAME``, or with the folder's own name, or is a module in the folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from toolbus.errors import SetupError
from toolbus.parts.moving.neko.entries import ui
from toolbus.parts.moving.neko.plugin_base import NekoPluginBase
from toolbus.parts.moving.neko.plugin_config import merge
from toolbus.parts.moving.neko.plugin_context import PluginContext
from toolbus.parts.moving.neko.plugin_logger import plugin_logger
from toolbus.parts.moving.neko.sdk_errors import Absence, ModuleNotProvided
from toolbus.parts.moving.neko.sdk_names import NAMES, find_name
from toolbus.protocol.tool import plugin_source

# `use_sdk` adds finders to `sys.meta_path`, and returns a function that removes them. An import of this file changes
# nothing.

PLUGINS = "plugin.plugins"
MARKET = "plugins"  # the same package, as the market of that project and its guide write it
# The modules of the SDK, for imports such as `from plugin.sdk.shared import core`; all have the same names.
SUBMODULES = {
    *("adapter", "base", "bus", "config", "constants", "context", "core", "database", "decorators", "errors", "events"),
    *("exceptions", "extension", "i18n", "logger", "logging", "memory", "models", "result", "router", "runtime"),
    *("settings", "shared", "storage", "store", "types", "plugin", "sdk", "transport", "llm_tool", "ui", "activity"),
    *("cards", "images", "finish", "reply_tail", "plugins", "state", "system_info", "responses", "version", "hooks"),
    *("constants", "context", "bus_context", "entry_runtime", "message_plane", "push_message_schema"),
}
# Packages of that project's main program, which are beside `plugin` there.
MAIN_PROGRAM = {"agent", "brain", "config", "main_logic", "main_routers", "main_server", "memory", "utils"}
SERVER = Absence("is a part of its plugin server", "Remove the import: a tool needs only plugin.sdk.")
MAIN = Absence("is a part of its main program", "Copy what the plugin needs of it into the plugin's folder.")
_GENERATE = "a model that a host lends answers `await plugin.generate(prompt)` of a Plugin of toolbus.sdk"
MODEL = Absence(
    "calls the model of its main program", f"Call a model's API from the plugin, or use the bus: {_GENERATE}."
)
_MODEL = re.compile(r"omni|llm|chat_?completion", re.IGNORECASE)
MAIN_LOGIC = Absence(
    MAIN.purpose,
    f"{MAIN.remedy[:-1]}; toolbus.tools has ToolDefinition, and ToolRegistry to register it in; {_GENERATE}.",
)


_NOT_BY_STAR = {"Protocol"}  # of adapters there; a plugin has imported it from typing


class _SdkModule(ModuleType):
    """A module of ``plugin.sdk``."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in NAMES or name == "plugin":  # a module of that name, once imported, does not hide what it holds
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":  # for `from plugin.sdk.plugin import *`
            return [each for each in NAMES if each not in _NOT_BY_STAR]
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__.endswith(".ui") and name in ("action", "context"):
            return getattr(ui, name)
        if name in SUBMODULES and name not in NAMES:
            return importlib.import_module(f"{self.__name__}.{name}")
        return find_name(self.__name__, name)


class _Made(Loader):
    """Makes modules that no file has."""

    def __init__(self, path: Sequence[str] = (), kind: type[ModuleType] = ModuleType) -> None:
        self._path = list(path)
        self._kind = kind

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = self._kind(spec.name, f"{spec.name}, as toolbus has it.")
        module.__path__ = self._path
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the module is complete."""


class _Alias(Loader):
    """Makes a second name of a module: both are one object."""

    def __init__(self, module: str) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves a module to Python that `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self._module)


class SdkFinder(MetaPathFinder):
    """Finds ``plugin`` and its modules, and ``plugins`` for the plugin of a folder.

    Args:
        name: of the plugin's package in ``plugin.plugins``; empty without one.
        folder: the plugin's; None without one.
        plugin_id: a second name of the package: in N.E.K.O. the folder is called like the plugin.
    """

    def __init__(self, name: str = "", folder: Path | None = None, plugin_id: str = "") -> None:
        self._package = f"{PLUGINS}.{name}" if name else ""
        self._folder = folder
        self._second_name = f"{PLUGINS}.{plugin_id}" if plugin_id else self._package
        self._has_market = folder is not None and not has_module(folder, MARKET)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns how to load a module; None for those of other finders.

        Raises:
            ModuleNotProvided: it is a module of the plugin server, which toolbus does not have.
        """
        if (module := self._module(fullname)) != fullname:
            return ModuleSpec(fullname, _Alias(module), is_package=True)
        if fullname == self._package:
            return _package_spec(fullname, self._folder)
        if fullname == "plugin":
            return _made(fullname)
        if fullname == PLUGINS:
            return _made(fullname, [str(self._folder.parent)] if self._folder is not None else [])
        if is_of_sdk(fullname):
            return _made(fullname, kind=_SdkModule)
        if fullname.startswith("plugin.") and not fullname.startswith(f"{PLUGINS}."):
            raise ModuleNotProvided(fullname, SERVER)
        return None

    def _module(self, name: str) -> str:
        """Returns the name under which a module is loaded."""
        if self._has_market and f"{name}.".startswith(f"{MARKET}."):
            name = f"plugin.{name}"
        if self._second_name != self._package and f"{name}.".startswith(f"{self._second_name}."):
            return self._package + name.removeprefix(self._second_name)
        return name


class _LastFinder(MetaPathFinder):
    """Explains imports that no other finder found; so a plugin's own package of such a name comes first."""

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> None:
        """Finds nothing.

        Raises:
            ModuleNotProvided: a package of that project's main program.
        """
        if fullname.partition(".")[0] in MAIN_PROGRAM:
            raise ModuleNotProvided(fullname, main_program(fullname))


def is_of_sdk(module: str) -> bool:
    """Tells whether a module is one of ``plugin.sdk``, whose names toolbus has."""
    return module in ("plugin.sdk", "plugin.logging_config") or module.startswith("plugin.sdk.")


def main_program(module: str, name: str = "") -> Absence:
    """Returns why a module of that project's main program is not here.

    Args:
        name: what is imported of it, if that is known.
    """
    if _MODEL.search(f"{module}.{name}"):
        return MODEL
    return MAIN_LOGIC if module.partition(".")[0] == "main_logic" else MAIN


def use_sdk(name: str = "", folder: Path | None = None, plugin_id: str = "") -> Callable[[], None]:
    """Makes this process find the SDK, and a plugin's folder as its package; returns a function that undoes it.

    Args:
        name: of the package in ``plugin.plugins``.
        folder: the plugin's.
        plugin_id: a second name of the package.
    """
    first, last = SdkFinder(name, folder, plugin_id), _LastFinder()
    sys.meta_path.insert(0, first)
    sys.meta_path.append(last)
    if folder is not None and not (folder / "plugins").exists():  # else that is found in place of ours
        os.environ[_SPAWNED] = json.dumps([name, str(folder.resolve()), plugin_id])
        sys.path.append(_SPAWNED_PATH)

    def undo() -> None:
        os.environ.pop(_SPAWNED, None)
        if _SPAWNED_PATH in sys.path:
            sys.path.remove(_SPAWNED_PATH)
        for finder in (first, last):
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if f"{getattr(module, '__name__', name)}.".startswith("plugin."):  # under its second name too
                del sys.modules[name]

    return undo


# Processes that a plugin spawns get its path of imports and its environment, and begin without its finders.
_SPAWNED, _SPAWNED_PATH = "_SPAWNED_BY_A_PLUGIN", str(Path(__file__).with_name("spawned"))


def import_as_parent(module: str) -> None:
    """Makes a process that a plugin spawned find the SDK and the plugin's folder, and imports a package of them."""
    name, folder, plugin_id = json.loads(os.environ[_SPAWNED])
    use_sdk(name, Path(folder), plugin_id)
    del sys.modules[module]
    sys.modules[module] = importlib.import_module(module)


def _made(name: str, path: Sequence[str] = (), kind: type[ModuleType] = ModuleType) -> ModuleSpec:
    return ModuleSpec(name, _Made(path, kind), is_package=True)


def _package_spec(name: str, folder: Path | None) -> ModuleSpec | None:
    assert folder is not None  # a finder with a name has one
    file = folder / "__init__.py"
    if not file.is_file():
        return _made(name, [str(folder)])
    return importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(folder)])


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
        return PluginContext(
            self.id,
            plugin_logger(self.id),
            self.folder,
            self.values,
            read=lambda: read_manifest(self.folder).values,
            files=(self.folder / MANIFEST, self.folder / EXAMPLE),
        )


def is_plugin_folder(path: Path) -> bool:
    """Tells whether a path is the folder of a plugin, as far as this user can see."""
    return os.path.isfile(path / MANIFEST)


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
        plugin_source(plugin_id)
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
    if parts[-1] == "__init__" and len(parts) > 1:
        parts = parts[:-1]
    if parts[:2] == prefix and len(parts) > 2:
        return ".".join(parts)
    in_folder = has_module(folder, parts[0])
    if not in_folder and parts[0] == MARKET and len(parts) > 1:
        return ".".join([*prefix, *parts[1:]])
    if not in_folder:  # its first part is the folder's name in N.E.K.O., which may differ from the one here
        return ".".join([*prefix, *parts])
    name = re.sub(r"\W", "_", folder.name)
    return ".".join([*prefix, name if _IDENTIFIER.fullmatch(name) else f"plugin_{name}", *parts])


def has_module(folder: Path, name: str) -> bool:
    """Tells whether a folder has a module, or a folder that is a package."""
    return (folder / name).is_dir() or (folder / f"{name}.py").is_file()


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
