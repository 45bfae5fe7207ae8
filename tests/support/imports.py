"""Undoes what a test did to the imports of this process, so that no test depends on the tests before it."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def restored_imports() -> Generator[None]:
    """Restores `sys.path`, and removes the finders of toolbus and the modules from elsewhere that were added.

    What libraries add when they are first imported stays: they add it once.
    """
    path, finders, modules = list(sys.path), list(sys.meta_path), set(sys.modules)
    try:
        yield
    finally:
        sys.path[:] = path
        if sys.meta_path != finders:
            sys.meta_path[:] = [each for each in sys.meta_path if each in finders or not _is_of_toolbus(type(each))]
        if len(sys.modules) != len(modules):
            for name in set(sys.modules) - modules:
                if _is_foreign(name, sys.modules[name], path):
                    del sys.modules[name]


def _is_of_toolbus(cls: type) -> bool:
    return cls.__module__.startswith("toolbus.")


def _is_foreign(name: str, module: ModuleType, path: list[str]) -> bool:
    """Says whether a module was found beside the path, or is one of toolbus under another name."""
    file = getattr(module, "__file__", None)
    if file is not None and not any(Path(file).is_relative_to(folder) for folder in path if folder):
        return True
    own = str(getattr(module, "__name__", name))
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    return (own != name and own.startswith("toolbus")) or _is_of_toolbus(type(loader))
