"""Compares texts by meaning: the vectors of an embedder, cached by text, and their cosines.

The embedder is a program's own, or the table of word vectors in the package of the extra `semantic`, which needs no
network. numpy and the table are loaded at the first comparison, never on import. All of it may be used from any thread,
and takes too long for an event loop.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from toolbus.common.newest import NewestCacheBySize
from toolbus.errors import SetupError
from toolbus.protocol.tool import MIB

Embedder: TypeAlias = Callable[[Sequence[str]], Any]
"""Given texts, at most 256 at once, returns a vector for each: a list of lists of numbers, or a numpy array.

All its vectors have one length, up to 8,192. One call at a time, on any thread; it may block. Where it raises, the
search answers by words.
"""

EmbedderChoice: TypeAlias = Embedder | Literal[False] | None
"""None: the embedder of the extra `semantic`, where it is installed; False: none, so that searches go by words."""

REMEDY = "install the extra: pip install 'toolbus[semantic]'"
BATCH = 256  # texts that an embedder gets at once
MAX_DIMENSIONS = 8192
MAX_BYTES = 64 * MIB  # of vectors that are cached, and again of catalogs that are ready to be searched
MAX_ENTRIES = 100_000
_PACKAGE = "wordllama"  # brings the files below along; it is never imported, since its import changes the root logger
_LIBRARIES = ("numpy", "safetensors", "tokenizers")
_WEIGHTS = Path("weights", "l2_supercat_256.safetensors")
_TOKENIZER = Path("tokenizers", "l2_supercat_tokenizer_config.json")


class EmbeddedTexts:
    """The texts of one catalog, each in a row of its own.

    Attributes:
        texts: by row; None where a text was removed, whose cosine is 0.
        changed: the rows whose vectors are not those of their texts yet.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts: list[str | None] = [*texts]
        self.changed = set(range(len(self.texts)))

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        return f"<EmbeddedTexts {len(self)}>"

    def put(self, row: int, text: str | None) -> None:
        """Replaces or removes the text of a row, or adds it to the end."""
        self.texts[row : row + 1] = [text]
        self.changed.add(row)

    def in_deviations(self, scores: Any) -> Any:
        """Returns scores by row in standard deviations of those of the texts that are there."""
        import numpy as np

        removed = [row for row, text in enumerate(self.texts) if text is None] if None in self.texts else []
        there = np.delete(scores, removed) if removed else scores
        return (scores - there.mean()) / (there.std() or 1.0) if len(there) else scores


