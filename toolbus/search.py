"""Searches a catalog of tools that is too large to be offered to a model as a whole.

`ToolIndex` indexes one catalog: words ranked by SQLite's FTS5, a plain substring, or a ranker of the caller. It knows
neither where tools come from nor how they are called, so programs and the bus use the same index.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sqlite3
import threading
import unicodedata
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from toolbus.newest import NewestCache
from toolbus.text import quote, repair_utf8
from toolbus.tool import Annotations, Tool

log = logging.getLogger("toolbus.search")

Ranker: TypeAlias = Callable[[str, Sequence[Tool]], Sequence[tuple[str, float]]]
"""Given a query and the tools: names with scores, where higher is better. Called from any thread."""

SEARCH_TOOLS = "search_tools"
REQUEST_TOOL_INJECTION = "request_tool_injection"
MODES = ("bm25", "keyword", "semantic")
MAX_RESULTS = 50
MAX_QUERY_CHARACTERS = 1000  # a query is a sentence; a longer one is cut
MAX_QUERY_PHRASES = 64  # each costs a lookup
MAX_INDEXES = 8  # one for each role and host in use

# -- words -----------------------------------------------------------------------------------------------------------

# Scripts without spaces between words: Han, kana and their marks, Hangul.
_CJK = "々〇ぁ-ゖゝ-ゟァ-ヺー-ヿ㐀-䶿一-鿿가-힣豈-﫿\U00020000-\U0003ffff"
_CJK_RUN = re.compile(rf"[{_CJK}]+")
_WORD = re.compile(rf"([{_CJK}]+)|([^\W_{_CJK}]+(?:[_.:-][^\W_{_CJK}]+)*)")
_WORD_BREAK = re.compile(
    r"[_.:-]|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
)  # get_weather, getWeather, HTTPServer

# Stop words: in a query that is a sentence they would match every tool.
_STOP_WORDS = re.compile(
    "a|an|and|any|are|as|at|be|by|can|do|does|for|from|have|how|i|in|into|is|it|me|my|need|of|on|or|please|some|that|"
    "the|there|this|to|tools?|use|want|what|which|with|you|your"
)


def _words(text: str) -> Iterator[str]:
    """Yields the words of a text in NFKC: a run of CJK as one word, a name in its parts and also joined.

    The joined name lets `github` find GitHub and `getweather` find get_weather.
    """
    for cjk_run, name in _WORD.findall(text):
        if cjk_run:
            yield cjk_run
            continue
        parts = _WORD_BREAK.split(name)
        yield from parts
        if len(parts) > 1:
            yield "".join(parts)


class _Tokenizer(dict[str, str]):
    """Splits texts for the index into words, and CJK into characters.

    Each piece between two spaces is split once, since a catalog repeats its words: it takes a third of the time.
    """

    def __missing__(self, piece: str) -> str:
        tokens = " ".join(" ".join(word) if _CJK_RUN.match(word) else word for word in _words(piece))
        self[piece] = tokens
        return tokens

    def split(self, text: str) -> str:
        return " ".join(map(self.__getitem__, unicodedata.normalize("NFKC", text).split()))


def _match(query: str) -> str:
    """Returns a query as an FTS5 expression: any of its phrases, or "" where it has none.

    Every phrase is quoted and holds only letters and digits, so no query is read as FTS5 syntax. CJK is searched in
    pairs of characters, which are about as long as its words.
    """
    phrases: dict[str, None] = {}  # in order, without duplicates
    stop_words: dict[str, None] = {}
    for word in _words(unicodedata.normalize("NFKC", query)):
        if _CJK_RUN.match(word):
            phrases.update(dict.fromkeys(map(" ".join, pairwise(word)) if len(word) > 1 else word))
        else:
            (stop_words if _STOP_WORDS.fullmatch(word.lower()) else phrases)[word.lower()] = None
    return " OR ".join(f'"{phrase}"' for phrase in [*(phrases or stop_words)][:MAX_QUERY_PHRASES])


def _parameter_text(tool: Tool) -> str:
    """Returns the names and descriptions of a tool's parameters, at any depth."""
    texts: list[str] = []
    pending: list[Any] = [tool.parameters]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            properties = node.get("properties")
            texts += properties if isinstance(properties, dict) else ()
            description = node.get("description")
            texts += [description] if isinstance(description, str) else ()
            pending += node.values()
    return " ".join(texts)


