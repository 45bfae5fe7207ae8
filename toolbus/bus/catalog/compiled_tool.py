"""Compiles tools for the registry: checks them and their schemas, all or none.

A *compiled tool* becomes a declaration when a handler registers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolbus.bus.catalog.schema import ArgumentChecker, SchemaFault, compile_schema
from toolbus.errors import InvalidTool, LimitExceeded
from toolbus.tool import USER_KEYS, Limits, Tool


@dataclass(frozen=True, slots=True)
class CompiledTool:
    """A tool that was checked and compiled, ready to be registered."""

    tool: Tool
    checker: ArgumentChecker | None  # None: arguments are not validated
    strips: frozenset[str]  # keys that are taken out of the arguments


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
        is_extension = qualified or tool.council_eligible or tool.inline_available
        declared = None if is_extension else tool.parameters.get("properties")
        strips = USER_KEYS - set(declared) if isinstance(declared, dict) else USER_KEYS
        validates = checks_arguments if tool.validate is None else tool.validate
        compiled.append(CompiledTool(tool, checker if validates else None, strips))
    if faults:
        raise InvalidTool(faults)
    return compiled
