"""Implements ``toolbus access explain``: shows step by step why a tool is listed and can be called, or not."""

from __future__ import annotations

from typing import Annotated

import typer

from toolbus.cli import terminal
from toolbus.cli.call_command import Steps, operator
from toolbus.cli.help_text import epilog
from toolbus.common.part import load

EXPLAIN_EPILOG = epilog(
    (
        "toolbus access explain get_weather",
        "toolbus access explain get_weather --user u-17 --level 50",
        "toolbus access explain files.read --dialect gemini",
        "toolbus access explain get_weather --identity laptop --json",
    ),
    """
    Shows the decisions of the bus about a call, in their order: whether the tool is registered, whether the caller may
    use it, and whether its plugin can be reached. For a missing tool it quotes the notices that name it, or a skipped
    file of that name. The last line is the outcome of a call. With --dialect it adds the name under which a model sees
    the tool, and the parts of its schema that are lost.
    """,
    "0 a call would reach the tool, 1 it would not, or the bus refused, 2 wrong usage, 3 no bus found.",
)
_MARKS = {True: "yes", False: "NO", None: "-"}


@operator
def explain(
    tool: Annotated[str, typer.Argument(metavar="TOOL", help="Name of the tool, as in `toolbus list`.")],
    *,
    user: Annotated[str, typer.Option(metavar="ID", help="For this user (default: no user).")] = "",
    role: Annotated[str, typer.Option(metavar="NAME", help="In this role (default: all roles).")] = "",
    level: Annotated[int, typer.Option(min=0, metavar="N", help="With this access level (default: 0).")] = 0,
    dialect: Annotated[str, typer.Option(metavar="NAME", help="As this provider's models see it.")] = "",
    identity: Annotated[
        str, typer.Option(metavar="NAME", help="For this identity of keys.toml (default: a program of this machine).")
    ] = "",
) -> Steps:
    """Explain step by step why a tool is listed and can be called, or not."""
    if dialect:
        _check_dialect(dialect)
    explained = yield (
        "explain",
        {"tool": tool, "user": user, "role": role, "level": level, "dialect": dialect, "identity": identity},
    )

    def show() -> None:
        rows = [(_MARKS[each["passed"]], each["step"], each["why"]) for each in explained["steps"]]
        wrong = {place for place, row in enumerate(rows) if row[0] == "NO"}
        terminal.print_table(("PASSES", "STEP", "WHY"), rows, wrong)
        terminal.print_lines(explained["verdict"])

    yield show
    if not explained["callable"]:
        raise typer.Exit(terminal.REFUSED)


def _check_dialect(dialect: str) -> None:
    with terminal.wrong_usage():  # its part may be missing
        dialects = load("toolbus.parts.models.dialects.names:DIALECTS")
    if dialect not in dialects:
        terminal.fail(f"--dialect is {dialect!r}, it must be one of {', '.join(dialects)}", terminal.USAGE)
