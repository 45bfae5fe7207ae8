"""Holds the files of the console's page as they are served, and the headers that make a browser trust nothing else.

All files are read once, at the first request. A path is looked up in a dictionary, so none leads out of the
folder. Below a version, which is a digest of all contents, they never change; elsewhere a browser checks for
changes. The page refers to the files below the version, so it always loads files that belong together. Its head
names all modules, so that a browser requests them at once instead of import after import.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

PAGE_PATH = "/console"
HOME = f"{PAGE_PATH}/"
INDEX = "index.html"
# Scripts come from files of ours alone, and none can make markup out of a text: what plugins write stays text.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".webp": "image/webp",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
}
_ASK = "no-cache"
_NEVER_CHANGES = "public, max-age=31536000, immutable"
_PRELOAD = b'<link rel="modulepreload" href="%b">\n'
_REFERENCE = re.compile(rb'\b(href|src)="(?:/console/|\./)?([^":/#?][^":#?]*)"')


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file.

    Attributes:
        content_type: of the file, "" where no browser has to know it.
        etag: identifies its content, with its quotes.
    """

    content: bytes
    content_type: str
    etag: str


class PageFiles:
    """The files of a folder and of the folders in it.

    Args:
        folder: has an `index.html`; without one there is no page.
    """

    def __init__(self, folder: Path) -> None:
        contents = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.suffix in TYPES and path.is_file()
        }
        whole = hashlib.sha256()
        for name, content in contents.items():
            whole.update(b"%b\0%d\0%b" % (name.encode(), len(content), content))
        self.version = whole.hexdigest()[:16]
        if INDEX in contents:
            modules = b"".join(_PRELOAD % name.encode() for name in contents if name.endswith(".mjs"))
            index = contents[INDEX].replace(b"</head>", modules + b"</head>", 1)
            contents[INDEX] = self._versioned(index, frozenset(contents))
        self._files = {name: _file(name, content) for name, content in contents.items()}

    def __repr__(self) -> str:
        return f"<PageFiles {self.version} files={len(self._files)}>"

    def find(self, path: str) -> tuple[PageFile, str] | None:
        """Returns the file of a path below `HOME`, and its Cache-Control; None where no such file exists."""
        name = path.removeprefix(HOME)
        version, slash, rest = name.partition("/")
        is_versioned = bool(slash) and version == self.version
        file = self._files.get((rest if is_versioned else name) or INDEX)
        if file is None or (is_versioned and not rest):
            return None
        return file, _NEVER_CHANGES if is_versioned else _ASK

    def _versioned(self, index: bytes, names: frozenset[str]) -> bytes:
        """Returns the page with its references to files of the folder below the version."""

        def below(match: re.Match[bytes]) -> bytes:
            if match[2].decode("utf-8", "replace") not in names:
                return match[0]
            return b'%b="%b%b/%b"' % (match[1], HOME.encode(), self.version.encode(), match[2])

        return _REFERENCE.sub(below, index)


def _file(name: str, content: bytes) -> PageFile:
    digest = hashlib.sha256(content).hexdigest()[:32]
    return PageFile(content, TYPES[Path(name).suffix], f'"{digest}"')
