"""Measures what a search finds: 200 tools, 100 questions that paraphrase, and 50 queries in the words of the tools.

A paraphrase shares no word with the tool that answers it, as its name and description have them, so it shows what a
search by words cannot do. Models also write queries in the usual words, so that these must not get worse.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Fact, Line, Measured, measured
from lab.stage import Stage
from toolbus.embeddings import Embeddings
from toolbus.search import MAX_RESULTS, MODES, ToolIndex
from toolbus.tool import Tool

DATA = Path(__file__).parent / "search_data"
QUERIES = {"paraphrases": "paraphrases.tsv", "usual words": "keywords.tsv"}
PLACES = (1, 5, 10)
FUSED = "semantic and bm25, by ranks"
RANKS_ADDED = 60  # as it is usual in reciprocal rank fusion

Question = tuple[str, frozenset[str]]
"""A query, and the tools of which each is a right answer."""
Search = Callable[[str], Sequence[str]]


def search_quality(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Asks every question in every mode; the figures are the same each time."""
    index = ToolIndex(tools(), embeddings=Embeddings())
    questions = {kind: queries(kind) for kind in QUERIES}
    modes = [mode for mode in MODES if mode in index.modes]
    searches = {mode: functools.partial(found, index, mode) for mode in modes}
    if "semantic" in modes:
        searches[FUSED] = functools.partial(_fused, index)
    lines: dict[str, Line] = {name: functools.partial(_asked, search, questions) for name, search in searches.items()}
    return asyncio.run(measured("search_quality", f"Right tools found, of {len(index)}", lines, 1))


async def _asked(search: Search, questions: Mapping[str, Sequence[Question]]) -> Measured:
    return {
        (f"{kind}, first {places}" if places > 1 else f"{kind}, first", "%"): [rate]
        for kind, asked in questions.items()
        for places, rate in hit_rates(search, asked).items()
    }


def found(index: ToolIndex, mode: str, query: str) -> list[str]:
    """Returns the names of the tools that a search finds, best first."""
    return [result["name"] for result in index.search(query, mode=mode, top_k=MAX_RESULTS)["results"]]


def _fused(index: ToolIndex, query: str) -> list[str]:
    """Returns what reciprocal rank fusion makes of the two lists that mode hybrid joins by their scores."""
    scores: dict[str, float] = {}
    for mode in ("semantic", "bm25"):
        for rank, name in enumerate(found(index, mode, query)):
            scores[name] = scores.get(name, 0.0) + 1.0 / (RANKS_ADDED + rank + 1)
    return sorted(scores, key=lambda name: -scores[name])


def hit_rates(search: Search, questions: Sequence[Question]) -> dict[int, float]:
    """Returns, by places, for how many of 100 questions a right tool is among so many first results."""
    hits = dict.fromkeys(PLACES, 0)
    for query, right in questions:
        is_right = [name in right for name in search(query)]
        for places in PLACES:
            hits[places] += any(is_right[:places])
    return {places: 100.0 * count / len(questions) for places, count in hits.items()}


def tools() -> list[Tool]:
    """Returns the catalog."""
    return [_tool(*line) for line in _lines("tools.tsv")]


def queries(kind: str) -> list[Question]:
    """Returns the questions of a kind, see `QUERIES`."""
    return [(query, frozenset(names.split(","))) for query, names in _lines(QUERIES[kind])]


def _tool(name: str, description: str, parameters: str) -> Tool:
    properties: dict[str, dict[str, str]] = {each.strip(): {} for each in parameters.split(",") if each.strip()}
    return Tool(name, description, json.dumps({"type": "object", "properties": properties}))


def _lines(file: str) -> list[list[str]]:
    return [line.split("\t") for line in (DATA / file).read_text("utf-8").splitlines()]
