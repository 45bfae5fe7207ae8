"""Applies overlays: to tools as they are registered, and to calls before they are sent.

The registry offers the changed tool, compiled and checked like any declaration, and remembers the original in it. A
call is validated as the tool is offered; then its arguments are turned into those of the author, and validated again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolbus.bus.calls.call import Call, Interceptor
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.calls.refusals import Refused
from toolbus.bus.catalog.entry import CompiledTool, Declaration, Entry, Handler, compile_tool, is_operators
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.catalog.schema import load_arguments
from toolbus.common.text import list_names, quote
from toolbus.errors import Code, InvalidTool
from toolbus.parts.overlays.settings import HINTS, Argument, Overlay
from toolbus.protocol.tool import MAX_LEVEL, Annotations, Limits, Tool
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.overlays")

NOTE = "an overlay of the operator changed the arguments"


class Overlays(Interceptor):
    """The overlays of one bus: an `Interceptor`, and what the registry asks how a tool is offered."""

    def __init__(self, overlays: Mapping[str, Overlay], registry: Registry, dispatcher: Dispatcher, limits: Limits):
        self._registry = registry
        self._dispatcher = dispatcher
        self._limits = limits
        self._listed: dict[str, str] = {}  # the names of overlaid tools as they are without their overlays
        self._first: dict[str, str] = {}  # the fingerprints of originals as they were first seen
        self._problems: dict[str, str] = {}  # why overlays do not fit, by the tools that they are for
        self.of: Mapping[str, Overlay] = {}
        self._put_in_force(overlays)

    def __repr__(self) -> str:
        return f"<Overlays {len(self.of)}>"

    def _put_in_force(self, overlays: Mapping[str, Overlay]) -> None:
        self.of = overlays
        self._registry.renamed = {key: overlay.name for key, overlay in overlays.items() if overlay.name}

    def change(self, overlays: Mapping[str, Overlay]) -> list[str]:
        """Replaces the overlays. Returns the tools that are offered otherwise from now on."""
        before = self.of
        changed = [key for key in {**before, **overlays} if before.get(key) != overlays.get(key)]
        again: list[tuple[Handler, CompiledTool, bool, str | None]] = []
        for key in changed:
            source, _, name = key.rpartition(":")
            for entry in self._registry.entries_of(source, name):
                qualified = self._listed.get(key, entry.name).startswith(f"{source}:")
                for declaration in list(entry.declarations.values()):
                    item = declaration.original or _compiled(declaration)
                    again += [(handler, item, qualified, entry.table.role) for handler in declaration.handlers]
        for handler, item, _, _ in again:
            self._registry.withdraw(handler, names={item.tool.name})
        for key in changed:
            self._listed.pop(key, None)
            self._problems.pop(key, None)
        self._put_in_force(overlays)
        for handler, item, qualified, role in again:
            self._registry.register(handler, [item], qualified=qualified, roles=[role])
        return changed

    # -- as tools are registered ---------------------------------------------------------------------------------------

    def apply(self, handler: Handler, item: CompiledTool, name: str) -> tuple[CompiledTool, str]:
        """Returns how a handler's tool is offered, and under which name."""
        key = f"{handler.source}:{item.tool.name}"
        overlay = self.of.get(key)
        if overlay is None or is_operators(handler.source):
            return item, name
        self._listed[key] = name
        warnings = [f"an overlay changes it: {changes_of(overlay)}"]
        first = overlay.original or self._first.setdefault(key, item.tool.schema_hash)
        if first != item.tool.schema_hash:
            warnings.append(
                f"it changed since its overlay was written, from {first} to {item.tool.schema_hash}: compare them, and "
                f'write original = "{item.tool.schema_hash}" into the overlay'
            )
        self._problems.pop(key, None)
        try:
            overlaid = compile_tool(overlaid_tool(item.tool, overlay), self._limits)
        except (InvalidTool, ValueError) as problem:
            self._problems[key] = str(problem)
            warnings.append(f"its overlay does not fit, so calls are refused: {problem}")
            overlaid = item
        checker = overlaid.checker if item.checker is not None else None
        changed = replace(item, tool=overlaid.tool, checker=checker, original=item)
        return replace(changed, warnings=(*item.warnings, *warnings)), overlay.name or name

    # -- the interceptor -----------------------------------------------------------------------------------------------

    def before(self, calls: list[Call], now: float) -> list[Call]:
        """Turns arguments into those of the author, and answers calls of retired tools."""
        passed = []
        for call in calls:
            overlay = self._overlay_of(call.entry) if call.declaration.original is not None else None
            if overlay is None:
                passed.append(call)
                continue
            try:
                if overlay.has_answer:
                    answer = pb.ToolResult(call_id=call.id, output_json=json.dumps(overlay.answer))
                    self._dispatcher.results(call.handler, [answer], now)
                    continue
                self._turn(call, overlay)
                passed.append(call)
            except Refused as refused:
                self._dispatcher.endings.refuse(call, refused.error, now)
        return passed

    def _overlay_of(self, entry: Entry) -> Overlay | None:
        return self.of.get(f"{entry.source}:{entry.bare_name}")

    def _turn(self, call: Call, overlay: Overlay) -> None:
        problem = self._problems.get(f"{call.entry.source}:{call.entry.bare_name}")
        if problem is not None:
            text = f"the operator's overlay of {quote(call.entry.name)} does not fit the tool: {problem}"
            raise Refused(Code.UNAVAILABLE, text)
        if not overlay.arguments:
            return
        given = load_arguments(call.arguments_json or "{}")
        arguments = turned(given if isinstance(given, dict) else {}, overlay.arguments)
        text = json.dumps(arguments, separators=(",", ":"))
        self._dispatcher.arguments.replace(call, text, NOTE)

    # -- explanations --------------------------------------------------------------------------------------------------

    def explained(self, entry: Entry) -> str:
        """Returns what an overlay changes in a tool, and what its author declared; "" without one."""
        overlay, declaration = self._overlay_of(entry), entry.current or entry.suspended
        original = declaration.original if declaration is not None else None
        if overlay is None or original is None:
            return ""
        tool = original.tool
        arguments = list_names(tool.parameters.get("properties") or {}) or "none"
        return (
            f"{changes_of(overlay)}; the author declares {quote(tool.name)}, {quote(tool.description)}, arguments "
            f"{arguments}, fingerprint {tool.schema_hash}"
        )


