"""Tools on their way into the registry: checked and compiled, all or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolbus.bus.catalog.schema import ArgumentChecker, SchemaFault, compile_schema
from toolbus.errors import InvalidTool, LimitExceeded
from toolbus.tool import USER_KEYS, Limits, Tool


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool that was checked and compiled, ready to be registered."""

    tool: Tool
    checker: ArgumentChecker | None
    strips: frozenset[str]


def prepare(
    tools: Sequence[Tool], limits: Limits, *, checks_arguments: bool = True, qualified: bool = False
) -> list[Offered]:
    """Compiles the schemas of tools that are to be registered together.

    Args:
        qualified: whether they are an extension's: then `USER_KEYS` never reach them, whatever their schemas declare.

    Raises:
        InvalidTool: naming every fault of every tool.
        LimitExceeded: for more tools than a session may have.
    """
    if len(tools) > limits.tools:
        raise LimitExceeded("tools", limits.tools, f"{len(tools)} tools are too many for one session")
    faults: list[str] = []
    offered: list[Offered] = []
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
        extends = qualified or tool.council_eligible or tool.inline_available
        declared = None if extends else tool.parameters.get("properties")
        strips = USER_KEYS - set(declared) if isinstance(declared, dict) else USER_KEYS
        wanted = checks_arguments if tool.validate is None else tool.validate
        offered.append(Offered(tool, checker if wanted else None, strips))
    if faults:
        raise InvalidTool(faults)
    return offered
