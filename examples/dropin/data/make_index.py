"""Makes archive_index.json, which archive_search searches, from the Python that runs this script.

    python3.11 make_index.py

It reads two parts of the standard library: the topics of the language reference that `help()` shows, and the docstrings
of modules. The texts are the Python Software Foundation's, under the PSF licence. Only `pydoc` and modules that are
written in C are imported; of the others the source is read.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import platform
import pydoc
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

SITE = f"https://docs.python.org/{sys.version_info[0]}.{sys.version_info[1]}"
MAX_CHARACTERS = 240  # of a summary
UNDERLINED = re.compile(r"^(?:.*\n)?[ \t]*([-=~*])\1+[ \t]*$", re.MULTILINE)  # a heading with its line

# Page of the documentation → the topics on it.
PAGES = {
    "reference/simple_stmts": "assert assignment augassign break continue del global import nonlocal pass raise return "
    "yield",
    "reference/compound_stmts": "async class compound else for function if try type-params while with",
    "reference/expressions": "atom-identifiers atom-literals attribute-references await binary bitwise booleans calls "
    "comparisons conversions exprlists in lambda lists operator-summary power shifting slicings subscriptions unary",
    "reference/datamodel": "attribute-access callable-types context-managers customization numeric-types objects "
    "sequence-types specialnames types",
    "reference/executionmodel": "dynamic-features exceptions execmodel naming",
    "reference/lexical_analysis": "floating id-classes identifiers imaginary integers numbers strings",
    "library/pdb": "debugger",
    "library/stdtypes": "bltin-code-objects bltin-ellipsis-object bltin-null-object bltin-type-objects dict "
    "specialattrs string-methods truth typesfunctions typesmapping typesmethods typesmodules typesseq typesseq-mutable",
    "library/string": "formatstrings",
}
# Chapter of the library → its modules.
CHAPTERS = {
    "text processing": "string re difflib textwrap unicodedata stringprep",
    "binary data": "struct codecs",
    "data types": "datetime zoneinfo calendar collections collections.abc heapq bisect array weakref types copy pprint "
    "reprlib enum graphlib",
    "mathematics": "numbers math cmath decimal fractions random statistics",
    "functional programming": "itertools functools operator",
    "files and directories": "pathlib os.path fileinput stat filecmp tempfile glob fnmatch linecache shutil",
    "persistence": "pickle copyreg shelve marshal dbm sqlite3",
    "compression": "zlib gzip bz2 lzma zipfile tarfile",
    "file formats": "csv configparser tomllib netrc plistlib",
    "cryptography": "hashlib hmac secrets",
    "operating system": "os io time argparse getopt logging logging.handlers getpass curses platform errno ctypes",
    "concurrency": "threading multiprocessing multiprocessing.shared_memory concurrent.futures subprocess sched queue "
    "contextvars",
    "networking": "asyncio socket ssl select selectors signal mmap",
    "internet data": "email json mailbox mimetypes base64 binascii quopri",
    "markup": "html html.parser xml.etree.ElementTree xml.dom.minidom xml.sax",
    "internet protocols": "webbrowser wsgiref urllib.request urllib.parse urllib.error urllib.robotparser http "
    "http.client ftplib poplib imaplib smtplib uuid socketserver http.server http.cookies xmlrpc.client ipaddress",
    "multimedia": "wave colorsys",
    "internationalization": "gettext locale",
    "program frameworks": "turtle cmd shlex",
    "graphical interfaces": "tkinter",
    "development": "typing pydoc doctest unittest unittest.mock",
    "debugging": "bdb faulthandler pdb timeit trace tracemalloc cProfile",
    "packaging": "ensurepip venv zipapp",
    "runtime services": "sys sysconfig builtins warnings dataclasses contextlib abc atexit traceback gc inspect site",
    "interpreters": "code codeop",
    "importing": "zipimport pkgutil modulefinder runpy importlib importlib.resources importlib.metadata",
    "language services": "ast symtable keyword tokenize tabnanny pyclbr py_compile compileall dis pickletools",
    "unix": "posix pwd grp termios tty pty fcntl resource syslog",
}


def make_index() -> dict[str, Any]:
    """Returns the whole index."""
    return {
        "origin": {
            "title": "Python documentation: language reference topics and standard library modules",
            "url": SITE,
            "licence": "PSF-2.0 (https://docs.python.org/3/license.html)",
            "python": platform.python_version(),
        },
        "entries": [*_topics(), *_modules()],
    }


def as_text(index: dict[str, Any]) -> str:
    """Returns the file: one line for each entry, so that diffs show single entries."""
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in index["entries"])
    return f'{{"origin": {json.dumps(index["origin"])},\n"entries": [\n{lines}\n]}}\n'


def _topics() -> Iterator[dict[str, Any]]:
    pages = {topic: page for page, names in PAGES.items() for topic in names.split()}
    if missing := sorted(set(topics) - set(pages)):
        raise SystemExit(f"topics without a page: {', '.join(missing)}. Add each to PAGES")
    for topic, text in sorted(topics.items()):
        title, _, body = text.partition("\n")
        yield {
            "title": title.strip().replace('"', ""),
            "url": f"{SITE}/{pages[topic]}.html#{topic}",
            "summary": _first_words(body),
            "tags": _tags(topic, topic.replace("-", " "), *_words_for(topic)),
        }


def _words_for(topic: str) -> Iterator[str]:
    """Yields the words for which `help()` shows a topic: keywords, symbols and names of topics."""
    names = {name for name, entry in pydoc.Helper.topics.items() if isinstance(entry, tuple) and entry[0] == topic}
    yield from sorted(name.lower() for name in names)
    for words in (pydoc.Helper.keywords, pydoc.Helper.symbols):
        for word, entry in sorted(words.items()):
            target = entry[0] if isinstance(entry, tuple) else entry
            if word.isalnum() and (target == topic or target.split(" ")[0] in names):
                yield word


def _modules() -> Iterator[dict[str, Any]]:
    for chapter, names in CHAPTERS.items():
        for name in names.split():
            docstring, public = _docstring_and_names(name)
            yield {
                "title": name,
                "url": f"{SITE}/library/{'profile' if name == 'cProfile' else name.lower()}.html",
                "summary": _first_words(docstring) or _default_summary(chapter, public),
                "tags": _tags(name, *re.split(r"[._]", name), chapter, *public),
            }


def _default_summary(chapter: str, public: list[str]) -> str:
    """Returns the summary of a module without a docstring."""
    return f"A module for {chapter}" + (f", with {', '.join(public[:8])}." if public else ".")


def _docstring_and_names(name: str) -> tuple[str, list[str]]:
    """Returns a module's docstring and the public names that it lists, without constants."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return importlib.import_module(name).__doc__ or "", []
    tree = ast.parse(Path(spec.origin).read_bytes())
    public: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(at, ast.Name) and at.id == "__all__" for at in node.targets):
            try:
                public = [str(each) for each in ast.literal_eval(node.value)]
            except ValueError:  # built at run time
                public = []
    return ast.get_docstring(tree) or "", [each for each in public if not each.isupper() and not each.startswith("_")]


def _tags(*words: str) -> list[str]:
    return list(dict.fromkeys(word.lower() for word in words if len(word) > 1))


def _first_words(text: str) -> str:
    """Returns the first paragraph that is not a heading, link or grammar, shortened at a word."""
    paragraphs = (" ".join(each.split()) for each in re.split(r"\n\s*\n", UNDERLINED.sub("", text)))
    prose = (each for each in paragraphs if " " in each and "::=" not in each and not each.startswith("**Source code"))
    first = next(prose, "")
    return first if len(first) <= MAX_CHARACTERS else first[:MAX_CHARACTERS].rsplit(" ", 1)[0] + " …"


if __name__ == "__main__":
    Path(__file__).with_name("archive_index.json").write_text(as_text(make_index()), encoding="utf-8")
