"""Makes `import plugin.sdk…` find toolbus in this process, and `plugin.plugins.NAME` the folder of a plugin.

`use_sdk` adds finders to `sys.meta_path`, and returns a function that removes them. An import of this file changes
nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from toolbus.neko.sdk_errors import Absence, ModuleNotProvided
from toolbus.neko.sdk_names import NAMES, find_name

PLUGINS = "plugin.plugins"
# The modules of the SDK, for imports such as `from plugin.sdk.shared import core`; all have the same names.
SUBMODULES = {
    *("adapter", "base", "bus", "config", "constants", "context", "core", "database", "decorators", "errors", "events"),
    *("exceptions", "extension", "i18n", "logger", "logging", "memory", "models", "result", "router", "runtime"),
    *("settings", "shared", "storage", "store", "types", "plugin", "sdk"),
}
# Packages of that project's main program, which are beside `plugin` there.
MAIN_PROGRAM = {"agent", "brain", "config", "main_logic", "main_routers", "main_server", "memory", "utils"}
SERVER = Absence("is a part of its plugin server", "Remove the import: a tool needs only plugin.sdk.")
MAIN = Absence("is a part of its main program", "Copy what the plugin needs of it into the plugin's folder.")
MAIN_LOGIC = Absence(
    MAIN.purpose, f"{MAIN.remedy[:-1]}; toolbus.tools has ToolDefinition, and ToolRegistry to register it in."
)


class _SdkModule(ModuleType):
    """A module of ``plugin.sdk``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
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


class SdkFinder(MetaPathFinder):
    """Finds ``plugin`` and its modules.

    Args:
        name: of the plugin's package in ``plugin.plugins``; empty without one.
        folder: the plugin's; None without one.
    """

    def __init__(self, name: str = "", folder: Path | None = None) -> None:
        self._package = f"{PLUGINS}.{name}" if name else ""
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns how to load a module; None for those of other finders.

        Raises:
            ModuleNotProvided: it is a module of the plugin server, which toolbus does not have.
        """
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


def main_program(module: str) -> Absence:
    """Returns why a module of that project's main program is not here."""
    return MAIN_LOGIC if module.partition(".")[0] == "main_logic" else MAIN


def use_sdk(name: str = "", folder: Path | None = None) -> Callable[[], None]:
    """Makes this process find the SDK, and a plugin's folder as its package; returns a function that undoes it.

    Args:
        name: of the package in ``plugin.plugins``.
        folder: the plugin's.
    """
    first, last = SdkFinder(name, folder), _LastFinder()
    sys.meta_path.insert(0, first)
    sys.meta_path.append(last)

    def undo() -> None:
        for finder in (first, last):
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
        for module in [each for each in sys.modules if each == "plugin" or each.startswith("plugin.")]:
            del sys.modules[module]

    return undo


def _made(name: str, path: Sequence[str] = (), kind: type[ModuleType] = ModuleType) -> ModuleSpec:
    return ModuleSpec(name, _Made(path, kind), is_package=True)


def _package_spec(name: str, folder: Path | None) -> ModuleSpec | None:
    assert folder is not None  # a finder with a name has one
    file = folder / "__init__.py"
    if not file.is_file():
        return _made(name, [str(folder)])
    return importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(folder)])
