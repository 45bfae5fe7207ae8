"""Makes tools of a plugin's entries: methods with `plugin_entry`, which N.E.K.O.'s agent calls and no model sees.

`toolbus run --entries` offers them. An entry's id is the tool's name, its `input_schema` or the schema of its `params`
model the schema of the arguments; without either they are read from the type hints. Of its result, models see the
fields in `llm_result_fields`.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, overload

from toolbus.common.text import list_names
from toolbus.errors import ToolBusError
from toolbus.functions import hints, reply
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import ToolSpec, describe, spec_of
from toolbus.parts.moving.neko.plugin_base import NekoPluginBase, as_sent, tools_of
from toolbus.parts.moving.neko.plugin_lifecycle import NEVER_CALLED, moment_of, routines_of
from toolbus.parts.moving.neko.sdk_errors import EntryConflictError
from toolbus.protocol.tool import DEFAULT_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS, Result

# `toolbus run` logs the marked methods once, so that their author knows which of them are never called.

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
    if not tools and ENTRY in by_kind:
        entries = list_names(dict.fromkeys(by_kind[ENTRY]), 10)
        return f"it offers no tool, only entries ({entries}): run it with --entries to offer them to models"
    listed = "; ".join(f"@{kind} {', '.join(dict.fromkeys(names))}" for kind, names in by_kind.items())
    entries = "Run it with --entries, or put" if ENTRY in by_kind else "Put"
    return f"these methods are called by N.E.K.O. only: {listed}. {entries} @llm_tool above one, to offer it to models"


def _mark(function: Any, mark: Mark) -> Any:
    inner = getattr(function, "__func__", function)  # a staticmethod below the decorator
    setattr(inner, _ATTRIBUTE, (*getattr(inner, _ATTRIBUTE, ()), mark))
    return function


log = logging.getLogger("toolbus.neko.entries")

_CONTEXT = "_ctx"  # the parameter for the context, which that system adds to the arguments
# The keys of a result around its data: of `ok()`, `fail()`, `finish()` and of a tool's own envelope.
_ENVELOPE = frozenset(
    ("success", "data", "message", "error", "code", "time", "trace_id", "meta", "output", "is_error", "images")
)


def offer_entries(plugin: NekoPluginBase) -> list[str]:
    """Adds a tool for each entry of a plugin and of its routers; returns the names of their methods.

    Entries that the plugin registers while it runs become tools too. An entry is skipped if a tool has its name, or,
    with a warning, if it makes no valid tool.
    """
    tools, offered = tools_of(plugin), []
    for owner in (plugin, *(plugin.get_router(name) for name in plugin.list_routers())):
        prefix = getattr(owner, "prefix", "") if owner is not plugin else ""
        for method, mark in marked_methods(owner):
            if mark.kind != ENTRY:
                continue
            name = f"{prefix}{mark.options.get('id') or method}"
            spec = _spec(plugin, getattr(owner, method), name, mark.options)
            if spec is not None and tools.add(spec):
                offered.append(method)
    dynamic = DynamicEntries(plugin)
    for name in DYNAMIC:
        setattr(plugin, name, getattr(dynamic, name))
    return offered


class DynamicEntries:
    """The entries that a plugin registers while it runs, as tools; its methods become those of the plugin.

    Args:
        plugin: the plugin.
    """

    def __init__(self, plugin: NekoPluginBase) -> None:
        self._plugin = plugin
        self._specs: dict[str, ToolSpec] = {}

    def __repr__(self) -> str:
        return f"<DynamicEntries {', '.join(self._specs)}>"

    def register_dynamic_entry(
        self,
        entry_id: str,
        handler: Any,
        name: str = "",
        description: str = "",
        input_schema: dict[str, Any] | None = None,
        **options: Any,
    ) -> bool:
        """Offers an entry; returns False if it makes no valid tool, or another tool has its name.

        Raises:
            EntryConflictError: the plugin has registered an entry of that id.
        """
        if entry_id in self._specs:
            raise EntryConflictError(entry_id)
        described = {"name": name, "description": description, "input_schema": input_schema, **options}
        spec = _spec(self._plugin, handler, entry_id, described)
        if spec is None or not tools_of(self._plugin).add(spec):
            return False
        self._specs[entry_id] = spec
        return True

    def unregister_dynamic_entry(self, entry_id: str) -> bool:
        """Withdraws an entry; returns whether there was one of that id."""
        existed = self.disable_entry(entry_id)
        self._specs.pop(entry_id, None)
        return existed

    def enable_entry(self, entry_id: str) -> bool:
        """Offers a registered entry again; returns whether there is one of that id."""
        spec = self._specs.get(entry_id)
        if spec is not None:
            tools_of(self._plugin).add(spec)
        return spec is not None

    def disable_entry(self, entry_id: str) -> bool:
        """Withdraws a registered entry until it is enabled; returns whether there is one of that id."""
        spec = self._specs.get(entry_id)
        if spec is not None and self.is_entry_enabled(entry_id):  # else another tool may have the name
            tools_of(self._plugin).remove(spec.tool.name)
        return spec is not None

    def is_entry_enabled(self, entry_id: str) -> bool | None:
        """Tells whether an entry is offered; None if there is no entry of that id."""
        spec = self._specs.get(entry_id)
        return None if spec is None else tools_of(self._plugin).get(spec.tool.name) is spec


DYNAMIC = ("register_dynamic_entry", "unregister_dynamic_entry", "enable_entry", "disable_entry", "is_entry_enabled")


def _spec(plugin: NekoPluginBase, handler: Any, entry_id: str, options: Mapping[str, Any]) -> ToolSpec | None:
    """Returns an entry as a tool; None, with a warning, if it makes no valid one."""
    model = options.get("params")
    timeout = options.get("timeout")
    seconds = float(timeout) if isinstance(timeout, int | float) and timeout > 0 else DEFAULT_TIMEOUT_SECONDS
    try:
        schema = plugin.i18n.resolve(options.get("input_schema"))
        meta = describe(
            handler,
            name=re.sub(r"[^A-Za-z0-9_.-]", "_", entry_id)[:64],
            description=str(plugin.i18n.resolve(options.get("description") or options.get("name") or "")),
            parameters=_schema(handler, model) if schema is None else schema,
            timeout=min(seconds, MAX_TIMEOUT_SECONDS),
        )
        spec = as_sent(spec_of(handler, meta))
        return replace(
            spec,
            prepare=_preparing(handler, model, any_keyword=spec.names is None and spec.rest is None),
            handler=_selecting(handler, options.get("llm_result_fields")),
        )
    except (TypeError, ValueError, ToolBusError) as problem:
        log.warning("%s: the entry %s is not offered: %s", plugin.plugin_id, entry_id, problem)
        return None


def _schema(handler: Any, model: Any) -> Any:
    """Returns the schema of a model, or of a handler's hints without the context; None means the hints as they are."""
    if callable(of_model := getattr(model, "model_json_schema", None)):
        return of_model()
    if _CONTEXT not in inspect.signature(handler).parameters:
        return None
    schema = hints.parameters_schema(handler)
    schema["properties"].pop(_CONTEXT, None)
    schema["required"] = [each for each in schema.get("required", ()) if each != _CONTEXT]
    return schema


