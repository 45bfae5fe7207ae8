"""Fetches the libraries of the console's page from the npm registry and writes down what they are: `make vendor`.

The page is served as it lies in the package, under a Content-Security-Policy that forbids import maps: imports by the
name of a package become paths.
"""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.parts.mcp.official.suite import NODE, NPM, node_environment

PAGE = Path(__file__).parents[4] / "toolbus/parts/console/page"
VENDOR = PAGE / "vendor"
IMPORT = re.compile(r"""(?P<start>\b(?:from|import)\s*)(?P<quote>["'])(?P<name>[^"']+)(?P=quote)""")
SOURCE_MAP = re.compile(r"\s*//# sourceMappingURL=\S+\s*$")


class Module(NamedTuple):
    """A file of a package."""

    name: str  # by which others import it
    package: str
    version: str
    path: str  # in the package
    licence: str


MODULES = {
    "preact.mjs": Module("preact", "preact", "11.2.0", "dist/preact.mjs", "MIT"),
    "hooks.mjs": Module("preact/hooks", "preact", "11.2.0", "hooks/dist/hooks.mjs", "MIT"),
    "signals-core.mjs": Module(
        "@preact/signals-core", "@preact/signals-core", "1.14.5", "dist/signals-core.mjs", "MIT"
    ),
    "signals.mjs": Module("@preact/signals", "@preact/signals", "2.11.4", "dist/signals.mjs", "MIT"),
    "htm.mjs": Module("htm", "htm", "3.1.1", "dist/htm.mjs", "Apache-2.0"),
}
ABOUT = """# Libraries of the console's page

Written by `make vendor`, which fetches them from the npm registry, makes paths of the names that they import, and
leaves out the references to source maps. Do not edit them: a test compares the hashes.

| file | package | version | licence | sha256 |
| --- | --- | --- | --- | --- |
{rows}

htm is under the Apache License 2.0, as toolbus is. The licences of the others:
{licences}"""


def with_paths(text: str) -> str:
    """Returns a module whose imports lead to the files beside it.

    Raises:
        KeyError: it imports what is not vendored.
    """
    files = {module.name: file for file, module in MODULES.items()}
    text = IMPORT.sub(lambda found: f'{found["start"]}"./{files[found["name"]]}"', text)
    return SOURCE_MAP.sub("", text) + "\n"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main() -> None:
    """Fetches and writes everything."""
    VENDOR.mkdir(parents=True, exist_ok=True)
    licences: dict[str, list[str]] = {}  # of those that ask to be repeated: text → packages
    packed: dict[str, dict[str, bytes]] = {}
    rows = []
    for file, module in MODULES.items():
        if module.package not in packed:
            packed[module.package] = _fetch(module.package, module.version)
            if module.licence != "Apache-2.0":
                licences.setdefault(packed[module.package]["LICENSE"].decode().strip(), []).append(module.package)
        data = with_paths(packed[module.package][module.path].decode()).encode()
        (VENDOR / file).write_bytes(data)
        rows.append(f"| {file} | {module.package} | {module.version} | {module.licence} | `{sha256(data)}` |")
    texts = "".join(f"\n## {' and '.join(names)}\n\n```\n{text}\n```\n" for text, names in licences.items())
    (VENDOR / "VENDOR.md").write_text(ABOUT.format(rows="\n".join(rows), licences=texts))


def _fetch(package: str, version: str) -> dict[str, bytes]:
    """Returns the files of a package by their paths."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [NODE, NPM, "pack", "--silent", f"{package}@{version}"],
            cwd=folder,
            check=True,
            stdout=sys.stderr,
            env=node_environment(),
        )
        (archive,) = Path(folder).glob("*.tgz")
        data = archive.read_bytes()
    files = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as members:
        for member in members:
            content = members.extractfile(member) if member.isfile() else None
            if content is not None:
                files[member.name.partition("/")[2]] = content.read()
    return files


if __name__ == "__main__":
    main()
