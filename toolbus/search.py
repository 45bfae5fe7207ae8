"""Finds tools where there are too many to show them all to a model.

`ToolIndex` searches one catalog: words ranked by SQLite's FTS5, or a plain substring, or a ranker of the caller's. It
knows neither where tools come from nor how they are called, so the SDK's side uses it like the bus's.
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

from toolbus.tool import Annotations, Tool

log = logging.getLogger("toolbus.search")

Ranker: TypeAlias = Callable[[str, Sequence[Tool]], Sequence[tuple[str, float]]]
"""Given a query and the tools: names with scores, where higher is better. Called from any thread."""

SEARCH_TOOLS = "search_tools"
REQUEST_TOOL_INJECTION = "request_tool_injection"
MODES = ("bm25", "keyword", "semantic")
MAX_RESULTS = 50
MAX_QUERY_CHARACTERS = 1000  # a query is a sentence; what is longer is cut
MAX_QUERY_PHRASES = 64  # each costs a look-up
CATALOGUES_KEPT = 8  # one for each role and host that is in use

# -- words -----------------------------------------------------------------------------------------------------------

# Written without spaces between words: Han, kana and their marks, Hangul.
_CJK = "々〇ぁ-ゖゝ-ゟァ-ヺー-ヿ㐀-䶿一-鿿가-힣豈-﫿\U00020000-\U0003ffff"
_STRETCH = re.compile(rf"[{_CJK}]+")
_WORD = re.compile(rf"([{_CJK}]+)|([^\W_{_CJK}]+(?:[_.:-][^\W_{_CJK}]+)*)")
_SEAM = re.compile(r"[_.:-]|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # get_weather, getWeather, HTTPServer

# Nobody looks for these; in a query that is a sentence they would find everything.
_FILLERS = re.compile(
    "a|an|and|any|are|as|at|be|by|can|do|does|for|from|have|how|i|in|into|is|it|me|my|need|of|on|or|please|some|that|"
    "the|there|this|to|tools?|use|want|what|which|with|you|your"
)


def _words(text: str) -> Iterator[str]:
    """Yields the words of a text in NFKC: a stretch of CJK as one, a name in its parts and also as a whole.

    The whole lets `github` find GitHub and `getweather` find get_weather.
    """
    for stretch, name in _WORD.findall(text):
        if stretch:
            yield stretch
            continue
        parts = _SEAM.split(name)
        yield from parts
        if len(parts) > 1:
            yield "".join(parts)


class _Spelling(dict[str, str]):
    """How texts are written in the index: words apart, and CJK character by character.

    What stands between two spaces is worked out once, since a catalog repeats its words: a third of the time.
    """

    def __missing__(self, piece: str) -> str:
        spelt = " ".join(" ".join(word) if _STRETCH.match(word) else word for word in _words(piece))
        self[piece] = spelt
        return spelt

    def of(self, text: str) -> str:
        return " ".join(map(self.__getitem__, unicodedata.normalize("NFKC", text).split()))


def _match(query: str) -> str:
    """Returns a query as an FTS5 expression: any of its phrases, or "" where it has none.

    Every phrase stands in quotes and holds letters and digits only, so no query is taken for FTS5's own syntax. CJK is
    asked for in pairs, which are about as long as its words.
    """
    phrases: dict[str, None] = {}  # in order, each once
    fillers: dict[str, None] = {}
    for word in _words(unicodedata.normalize("NFKC", query)):
        if _STRETCH.match(word):
            phrases.update(dict.fromkeys(map(" ".join, pairwise(word)) if len(word) > 1 else word))
        else:
            (fillers if _FILLERS.fullmatch(word.lower()) else phrases)[word.lower()] = None
    return " OR ".join(f'"{phrase}"' for phrase in [*(phrases or fillers)][:MAX_QUERY_PHRASES])


def _parameter_text(tool: Tool) -> str:
    """Returns the names and descriptions of a tool's parameters, at any depth."""
    found: list[str] = []
    waiting: list[Any] = [tool.parameters]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            properties = node.get("properties")
            found += properties if isinstance(properties, dict) else ()
            description = node.get("description")
            found += [description] if isinstance(description, str) else ()
            waiting += node.values()
    return " ".join(found)


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


# -- the index -------------------------------------------------------------------------------------------------------


