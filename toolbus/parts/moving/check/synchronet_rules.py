"""Lists what differs for tool files of a Synchronet BBS (`exec/llm_tools/*.js`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from toolbus.parts.dropin.javascript.remedies import HELPERS, SPIDERMONKEY, sentence
from toolbus.parts.moving.check.script_rules import bad_names, code_of, line_of, missing_names, parsed
from toolbus.parts.moving.check.source_file import Effect, Finding, SourceFile, System, read_source

_LOADS = re.compile(r"(?<![\w$.])(?:load|require)\s*\(")
_TEXT = re.compile(r"""\s*["']([^"'\n]*)["']""")
_OLD = re.compile(r"\bfor\s+each\s*\(|\bcatch\s*\(\s*\w+\s+if\b|=\s*<\w|\.toSource\s*\(")
_REGISTERED = re.compile(r"\bllm_tool_register\s*\(")
_PART = re.compile(r"(?P<open>[{(\[])|(?P<close>[})\]])|(?P<key>[\w$]*)\s*(?P<colon>:)")
_QUOTED_KEY = re.compile(r"""["']([\w$]+)["']\s*$""")
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
    for match in _REGISTERED.finditer(code):
        own = _keys(source, code, code.find("{", match.end()))
        definition = own.get("def")
        inner = {} if definition is None else _keys(source, code, definition)
        if "function" in inner:
            inner = _keys(source, code, inner["function"])
        names = [_written(source, keys.get("name")) for keys in (own, inner)]
        if all(names) and names[0] != names[1]:
            what = f"a tool is called {names[0]!r} and, in its definition, {names[1]!r}: it is left out"
            yield source.finding(line_of(code, match.start()), Effect.STOPS, what, "Give both the same name.")


def _keys(source: SourceFile, code: str, place: int) -> dict[str, int]:
    """Returns the keys of the object that is written out at a place, with the places of their values.

    Args:
        code: the code of the file, in which the texts are blank; quoted keys are read from the file.
    """
    keys: dict[str, int] = {}
    if not 0 <= place < len(code) or not code[place:].lstrip().startswith("{"):
        return keys
    depth = 0
    for match in _PART.finditer(code, place):
        if match["open"]:
            depth += 1
        elif match["close"]:
            depth -= 1
            if not depth:
                break
        elif depth == 1:
            quoted = _QUOTED_KEY.search(source.text, 0, match.start("colon")) if not match["key"] else None
            key = match["key"] or (quoted[1] if quoted else "")
            keys.setdefault(key, match.end())
    return keys


def _written(source: SourceFile, place: int | None) -> str:
    """Returns the text that is written out at a place; empty if something else is."""
    text = None if place is None else _TEXT.match(source.text, place)
    return text[1] if text else ""


def _order(folder: Path) -> Iterator[Finding]:
    for file in sorted(folder.glob("*.js")):
        if file.name < "_" and any(other.name.startswith("_") for other in folder.glob("_*.js")):
            what = "loads after the helpers here, and before them on a BBS"
            yield Finding(file, 0, Effect.DIFFERS, what, "Nothing, unless a helper uses what the file declares.")


SYNCHRONET = System(
    "synchronet", "Synchronet", rules={".js": (_missing_names, _loads, _syntax, _names)}, folder_rules=(_order,)
)
