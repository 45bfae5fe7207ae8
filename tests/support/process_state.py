"""Undoes what a file of tests did to its process, so that no test depends on the files that ran before it."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(scope="module", autouse=True)
def restored_state() -> Iterator[None]:
    """Restores imports, the environment, the folder, loggers and signals after the last test of each file."""
    with restored_imports(), restored_environment(), restored_loggers(), restored_signals():
        yield


@contextmanager
def restored_imports() -> Iterator[None]:
    """Restores `sys.path`, and removes the finders of toolbus and the modules from elsewhere that were added.

    What libraries add when they are first imported stays: they add it once.
    """
    path, finders, modules = list(sys.path), list(sys.meta_path), set(sys.modules)
    try:
        yield
    finally:
        sys.path[:] = path
        sys.meta_path[:] = [each for each in sys.meta_path if each in finders or not _is_of_toolbus(type(each))]
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


@contextmanager
def restored_environment() -> Iterator[None]:
    variables, folder = dict(os.environ), Path.cwd()
    try:
        yield
    finally:
        if os.environ != variables:
            os.environ.clear()
            os.environ.update(variables)
        os.chdir(folder)
        gc.enable()


@contextmanager
def restored_loggers() -> Iterator[None]:
    """Restores the loggers that there were; those that came since get the defaults."""
    saved = {name: _settings(logger) for name, logger in _loggers()}
    try:
        yield
    finally:
        for name, logger in _loggers():
            level, handlers, propagate, disabled = saved.get(name, (logging.NOTSET, [], True, False))
            if _settings(logger) != (level, handlers, propagate, disabled):
                logger.setLevel(level)
                logger.handlers[:] = handlers
                logger.propagate, logger.disabled = propagate, disabled
        logging.disable(logging.NOTSET)


def _loggers() -> Iterator[tuple[str, logging.Logger]]:
    yield "", logging.getLogger()
    for name, logger in list(logging.Logger.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and name.startswith(("toolbus", "uvicorn", "asyncio", "aiohttp")):
            yield name, logger


def _settings(logger: logging.Logger) -> tuple[int, list[logging.Handler], bool, bool]:
    return logger.level, list(logger.handlers), logger.propagate, logger.disabled


@contextmanager
def restored_signals() -> Iterator[None]:
    saved = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in saved.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