def _casefold(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


# -- the index -------------------------------------------------------------------------------------------------------


class ToolIndex:
    """Searches one catalog, which does not change. Thread-safe.

    Args:
        tools: the catalog; equal scores keep its order.
        ranker: ranks for mode `semantic`, by embeddings for instance. Where it fails or is None, bm25 answers.
    """

    def __init__(self, tools: Iterable[Tool], *, ranker: Ranker | None = None) -> None:
        self._tools = tuple(tools)
        self._ranker = ranker  # None: no search by meaning
        self._casefolded = [(_casefold(tool.name), _casefold(tool.description)) for tool in self._tools]  # for keyword
        self._lock = threading.Lock()  # one statement at a time on the connection
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        # A cache may drop an index while another thread searches it, so the last reference closes the database.
        weakref.finalize(self, self._database.close)
        tokenizer = _Tokenizer()
        with self._database:
            self._database.execute(  # contentless: `_tools` holds the texts
                "CREATE VIRTUAL TABLE tools USING fts5("
                "name, description, parameters, content = '', tokenize = 'porter unicode61 remove_diacritics 2')"
            )
            self._database.executemany(
                "INSERT INTO tools (rowid, name, description, parameters) VALUES (?, ?, ?, ?)",
                (
                    (number, *map(tokenizer.split, (tool.name, tool.description, _parameter_text(tool))))
                    for number, tool in enumerate(self._tools)
                ),
            )

    def __len__(self) -> int:
        return len(self._tools)

    def __repr__(self) -> str:
        return f"ToolIndex({len(self._tools)} tools, ranker={'yes' if self._ranker else 'no'})"

    def search(
        self, query: str, *, mode: str = "bm25", top_k: int = 10, include_parameters: bool = False
    ) -> dict[str, Any]:
        """Returns the best tools, best first, as `success, mode, fallback, query, result_count, results`.

        `mode` is the mode that answered; `fallback` is true where it is not the requested one. An unknown mode gets
        `success: False` and a sentence under `error`. Scores are comparable within one answer only.

        Args:
            mode: `bm25` for words, `keyword` for a substring of name or description, `semantic` for the ranker.
            top_k: how many at most; clamped to 1 to 50.
            include_parameters: whether each result carries its JSON Schema.
        """
        query = repair_utf8(query[:MAX_QUERY_CHARACTERS])
        if mode not in MODES:
            why = f"mode is {quote(repair_utf8(mode))}, it must be one of {', '.join(MODES)}: leave it out for bm25"
            return {**_answer(query, "bm25", False, []), "success": False, "error": why}
        limit = max(1, min(top_k, MAX_RESULTS))
        hits = self._by_meaning(query, limit) if mode == "semantic" else None
        fallback = mode == "semantic" and hits is None
        if hits is None:
            hits = self._by_substring(query, limit) if mode == "keyword" else self._by_words(query, limit)
        results = [_result(tool, score, include_parameters) for tool, score in hits]
        return _answer(query, "bm25" if fallback else mode, fallback, results)

    def _by_words(self, query: str, limit: int) -> list[tuple[Tool, float]]:
        match = _match(query)
        if not match:
            return []
        with self._lock:
            rows = self._database.execute(
                "SELECT rowid, bm25(tools, 8.0, 3.0, 1.0) AS cost FROM tools WHERE tools MATCH ? "
                "ORDER BY cost, rowid LIMIT ?",
                (match, limit),
            ).fetchall()
        return [(self._tools[number], -cost) for number, cost in rows]

    def _by_substring(self, query: str, limit: int) -> list[tuple[Tool, float]]:
        substring = _casefold(query.strip())
        if not substring:
            return []
        scored = [
            (tool, 2.0 if substring in name else 1.0)
            for tool, (name, description) in zip(self._tools, self._casefolded, strict=True)
            if substring in name or substring in description
        ]
        return sorted(scored, key=lambda hit: -hit[1])[:limit]

    def _by_meaning(self, query: str, limit: int) -> list[tuple[Tool, float]] | None:
        """Returns the ranker's results, or None where there is no ranker or it failed."""
        if self._ranker is None:
            return None
        if not query.strip():
            return []
        by_name = {tool.name: tool for tool in self._tools}
        try:
            scores = {name: float(score) for name, score in self._ranker(query, self._tools) if name in by_name}
            if not all(map(math.isfinite, scores.values())):
                raise ValueError("a score is not a finite number")
        except Exception as error:  # embeddings come from models and networks; bm25 works without them
            log.warning("the ranker failed with %s; bm25 answers instead", type(error).__name__)
            return None
        best = sorted(scores.items(), key=lambda item: -item[1])[:limit]
        return [(by_name[name], score) for name, score in best]


def _answer(query: str, mode: str, fallback: bool, results: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "success": True,
        "mode": mode,
        "fallback": fallback,
        "query": query,
        "result_count": len(results),
        "results": results,
    }


def _result(tool: Tool, score: float, include_parameters: bool) -> dict[str, Any]:
    parameters = {"parameters": tool.parameters} if include_parameters else {}
    return {"name": tool.name, "description": tool.description, **parameters, "score": round(score, 6)}


class IndexCache:
    """Caches the indexes of the catalogs that were used last. Thread-safe.

    Args:
        ranker: given to every index.
    """

    def __init__(self, ranker: Ranker | None = None) -> None:
        self._ranker = ranker
        self._lock = threading.Lock()  # held while an index is built, so that each is built once
        self._indexes: NewestCache[Hashable, ToolIndex] = NewestCache(MAX_INDEXES)

    def index_of(self, revision: Hashable, tools: Iterable[Tool]) -> ToolIndex:
        """Returns the index of a catalog, built where its revision is new.

        Args:
            revision: a key that differs for different tools, for instance a bus's revision with role and caller.
        """
        with self._lock:
            index = self._indexes.get(revision)
            if index is None:
                index = ToolIndex(tools, ranker=self._ranker)
            self._indexes[revision] = index  # a used index counts as the newest
        return index


def search_tool() -> Tool:
    """Returns the declaration of `search_tools`."""
    parameters = {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What the tool should do, e.g. `send email`"},
            "mode": {
                "type": "string",
                "enum": [*MODES],
                "default": "bm25",
                "description": "bm25: any of the words; keyword: exactly this text; semantic: by meaning, if available",
            },
            "top_k": {"type": "integer", "minimum": 1, "maximum": MAX_RESULTS, "default": 10},
            "include_parameters": {
                "type": "boolean",
                "default": False,
                "description": "Also return each tool's parameters",
            },
        },
        "required": ["query"],
    }
    return Tool(
        name=SEARCH_TOOLS,
        description=(
            "Find tools that are not in your list. There are more tools than the ones you see. "
            "Call this when the task needs something that none of your tools does. "
            "Do NOT call it when one of your tools fits, nor to look up facts, files or web pages: it finds tools. "
            f"To use a tool that it found, pass its name to {REQUEST_TOOL_INJECTION}. "
            "If results is empty, there is no such tool: try other words once, then say that you cannot do it. "
            "Never invent a tool."
        ),
        parameters_json=json.dumps(parameters),
        annotations=Annotations(read_only=True, idempotent=True),
    )
