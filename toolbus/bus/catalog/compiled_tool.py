"""Compiles tools for the registry: checks them and their schemas, one by one, or all or none.

A *compiled tool* becomes a declaration when a handler registers it. Here, and nowhere else, a tool gets the schema that
is listed, exported, hashed and checked: the normal form of what its author declared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolbus.bus.catalog.schema import ArgumentChecker, SchemaFault, compile_output_schema, compile_schema
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
    output_checker: ArgumentChecker | None = None  # None: results are not checked


def compile_tool(tool: Tool, limits: Limits, *, checks_arguments: bool = True, qualified: bool = False) -> CompiledTool:
    """Compiles one tool.

    Args:
        checks_arguments: whether calls are validated, for a tool that does not say so itself.
        qualified: whether it belongs to an extension: `USER_KEYS` never reach it then, even if its schema declares
            them.

    Raises:
        InvalidTool: its schema breaks a rule.
    """
    try:
        checker = compile_schema(tool.parameters_json, limits)
    except SchemaFault as fault:
        raise InvalidTool([f"tool {tool.name!r}: {fault}"]) from None
    try:
        output = compile_output_schema(tool.output_schema_json, limits) if tool.output_schema_json else None
    except SchemaFault as fault:
        raise InvalidTool([f"tool {tool.name!r}: output {fault}"]) from None
    declared, tool = tool, _normal(tool, checker, output)
    warnings = checker.warnings
    if output is not None:
        warnings = (*warnings, *(f"output {warning}" for warning in output.warnings))
    is_extension = qualified or tool.council_eligible or tool.inline_available
    properties = None if is_extension else tool.parameters.get("properties")
    strips = USER_KEYS - set(properties) if isinstance(properties, dict) else USER_KEYS
    validates = checks_arguments if tool.validate is None else tool.validate
    validates_output = output if tool.validate_output else None
    return CompiledTool(tool, checker if validates else None, strips, declared, warnings, validates_output)


def declared_twice(name: str) -> InvalidTool:
    """Returns the fault of the second of two tools with one name and role."""
    return InvalidTool([f"tool {name!r} is declared twice: drop one of them"])


def compile_tools(
    tools: Sequence[Tool], limits: Limits, *, checks_arguments: bool = True, qualified: bool = False
) -> list[CompiledTool]:
    """Compiles tools that are to be registered together, all or none.

    Args:
        checks_arguments, qualified: as for `compile_tool`.

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
            faults.extend(declared_twice(tool.name).faults)
        seen.add((tool.name, tool.role))
        try:
            compiled.append(compile_tool(tool, limits, checks_arguments=checks_arguments, qualified=qualified))
        except InvalidTool as fault:
            faults.extend(fault.faults)
    if faults:
        raise InvalidTool(faults)
    return compiled


def unchecked(tool: Tool, limits: Limits) -> CompiledTool:
    """Returns a tool whose arguments are not checked: a tool that came by REST gets them as they are (REST-40).

    Whatever its schema is, the tool is taken; models are offered the normal form, where there is one. A schema of its
    output that breaks a rule is left out.
    """
    output: ArgumentChecker | None = None
    warnings: tuple[str, ...] = ()
    if tool.output_schema_json:
        try:
            output = compile_output_schema(tool.output_schema_json, limits)
            warnings = tuple(f"output {warning}" for warning in output.warnings)
        except SchemaFault as fault:
            tool, warnings = replace(tool, output_schema_json=""), (f"output {fault}; it is left out",)
    validates_output = output if tool.validate_output else None
    strips = USER_KEYS if tool.council_eligible or tool.inline_available else frozenset()
    try:
        checker = compile_schema(tool.parameters_json, limits)
    except SchemaFault as fault:
        warnings = (f"{fault}; models are offered what is left of it", *warnings)
        return CompiledTool(tool, None, strips, tool, warnings, validates_output)
    warnings = (*checker.warnings, *warnings)
    return CompiledTool(_normal(tool, checker, output), None, strips, tool, warnings, validates_output)


def _normal(tool: Tool, checker: ArgumentChecker, output: ArgumentChecker | None) -> Tool:
    output_schema_json = output.text if output is not None else ""
    if checker.text == tool.parameters_json and output_schema_json == tool.output_schema_json:
        return tool
    return replace(tool, parameters_json=checker.text, output_schema_json=output_schema_json)
