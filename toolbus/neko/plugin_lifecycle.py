"""Runs the methods of a plugin object that belong to a moment of its life, and the timers between them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from toolbus.errors import SetupError
from toolbus.functions.reply import Err

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
RunSync = Callable[[Callable[[], Any]], Awaitable[Any]]

MOMENTS = ("startup", "shutdown", "reload", "freeze", "unfreeze", "config_change")
NEVER_CALLED = MOMENTS[2:]  # moments that only N.E.K.O. has
_MOMENT = "__toolbus_lifecycle__"  # on a method: one of MOMENTS


def lifecycle(*, id: str, **shown: Any) -> Callable[[F], F]:
    """Makes a method run at a moment of the plugin's life.

    Args:
        id: `startup`, before it takes calls, or `shutdown`, after its last one. `config_change`, `reload`, `freeze` and
            `unfreeze` are moments of N.E.K.O. only: their methods are never called.
        shown: what N.E.K.O. shows about it (`name`, `description`, `metadata`); not used.

    Raises:
        ValueError: another moment.
    """
    if id not in MOMENTS:
        raise ValueError(f"lifecycle id {id!r} is unknown: it must be one of {', '.join(MOMENTS)}")

    def mark(method: F) -> F:
        setattr(method, _MOMENT, id)
        return method

    return mark


async def start_plugin(plugin: object, run_sync: RunSync) -> None:
    """Runs what a plugin wants run before its first call, in the order in which it is written.

    Args:
        run_sync: runs a method that is a plain function off the loop.

    Raises:
        SetupError: a method raised or returned `Err`; the plugin must not start.
    """
    for name, method in _methods(plugin, "startup"):
        shown = f"{type(plugin).__name__}.{name}"
        try:
            returned = await _run(method, run_sync)
        except Exception as problem:
            raise SetupError(f"{shown} raised {type(problem).__name__}: {problem}") from problem
        if isinstance(returned, Err):
            raise SetupError(f"{shown} returned Err: {returned.error}")


async def stop_plugin(plugin: object, run_sync: RunSync) -> None:
    """Runs what a plugin wants run after its last call, the newest method first; failures are logged, never raised."""
    for name, method in reversed(_methods(plugin, "shutdown")):
        try:
            returned = await _run(method, run_sync)
        except Exception:
            log.exception("%s.%s failed while the plugin stopped", type(plugin).__name__, name)
            continue
        if isinstance(returned, Err):
            log.error("%s.%s returned Err: %s", type(plugin).__name__, name, returned.error)


def _methods(plugin: object, moment: str) -> list[tuple[str, Callable[..., Any]]]:
    """Returns the methods for a moment: those with `lifecycle` as written, base classes first, then `on_…`."""
    names: dict[str, bool] = {}
    for kind in reversed(type(plugin).__mro__):
        for name, raw in vars(kind).items():
            if name in names or inspect.isroutine(raw):
                names[name] = getattr(raw, _MOMENT, None) == moment
    last = {"startup": "on_start", "shutdown": "on_shutdown"}[moment]
    marked = [name for name, is_marked in names.items() if is_marked and name != last]
    return [(name, getattr(plugin, name)) for name in [*marked, last]]


async def _run(method: Callable[..., Any], run_sync: RunSync) -> Any:
    returned = method() if inspect.iscoroutinefunction(method) else await run_sync(method)
    return await returned if inspect.isawaitable(returned) else returned
