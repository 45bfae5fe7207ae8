"""Implements ``toolbus search``: finds tools by what they do, as a model would."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import BusOption, JsonOption, LevelOption, UserOption
from toolbus.cli.call_command import administer
from toolbus.cli.help_text import manual

MANUAL = manual(
    ("toolbus search 'send an email'", "toolbus search 天气 --top-k 3", "toolbus search mail --mode keyword --json"),
    """
    Finds tools as a model would, by the words of names, descriptions and parameters, best first. Modes: bm25 ranks by
    words, keyword takes the query as it is, semantic ranks by meaning where the bus can, and by words where it cannot.
    With --user and --level it looks at what that user may call. A score compares results of one answer only.
    """,
    "0 done (also where nothing is found), 1 the bus said no, 2 wrong usage, 3 no bus there.",
)
MAX_RESULTS = 50  # that the bus answers with


def search(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What the tool should do, in a few words.")],
    bus: BusOption = None,
    mode: Annotated[str, typer.Option(metavar="bm25|keyword|semantic", help="How to rank.")] = "bm25",
    top_k: Annotated[int, typer.Option(min=1, max=MAX_RESULTS, help="At most this many.")] = 10,
    user: UserOption = None,
    level: LevelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find tools by what they do."""
    from toolbus.search import MODES

    if mode not in MODES:
        terminal.fail(f"--mode is {mode!r}, it must be one of {', '.join(MODES)}", terminal.USAGE)
    found = administer(bus, "search_tools", {"query": query, "mode": mode, "top_k": top_k}, user, level)
    if as_json:
        terminal.say_json(found)
        return
    rows = [(f"{each['score']:.3f}", each["name"], each["description"]) for each in found["results"]]
    terminal.table(("SCORE", "NAME", "DESCRIPTION"), rows)
    if found["fallback"]:
        print(f"toolbus: this bus cannot rank by {mode}, so {found['mode']} answered", file=sys.stderr)
