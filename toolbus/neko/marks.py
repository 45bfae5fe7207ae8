"""Provides the decorators of N.E.K.O. that do not concern models: each marks a method and does not change it.

`toolbus run` logs the marked methods once, so that their author knows which of them are never called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from toolbus.neko.plugin_lifecycle import NEVER_CALLED, moment_of, routines_of

F = TypeVar("F", bound=Callable[..., Any])

ENTRY = "plugin_entry"
_ATTRIBUTE = "__toolbus_marks__"  # on a function: a tuple of Mark


@dataclass(frozen=True, slots=True)
class Mark:
    """The mark of one decorator on a method.

    Attributes:
        kind: the decorator's name.
        options: its arguments.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)


class Marking:
    """A decorator that marks a method; with or without arguments.

    Args:
        kind: its name.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<decorator {self.kind}>"

    @overload
    def __call__(self, function: F, /) -> F: ...
    @overload
    def __call__(self, /, *args: Any, **options: Any) -> Callable[[F], F]: ...
    def __call__(self, function: Any = None, /, *args: Any, **options: Any) -> Any:
        """Marks a function, or returns a decorator that does."""
        if callable(function) and not options:
            return _mark(function, Mark(self.kind))
        return lambda inner: _mark(inner, Mark(self.kind, options))


plugin_entry = Marking(ENTRY)
on_event = Marking("on_event")
message = Marking("message")
custom_event = Marking("custom_event")
hook = Marking("hook")
before_entry = Marking("before_entry")
after_entry = Marking("after_entry")
around_entry = Marking("around_entry")
replace_entry = Marking("replace_entry")
quick_action = Marking("quick_action")
KINDS = (
    *(ENTRY, "on_event", "message", "custom_event", "hook", "before_entry", "after_entry", "around_entry"),
    *("replace_entry", "quick_action", "ui.action", "ui.context"),
)


class ui:
    """The decorators for windows: `ui.action` and `ui.context`."""

    action = Marking("ui.action")
    context = Marking("ui.context")


def marked_methods(owner: object) -> Iterator[tuple[str, Mark]]:
    """Yields names and marks of an object's methods, base classes first, with unused lifecycle methods."""
    for name, raw in routines_of(type(owner)).items():
        for mark in getattr(raw, _ATTRIBUTE, ()):
            yield name, mark
        if (moment := moment_of(raw)) in NEVER_CALLED:
            yield name, Mark(f'lifecycle(id="{moment}")')


def describe_unused(owner: object, tools: Set[str]) -> str:
    """Returns one text about an object's methods that only N.E.K.O. calls; empty without such methods.

    Args:
        tools: names of methods that are tools, which toolbus calls.
    """
    by_kind: dict[str, list[str]] = {}
    for name, mark in marked_methods(owner):
        if name not in tools:
            by_kind.setdefault(mark.kind, []).append(name)
    if not by_kind:
        return ""
    listed = "; ".join(f"@{kind} {', '.join(dict.fromkeys(names))}" for kind, names in by_kind.items())
    entries = "Run it with --entries, or put" if ENTRY in by_kind else "Put"
    return f"these methods are called by N.E.K.O. only: {listed}. {entries} @llm_tool above one, to offer it to models"


def _mark(function: Any, mark: Mark) -> Any:
    inner = getattr(function, "__func__", function)  # a staticmethod below the decorator
    setattr(inner, _ATTRIBUTE, (*getattr(inner, _ATTRIBUTE, ()), mark))
    return function
