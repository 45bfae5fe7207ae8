"""Implements ``toolbus search``: finds tools by what they do, as a model would."""

from __future__ import annotations

from typing import Annotated

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import BusOption, BusTarget, CredentialOption, JsonOption, LevelOption, UserOption
from toolbus.cli.call_command import call_bus_tool
from toolbus.cli.help_text import epilog
from toolbus.protocol.limits import MAX_SEARCH_RESULTS

EPILOG = epilog(
    ("toolbus search 'send an email'", "toolbus search 天气 --top-k 3", "toolbus search mail --mode keyword --json"),
    """
    Searches names, descriptions and parameters, as a model would; the best match comes first. Modes: bm25 ranks by
    words, keyword takes the query as one phrase, semantic ranks by meaning, hybrid by meaning and words. The last two
    need the extra toolbus[semantic] at the bus; hybrid is the default there, else bm25. With --user and --level it
    searches what that user may call. Scores can be compared within one result only.
    """,
    "0 done (also if no tool is found), 1 the bus refused, 2 wrong usage, 3 no bus found.",
)
MAX_RESULTS = MAX_SEARCH_RESULTS


def search(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What the tool should do, in a few words.")],
    bus: BusOption = None,
    credential: CredentialOption = None,
    mode: Annotated[
        str | None, typer.Option(metavar="bm25|keyword|semantic|hybrid", help="How to rank the tools.")
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, max=MAX_RESULTS, help="Print at most this many tools.")] = 10,
    user: UserOption = None,
    level: LevelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find tools by what they do."""
    from toolbus.parts.models.search import MODES

    if mode is not None and mode not in MODES:
        terminal.fail(f"--mode is {mode!r}, it must be one of {', '.join(MODES)}", terminal.USAGE)
    result = call_bus_tool(
        BusTarget(bus, credential), "search_tools", {"query": query, "mode": mode or "", "top_k": top_k}, user, level
    )
    if not result["success"]:
        terminal.fail(result["error"])
    if as_json:
        terminal.print_json(result)
        return
    rows = [(f"{each['score']:.3f}", each["name"], each["description"]) for each in result["results"]]
    terminal.print_table(("SCORE", "NAME", "DESCRIPTION"), rows)
    if result["fallback"]:
        terminal.print_note(f"this bus cannot rank by {mode}, so it ranked by {result['mode']}")
