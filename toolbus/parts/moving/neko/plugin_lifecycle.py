"""Runs the methods of a plugin object that belong to a moment of its life, and the timers between them."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from toolbus.errors import SetupError
from toolbus.functions.reply import Err

log = logging.getLogger("toolbus.neko.plugin_lifecycle")

F = TypeVar("F", bound=Callable[..., Any])
RunSync = Callable[[Callable[[], Any]], Awaitable[Any]]

MOMENTS = ("startup", "shutdown", "reload", "freeze", "unfreeze", "config_change")
NEVER_CALLED = MOMENTS[2:]  # moments that only N.E.K.O. has
_MOMENT = "__toolbus_lifecycle__"  # on a method: one of MOMENTS
_TIMER = "__toolbus_timer__"  # on a method: a _Timer
_RUNNING = "_toolbus_timers"  # on a plugin object: the tasks of its timers
_ON_LOOP = "_on_command_loop_start"  # a method that N.E.K.O. calls on the loop of the handlers before the first call


@dataclass(frozen=True, slots=True)
class _Timer:
    seconds: float
    auto_start: bool


def lifecycle(*, id: str, **shown: Any) -> Callable[[F], F]:
    """Makes a method run at a moment of the plugin's life.

    Args:
        id: `startup`, before it takes calls, or `shutdown`, after its last one. `config_change`, `reload`, `freeze` and
            `unfreeze` are moments of N.E.K.O. only: their methods are never called.
        shown: texts that N.E.K.O. shows about it (`name`, `description`, `metadata`); not used.

    Raises:
        ValueError: another moment.
    """
    if id not in MOMENTS:
        raise ValueError(f"lifecycle id {id!r} is unknown: it must be one of {', '.join(MOMENTS)}")

    def mark(method: F) -> F:
        setattr(method, _MOMENT, id)
        return method

    return mark


def moment_of(method: object) -> str:
    """Returns the moment of a method with `lifecycle`; empty for other methods."""
    return getattr(method, _MOMENT, None) or ""


def timer_interval(*, seconds: float, id: str = "", auto_start: bool = True, **shown: Any) -> Callable[[F], F]:
    """Makes a method run repeatedly while the plugin runs: at its start, and some seconds after each end.

    Args:
        seconds: between two runs, more than 0.
        id: its name; not used.
        auto_start: a timer without it never runs.
        shown: texts that N.E.K.O. shows about it; not used.

    Raises:
        ValueError: `seconds` breaks its rule.
    """
    if not seconds > 0:
        raise ValueError(f"timer_interval: seconds is {seconds!r}, it must be more than 0")

    def mark(method: F) -> F:
        setattr(method, _TIMER, _Timer(seconds, auto_start))
        return method

    return mark


async def start_plugin(plugin: object, run_sync: RunSync, run_timer: RunSync | None = None) -> None:
    """Runs a plugin's startup methods before its first call, in the order of the source, and starts its timers.

    Args:
        run_sync: runs a method that is a plain function off the loop.
        run_timer: runs a timer's method that is a plain function off the loop; None means `run_sync`.

    Raises:
        SetupError: a method raised or returned `Err`; the plugin must not start.
    """
    for name, method in _methods(plugin, "startup"):
        shown = f"{type(plugin).__name__}.{name}"
        try:
            returned = await _run(method, run_sync)
        except Exception as problem:
            raise SetupError(
                f"{shown} raised {type(problem).__name__}: {problem}{_place(plugin, problem)}"
            ) from problem
        if isinstance(returned, Err):
            raise SetupError(f"{shown} returned Err: {returned.error}")
    plugin.__dict__[_RUNNING] = [
        asyncio.create_task(_repeat(getattr(plugin, name), timer, run_timer or run_sync))
        for name, raw in routines_of(type(plugin)).items()
        if isinstance(timer := getattr(raw, _TIMER, None), _Timer) and timer.auto_start
    ]


def _place(plugin: object, problem: Exception) -> str:
    """Returns the line of the plugin's own files that raised it; empty if none of them did."""
    file = getattr(sys.modules.get(type(plugin).__module__), "__file__", None)
    places = [
        f" ({frame.f_code.co_filename}:{line})"
        for frame, line in traceback.walk_tb(problem.__traceback__)
        if file and Path(frame.f_code.co_filename).is_relative_to(Path(file).parent)
    ]
    return places[-1] if places else ""


async def stop_plugin(plugin: object, run_sync: RunSync) -> None:
    """Runs a plugin's shutdown methods after its last call, the last in the source first; failures are only logged."""
    for task in plugin.__dict__.pop(_RUNNING, ()):
        task.cancel()
    for name, method in reversed(_methods(plugin, "shutdown")):
        try:
            returned = await _run(method, run_sync)
        except Exception:
            log.exception("%s.%s failed while the plugin stopped", type(plugin).__name__, name)
            continue
        if isinstance(returned, Err):
            log.error("%s.%s returned Err: %s", type(plugin).__name__, name, returned.error)


def _methods(plugin: object, moment: str) -> list[tuple[str, Callable[..., Any]]]:
    """Returns the methods for a moment: those with `lifecycle` in the order of the source, then `on_…`."""
    routines = routines_of(type(plugin))
    last = {"startup": ("on_start", _ON_LOOP), "shutdown": ("on_shutdown",)}[moment]
    marked = [name for name, raw in routines.items() if moment_of(raw) == moment and name not in last]
    return [(name, getattr(plugin, name)) for name in [*marked, *(each for each in last if each in routines)]]


def routines_of(cls: type) -> dict[str, Any]:
    """Returns a class's methods, base classes first; an attribute that overrides a method takes its place."""
    routines: dict[str, Any] = {}
    for kind in reversed(cls.__mro__):
        for name, raw in vars(kind).items():
            if name in routines or inspect.isroutine(raw):
                routines[name] = raw
    return routines


async def _repeat(method: Callable[..., Any], timer: _Timer, run_sync: RunSync) -> None:
    while True:
        try:
            await _run(method, run_sync)
        except Exception:
            log.exception("timer %s failed; it runs again in %g s", method.__qualname__, timer.seconds)
        await asyncio.sleep(timer.seconds)


async def _run(method: Callable[..., Any], run_sync: RunSync) -> Any:
    returned = method() if inspect.iscoroutinefunction(method) else await run_sync(method)
    return await returned if inspect.isawaitable(returned) else returned
