"""Searches a catalog of tools that is too large to be offered to a model as a whole.

`ToolIndex` indexes one catalog: words ranked by SQLite's FTS5, a plain substring, the meaning of texts
(`embeddings`), or words and meaning together. It knows neither where tools come from nor how they are called, so
programs and the bus use the same index.
"""

from __future__ import annotations

import bisect
import itertools
import json
import logging
import re
import reprlib
import sqlite3
import threading
import unicodedata
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from toolbus.common.newest import NewestCache
from toolbus.common.text import quote, repair_utf8
from toolbus.parts.models.embeddings import REMEDY, EmbeddedTexts, EmbedderChoice, Embeddings
from toolbus.protocol.limits import MAX_SEARCH_RESULTS
from toolbus.protocol.tool import Annotations, Tool

log = logging.getLogger("toolbus.search")

WORD_MODES = ("bm25", "keyword")
MEANING_MODES = ("semantic", "hybrid")  # with embeddings only
MODES = (*WORD_MODES, *MEANING_MODES)
MAX_RESULTS = MAX_SEARCH_RESULTS
MAX_QUERY_CHARACTERS = 1000  # a query is a sentence; a longer one is cut
MAX_EMBEDDED_CHARACTERS = 1000  # of a tool: the first sentences of a description say what it is for
MAX_WORD_HITS = 200  # tools whose words count in mode hybrid
# A meaning farther away than this does not count, so that a search may find nothing: of the paraphrases that find their
# tool among the first five, none is (`make bench ARGS=search-quality`). Embedders whose cosines are all high pass it.
MIN_COSINE = 0.12
# What a match of the words adds in mode hybrid, to a meaning in standard deviations: `make bench ARGS=search-quality`
# found the best tools with 0.05 to 0.3, and words should count as much as they can.
WORDS_WEIGHT = 0.3
MAX_QUERY_PHRASES = 64  # each costs a lookup
MAX_INDEXES = 8  # one for each role and host in use
MAX_OF_PLACE = 1 << 20  # tools of one name in the roles of a bus

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


def _meaning_text(tool: Tool) -> str:
    """Returns the text that stands for a tool's meaning: its name in words, and its description."""
    return repair_utf8(f"{_WORD_BREAK.sub(' ', tool.name)}. {tool.description}"[:MAX_EMBEDDED_CHARACTERS])


# -- the index -------------------------------------------------------------------------------------------------------


