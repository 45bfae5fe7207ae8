"""Implements ``toolbus export``: prints the tools in the format of a model provider."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from toolbus.cli import bus_client, terminal
from toolbus.cli.bus_client import (
    BusOption,
    BusTarget,
    CredentialOption,
    JsonOption,
    LevelOption,
    RoleOption,
    UserOption,
)
from toolbus.cli.help_text import epilog

if TYPE_CHECKING:
    from toolbus.parts.models.dialects.dialect import Dialect, RealtimeDialect
    from toolbus.parts.models.dialects.export import Export

EPILOG = epilog(
    (
        "toolbus export --dialect openai",
        "toolbus export get_weather --dialect gemini --json > tools.json",
        "toolbus export --dialect anthropic --role Lanlan --user u-17",
    ),
    """
    Dialects: openai, openai-grammar (vLLM and other servers that turn schemas into grammars), openai-responses,
    anthropic, gemini, ollama, mcp, and for realtime sessions openai-realtime, grok, glm-realtime, qwen-realtime,
    stepfun-realtime, gemini-live.

    The table has each tool's name on the wire, its estimated cost in tokens, and what its schema loses in this dialect;
    the bus still checks arguments against the whole schema. The last line is the sum of the tokens. Tools that the
    dialect cannot express, and names that are not offered, are printed to standard error with the reason; so is a
    warning where there are more tools than the provider takes. With --json the tools are printed as they are in a
    request.
    """,
    "0 done (also if tools are left out), 1 the bus refused (an unknown role, for example), 2 wrong usage, "
    "3 no bus found.",
)


def export(
    dialect: Annotated[str, typer.Option(metavar="NAME", help="Format of the provider, see below.")],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="Only these tools (default: all).")
    ] = None,
    bus: BusOption = None,
    credential: CredentialOption = None,
    role: RoleOption = None,
    user: UserOption = None,
    level: LevelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the tools in the format of a model provider."""
    writer = _dialect(dialect)
    listing = bus_client.listing(BusTarget(bus, credential), user, level, names=names or (), role=role)
    exported = writer.export(listed.tool for listed in listing)
    if as_json:
        terminal.print_json(list(exported.tools))
    else:
        _show(exported)
    if unknown := [name for name in names or () if name not in {listed.name for listed in listing}]:
        whom = f" to user {user!r}" if user else ""
        missing = ", ".join(map(repr, dict.fromkeys(unknown)))
        terminal.print_note(f"not offered{whom}: {missing}; `toolbus list` shows the tools")
    if writer.max_tools is not None and len(exported.tools) > writer.max_tools:
        terminal.print_note(
            f"these are {len(exported.tools)} tools, and {dialect} takes at most {writer.max_tools}: name some of "
            "them, or let a tool loop search the others, ToolLoop(…, pinned=[…])"
        )
    if exported.left_out:
        terminal.print_table(
            ("LEFT OUT", "WHY"), [(each.tool, each.why) for each in exported.left_out], stream=sys.stderr
        )


def _dialect(name: str) -> Dialect | RealtimeDialect:
    from toolbus.errors import InvalidRequest
    from toolbus.parts.models.dialects.names import find_dialect

    try:
        return find_dialect(name)
    except InvalidRequest as error:
        terminal.fail(str(error), terminal.USAGE)


def _show(exported: Export) -> None:
    from toolbus.parts.models.dialects.token_usage import costs

    lost: dict[str, list[str]] = {}
    for loss in exported.losses:
        lost.setdefault(loss.tool, []).append(f"{loss.path}: {loss.why}" if loss.path else loss.why)
    cost = costs(exported)
    rows = [
        (name, exported.names.to_wire[name], str(tokens), "; ".join(lost.get(name, ())))
        for name, tokens in cost.items()
    ]
    terminal.print_table(("NAME", "ON THE WIRE", "TOKENS", "LOSSES"), rows)
    terminal.print_lines(f"about {sum(cost.values())} tokens in all")
