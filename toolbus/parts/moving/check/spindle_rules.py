"""Lists what differs for extensions of Spindle."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from toolbus.parts.dropin.file_loader import extension_entry
from toolbus.parts.dropin.javascript.remedies import is_announced, sentence, spindle_remedy
from toolbus.parts.dropin.manifest import EXTENSION
from toolbus.parts.dropin.manifest import FILE as MANIFEST
from toolbus.parts.moving.check.script_rules import (
    bad_names,
    code_of,
    imports,
    line_of,
    missing_names,
    parsed,
    spans_tried,
)
from toolbus.parts.moving.check.source_file import Effect, Finding, SourceFile, System

_MEMBER = re.compile(r"(?<![\w$.])spindle\s*(?:\?\.|\.)\s*([\w$]+(?:\s*(?:\?\.|\.)\s*[\w$]+)*)")
_EVENT = re.compile(r"""\s*\(\s*["'](\w+)["']""")
_WORKS = re.compile(
    r"(registerTool|unregisterTool|on|log(\.(info|warn|error|debug))?|manifest(\..*)?|generate(\.(quiet|raw))?"
    r"|permissions(\.(has|getGranted|onDenied|onChanged))?)"
)
_GRANTED = {  # what works with a grant, by the first part of its name
    "cors": ("connect", "api.example.org:443"),
    "storage": ("write", "/a/folder/of/its/own"),
    "userStorage": ("write", "/a/folder/of/its/own"),
    "enclave": ("secrets", "API_KEY"),
}
_NEVER = ("enclave.put", "enclave.delete")  # has no grant
_TOOLS_ONLY = "Nothing: the tools of the extension work."


def _members(source: SourceFile) -> Iterator[Finding]:
    if not _is_entry(source):
        return
    code = code_of(source)
    tried = spans_tried(code)
    for match in _MEMBER.finditer(code):
        name = re.sub(r"\s|\?", "", match[1])
        line = line_of(code, match.start())
        if _WORKS.fullmatch(name):
            event = _EVENT.match(source.text, match.end()) if name == "on" else None
            if event is not None and event[1] != "TOOL_INVOCATION":
                what = f"waits for the event {event[1]}, which never comes"
                yield source.finding(line, Effect.DIFFERS, what, _TOOLS_ONLY)
        elif (grant := _GRANTED.get(name.partition(".")[0])) is not None and name not in _NEVER:
            key, value = grant
            yield source.finding(line, Effect.DIFFERS, f"spindle.{name} needs a grant", _grant(source, key, value))
        elif is_announced(f"spindle.{name}"):
            yield source.finding(line, Effect.DIFFERS, f"spindle.{name} has no effect", _TOOLS_ONLY)
        else:
            optional = any(match.start() in span for span in tried)
            remedy = sentence(spindle_remedy(name.partition(".")[0]))
            yield source.missing(line, f"spindle.{name} throws an error", remedy, optional=optional)
    if not re.search(r"\bregisterTool\b", code):
        yield source.finding(0, Effect.DIFFERS, "registers no tool, so nothing of it is used", "")


def _names(source: SourceFile) -> Iterator[Finding]:
    if _is_entry(source):
        yield from parsed(source, module=True)
        yield from bad_names(source, "registerTool")
        for found in missing_names(source):
            if found.what.startswith("uses fetch,"):
                fix = _grant(source, "connect", "api.example.org:443")
                yield source.finding(found.line, Effect.DIFFERS, "fetch needs a grant", fix)
            else:
                yield found
        yield from imports(source)


def _grant(source: SourceFile, key: str, value: str) -> str:
    folder = source.root.parent if (source.root / EXTENSION).is_file() else source.root
    file = source.path.relative_to(folder).as_posix()
    return f'Grant it in {MANIFEST}, beside it: {{"files": {{"{file}": {{"{key}": ["{value}"]}}}}}}.'


def _is_entry(source: SourceFile) -> bool:
    """Tells whether a file is what runs of an extension; a file that stands alone does."""
    if not (source.root / EXTENSION).is_file():
        return True
    return source.path == source.root / extension_entry(source.root)


def _manifest(folder: Path) -> Iterator[Finding]:
    file = folder / EXTENSION
    if not file.is_file():
        return
    entry = folder / extension_entry(folder)
    if not entry.is_file():
        what = f"its entry {entry.relative_to(folder)} is not in the folder"
        yield Finding(file, 0, Effect.STOPS, what, "Build the extension, and name the file in entry_backend.")
    try:
        text = file.read_text("utf-8-sig")
        manifest = json.loads(text)
    except (OSError, ValueError, RecursionError) as problem:
        line = getattr(problem, "lineno", 0)
        yield Finding(file, line, Effect.DIFFERS, f"cannot be read: {problem}", "Correct it: dist/backend.js is taken.")
        return
    if not isinstance(manifest, dict):
        return
    if "entry_frontend" in manifest:
        line = line_of(text, text.find("entry_frontend"))
        yield Finding(file, line, Effect.DIFFERS, "names a frontend, which is not used", _TOOLS_ONLY)
    identifier = manifest.get("identifier")
    if isinstance(identifier, str) and identifier != folder.resolve().name:
        line = line_of(text, text.find("identifier"))
        what = f"the tools are listed under the folder's name, not under {identifier}"
        yield Finding(file, line, Effect.NOTE, what, f"Rename the folder to {identifier} to keep the name.")


def _roots(path: Path) -> Sequence[Path]:
    if (path / EXTENSION).is_file():
        return [path]
    return [*sorted(each.parent for each in path.glob(f"*/{EXTENSION}")), *sorted(path.glob("*.js"))] or [path]


SPINDLE = System("spindle", "Spindle", rules={".js": (_members, _names)}, folder_rules=(_manifest,), roots=_roots)