class ToolIndex:
    """Searches one catalog. Thread-safe.

    Args:
        tools: the catalog; equal scores keep its order.
        embeddings: for the modes `semantic` and `hybrid`; None: this index has neither. Where they fail, bm25 answers.
    """

    def __init__(self, tools: Iterable[Tool], *, embeddings: Embeddings | None = None) -> None:
        self._tools: dict[int, Tool] = {}  # by number; the numbers rise in the order of the catalog
        self._embeddings = embeddings if embeddings is not None and embeddings.available else None
        self._meanings: _Meanings | None = None  # None until the first search by meaning
        self._casefolded: dict[int, tuple[str, str]] = {}  # for keyword
        self._lock = threading.Lock()  # one statement at a time on the connection
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        # A cache may drop an index while another thread searches it, so the last reference closes the database.
        weakref.finalize(self, self._database.close)
        with self._database:
            self._database.execute(  # contentless: `_tools` holds the texts
                "CREATE VIRTUAL TABLE tools USING fts5("
                "name, description, parameters, content = '', tokenize = 'porter unicode61 remove_diacritics 2')"
            )
        self.update({}, dict(enumerate(tools)))

    def update(self, before: Mapping[int, Tool], after: Mapping[int, Tool]) -> None:
        """Replaces a part of the catalog: tools by their numbers, which rise in the order of the catalog."""
        removed = {number: tool for number, tool in before.items() if after.get(number) is not tool}
        added = {number: tool for number, tool in after.items() if before.get(number) is not tool}
        split = _Tokenizer().split
        with self._lock, self._database:
            for command, tools in (("'delete'", removed), ("NULL", added)):
                self._database.executemany(
                    f"INSERT INTO tools (tools, rowid, name, description, parameters) VALUES ({command}, ?, ?, ?, ?)",
                    (
                        (number, *map(split, (tool.name, tool.description, _parameter_text(tool))))
                        for number, tool in tools.items()
                    ),
                )
            last = next(reversed(self._tools), -1)
            is_behind = any(number < last for number in added.keys() - self._tools.keys())
            for number, tool in added.items():
                self._tools[number] = tool
                self._casefolded[number] = (_casefold(tool.name), _casefold(tool.description))
            for number in removed.keys() - added.keys():
                del self._tools[number], self._casefolded[number]
            if is_behind:  # in the order of the catalog again
                self._tools, self._casefolded = (
                    dict(sorted(self._tools.items())),
                    dict(sorted(self._casefolded.items())),
                )
                self._meanings = None
            if self._meanings is not None and not self._meanings.update(removed, added):
                self._meanings = None

    def __len__(self) -> int:
        return len(self._tools)

    def __repr__(self) -> str:
        return f"ToolIndex({len(self._tools)} tools, modes={', '.join(self.modes)})"

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that it has."""
        return modes_of(self._embeddings)

    def search(
        self, query: str, *, mode: str = "", top_k: int = 10, include_parameters: bool = False
    ) -> dict[str, Any]:
        """Returns the best tools, best first, as `success, mode, fallback, query, result_count, results`.

        `mode` is the mode that answered; `fallback` is true where it is not the requested one. A mode that does not
        exist, or needs embeddings where there are none, gets `success: False` and a sentence under `error`. Scores are
        comparable within one answer only.

        Args:
            mode: `bm25` for words, `keyword` for a substring of name or description, `semantic` for meaning, `hybrid`
                for meaning and words; "": the default of this index.
            top_k: how many at most; clamped to 1 to 50.
            include_parameters: whether each result carries its JSON Schema.
        """
        query = repair_utf8(query[:MAX_QUERY_CHARACTERS])
        mode = mode or default_mode(self.modes)
        if mode not in self.modes:
            return {**_answer(query, "bm25", False, []), "success": False, "error": self._unknown(mode)}
        limit = max(1, min(top_k, MAX_RESULTS))
        hits = self._by_meaning(query, limit, words=mode == "hybrid") if mode in MEANING_MODES else None
        fallback = mode in MEANING_MODES and hits is None
        if hits is None:
            hits = self._by_substring(query, limit) if mode == "keyword" else self._by_words(query, limit)
        results = [_result(tool, score, include_parameters) for tool, score in hits]
        return _answer(query, "bm25" if fallback else mode, fallback, results)

    def _unknown(self, mode: str) -> str:
        if mode in MEANING_MODES:
            return f"mode {mode} needs embeddings, which are not installed here: leave mode out for bm25, or {REMEDY}"
        default = default_mode(self.modes)
        return (
            f"mode is {quote(repair_utf8(mode))}, it must be one of {', '.join(self.modes)}: leave it out for {default}"
        )

    def _by_words(self, query: str, limit: int) -> list[tuple[Tool, float]]:
        scores = self._word_scores(_match(query), limit)
        return [(tool, score) for number, score in scores if (tool := self._tools.get(number)) is not None]

    def _word_scores(self, match: str, limit: int) -> list[tuple[int, float]]:
        """Returns the places of tools in the catalog with their scores by an FTS5 expression, best first."""
        if not match:
            return []
        with self._lock:
            rows = self._database.execute(
                "SELECT rowid, bm25(tools, 8.0, 3.0, 1.0) AS cost FROM tools WHERE tools MATCH ? "
                "ORDER BY cost, rowid LIMIT ?",
                (match, limit),
            ).fetchall()
        return [(number, -cost) for number, cost in rows]

    def _by_substring(self, query: str, limit: int) -> list[tuple[Tool, float]]:
        substring = _casefold(query.strip())
        if not substring:
            return []
        scored = [
            (number, 2.0 if substring in name else 1.0)
            for number, (name, description) in [*self._casefolded.items()]  # copied in one step
            if substring in name or substring in description
        ]
        best = sorted(scored, key=lambda hit: -hit[1])[:limit]
        return [(tool, score) for number, score in best if (tool := self._tools.get(number)) is not None]

    def _by_meaning(self, query: str, limit: int, *, words: bool) -> list[tuple[Tool, float]] | None:
        """Returns the tools nearest in meaning, or None where there are no embeddings or they failed.

        Args:
            words: whether matching words count as well: the cosines are taken in standard deviations then, whose scale
                is the same for every embedder, and the score of the words for each phrase of the query is added.
        """
        if self._embeddings is None:
            return None
        if not query.strip() or not self._tools:
            return []
        with self._lock:
            if self._meanings is None:
                self._meanings = _Meanings(self._tools)
            meanings = self._meanings
        try:
            scores = self._embeddings.similarities(query, meanings.texts)
        except Exception as error:  # embeddings come from models and networks; bm25 works without them
            log.warning("the embedder failed with %s; bm25 answers instead", type(error).__name__)
            return None
        numbers = meanings.numbers
        near = set((scores >= MIN_COSINE).nonzero()[0].tolist())
        if words:
            scores = meanings.texts.in_deviations(scores)
            match = _match(query)
            phrases = match.count(" OR ") + 1
            for number, score in self._word_scores(match, MAX_WORD_HITS):
                row = bisect.bisect_left(numbers, number)
                if row < len(scores) and numbers[row] == number:
                    scores[row] += WORDS_WEIGHT * score / phrases
                    near.add(row)
        best = (row for row in (-scores).argsort(kind="stable").tolist() if row in near)
        hits = [(numbers[row], float(scores[row])) for row in itertools.islice(best, limit)]
        return [(tool, score) for number, score in hits if (tool := self._tools.get(number)) is not None]


class _Meanings:
    """The texts of an index that are compared by meaning.

    Attributes:
        texts: in rows; numbers: of the tools in the same rows, rising; removed: the rows of former tools.
    """

    def __init__(self, tools: Mapping[int, Tool]) -> None:
        self.texts = EmbeddedTexts([_meaning_text(tool) for tool in tools.values()])
        self.numbers = [*tools]
        self.removed: set[int] = set()

    def update(self, removed: Mapping[int, Tool], added: Mapping[int, Tool]) -> bool:
        """Takes changes over. Returns whether they are worth it: else all are to be compared anew."""
        for number in removed:
            row = bisect.bisect_left(self.numbers, number)
            self.texts.put(row, None)
            self.removed.add(row)
        for number, tool in added.items():
            row = bisect.bisect_left(self.numbers, number)
            self.numbers[row : row + 1] = [number]
            self.texts.put(row, _meaning_text(tool))
            self.removed.discard(row)
        return len(self.removed) <= len(self.numbers) // 8


def modes_of(embeddings: Embeddings | None) -> tuple[str, ...]:
    """Returns the modes of a search with these embeddings."""
    return MODES if embeddings is not None and embeddings.available else WORD_MODES


def default_mode(modes: Iterable[str]) -> str:
    """Returns the mode that is used where none is named: it finds most, see docs/about/performance.md."""
    return "hybrid" if "hybrid" in modes else "bm25"


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


class CatalogLine(Protocol):
    """One line of a bus's catalog."""

    @property
    def tool(self) -> Tool:
        """The tool."""

    @property
    def place(self) -> int:
        """Its position among others."""


