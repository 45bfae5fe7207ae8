"""Vectors of texts: which are computed, how many are cached, and what a missing package costs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.search_catalog import concepts
from toolbus.errors import SetupError
from toolbus.parts.models.embeddings import BATCH, EmbeddedTexts, Embeddings, packaged_embedder

VECTOR_BYTES = 4 * len(concepts(["a"])[0])


class Noting:
    """Embeds texts and notes them, a list for each call."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def __call__(self, texts: Sequence[str]) -> Any:
        self.batches.append(list(texts))
        return concepts(texts)


def test_a_text_with_the_meaning_of_the_query_has_the_cosine_1_and_one_without_any_has_0() -> None:
    embeddings = Embeddings(lambda texts: [[2.0 * text.count("a"), 3.0 * text.count("b")] for text in texts])
    assert embeddings.similarities("aa", EmbeddedTexts(["a", "b", "-", "ab"])).tolist() == pytest.approx(
        [1, 0, 0, 0.5547], abs=1e-4
    )
    assert embeddings.similarities("-", EmbeddedTexts(["a"])).tolist() == [0]
    assert embeddings.similarities("a", EmbeddedTexts([])).tolist() == []


def test_an_embedder_gets_at_most_256_texts_at_once_and_each_text_once() -> None:
    embedder = Noting()
    texts = [f"text {number}" for number in range(BATCH + 10)]
    Embeddings(embedder).similarities("query", EmbeddedTexts([*texts, *texts]))
    assert [len(batch) for batch in embedder.batches] == [BATCH, 10, 1]


def test_beyond_the_bound_the_oldest_texts_are_embedded_again() -> None:
    embedder = Noting()
    embeddings = Embeddings(embedder, max_bytes=3 * VECTOR_BYTES)
    first, *others = (EmbeddedTexts([f"{catalog} one", f"{catalog} two"]) for catalog in "abc")

    def embedded(catalog: EmbeddedTexts) -> list[str]:
        embedder.batches.clear()
        embeddings.similarities("q", catalog)
        return [text for batch in embedder.batches for text in batch if text != "q"]

    assert embedded(first) == ["a one", "a two"]
    assert embedded(first) == []
    assert [embedded(other) for other in others] == [["b one", "b two"], ["c one", "c two"]]
    assert embedded(first) == ["a one", "a two"]
    assert repr(embeddings) == "<Embeddings available vectors=3>"


def test_without_numpy_or_the_package_there_are_no_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Embeddings(concepts).available
    assert not Embeddings(False).available
    monkeypatch.setitem(sys.modules, "wordllama", None)
    assert not Embeddings().available
    assert Embeddings(concepts).available
    packaged_embedder.cache_clear()
    with pytest.raises(SetupError, match=r"needs the package wordllama.* pip install 'toolbus\[semantic\]'"):
        packaged_embedder()
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert not Embeddings(concepts).available


def test_the_package_is_read_and_never_imported_since_its_import_changes_the_root_logger() -> None:
    vectors = packaged_embedder()(["weather forecast", "", "天气"])
    assert (vectors.shape, vectors[1].any()) == ((3, 256), False)
    assert "wordllama" not in sys.modules
