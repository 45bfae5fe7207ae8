"""Makes tools that can be offered and run: one (`ToolSpec`), those of an object (`collect`) or a plugin (`ToolSet`).

`spec_of` joins the options of `llm_tool` with the signature of the function: the `Tool` for the bus, and how `runner`
runs it.
"""

from __future__ import annotations

import enum
import functools
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from toolbus.functions import conversion, hints
from toolbus.functions.declaration import LlmToolMeta, meta_of
from toolbus.functions.scope import ToolScope
from toolbus.normal_schema import properties_of
from toolbus.tool import Tool

# The fields that a declaration and the tool made of it have in common.
_SAME_NAMES = {each.name for each in fields(LlmToolMeta)} & {each.name for each in fields(Tool)}


class HandlerKind(enum.Enum):
    """How a handler has to be run."""

    SYNC = "sync"
    ASYNC = "async"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async generator"


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool and how to run it.

    Attributes:
        tool: the declaration, for the bus and models.
        handler: the function, bound to its object if it has one.
        kind: how it has to be run.
        scope: the name of the parameter that gets the `ToolScope`; empty without one.
        names: the keywords that it takes; None if it takes any.
        required: the keywords that it requires.
        converters: functions by argument that convert it to the hinted type, if the schema came from hints.
        defaults: functions by argument that make its default, for arguments without a default in Python.
        takes_dict: whether the handler takes all arguments as one dict (`ToolDefinition`) instead of as keywords.
        prepare: changes the arguments before they are checked and converted; None changes nothing.
        is_async: whether cancelling a call cancels a task; a sync handler can only check its scope.
    """

    tool: Tool
    handler: Callable[..., Any] = field(compare=False)
    kind: HandlerKind
    scope: str = ""
    names: frozenset[str] | None = None
    required: frozenset[str] = frozenset()
    converters: tuple[tuple[str, conversion.Converter], ...] = ()
    defaults: tuple[tuple[str, Callable[[], Any]], ...] = ()
    takes_dict: bool = False
    prepare: Callable[[dict[str, Any], ToolScope], dict[str, Any]] | None = field(default=None, compare=False)
    is_async: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_async", self.kind in (HandlerKind.ASYNC, HandlerKind.ASYNC_GENERATOR))


def spec_of(handler: Callable[..., Any], meta: LlmToolMeta | None = None, *, takes_dict: bool = False) -> ToolSpec:
    """Returns the specification of a decorated function or bound method, or of any callable with its record.

    Raises:
        TypeError: the function is not decorated, or has parameters that no keyword can fill.
        InvalidTool: the record makes no tool.
    """
    meta = meta or meta_of(handler)
    if meta is None:
        raise TypeError(f"{handler!r} is not a tool: put @llm_tool above it")
    signature = hints.signature_of(handler)
    if signature.positional_only and not takes_dict:
        raise TypeError(
            f"tool {meta.name!r}: parameter {signature.positional_only[0]!r} is positional-only, but arguments come by "
            f"name: remove the '/' from the signature of {getattr(handler, '__qualname__', handler)}"
        )
    declared = () if meta.declared_json is None else properties_of(meta.parameters)
    scope = signature.scope
    if scope in declared:
        scope = ""  # the author declared an argument of that name: it is the model's
    names = frozenset(each.name for each in signature.parameters) | ({signature.scope} - {scope, ""})
    tool = _tool(meta, meta.declared_json or json.dumps(hints.parameters_schema(handler), ensure_ascii=False))
    if meta.output_from_hints:
        tool = replace(tool, output_schema_json=json.dumps(meta.output_schema, ensure_ascii=False))
    return ToolSpec(
        tool=tool,
        handler=handler,
        kind=_kind(handler),
        scope=scope,
        names=None if signature.any_keyword or takes_dict else names,
        required=frozenset()
        if takes_dict
        else frozenset(each.name for each in signature.parameters if each.default is inspect.Parameter.empty),
        converters=() if meta.declared_json is not None or takes_dict else converters_of(signature),
        defaults=() if takes_dict else signature.defaults,
        takes_dict=takes_dict,
    )


def spec_of_method(method: Callable[..., Any]) -> ToolSpec:
    """Returns the specification of a decorated method; its function, with ``self`` first, is read once per process.

    Every bus offers the same two dozen methods, and reading their hints takes ten milliseconds.
    """
    function = getattr(method, "__func__", None)
    return spec_of(method) if function is None else replace(_spec_of_function(function), handler=method)


@functools.lru_cache
def _spec_of_function(function: Callable[..., Any]) -> ToolSpec:
    return spec_of(function)


def collect(owner: object) -> list[ToolSpec]:
    """Returns an object's decorated methods, base classes first, in the order of the source.

    A method that overrides another takes its place in that order; if it has no decorator, the tool is removed.
    Properties are not evaluated.
    """
    metas: dict[str, LlmToolMeta | None] = {}
    for kind in reversed(type(owner).__mro__):
        for name, raw in vars(kind).items():
            meta = None if isinstance(raw, property | type) else meta_of(raw)
            if meta is not None or name in metas:
                metas[name] = meta
    return [spec_of(getattr(owner, name), meta) for name, meta in metas.items() if meta is not None]


class ToolSet:
    """The tools that one plugin offers, in order; safe from any thread.

    Attributes:
        on_change: called after each change, without the lock and on the thread that made it, with the tool's name and
            its spec, or None for a withdrawn tool. None until a connection listens.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[str, ToolSpec | None], None] | None = None
        self._lock = threading.Lock()
        self._specs: dict[str, ToolSpec] = {}

    def __repr__(self) -> str:
        return f"<ToolSet of {len(self._specs)}: {', '.join(list(self._specs)[:10])}>"

    def __iter__(self) -> Iterator[ToolSpec]:
        return iter(list(self._specs.values()))

    def __len__(self) -> int:
        return len(self._specs)

    def get(self, name: str) -> ToolSpec | None:
        """Returns a tool by its bare name; None if there is no such tool."""
        return self._specs.get(name)

    def add(self, spec: ToolSpec, *, replace: bool = False) -> bool:
        """Offers a tool; returns False, and changes nothing, if the name is taken and not to be replaced."""
        with self._lock:
            if not replace and spec.tool.name in self._specs:
                return False
            self._specs[spec.tool.name] = spec
        self._notify(spec.tool.name, spec)
        return True

    def remove(self, name: str) -> bool:
        """Withdraws a tool; returns whether it existed."""
        with self._lock:
            existed = self._specs.pop(name, None) is not None
        if existed:
            self._notify(name, None)
        return existed

    def _notify(self, name: str, spec: ToolSpec | None) -> None:
        if self.on_change is not None:
            self.on_change(name, spec)


def _kind(handler: Any) -> HandlerKind:
    target = handler
    while isinstance(target, functools.partial):
        target = target.func
    if not inspect.isroutine(target) and not isinstance(target, type):
        target = getattr(target, "__call__", target)  # noqa: B004  # an object with an async __call__
    if inspect.isasyncgenfunction(target):
        return HandlerKind.ASYNC_GENERATOR
    if inspect.iscoroutinefunction(target):
        return HandlerKind.ASYNC
    return HandlerKind.GENERATOR if inspect.isgeneratorfunction(target) else HandlerKind.SYNC


def converters_of(signature: hints.Signature) -> tuple[tuple[str, conversion.Converter], ...]:
    """Returns the converters of the arguments that need one."""
    converters = (
        (each.name, conversion.converter(signature.hints.get(each.name, Any))) for each in signature.parameters
    )
    return tuple((name, own) for name, own in converters if own is not None)


def _tool(meta: LlmToolMeta, parameters_json: str) -> Tool:
    return Tool(
        parameters_json=parameters_json,
        timeout_seconds=meta.timeout,
        idle_timeout_seconds=meta.idle_timeout,
        **{name: getattr(meta, name) for name in _SAME_NAMES},
    )