def _compiled(declaration: Declaration) -> CompiledTool:
    tool = declaration.tool
    rest = declaration.warnings, declaration.output_checker
    return CompiledTool(tool, declaration.checker, declaration.strips, tool, *rest)


def changes_of(overlay: Overlay) -> str:
    """Returns what an overlay changes, as a list of words."""
    words = [word for word in ("name", "title", "description", "hints", "min_level") if getattr(overlay, word)]
    words += ["hidden"] * overlay.hidden + ["a static answer"] * overlay.has_answer
    for name, argument in overlay.arguments.items():
        how = "fixed" if argument.has_fixed else "hidden" if argument.hidden else ""
        words.append(f"argument {name} ({how or (f'as {argument.name}' if argument.name else 'description')})")
    return ", ".join(words) or "nothing"


def overlaid_tool(tool: Tool, overlay: Overlay) -> Tool:
    """Returns a tool as an overlay offers it.

    Raises:
        InvalidTool: the overlay makes an invalid tool of it.
        ValueError: it names an argument that the tool does not have, or one that callers have to give.
    """
    annotations, trusted = tool.annotations, tool.hints_trusted
    if overlay.hints:
        own = {hint: getattr(annotations, hint) if trusted else None for hint in HINTS}
        annotations, trusted = Annotations(**{**own, **overlay.hints}), True
    level = MAX_LEVEL if overlay.hidden else overlay.min_level
    return replace(
        tool,
        display_name=overlay.title or tool.display_name,
        description=overlay.description or tool.description,
        annotations=annotations,
        hints_trusted=trusted,
        min_level=tool.min_level if level is None else level,
        parameters_json=_parameters(tool, overlay.arguments) if overlay.arguments else tool.parameters_json,
    )


def _parameters(tool: Tool, arguments: Mapping[str, Argument]) -> str:
    schema = dict(tool.parameters)
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    required = list(schema.get("required") or ())
    offered: dict[str, Any] = {}
    missing = [name for name in arguments if name not in properties]
    if missing:
        have = list_names(properties) or "none"
        raise ValueError(f"it names the arguments {list_names(missing)}, and the tool has {have}")
    for name, declared in properties.items():
        argument = arguments.get(name, Argument())
        if argument.hidden and not argument.has_fixed and name in required:
            raise ValueError(f"it hides the argument {name}, which the tool requires: give it a fixed value")
        if argument.hidden or argument.has_fixed:
            required = [each for each in required if each != name]
            continue
        shown = argument.name or name
        if shown in offered or (argument.name in properties and argument.name != name):
            raise ValueError(f"it names two arguments {shown}: choose another name")
        if argument.description:
            declared = {**(declared if isinstance(declared, dict) else {}), "description": argument.description}
        offered[shown] = declared
        required = [shown if each == name else each for each in required]
    schema |= {"properties": offered, "required": required}
    return json.dumps(schema, ensure_ascii=False)


def turned(given: Mapping[str, Any], arguments: Mapping[str, Argument]) -> dict[str, Any]:
    """Returns the arguments of the author for those that a caller gave.

    Raises:
        Refused: an argument that callers cannot give, or that has another name.
    """
    own = {argument.name: name for name, argument in arguments.items() if argument.name}
    closed = {name for name, argument in arguments.items() if argument.name or argument.hidden or argument.has_fixed}
    unknown = sorted((closed & given.keys()) - own.keys())
    if unknown:
        raise Refused(Code.INVALID_ARGUMENTS, f"there are no arguments {list_names(unknown)}: leave them out")
    fixed = {name: argument.fixed for name, argument in arguments.items() if argument.has_fixed}
    return {own.get(name, name): value for name, value in given.items()} | fixed
