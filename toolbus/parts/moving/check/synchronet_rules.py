"""Lists what differs for tool files of a Synchronet BBS (`exec/llm_tools/*.js`)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from toolbus.parts.dropin.javascript.remedies import HELPERS, SPIDERMONKEY, sentence
from toolbus.parts.moving.check.script_rules import bad_names, code_of, line_of, missing_names, parsed
from toolbus.parts.moving.check.source_file import Effect, Finding, SourceFile, read_source
from toolbus.parts.moving.check.system import System

_LOADS = re.compile(r"(?<![\w$.])(?:load|require)\s*\(")
_TEXT = re.compile(r"""\s*["']([^"'\n]*)["']""")
_OLD = re.compile(r"\bfor\s+each\s*\(|\bcatch\s*\(\s*\w+\s+if\b|=\s*<\w|\.toSource\s*\(")
_REGISTERED = re.compile(r"\bllm_tool_register\s*\(")
_NAMED = re.compile(r"""\bname\s*:\s*["']([^"'\n]*)["']""")
_LOADED_ANYWAY = "sbbsdefs.js"


def _missing_names(source: SourceFile) -> Iterator[Finding]:
    """Yields the names that neither this file nor a helper declares: all files of a folder share one scope."""
    files = [read_source(file, source.root) for file in sorted(source.root.glob("_*.js")) if file != source.path]
    yield from missing_names(source, [code_of(each) for each in files if isinstance(each, SourceFile)])


def _loads(source: SourceFile) -> Iterator[Finding]:
    code = code_of(source)
    for match in _LOADS.finditer(code):
        text = _TEXT.match(source.text, match.end())
        file = text[1].replace("\\", "/").rpartition("/")[2] if text else ""
        if file == _LOADED_ANYWAY or (file and (source.root / file).is_file()):
            continue
        what = f"loads {file or 'a file'}, which is not in the folder"
        yield source.finding(line_of(code, match.start()), Effect.STOPS, what, sentence(HELPERS))


def _syntax(source: SourceFile) -> Iterator[Finding]:
    code = code_of(source)
    old = list(_OLD.finditer(code))
    if not old:
        yield from parsed(source, module=False)
    for match in old:
        line = line_of(code, match.start())
        yield source.finding(line, Effect.STOPS, "is JavaScript that only SpiderMonkey reads", sentence(SPIDERMONKEY))


def _names(source: SourceFile) -> Iterator[Finding]:
    """Yields registrations with a bad name, and those whose two names differ: the bus takes none, the BBS the first."""
    yield from bad_names(source, "llm_tool_register")
    code = code_of(source)
    starts = [match.start() for match in _REGISTERED.finditer(code)]
    for start, end in itertools.pairwise([*starts, len(code)]):
        names = list(dict.fromkeys(_NAMED.findall(source.text, start, end)))[:2]
        if len(names) == 2 and re.search(r"\bdef\s*:", code[start:end]) and names[1] not in _properties(source, start):
            what = f"a tool is called {names[0]!r} and, in its definition, {names[1]!r}: it is left out"
            yield source.finding(line_of(code, start), Effect.STOPS, what, "Give both the same name.")


def _properties(source: SourceFile, start: int) -> set[str]:
    """Returns the names that stand in the parameters of a registration."""
    place = source.text.find("parameters", start)
    return set(_NAMED.findall(source.text, place)) if place >= 0 else set()


def _order(folder: Path) -> Iterator[Finding]:
    for file in sorted(folder.glob("*.js")):
        if file.name < "_" and any(other.name.startswith("_") for other in folder.glob("_*.js")):
            what = "loads after the helpers here, and before them on a BBS"
            yield Finding(file, 0, Effect.DIFFERS, what, "Nothing, unless a helper uses what the file declares.")


SYNCHRONET = System(
    "synchronet",
    "Synchronet",
    rules={".js": (_missing_names, _loads, _syntax, _names)},
    folder_rules=(_order,),
)