def _preparing(
    handler: Any, model: Any, *, any_keyword: bool
) -> Callable[[dict[str, Any], ToolScope], dict[str, Any]] | None:
    """Returns a function that makes the entry's arguments from the tool's; None if they are the same."""
    wants_context = any_keyword or _CONTEXT in inspect.signature(handler).parameters
    parameter = _model_parameter(handler, model) if model is not None else None
    if parameter is None and not wants_context:
        return None

    def prepare(arguments: dict[str, Any], scope: ToolScope) -> dict[str, Any]:
        ready = arguments if parameter is None else {parameter: model.model_validate(arguments)}
        return {**ready, _CONTEXT: _context(scope)} if wants_context else ready

    return prepare


def _context(scope: ToolScope) -> dict[str, str]:
    """Returns what that system tells an entry about its call, as far as it is known here."""
    attributes = scope.context.attributes
    known = {
        "user_id": scope.context.user_id,
        "lanlan_name": attributes.get("lanlan_name") or scope.role,
        "run_id": scope.request_id,
        "conversation_id": attributes.get("conversation_id") or scope.channel_id,
    }
    return {key: value for key, value in known.items() if value or key == "user_id"}


def _selecting(handler: Any, fields: Any) -> Any:
    """Returns a handler whose result has only some fields, for the model; the same handler if all are for it."""
    if not isinstance(fields, list | tuple) or inspect.isgeneratorfunction(handler):
        return handler
    names = [str(each) for each in fields]

    @functools.wraps(handler)
    async def select_later(returned: Any) -> Any:
        return _selected(await returned, names)

    @functools.wraps(handler)
    async def run_async(**arguments: Any) -> Any:
        return _selected(await handler(**arguments), names)

    @functools.wraps(handler)
    def run(**arguments: Any) -> Any:
        returned = handler(**arguments)
        return select_later(returned) if inspect.isawaitable(returned) else _selected(returned, names)

    return run_async if inspect.iscoroutinefunction(handler) else run


def _selected(returned: Any, names: Sequence[str]) -> Any:
    """Returns a result with only some fields: of its data, if it is an envelope of that system."""
    if isinstance(returned, reply.Ok):
        return reply.Ok(_selected(returned.value, names))
    if isinstance(returned, reply.Reply):
        return replace(returned, output=_selected(returned.output, names))
    if isinstance(returned, Result):
        return replace(returned, output_json=reply.dump_output(_selected(returned.output, names)))
    if returned is None or isinstance(returned, str | int | float | reply.Err):
        return returned
    value = json.loads(reply.dump_output(returned))
    if isinstance(value, list):
        return [_selected(each, names) for each in value]
    if not isinstance(value, dict):
        return value
    for data in ("output", "data"):
        if data in value and value.keys() <= _ENVELOPE and _ENVELOPE.isdisjoint(names):
            return {**value, data: _selected(value[data], names)}
    if value.get("is_error"):  # what it says of the failure is for the model
        return value
    return {name: value[name] for name in names if name in value}


def _model_parameter(handler: Any, model: Any) -> str | None:
    """Returns the parameter that gets all arguments as one object of a model; None if each has its own."""
    parameters = [each for each in inspect.signature(handler).parameters.values() if each.name != _CONTEXT]
    named = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if "params" in named:
        return "params"
    fields: Mapping[str, Any] = getattr(model, "model_fields", {})
    return named[0] if len(named) == 1 and named[0] not in fields else None
