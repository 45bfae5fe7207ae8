"""Makes tools of a plugin's entries: methods with `plugin_entry`, which N.E.K.O.'s agent calls and no model sees.

`toolbus run --entries` offers them. An entry's id is the tool's name, its `input_schema` or the schema of its `params`
model the schema of the arguments; without either they are read from the type hints.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from toolbus.functions import hints
from toolbus.functions.declaration import describe
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import ToolSpec, spec_of
from toolbus.neko.marks import ENTRY, Mark, marked_methods
from toolbus.neko.plugin_base import NekoPluginBase, tools_of
from toolbus.tool import DEFAULT_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS

log = logging.getLogger(__name__)

_CONTEXT = "_ctx"  # what that system hands to entries beside the arguments


def offer_entries(plugin: NekoPluginBase) -> list[str]:
    """Adds a tool for each entry of a plugin and of its routers; returns the names of their methods.

    An entry whose name is a tool already, or that makes no tool, is skipped; the latter with a warning.
    """
    tools, offered = tools_of(plugin), []
    for owner in (plugin, *(plugin.get_router(name) for name in plugin.list_routers())):
        for method, mark in marked_methods(owner):
            if mark.kind != ENTRY:
                continue
            try:
                spec = _spec(plugin, owner, method, mark)
            except (TypeError, ValueError) as problem:
                log.warning("%s: the entry %s is not offered: %s", plugin.plugin_id, method, problem)
                continue
            if tools.add(spec):
                offered.append(method)
    return offered


def _spec(plugin: NekoPluginBase, owner: Any, method: str, mark: Mark) -> ToolSpec:
    options, handler = mark.options, getattr(owner, method)
    model = options.get("params")
    schema = plugin.i18n.resolve(options.get("input_schema"))
    if schema is None:
        schema = _schema(handler, model)
    prefix = getattr(owner, "prefix", "") if owner is not plugin else ""
    described = plugin.i18n.resolve(options.get("description") or options.get("name") or "")
    timeout = options.get("timeout")
    seconds = float(timeout) if isinstance(timeout, int | float) and timeout > 0 else DEFAULT_TIMEOUT_SECONDS
    meta = describe(
        handler,
        name=re.sub(r"[^A-Za-z0-9_.-]", "_", f"{prefix}{options.get('id') or method}")[:64],
        description=str(described),
        parameters=schema,
        timeout=min(seconds, MAX_TIMEOUT_SECONDS),
    )
    return replace(spec_of(handler, meta), prepare=_preparing(handler, model))


def _schema(handler: Any, model: Any) -> Any:
    """Returns the schema of a model or of a handler's hints; None leaves it to the hints as they are."""
    if callable(of_model := getattr(model, "model_json_schema", None)):
        return of_model()
    if _CONTEXT not in inspect.signature(handler).parameters:
        return None
    schema = hints.parameters_schema(handler)
    schema["properties"].pop(_CONTEXT, None)
    schema["required"] = [each for each in schema.get("required", ()) if each != _CONTEXT]
    return schema


def _preparing(handler: Any, model: Any) -> Callable[[dict[str, Any], ToolScope], dict[str, Any]] | None:
    """Returns what makes an entry's arguments of a tool's; None where they are the same."""
    wants_context = _CONTEXT in inspect.signature(handler).parameters
    parameter = _model_parameter(handler, model) if model is not None else None
    if parameter is None and not wants_context:
        return None

    def prepare(arguments: dict[str, Any], scope: ToolScope) -> dict[str, Any]:
        ready = arguments if parameter is None else {parameter: model.model_validate(arguments)}
        return {**ready, _CONTEXT: {"user_id": scope.context.user_id}} if wants_context else ready

    return prepare


def _model_parameter(handler: Any, model: Any) -> str | None:
    """Returns the parameter that gets all arguments as one object of a model; None where each has its own."""
    parameters = [each for each in inspect.signature(handler).parameters.values() if each.name != _CONTEXT]
    named = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if "params" in named:
        return "params"
    fields: Mapping[str, Any] = getattr(model, "model_fields", {})
    return named[0] if len(named) == 1 and named[0] not in fields else None
