"""Runs the methods of a plugin object that belong to a moment of its life, and the timers between them."""

from __future__ import annotations

import asyncio
import functools
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
from toolbus.parts.moving.neko.plugin_context import PluginContext

log = logging.getLogger("toolbus.neko.plugin_lifecycle")

F = TypeVar("F", bound=Callable[..., Any])
RunSync = Callable[[Callable[[], Any]], Awaitable[Any]]

MOMENTS = ("startup", "shutdown", "reload", "freeze", "unfreeze", "config_change")
NEVER_CALLED = ("reload", "freeze", "unfreeze")  # moments that only N.E.K.O. has
WATCH_SECONDS = 0.5  # between two looks at the files of a plugin's configuration
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
        id: `startup`, before it takes calls; `shutdown`, after its last one; `config_change`, after a file of its
            configuration has changed: the method gets those of the keywords `old_config`, `new_config` and `mode` that
            it takes. `reload`, `freeze` and `unfreeze` are moments of N.E.K.O. only: their methods are never called.
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


async def start_plugin(
    plugin: object, run_sync: RunSync, run_timer: RunSync | None = None, watch: PluginContext | None = None
) -> None:
    """Runs a plugin's startup methods before its first call, in the order of the source, and starts its timers.

    Args:
        run_sync: runs a method that is a plain function off the loop.
        run_timer: runs a timer's method that is a plain function off the loop; None means `run_sync`.
        watch: the context of the configuration whose changes the methods for `config_change` follow; None means none.

    Raises:
        SetupError: a method raised or returned `Err`; the plugin must not start.
    """
    stamp = watch.stamp() if watch is not None else None  # a change during the start counts
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
    if watch is not None and (methods := _methods(plugin, "config_change")):
        plugin.__dict__[_RUNNING].append(asyncio.create_task(_follow(plugin, watch, stamp, methods, run_sync)))


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
        await _run_logged(method, run_sync, f"{type(plugin).__name__}.{name}", "while the plugin stopped")


async def _run_logged(method: Callable[..., Any], run_sync: RunSync, shown: str, when: str) -> None:
    """Runs a method whose failure is only logged."""
    try:
        returned = await _run(method, run_sync)
    except Exception:
        log.exception("%s failed %s", shown, when)
        return
    if isinstance(returned, Err):
        log.error("%s returned Err: %s", shown, returned.error)


def _methods(plugin: object, moment: str) -> list[tuple[str, Callable[..., Any]]]:
    """Returns the methods for a moment: those with `lifecycle` in the order of the source, then `on_…`."""
    routines = routines_of(type(plugin))
    last = {"startup": ("on_start", _ON_LOOP), "shutdown": ("on_shutdown",)}.get(moment, ())
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


async def _follow(
    plugin: object,
    watched: PluginContext,
    stamp: object,
    methods: list[tuple[str, Callable[..., Any]]],
    run_sync: RunSync,
) -> None:
    """Calls the methods for `config_change` after each change of the configuration's files."""
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        if (now := watched.stamp()) == stamp:
            continue
        stamp = now
        try:
            before, after = watched.reload()
        except SetupError as problem:
            log.warning("the configuration from before goes on: %s", problem)
            continue
        changed = {"old_config": before, "new_config": after, "mode": "file"}
        for name, method in methods if before != after else ():
            parameters = inspect.signature(method).parameters
            takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            taken = {key: value for key, value in changed.items() if takes_any or key in parameters}
            call, shown = functools.partial(method, **taken), f"{type(plugin).__name__}.{name}"
            await _run_logged(call, run_sync, shown, "after a change of the configuration")


async def _run(method: Callable[..., Any], run_sync: RunSync) -> Any:
    returned = method() if inspect.iscoroutinefunction(method) else await run_sync(method)
    return await returned if inspect.isawaitable(returned) else returned
