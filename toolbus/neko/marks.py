"""Provides the decorators of N.E.K.O. that mean nothing to models: they leave a mark, and the method as it is.

`toolbus run` names the marked methods once, so that their author knows which of them are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

from toolbus.neko.plugin_lifecycle import NEVER_CALLED, moment_of, routines_of

ENTRY = "plugin_entry"
_ATTRIBUTE = "__toolbus_marks__"  # on a function: a tuple of Mark


@dataclass(frozen=True, slots=True)
class Mark:
    """What one decorator left on a method.

    Attributes:
        kind: the decorator's name.
        options: its arguments.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)


def marking(kind: str) -> Callable[..., Any]:
    """Returns a decorator of a name; it stands with or without arguments."""

    def decorator(function: Any = None, /, *args: Any, **options: Any) -> Any:
        if callable(function) and not options:
            return _mark(function, Mark(kind))
        return lambda inner: _mark(inner, Mark(kind, options))

    decorator.__name__ = kind
    return decorator


plugin_entry = marking(ENTRY)
on_event = marking("on_event")
message = marking("message")
custom_event = marking("custom_event")
hook = marking("hook")
before_entry = marking("before_entry")
after_entry = marking("after_entry")
around_entry = marking("around_entry")
replace_entry = marking("replace_entry")
quick_action = marking("quick_action")
KINDS = (
    *(ENTRY, "on_event", "message", "custom_event", "hook", "before_entry", "after_entry", "around_entry"),
    *("replace_entry", "quick_action", "ui.action", "ui.context"),
)


class ui:
    """The decorators for windows: `ui.action` and `ui.context`."""

    action = staticmethod(marking("ui.action"))
    context = staticmethod(marking("ui.context"))


def marked_methods(owner: object) -> Iterator[tuple[str, Mark]]:
    """Yields names and marks of an object's methods, base classes first, lifecycle methods that nothing calls too."""
    for name, raw in routines_of(type(owner)).items():
        for mark in getattr(raw, _ATTRIBUTE, ()):
            yield name, mark
        if (moment := moment_of(raw)) in NEVER_CALLED:
            yield name, Mark(f'lifecycle(id="{moment}")')


def describe_unused(owner: object, tools: Set[str]) -> str:
    """Returns one text about an object's methods that only N.E.K.O. calls; empty where there is none.

    Args:
        tools: names of methods that are tools: those are called here.
    """
    by_kind: dict[str, list[str]] = {}
    for name, mark in marked_methods(owner):
        if name not in tools:
            by_kind.setdefault(mark.kind, []).append(name)
    if not by_kind:
        return ""
    listed = "; ".join(f"@{kind} {', '.join(dict.fromkeys(names))}" for kind, names in by_kind.items())
    return f"these methods are called by N.E.K.O. only: {listed}. Put @llm_tool above one to offer it to models"


def _mark(function: Any, mark: Mark) -> Any:
    inner = getattr(function, "__func__", function)  # a staticmethod below the decorator
    setattr(inner, _ATTRIBUTE, (*getattr(inner, _ATTRIBUTE, ()), mark))
    return function