class ToolIndex:
    """Searches one catalog, which does not change. Safe to use from any thread.

    Args:
        tools: the catalog; equal scores keep its order.
        ranker: ranks for mode `semantic`, by embeddings for instance. Where it fails or is missing, bm25 answers.
    """

    def __init__(self, tools: Iterable[Tool], *, ranker: Ranker | None = None) -> None:
        self._tools = tuple(tools)
        self._ranker = ranker  # None: nobody can rank by meaning here
        self._folded = [(_folded(tool.name), _folded(tool.description)) for tool in self._tools]  # for mode keyword
        self._lock = threading.Lock()  # one statement at a time on the connection
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        # Whoever drops an index may not be the last to search it, so nobody closes it by hand.
        weakref.finalize(self, self._database.close)
        spelling = _Spelling()
        with self._database:
            self._database.execute(  # contentless: the tools are here already
                "CREATE VIRTUAL TABLE tools USING fts5("
                "name, description, parameters, content = '', tokenize = 'porter unicode61 remove_diacritics 2')"
            )
            self._database.executemany(
                "INSERT INTO tools (rowid, name, description, parameters) VALUES (?, ?, ?, ?)",
                (
                    (number, *map(spelling.of, (tool.name, tool.description, _parameter_text(tool))))
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

        `mode` is the one that answered; `fallback` tells that it is not the one that was asked for. A mode that does
        not exist gets `success: False` and a sentence under `error`. A score compares results of one answer only.

        Args:
            mode: `bm25` for words, `keyword` for a substring of name or description, `semantic` for the ranker.
            top_k: how many at most; taken as 1 to 50.
            include_parameters: whether each result carries its JSON Schema.
        """
        query = sendable(query, MAX_QUERY_CHARACTERS)
        if mode not in MODES:
            why = f"mode is {sendable(mode, 80)!r}, it must be one of {', '.join(MODES)}: leave it out for bm25"
            return {**_found(query, "bm25", False, []), "success": False, "error": why}
        most = max(1, min(top_k, MAX_RESULTS))
        hits = self._by_meaning(query, most) if mode == "semantic" else None
        fallback = mode == "semantic" and hits is None
        if hits is None:
            hits = self._by_substring(query, most) if mode == "keyword" else self._by_words(query, most)
        results = [_shown(tool, score, include_parameters) for tool, score in hits]
        return _found(query, "bm25" if fallback else mode, fallback, results)

    def _by_words(self, query: str, most: int) -> list[tuple[Tool, float]]:
        match = _match(query)
        if not match:
            return []
        with self._lock:
            rows = self._database.execute(
                "SELECT rowid, bm25(tools, 8.0, 3.0, 1.0) AS cost FROM tools WHERE tools MATCH ? "
                "ORDER BY cost, rowid LIMIT ?",
                (match, most),
            ).fetchall()
        return [(self._tools[number], -cost) for number, cost in rows]

    def _by_substring(self, query: str, most: int) -> list[tuple[Tool, float]]:
        sought = _folded(query.strip())
        if not sought:
            return []
        scored = [
            (tool, 2.0 if sought in name else 1.0)
            for tool, (name, description) in zip(self._tools, self._folded, strict=True)
            if sought in name or sought in description
        ]
        return sorted(scored, key=lambda hit: -hit[1])[:most]

    def _by_meaning(self, query: str, most: int) -> list[tuple[Tool, float]] | None:
        """Returns what the ranker says, or None where nobody can say it."""
        if self._ranker is None:
            return None
        if not query.strip():
            return []
        by_name = {tool.name: tool for tool in self._tools}
        try:
            scores = {name: float(score) for name, score in self._ranker(query, self._tools) if name in by_name}
            if not all(map(math.isfinite, scores.values())):
                raise ValueError("a score is no finite number")
        except Exception as problem:  # embeddings come from models and networks: whatever fails there, bm25 still works
            log.warning("the ranker failed with %s; bm25 answers instead", type(problem).__name__)
            return None
        best = sorted(scores.items(), key=lambda item: -item[1])[:most]
        return [(by_name[name], score) for name, score in best]


def _found(query: str, mode: str, fallback: bool, results: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "success": True,
        "mode": mode,
        "fallback": fallback,
        "query": query,
        "result_count": len(results),
        "results": results,
    }


def _shown(tool: Tool, score: float, include_parameters: bool) -> dict[str, Any]:
    parameters = {"parameters": tool.parameters} if include_parameters else {}
    return {"name": tool.name, "description": tool.description, **parameters, "score": round(score, 6)}


def sendable(text: str, most: int) -> str:
    """Cuts a text of a model's and takes out what UTF-8 cannot carry, so that an answer may quote it."""
    return text[:most].encode("utf-8", "replace").decode()


class IndexCache:
    """Keeps the indexes of the newest catalogs. Safe to use from any thread.

    Args:
        ranker: given to every index.
    """

    def __init__(self, ranker: Ranker | None = None) -> None:
        self._ranker = ranker
        self._lock = threading.Lock()  # held while an index is built, so that each is built once
        self._indexes: dict[Hashable, ToolIndex] = {}  # the one used last stands last

    def index_of(self, revision: Hashable, tools: Iterable[Tool]) -> ToolIndex:
        """Returns the index of a catalog, built where its revision is new.

        Args:
            revision: whatever is different for different tools. A bus's revision is that for one role and one caller.
        """
        with self._lock:
            index = self._indexes.pop(revision, None)
            if index is None:
                index = ToolIndex(tools, ranker=self._ranker)
            self._indexes[revision] = index
            if len(self._indexes) > CATALOGUES_KEPT:
                del self._indexes[next(iter(self._indexes))]
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