class IndexCache:
    """Caches the indexes of the catalogs that were used last. Thread-safe.

    Args:
        embedder: compares meanings; see `EmbedderChoice` for None and False.
    """

    def __init__(self, embedder: EmbedderChoice = None) -> None:
        self._embeddings = Embeddings(embedder)  # shared by all indexes: a text is embedded once
        self._lock = threading.Lock()  # held while an index is built, so that each is built once
        self._indexes: NewestCache[Hashable, ToolIndex] = NewestCache(MAX_INDEXES)
        self._of_blocks: NewestCache[Hashable, tuple[tuple[tuple[CatalogLine, ...], ...], ToolIndex]] = NewestCache(
            MAX_INDEXES
        )

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes of its indexes."""
        return modes_of(self._embeddings)

    def index_of(self, revision: Hashable, tools: Iterable[Tool]) -> ToolIndex:
        """Returns the index of a catalog, built where its revision is new.

        Args:
            revision: a key that differs for different tools, for instance a bus's revision with role and caller.
        """
        with self._lock:
            index = self._indexes.get(revision)
            if index is None:
                index = ToolIndex(tools, embeddings=self._embeddings)
            self._indexes[revision] = index  # a used index counts as the newest
        return index

    def index_of_blocks(self, key: Hashable, blocks: tuple[tuple[CatalogLine, ...], ...]) -> ToolIndex:
        """Returns the index of a bus's catalog; only blocks that have changed are indexed anew.

        Args:
            key: who sees the catalog so: role, user, level, scopes.
        """
        with self._lock:
            before, index = self._of_blocks.get(key) or ((), ToolIndex((), embeddings=self._embeddings))
            index.update(_numbered(before, blocks), _numbered(blocks, before))
            self._of_blocks[key] = blocks, index
        return index


def _numbered(blocks: Iterable[tuple[CatalogLine, ...]], others: Iterable[tuple[CatalogLine, ...]]) -> dict[int, Tool]:
    """Returns the tools of blocks that are not among others, by numbers in the order of the catalog."""
    known = set(map(id, others))
    listings = (listing for block in blocks if id(block) not in known for listing in block)
    return {
        place * MAX_OF_PLACE + number: listing.tool
        for place, same in itertools.groupby(listings, key=lambda listing: listing.place)
        for number, listing in enumerate(same)
    }


SEARCH_TOOLS = "search_tools"
REQUEST_TOOL_INJECTION = "request_tool_injection"
_MEANINGS = {
    "bm25": "any of the words",
    "keyword": "exactly this text",
    "semantic": "by meaning",
    "hybrid": "by meaning and words",
}


def search_tool(modes: Sequence[str] = WORD_MODES) -> Tool:
    """Returns the declaration of `search_tools`.

    Args:
        modes: those of the index that answers.
    """
    parameters = {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What the tool should do, e.g. `send email`"},
            "mode": {
                "type": "string",
                "enum": [*modes],
                "default": default_mode(modes),
                "description": "; ".join(f"{mode}: {_MEANINGS[mode]}" for mode in modes),
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
            "If no result fits, there is no such tool: try other words once, then say that you cannot do it. "
            "Never invent a tool."
        ),
        parameters_json=json.dumps(parameters),
        annotations=Annotations(read_only=True, idempotent=True),
    )


def search_arguments(arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the query and the options of a call, for `ToolIndex.search`, which checks the mode.

    Raises:
        ValueError: naming the argument that breaks its rule.
    """
    options = {name: arguments[name] for name in ("mode", "top_k", "include_parameters") if name in arguments}
    query, top_k = arguments.get("query", ""), options.get("top_k", 10)
    if not isinstance(query, str):
        raise ValueError(
            f"query is {reprlib.repr(query)}, it must be a string: say in a few words what the tool should do"
        )
    if not isinstance(options.get("mode", ""), str):
        raise ValueError(f"mode is {reprlib.repr(options['mode'])}, it must be one of {', '.join(MODES)}")
    if isinstance(top_k, bool) or not (isinstance(top_k, int) or (isinstance(top_k, float) and top_k.is_integer())):
        raise ValueError(f"top_k is {reprlib.repr(top_k)}, it must be an integer from 1 to {MAX_RESULTS}")
    if not isinstance(options.get("include_parameters", False), bool):
        raise ValueError(
            f"include_parameters is {reprlib.repr(options['include_parameters'])}, it must be true or false"
        )
    return query, {**options, "top_k": int(top_k)}
