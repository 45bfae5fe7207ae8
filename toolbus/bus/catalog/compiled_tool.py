"""Compiles tools for the registry: checks them and their schemas, all or none.

A *compiled tool* becomes a declaration when a handler registers it. Here, and nowhere else, a tool gets the schema that
is listed, exported, hashed and checked: the normal form of what its author declared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolbus.bus.catalog.schema import ArgumentChecker, SchemaFault, compile_schema
from toolbus.errors import InvalidTool, LimitExceeded
from toolbus.tool import USER_KEYS, Limits, Tool


@dataclass(frozen=True, slots=True)
class CompiledTool:
    """A tool that was checked and compiled, ready to be registered."""

    tool: Tool  # with the normal form of its schema
    checker: ArgumentChecker | None  # None: arguments are not validated
    strips: frozenset[str]  # keys that are taken out of the arguments
    declared: Tool  # as its author declared it
    warnings: tuple[str, ...] = ()  # what the normal form reads otherwise than it is declared


def compile_tools(
    tools: Sequence[Tool], limits: Limits, *, checks_arguments: bool = True, qualified: bool = False
) -> list[CompiledTool]:
    """Compiles tools that are to be registered together.

    Args:
        checks_arguments: whether calls are validated, for tools that do not say so themselves.
        qualified: whether they belong to an extension: `USER_KEYS` never reach them then, even if schemas declare them.

    Raises:
        InvalidTool: naming every fault of every tool.
        LimitExceeded: more tools than a session may have.
    """
    if len(tools) > limits.tools:
        raise LimitExceeded("tools", limits.tools, f"{len(tools)} tools are too many for one session")
    faults: list[str] = []
    compiled: list[CompiledTool] = []
    seen: set[tuple[str, str | None]] = set()
    for tool in tools:
        if (tool.name, tool.role) in seen:
            faults.append(f"tool {tool.name!r} is declared twice: drop one of them")
        seen.add((tool.name, tool.role))
        try:
            checker = compile_schema(tool.parameters_json, limits)
        except SchemaFault as fault:
            faults.append(f"tool {tool.name!r}: {fault}")
            continue
        declared, tool = tool, _normal(tool, checker)
        is_extension = qualified or tool.council_eligible or tool.inline_available
        properties = None if is_extension else tool.parameters.get("properties")
        strips = USER_KEYS - set(properties) if isinstance(properties, dict) else USER_KEYS
        validates = checks_arguments if tool.validate is None else tool.validate
        compiled.append(CompiledTool(tool, checker if validates else None, strips, declared, checker.warnings))
    if faults:
        raise InvalidTool(faults)
    return compiled


def unchecked(tool: Tool, limits: Limits) -> CompiledTool:
    """Returns a tool whose arguments are not checked: a tool that came by REST gets them as they are (REST-40).

    Whatever its schema is, the tool is taken; models are offered the normal form, where there is one.
    """
    try:
        checker = compile_schema(tool.parameters_json, limits)
    except SchemaFault as fault:
        return CompiledTool(tool, None, frozenset(), tool, (f"{fault}; models are offered what is left of it",))
    return CompiledTool(_normal(tool, checker), None, frozenset(), tool, checker.warnings)


def _normal(tool: Tool, checker: ArgumentChecker) -> Tool:
    return replace(tool, parameters_json=checker.text) if checker.warnings else tool
