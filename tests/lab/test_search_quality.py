"""Tests what a search by meaning finds: the data that it is measured with, and the least that it has to find."""

from __future__ import annotations

import functools
import re

import pytest

from lab.benchmarks.searches import found, hit_rates, queries, tools
from toolbus.parts.models.embeddings import Embeddings
from toolbus.parts.models.search import ToolIndex

# Words of grammar, which any two texts share.
GRAMMAR = frozenset(
    [
        *("the", "and", "for", "from", "with", "what", "when", "who", "whom", "where", "which", "how"),
        *("has", "have", "can", "its", "out", "one", "are", "not"),
    ]
)
INDEX = ToolIndex(tools(), embeddings=Embeddings())


def _stems(text: str) -> set[str]:
    words = re.findall(r"[a-z]{3,}", text.lower().replace("_", " "))
    return {word[:5] for word in words if word not in GRAMMAR}


def test_there_are_200_tools_and_every_right_answer_is_one_of_them() -> None:
    names = [tool.name for tool in tools()]
    assert len(set(names)) == len(names) == 200
    assert (len(queries("paraphrases")), len(queries("usual words"))) == (100, 50)
    for kind in ("paraphrases", "usual words"):
        for _, right in queries(kind):
            assert right <= set(names)


def test_a_paraphrase_shares_no_word_with_the_tools_that_answer_it() -> None:
    descriptions = {tool.name: f"{tool.name} {tool.description}" for tool in tools()}
    shared = {
        query: common
        for query, right in queries("paraphrases")
        if (common := _stems(query) & {stem for name in right for stem in _stems(descriptions[name])})
    }
    assert shared == {}


@pytest.mark.parametrize(
    ("mode", "paraphrases", "usual_words"), [("bm25", 0, 95), ("semantic", 55, 98), ("hybrid", 55, 98)]
)
def test_the_first_five_tools_have_the_right_one_as_often_as_the_docs_say(
    mode: str, paraphrases: int, usual_words: int
) -> None:
    search = functools.partial(found, INDEX, mode)
    assert hit_rates(search, queries("paraphrases"))[5] >= paraphrases
    assert hit_rates(search, queries("usual words"))[5] >= usual_words


def test_the_packaged_embeddings_need_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    results = ToolIndex(tools(), embeddings=Embeddings()).search("Will it rain?", mode="semantic", top_k=3)["results"]
    assert results[0]["name"] in ("get_forecast", "get_weather")
