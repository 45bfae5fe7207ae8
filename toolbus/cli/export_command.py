"""Implements ``toolbus export``: prints the tools in the format of a model provider."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from toolbus.cli import bus_client, terminal
from toolbus.cli.bus_client import BusOption, JsonOption, LevelOption, UserOption
from toolbus.cli.help_text import manual

if TYPE_CHECKING:
    from toolbus.dialects import Dialect, Export, RealtimeDialect

MANUAL = manual(
    (
        "toolbus export --dialect openai",
        "toolbus export get_weather --dialect gemini --json > tools.json",
        "toolbus export --dialect anthropic --role Lanlan --user u-17",
    ),
    """
    Dialects: openai, openai-responses, anthropic, gemini, ollama, mcp, and for realtime sessions openai-realtime, grok,
    glm-realtime, qwen-realtime, stepfun-realtime, gemini-live.

    The table shows what each tool is called on the wire, about how many tokens it costs, and what its schema loses; the
    bus checks arguments against the whole schema all the same. Below it stand the tokens of all. Tools that the dialect
    cannot express are listed with the reason on standard error, and names that nobody offers. With --json the tools
    themselves are printed, as they stand in a request.
    """,
    "0 done (also where tools are left out), 1 the bus said no (an unknown role, say), 2 wrong usage, 3 no bus there.",
)


def export(
    dialect: Annotated[str, typer.Option(metavar="NAME", help="Whose form, see below.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Only these tools.")] = None,
    bus: BusOption = None,
    role: Annotated[str | None, typer.Option(metavar="NAME", help="Only tools of this role.")] = None,
    user: UserOption = None,
    level: LevelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the tools in the form of a model's provider."""
    writer = _dialect(dialect)
    listing = bus_client.listing(bus, user, level, names=names or (), role=role)
    exported = writer.export(listed.tool for listed in listing)
    if as_json:
        terminal.say_json(list(exported.tools))
    else:
        _show(exported)
    if unknown := [name for name in names or () if name not in {listed.name for listed in listing}]:
        whom = f" to user {user!r}" if user else ""
        told = ", ".join(map(repr, dict.fromkeys(unknown)))
        print(
            terminal.clean(f"toolbus: nobody offers {told}{whom}: `toolbus list` shows what there is"), file=sys.stderr
        )
    if exported.left_out:
        terminal.table(("LEFT OUT", "WHY"), [(each.tool, each.why) for each in exported.left_out], stream=sys.stderr)


def _dialect(name: str) -> Dialect | RealtimeDialect:
    from toolbus.dialects import find_dialect
    from toolbus.errors import InvalidRequest

    try:
        return find_dialect(name)
    except InvalidRequest as problem:
        terminal.fail(str(problem), terminal.USAGE)


def _show(exported: Export) -> None:
    from toolbus.dialects.token_cost import costs

    lost: dict[str, list[str]] = {}
    for loss in exported.losses:
        lost.setdefault(loss.tool, []).append(f"{loss.path}: {loss.why}" if loss.path else loss.why)
    cost = costs(exported)
    rows = [
        (name, exported.names.to_wire[name], str(tokens), "; ".join(lost.get(name, ())))
        for name, tokens in cost.items()
    ]
    terminal.table(("NAME", "ON THE WIRE", "TOKENS", "LOSSES"), rows)
    print(f"about {sum(cost.values())} tokens in all")
