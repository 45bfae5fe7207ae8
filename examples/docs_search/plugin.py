"""Searches the documents of this machine: the project's own Markdown and the Python standard library's docstrings.

The short form of a plugin: a `Plugin` and two plain functions, whose type hints and docstrings become the schemas.
The library's source is read with `ast`, nothing of it is imported or run; SQLite's FTS5 ranks the hits.

    toolbus run examples/docs_search/plugin.py
"""

from __future__ import annotations

import ast
import re
import sqlite3
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from toolbus.sdk import Err, Plugin, ToolScope

PROJECT = Path(__file__).resolve().parents[2]
HEADING = re.compile(r"^(#{1,3}) +(.+?)\s*$", re.MULTILINE)
WORD = re.compile(r"\w+")
SNIPPET_WORDS = 24
PROGRESS_EVERY = 20  # files
MAX_CHARACTERS = 20_000  # of one document, so that it does not fill a model's context

OnProgress = Callable[[int, int], None]


class Document(NamedTuple):
    """A document that can be found and read."""

    id: str  # `docs/protocol.md#drain`, `python:json.dumps`
    title: str
    text: str


class Hit(NamedTuple):
    """A document that matches a query."""

    id: str
    title: str
    snippet: str


class Library:
    """An index that is built at its first use. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a sqlite3 connection serves one thread at a time
        self._index: sqlite3.Connection | None = None  # None until built

    def search(self, query: str, limit: int, on_progress: OnProgress) -> list[Hit]:
        """Returns the best hits: documents with every word of the query, else those with any of them."""
        words = [f'"{word}"' for word in WORD.findall(query)]  # quoted: FTS5's own operators mean nothing here
        if not words:
            return []
        with self._lock:
            index = self._built(on_progress)
            for joined in (" AND ".join(words), " OR ".join(words)):
                rows = index.execute(
                    "SELECT id, title, snippet(documents, 2, '[', ']', ' … ', ?) FROM documents "
                    "WHERE documents MATCH ? ORDER BY bm25(documents, 8.0, 4.0, 1.0) LIMIT ?",
                    (SNIPPET_WORDS, joined, limit),
                ).fetchall()
                if rows:
                    return [Hit(id, title, " ".join(snippet.split())) for id, title, snippet in rows]
        return []

    def read(self, id: str, on_progress: OnProgress) -> Document | None:
        """Returns a document; None for an unknown id."""
        with self._lock:
            row = (
                self._built(on_progress)
                .execute(
                    "SELECT id, title, text FROM documents WHERE rowid = (SELECT number FROM places WHERE id = ?)",
                    (id,),
                )
                .fetchone()
            )
        return Document(*row) if row else None

    def _built(self, on_progress: OnProgress) -> sqlite3.Connection:
        if self._index is None:
            index = sqlite3.connect(":memory:", check_same_thread=False)
            index.execute("CREATE VIRTUAL TABLE documents USING fts5(id, title, text, tokenize = 'porter unicode61')")
            index.execute("CREATE TABLE places (id TEXT PRIMARY KEY, number INTEGER)")
            for document in documents(on_progress):
                number = index.execute("INSERT INTO documents VALUES (?, ?, ?)", document).lastrowid
                index.execute("INSERT OR IGNORE INTO places VALUES (?, ?)", (document.id, number))
            self._index = index
        return self._index


def documents(on_progress: OnProgress) -> Iterator[Document]:
    """Yields every document; reports progress after every few files."""
    files = [*_markdown_files(), *_standard_library()]
    for number, (label, file) in enumerate(files):
        if number % PROGRESS_EVERY == 0:
            on_progress(number, len(files))
        if file.suffix == ".md":
            yield from _sections(label, file.read_text(encoding="utf-8"))
        else:
            yield from _docstrings(label, file.read_bytes())
    on_progress(len(files), len(files))


def _markdown_files() -> Iterator[tuple[str, Path]]:
    for file in (*sorted(PROJECT.glob("*.md")), *sorted(PROJECT.glob("docs/**/*.md"))):
        yield file.relative_to(PROJECT).as_posix(), file


def _standard_library() -> Iterator[tuple[str, Path]]:
    folder = Path(sysconfig.get_path("stdlib"))
    for name in sorted(sys.stdlib_module_names):
        for file in (folder / f"{name}.py", folder / name / "__init__.py"):
            if not name.startswith("_") and file.is_file():
                yield name, file


def _sections(path: str, text: str) -> Iterator[Document]:
    """Cuts Markdown at its headings."""
    headings = list(HEADING.finditer(text))
    for index, heading in enumerate(headings):
        end = headings[index + 1].start() if index + 1 < len(headings) else len(text)
        title = heading[2].replace("`", "")
        anchor = "-".join(WORD.findall(title.lower()))
        yield Document(f"{path}#{anchor}", title, text[heading.start() : end].strip())


def _docstrings(module: str, source: bytes) -> Iterator[Document]:
    """Yields the docstrings of a module and of its public classes and functions."""
    tree = ast.parse(source)
    named: list[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]] = [(module, tree)]
    named += [
        (f"{module}.{node.name}", node)
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
    ]
    for name, node in named:
        text = ast.get_docstring(node)
        if text:
            title = text.splitlines()[0] if text.strip() else name
            yield Document(f"python:{name}", f"{name}: {title}", text)


plugin = Plugin("docs-search")
library = Library()


@plugin.tool(read_only=True)
def search_docs(query: str, scope: ToolScope, limit: int = 5) -> Any:
    """Search the project's documentation and the Python standard library's docstrings.

    Args:
        query: words to look for
        limit: how many hits at most, from 1 to 50
    """
    if not 1 <= limit <= 50:
        return Err(f"limit is {limit}, it must be from 1 to 50")
    hits = library.search(query, limit, _reporting(scope))
    return [hit._asdict() for hit in hits]


@plugin.tool(read_only=True)
def read_doc(id: str, scope: ToolScope) -> Any:
    """Read one document that search_docs found.

    Args:
        id: the id of a hit
    """
    document = library.read(id, _reporting(scope))
    if document is None:
        return Err(f"there is no document {id[:200]!r}: take an id from an answer of search_docs")
    text = document.text
    cut = {"cut_at": MAX_CHARACTERS, "characters": len(text)} if len(text) > MAX_CHARACTERS else {}
    return {"id": document.id, "title": document.title, "text": text[:MAX_CHARACTERS], **cut}


def _reporting(scope: ToolScope) -> OnProgress:
    """Reports progress while the first call builds the index, which takes about a second."""

    def report(done: int, total: int) -> None:
        scope.progress(done, total=total, message=f"reading the documents, {done} of {total}")

    return report


if __name__ == "__main__":
    plugin.run()