class Embeddings:
    """The vectors of one embedder.

    Args:
        embedder: a program's own; see `EmbedderChoice` for None and False.
        max_bytes: of the vectors of texts that are cached, and again of those of whole catalogs.

    Attributes:
        available: whether there is an embedder, with everything that it needs.
    """

    def __init__(self, embedder: EmbedderChoice = None, *, max_bytes: int = MAX_BYTES) -> None:
        self._embedder = embedder or None  # None: the package's, which is loaded when it is needed
        needed = ("numpy",) if embedder else (_PACKAGE, *_LIBRARIES)
        installed = all(importlib.util.find_spec(name) is not None for name in needed)
        self.available = embedder is not False and installed
        self._lock = threading.Lock()  # one text is embedded once
        self._vectors: NewestCacheBySize[bytes, Any] = NewestCacheBySize(MAX_ENTRIES, max_bytes, _size)  # by text
        self._matrices: NewestCacheBySize[EmbeddedTexts, Any] = NewestCacheBySize(MAX_ENTRIES, max_bytes, _size)

    def __repr__(self) -> str:
        return f"<Embeddings {'available' if self.available else 'not installed'} vectors={len(self._vectors)}>"

    def similarities(self, query: str, catalog: EmbeddedTexts) -> Any:
        """Returns the cosine of a query with each text of a catalog, a numpy array; 0 for texts without meaning.

        Raises:
            Exception: what the embedder raised, or that its vectors have the wrong shape.
        """
        with self._lock:
            self._matrices[catalog] = matrix = self._matrix(catalog)  # one that is searched counts as the newest
            matrix = matrix[: len(catalog)]
            (vector,) = self._embed([query])
        if matrix.shape[0] and matrix.shape[1] != vector.shape[0]:
            raise ValueError(f"the embedder's vectors have {matrix.shape[1]} and {vector.shape[0]} numbers")
        import numpy as np

        # Not `@`: the threads of a BLAS, which wait for each other, take 20 ms instead of 0.6 on a busy machine.
        return np.einsum("ij,j->i", matrix, vector) if matrix.shape[0] else np.zeros(0, np.float32)

    def _matrix(self, catalog: EmbeddedTexts) -> Any:
        """Returns the vectors of a catalog's texts, one a row, and perhaps further rows for texts to come."""
        import numpy as np

        matrix, count = self._matrices.get(catalog), len(catalog)
        rows = range(count) if matrix is None else sorted(catalog.changed)
        texts = {row: text for row in rows if (text := catalog.texts[row]) is not None}
        digests = {row: hashlib.blake2b(text.encode(), digest_size=16).digest() for row, text in texts.items()}
        vectors = {each: vector for each in digests.values() if (vector := self._vectors.get(each)) is not None}
        missing = {digest: texts[row] for row, digest in digests.items() if digest not in vectors}
        vectors.update(zip(missing, self._embed([*missing.values()]), strict=True))
        for digest in missing:
            self._vectors[digest] = vectors[digest]
        if matrix is None or len(matrix) < count:
            width = len(next(iter(vectors.values()))) if vectors else 0
            grown: Any = np.zeros((count if matrix is None else count + count // 8, width), np.float32)
            if matrix is not None and len(matrix):
                grown[: len(matrix)] = matrix
            matrix = grown
        if matrix.shape[1]:
            for row in rows:
                matrix[row] = vectors[digests[row]] if row in digests else 0
        catalog.changed.clear()
        return matrix

    def _embed(self, texts: list[str]) -> list[Any]:
        """Returns the vectors of texts, each of length 1, or 0 where the embedder finds no meaning."""
        import numpy as np

        embedder = self._embedder
        if embedder is None:
            embedder = self._embedder = packaged_embedder()
        vectors: list[Any] = []
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            raw = np.asarray(embedder(batch), dtype=np.float32)
            if raw.ndim != 2 or raw.shape[0] != len(batch) or not 1 <= raw.shape[1] <= MAX_DIMENSIONS:
                raise ValueError(
                    f"the embedder returned an array of shape {raw.shape} for {len(batch)} texts: return a vector of "
                    f"up to {MAX_DIMENSIONS} numbers for each"
                )
            if not np.isfinite(raw).all():
                raise ValueError("the embedder returned a number that is not finite")
            lengths = np.linalg.norm(raw, axis=1, keepdims=True)
            vectors += list(raw / np.where(lengths == 0, 1, lengths))
        return vectors


@functools.lru_cache(maxsize=1)
def packaged_embedder() -> Embedder:
    """Returns the embedder of the extra `semantic`, loaded once per process.

    The vector of a text is the mean of the vectors of its tokens (WordLlama: 32,000 tokens, 256 dimensions).

    Raises:
        SetupError: it is not installed, or lacks its files.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SetupError(f"searching by meaning needs the package {_PACKAGE}, which is not installed: {REMEDY}")
    folder = Path(spec.submodule_search_locations[0])
    for file in (_WEIGHTS, _TOKENIZER):
        if not (folder / file).is_file():
            raise SetupError(f"the package {_PACKAGE} has no file {file}: {REMEDY} again")
    import numpy as np
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER))
    tokenizer.no_padding()
    table = load_file(str(folder / _WEIGHTS))["embedding.weight"].astype(np.float32)  # 32 MB

    def embed(texts: Sequence[str]) -> Any:
        vectors = np.zeros((len(texts), table.shape[1]), np.float32)
        for number, text in enumerate(texts):  # one by one: a batch would start threads of the library's own
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            if tokens:
                vectors[number] = np.add.reduce(table.take(tokens, axis=0, mode="clip"), axis=0) / len(tokens)
        return vectors

    return embed


def _size(array: Any) -> int:
    return int(array.nbytes)
