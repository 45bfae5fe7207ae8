"""Writes llms.txt into the site: each page in the order of the navigation, with its first sentence.

A hook of mkdocs; https://llmstxt.org describes the format.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_FIRST_SENTENCE = re.compile(r"(.+?(?<!\b[A-Z])[.:])(?:\s+(?=[A-Z`(*])|$)")  # the end of N.E.K.O. is none
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_MARKS = re.compile(r"`|\*+(?=\w)|(?<=\w)\*+")

_sentences: dict[str, str] = {}  # of each page, by its address in the site


def first_sentence(markdown: str) -> str:
    """Returns the first sentence of a page's text, without markup."""
    paragraphs = (part.strip() for part in markdown.split("\n\n"))
    text = next((part for part in paragraphs if part and not part.startswith(("#", "<", "|", "```"))), "")
    found = _FIRST_SENTENCE.match(_MARKS.sub("", _LINK.sub(r"\1", " ".join(text.split()))))
    return re.sub(":$", ".", found[1]) if found else text


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> None:
    """Remembers the first sentence of a page."""
    _sentences[page.url] = first_sentence(markdown)


def on_post_build(*, config: Any) -> None:
    """Writes the file."""
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}. {_sentences['index.html']}"]
    for section in config["nav"] or ():
        for title, pages in section.items():
            if isinstance(pages, list):
                lines += ["", f"## {title}", ""]
                lines += [_line(name, path) for row in pages for name, path in row.items()]
    Path(config["site_dir"], "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")


def _line(name: str, path: str) -> str:
    url = path.removesuffix(".md") + ".html"
    return f"- [{name}]({url}): {_sentences[url]}"
