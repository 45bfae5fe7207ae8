"""Finds names in JavaScript that do not exist here; the rules that two systems share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from toolbus.parts.dropin.javascript.engine import syntax_fault
from toolbus.parts.dropin.javascript.remedies import MODULES, NAMES, sentence
from toolbus.parts.moving.check.source_file import Effect, Finding, SourceFile
from toolbus.protocol.tool import NAME

# Comments, regular expressions and texts; what stands in them is not code.
_NO_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/"""
    r"""|(?<=[=(,:;!&|?\[{}])[ \t]*/(?![/*])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+/[a-z]*"""
    r"""|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"|`(?:\\.|[^`\\])*`""",
    re.DOTALL,
)
_DECLARED = r"\b(?:var|let|const|class|function)\s+{0}\b|[(,{{]\s*{0}\s*[,)=}}]|\b{0}\s*=>"
_USED = r"(?<![\w$.])(?:{0})\s*(?:\?\.|[.(\[])|\bnew\s+(?:{0})\b"
_NAME_USED = re.compile(_USED.format("|".join(re.escape(name) for name in NAMES if name != "spindle")))
_IMPORT = re.compile(r"^[ \t]*(?:import\b(?!\s*\.)|export\b[^;{]*\bfrom\b)|(?<![\w$.])import\s*\(", re.MULTILINE)
_FIRST_NAME = re.compile(r"""\s*name\s*:\s*["']([^"'\n]*)["']""")  # of a registration that begins with it


def code_of(source: SourceFile) -> str:
    """Returns the code of a script, of the same length, with blanks in place of comments, texts and expressions."""
    return _NO_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source.text)


def line_of(text: str, place: int) -> int:
    """Returns the line of a place in a text, from 1."""
    return text.count("\n", 0, place) + 1


def parsed(source: SourceFile, *, module: bool) -> Iterator[Finding]:
    """Yields where a script is not JavaScript, if the engine is installed, which parses it and runs none of it."""
    fault = syntax_fault(source.text, module=module)
    if fault is not None:
        yield source.finding(
            fault.line, Effect.STOPS, f"is not valid: {fault.reason}", "Correct the file: it cannot be read."
        )


def bad_names(source: SourceFile, register: str) -> Iterator[Finding]:
    """Yields the registrations whose name is written out and breaks the rule."""
    code = code_of(source)
    for match in re.finditer(rf"\b{register}\s*\(\s*\{{", code):
        name = _FIRST_NAME.match(source.text, match.end())
        if name is not None and not NAME.fullmatch(name[1]):
            what = f"the tool name {name[1]!r:.80} breaks the rule, so the tool is left out"
            yield source.finding(line_of(code, match.start()), Effect.STOPS, what, "Rename it: [A-Za-z0-9_.-]{1,64}.")


def missing_names(source: SourceFile, helpers: Sequence[str] = ()) -> Iterator[Finding]:
    """Yields where a script uses a name that does not exist here, such as `fetch`, unless it or a helper declares one.

    Args:
        helpers: the code of the files that share its scope.
    """
    code = code_of(source)
    tried = spans_tried(code)
    for match in _NAME_USED.finditer(code):
        name = re.sub(r"^new\s+|[^\w$]+$", "", match[0])
        if not any(re.search(_DECLARED.format(re.escape(name)), text) for text in (code, *helpers)):
            asks = re.search(rf"\btypeof\s*\(?\s*{re.escape(name)}(?![\w$.])", code) is not None
            optional = asks or any(match.start() in span for span in tried)
            line, what = line_of(code, match.end() - 1), f"uses {name}, which does not exist here"
            yield source.missing(line, what, sentence(NAMES[name]), optional=optional)


def spans_tried(code: str) -> list[range]:
    """Returns where the blocks stand whose errors the code catches, and throws none itself then."""
    spans = []
    for match in re.finditer(r"\btry\s*\{", code):
        end = _end_of_block(code, match.end())
        caught = re.compile(r"\s*catch\b[^{]*\{").match(code, end)
        if caught and not re.search(r"\bthrow\b", code[caught.end() : _end_of_block(code, caught.end())]):
            spans.append(range(match.end(), end))
    return spans


def _end_of_block(code: str, start: int) -> int:
    """Returns the place after the brace that closes a block, from the place after the one that opens it."""
    depth = 1
    for match in re.compile(r"[{}]").finditer(code, start):
        depth += 1 if match[0] == "{" else -1
        if not depth:
            return match.end()
    return len(code)


def imports(source: SourceFile) -> Iterator[Finding]:
    """Yields where a script imports another file."""
    code = code_of(source)
    for match in _IMPORT.finditer(code):
        line = line_of(code, match.end())
        yield source.finding(line, Effect.STOPS, "imports another file, which it cannot", sentence(MODULES))
