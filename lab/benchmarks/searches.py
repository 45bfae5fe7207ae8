"""Measures the search for tools: building an index of a catalog, querying it, and what it finds.

What it finds is measured with 200 tools, 100 questions that paraphrase, and 50 queries in the words of the tools. A
paraphrase shares no word with the tool that answers it, as its name and description have them, so it shows what a
search by words cannot do. Models also write queries in the usual words, so that these must not get worse.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lab.benchmarks import catalog
from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Column, Fact, Line, Measured, measured, microseconds
from lab.stage import Stage
from toolbus.parts.models.embeddings import Embeddings, packaged_embedder
from toolbus.parts.models.search import MAX_RESULTS, MODES, ToolIndex
from toolbus.protocol.tool import Tool

SIZES = (1_000, 10_000)
QUERIES = 5  # of one sample
WORD = "weather"
WORDS = "send an email"
SENTENCE = "how do I find the weather for my hotel and send it to a contact by email"
DATA = Path(__file__).parent / "search_data"
FILES = {"paraphrases": "paraphrases.tsv", "usual words": "keywords.tsv"}
PLACES = (1, 5, 10)
FUSED = "semantic and bm25, by ranks"
RANKS_ADDED = 60  # as it is usual in reciprocal rank fusion

Question = tuple[str, frozenset[str]]
"""A query, and the tools of which each is a right answer."""
Search = Callable[[str], Sequence[str]]


def search(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    tools = catalog.tools(max(SIZES))
    lines: dict[str, Line] = {f"{size:,} tools": functools.partial(_searched, tools[:size], repeats) for size in SIZES}
    return measured("search", "Search", lines, plan.rounds)


async def _searched(tools: Sequence[Tool], repeats: int) -> Measured:
    began_at = time.perf_counter()
    index = ToolIndex(tools, embeddings=Embeddings())
    built = (time.perf_counter() - began_at) * 1e3

    async def query_once(query: str, mode: str, number: int) -> None:
        if not index.search(query, mode=mode)["results"]:
            raise RuntimeError(f"the search for {query!r} found nothing")

    async def samples(query: str, mode: str = "bm25") -> list[float]:
        ask = functools.partial(query_once, query, mode)
        return [await microseconds(ask, QUERIES) / 1e3 for _ in range(repeats)]

    by_meaning: dict[Column, list[float]] = {}
    if "semantic" in index.modes:
        packaged_embedder()(["the model is loaded once per process"])
        began_at = time.perf_counter()
        index.search(SENTENCE, mode="semantic")
        by_meaning[("first by meaning: texts embedded", "ms")] = [(time.perf_counter() - began_at) * 1e3]
        for mode in ("semantic", "hybrid"):
            by_meaning[(f"{mode}, a sentence", "ms")] = await samples(SENTENCE, mode)
    return {
        ("index built", "ms"): [built],
        ("bm25, one word", "ms"): await samples(WORD),
        ("bm25, two words", "ms"): await samples(WORDS),
        ("bm25, a sentence", "ms"): await samples(SENTENCE),
        ("keyword", "ms"): await samples(WORD, "keyword"),
        **by_meaning,
    }


# -- what it finds ----------------------------------------------------------------------------------------------------


def search_quality(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Asks every question in every mode; the figures are the same each time."""
    index = ToolIndex(tools(), embeddings=Embeddings())
    questions = {kind: queries(kind) for kind in FILES}
    modes = [mode for mode in MODES if mode in index.modes]
    searches = {mode: functools.partial(found, index, mode) for mode in modes}
    if "semantic" in modes:
        searches[FUSED] = functools.partial(_fused, index)
    lines: dict[str, Line] = {name: functools.partial(_asked, search, questions) for name, search in searches.items()}
    return measured("search_quality", f"Right tools found, of {len(index)}", lines, 1)


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
    return [_tool(*line) for line in _lines("tools.tsv")]


def queries(kind: str) -> list[Question]:
    """Returns the questions of a kind, see `FILES`."""
    return [(query, frozenset(names.split(","))) for query, names in _lines(FILES[kind])]


def _tool(name: str, description: str, parameters: str) -> Tool:
    properties: dict[str, dict[str, str]] = {each.strip(): {} for each in parameters.split(",") if each.strip()}
    return Tool(name, description, json.dumps({"type": "object", "properties": properties}))


def _lines(file: str) -> list[list[str]]:
    return [line.split("\t") for line in (DATA / file).read_text("utf-8").splitlines()]
