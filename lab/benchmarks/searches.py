"""Measures the search for tools: building an index of a catalog, and querying it."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import uvloop

from lab.benchmarks import catalog
from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Column, Fact, Line, Measured, measured, microseconds
from lab.stage import Stage
from toolbus.embeddings import Embeddings, packaged_embedder
from toolbus.search import ToolIndex
from toolbus.tool import Tool

SIZES = (1_000, 10_000)
QUERIES = 5  # of one sample
WORD = "weather"
WORDS = "send an email"
SENTENCE = "how do I find the weather for my hotel and send it to a contact by email"


def search(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Builds indexes and asks them."""
    tools = catalog.tools(max(SIZES))
    lines: dict[str, Line] = {f"{size:,} tools": functools.partial(_searched, tools[:size], repeats) for size in SIZES}
    return uvloop.run(measured("search", "Search", lines, plan.rounds))


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
