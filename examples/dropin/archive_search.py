"""Finds pages of the Python documentation in an index that ships with the tool: `archive_search`.

The index is `data/archive_index.json`, made by `data/make_index.py` from the standard library. Ranking counts words, so
that the same query gives the same result and a person can see why.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from _common import cut, definition, limit_of, refuse, text_of

if TYPE_CHECKING:  # the loader gives each file this function
    from toolbus.dropin import register_tool

INDEX = json.loads((Path(__file__).parent / "data" / "archive_index.json").read_text(encoding="utf-8"))

DEFAULT_LIMIT, MAX_ROWS = 5, 10
TAG_POINTS, TEXT_POINTS = 2, 1  # an exact tag and a word of a tag count alike; only the former can stand alone
MAX_TERMS = 12
WORD = re.compile(r"[^\W_]+(?:_[^\W_]+)*")  # `lru_cache` is one word, `os.path` are two

# Words that do not select a page; those of the second group since every page is about them.
STOP_WORDS = frozenset(
    """
    a about an any are at be but by can could do does explain find for from get give have how i is it its me my of on
    one or please show tell that the their them there these they this to use used using want was what when where
    which who why will with would you your

    archive code doc docs documentation example examples language library manual module modules page pages program
    programming python reference standard stdlib tutorial
    """.split()  # noqa: SIM905  # 75 quoted words would fill the screen
)
# Keywords of the language: stop words in a sentence, but the subject of a query of one word.
KEYWORDS = frozenset({"for", "is", "or", "with"})


class Entry(NamedTuple):
    """One page, with its words as the ranking needs them."""

    shown: Mapping[str, Any]
    tags: frozenset[str]
    tag_words: frozenset[str]
    text_words: frozenset[str]


class Hit(NamedTuple):
    """How well a page matches a query."""

    distinct: int  # terms that it contains
    score: int
    exact: bool  # whether a term is one of its tags
    tagged: bool  # whether a term is a tag or a word of one
    entry: Entry


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case, each once, in order."""
    return list(dict.fromkeys(WORD.findall(text.lower())))


def read(entries: list[dict[str, Any]]) -> list[Entry]:
    """Returns the entries of an index, ready to be ranked."""
    return [
        Entry(
            entry,
            frozenset(tag.lower() for tag in entry["tags"]),
            frozenset(word for tag in entry["tags"] for word in words_of(tag)),
            frozenset(words_of(f"{entry['title']} {entry['summary']}")),
        )
        for entry in entries
    ]


def terms_of(query: str) -> list[str]:
    """Returns the words of a query without stop words."""
    words = words_of(query)
    if len(words) == 1 and words[0] in KEYWORDS:
        return words
    return [word for word in words if word not in STOP_WORDS][:MAX_TERMS]


def ranked(entries: list[Entry], terms: list[str], phrase: str = "") -> list[Hit]:
    """Returns the matching pages, best first: by distinct terms, then by score, then by their place in the index.

    Of several terms two have to match, or one has to be a tag; a single term has to be in a tag.

    Args:
        phrase: the whole query, which may be a tag of several words.
    """
    hits = [_hit(entry, terms, phrase) for entry in entries]
    matches = [hit for hit in hits if (hit.tagged if len(terms) == 1 else hit.distinct >= 2 or hit.exact)]
    return sorted(matches, key=lambda hit: (-hit.distinct, -hit.score))  # stable: equals stay in order


def _hit(entry: Entry, terms: list[str], phrase: str) -> Hit:
    in_tags = [term for term in terms if term in entry.tags or term in entry.tag_words]
    in_text = [term for term in terms if term in entry.text_words and term not in in_tags]
    exact = phrase in entry.tags or any(term in entry.tags for term in terms)
    score = TAG_POINTS * len(in_tags) + TEXT_POINTS * len(in_text)
    return Hit(len(in_tags) + len(in_text), score, exact, bool(in_tags), entry)


ENTRIES = read(INDEX["entries"])


def archive_search(args: Mapping[str, Any], env: Mapping[str, Any]) -> dict[str, Any]:
    """Finds pages for a few words."""
    query = text_of(args, "query")
    if not query:
        return refuse("`query` is empty: call archive_search again with the words to look for, such as 'json parse'.")
    terms = terms_of(query)
    if not terms:
        return {
            "count": 0,
            "shown": 0,
            "results": [],
            "note": "The query has only general words. Call archive_search again with a name or a subject, such as "
            "'context managers', or ask the user what they look for.",
        }
    hits = ranked(ENTRIES, terms, " ".join(query.lower().split()))
    shown = [{key: hit.entry.shown[key] for key in ("title", "url", "summary")} for hit in hits]
    answer = {"searched_for": terms} | cut(shown, limit_of(args, DEFAULT_LIMIT, MAX_ROWS), "results")
    if not hits:
        answer["note"] = "The index has nothing on this. Tell the user so. Do not give a URL or a title from memory."
    return answer


register_tool(
    name="archive_search",
    execute=archive_search,
    read_only=True,
    definition=definition(
        "archive_search",
        "Finds pages of the official Python documentation: title, URL and a summary. Call it BEFORE answering which "
        "module or function does something in Python, or where it is documented: 'which module reads csv files', "
        "'docs for lru_cache', 'link to the with statement'. Give only URLs from its results. Do NOT call it for "
        "packages that are not part of Python, for other languages, for news, or to run code.",
        {
            "query": {"type": "string", "description": "two or three telling words or one name, 'parse json'"},
            "limit": {"type": "integer", "description": f"results to show, 1 to {MAX_ROWS}. Default {DEFAULT_LIMIT}."},
        },
        ["query"],
    ),
)
