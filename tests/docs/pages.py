"""Reads the pages of the documentation: their blocks of code, prose, tables, headings and links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "lab" / "results"
PAGES = (
    "README.md",
    *sorted(str(page.relative_to(ROOT)) for folder in (DOCS, RESULTS) for page in folder.rglob("*.md")),
)
TEXTS = {page: (ROOT / page).read_text("utf-8") for page in PAGES}

DROP_IN = "docs/start/drop-in-tools.md"
FOLDERS = (
    DROP_IN,
    "docs/start/drop-in-javascript.md",
    "docs/moving/synchronet.md",
)  # their named snippets are files of one folder, except the host's

_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_ENTRY = re.compile(r"((?:`[^`]*`|[^`:]|:(?! ))*?)(?: \(((?:`[^`]*`|[^`:]|:(?! ))*)\))?(?:: (.*))?")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``shown`` is the ``text`` or ``json`` block directly below it: its output."""

    page: str
    line: int
    kind: str
    text: str
    shown: str | None = None
    shown_kind: str = ""

    @property
    def file(self) -> str:
        """The name in its first line, ``# weather.py`` or ``// dice.js``; empty if it has none."""
        named = re.match(r"(?:#|//) (\w+\.(?:py|js))\n", self.text)
        return named[1] if named else ""

    @property
    def is_drop_in(self) -> bool:
        return self.page in FOLDERS and self.kind in ("python", "js") and self.file not in ("", "host.py")

    @property
    def is_plugin(self) -> bool:
        return self.is_program or "NekoPluginBase" in self.text

    @property
    def is_program(self) -> bool:
        """Whether it is a plugin that runs without `toolbus run`."""
        return "plugin.run()" in self.text or "ThreadingHTTPServer(" in self.text

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    text = TEXTS[page]
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        follows = _FENCE.match(text, match.end() + 2)
        shown = (follows[2], follows[1]) if follows and follows[1] in ("text", "json") else (None, "")
        found.append(Block(page, text.count("\n", 0, match.start()) + 1, match[1].strip(), match[2], *shown))
    return found


def prose(text: str) -> str:
    """Returns a page without its blocks of code."""
    return _FENCE.sub("", text)


def code_spans(text: str) -> list[str]:
    """Returns the texts in backticks of a page's prose."""
    return _CODE.findall(prose(text))


def links(text: str) -> list[str]:
    return _LINK.findall(prose(text))


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def table(text: str, head: str) -> list[list[str]]:
    """Returns the cells of the rows below the table head that starts with a text."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(head)) + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def listed(text: str, before: str) -> list[list[str]]:
    """Returns the first list after a text of the page: the cells of `name (details): meaning` of each entry."""
    lines = text[text.index(before) :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("- "))
    entries: list[str] = []
    for line in lines[start:]:
        if line.startswith("- "):
            entries.append(line.removeprefix("- "))
        elif line.startswith("  "):
            entries[-1] += line[1:]
        else:
            break
    return [[cell or "" for cell in found.groups()] for entry in entries if (found := _ENTRY.fullmatch(entry))]
