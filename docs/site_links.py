"""Shows links that leave the documentation (to code, examples, results) as paths: the site holds the pages only.

Fences of code lose what they say to the tests.

A hook of mkdocs; the pages keep links that work in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"^(```python) no-run$", re.MULTILINE)  # what tests do not run; the site knows languages only
_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Returns a page with its links out of the documentation replaced by their text and path.

    Raises:
        FileNotFoundError: the target of such a link does not exist.
    """
    docs = Path(config["docs_dir"])

    def shown(match: re.Match[str]) -> str:
        text, link, _ = match.groups()
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link))
        if path.startswith("docs/"):
            return match[0]
        if not (docs.parent / path).exists():
            raise FileNotFoundError(f"docs/{page.file.src_uri} links to {path}, which does not exist")
        plain = text.strip("`")
        return f"`{path}`" if plain in path else f"{text} (`{path}`)"

    return _LINK.sub(shown, _FENCE.sub(r"\1", markdown))
