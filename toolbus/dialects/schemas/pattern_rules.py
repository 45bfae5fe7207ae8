"""Writes patterns so that a provider can read them, with the same meaning, or says why that is not possible.

Each rule takes a pattern as it stands in a schema and returns one for the provider. It stays as it is where the
provider can read it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

from toolbus.dialects.schemas.patterns import (
    Alternatives,
    CharacterClass,
    Pattern,
    Piece,
    Shorthand,
    Unreadable,
    read_pattern,
)
from toolbus.text import shorten

PatternRule: TypeAlias = Callable[[str], str]
"""Returns a pattern for a provider. Raises `Unreadable`, whose text says why it cannot be written."""

MAX_REPETITIONS = 2000  # from this number on, llama.cpp refuses a grammar (MAX_REPETITION_THRESHOLD, llama-grammar.cpp)
_MAX_WORDS = 300  # characters of a pattern in a description
_MAX_RE2_REPETITIONS = 1000
_RE2_PROPERTY = re.compile(r"[pP]\{[CLMNPSZ][a-z]?\}")
_LAST = "\U0010ffff"
_SETS = {
    "d": (("0", "9"),),
    "w": (("A", "Z"), ("a", "z"), ("0", "9"), ("_", "_")),
    "s": (
        *(("\t", "\r"), (" ", " "), ("\xa0", "\xa0"), ("\u1680", "\u1680"), ("\u2000", "\u200a")),
        *(("\u2028", "\u2029"), ("\u202f", "\u202f"), ("\u205f", "\u205f"), ("\u3000", "\u3000"), ("\ufeff", "\ufeff")),
    ),
}
_META = frozenset("\\^$.*+?()[]{}|")
_META_IN_CLASS = frozenset("\\]^-[")
_WHY = {
    "lookaround": "it looks ahead or behind",
    "backreference": "it refers back to a group",
    "boundary": "it names the boundary of a word",
    "property": "it names a property of Unicode",
}


def in_words(pattern: str, keyword: str = "pattern") -> str:
    """Returns a pattern for a description; of patternProperties, a key."""
    subject = "Matches" if keyword == "pattern" else "Names of further properties match"
    return f"{subject} the pattern {shorten(pattern, _MAX_WORDS)}"


def common_pattern(text: str) -> str:
    """Writes patterns for Python's `re`, RE2 and engines that build automata."""
    pattern = read_pattern(text)
    _refuse(pattern, "lookaround", "backreference", "property")
    return _Writer().alternatives(pattern.alternatives) if "spelling" in pattern.features else _unless(pattern, text)


def re2_pattern(text: str) -> str:
    """Writes patterns for RE2."""
    pattern = read_pattern(text)
    _refuse(pattern, "lookaround", "backreference")
    if _repeated(pattern.alternatives) > _MAX_RE2_REPETITIONS:
        raise Unreadable(f"it repeats more than {_MAX_RE2_REPETITIONS} times")
    written = _Writer().alternatives(pattern.alternatives)
    return written if "spelling" in pattern.features else _unless(pattern, text)


def grammar_pattern(text: str) -> str:
    """Writes patterns that llama.cpp converts into a grammar, and that other engines read, too.

    Its converter (common/json-schema-to-grammar.cpp) takes only whole texts, ``^…$``, and copies sets and literals into
    the grammar, whose parser knows few escapes: an unknown one fails the request with all its tools. A repetition after
    an escaped character repeats the whole literal before it. So sets with a name are written as ranges, and characters
    that need an escape stand in brackets.
    """
    pattern = read_pattern(text)
    _refuse(pattern, "lookaround", "backreference", "boundary", "property")
    if pattern.rules >= MAX_REPETITIONS:
        raise Unreadable(f"it repeats {MAX_REPETITIONS} times or more")
    rows = pattern.alternatives
    if not all(len(row) > 1 and (row[0].kind, row[-1].kind) == ("start", "end") for row in rows):
        raise Unreadable("it does not describe the whole text from ^ to $")
    body = _GrammarWriter().alternatives(tuple(row[1:-1] for row in rows))
    return f"^({body})$" if len(rows) > 1 else f"^{body}$"


def _unless(pattern: Pattern, text: str) -> str:
    """Returns the text itself, unless it is not ECMAScript."""
    return _Writer().alternatives(pattern.alternatives) if "foreign" in pattern.features else text


def _repeated(rows: Alternatives) -> int:
    """Returns how often the part that is repeated most often is repeated, groups in groups multiplied."""
    times = 1
    for piece in (piece for row in rows for piece in row):
        inner = _repeated(piece.value) if piece.kind == "group" else 1
        times = max(times, inner * max(piece.low, piece.high or 1, 1))
    return times


def _refuse(pattern: Pattern, *features: str) -> None:
    for feature in features:
        if feature in pattern.features:
            raise Unreadable(_WHY[feature])


class _Writer:
    """Writes pieces for engines of the usual kind."""

    def alternatives(self, rows: Alternatives) -> str:
        return "|".join("".join(map(self._piece, row)) for row in rows)

    def _piece(self, piece: Piece) -> str:
        return self._atom(piece) + self._repetition(piece)

    def _repetition(self, piece: Piece) -> str:
        lazy = "?" if piece.lazy else ""
        match piece.low, piece.high:
            case 1, 1:
                return ""
            case 0, 1:
                return f"?{lazy}"
            case 0 | 1 as low, None:
                return f"{'*+'[low]}{lazy}"
            case low, None:
                return f"{{{low},}}{lazy}"
            case low, high if low == high:
                return f"{{{low}}}{lazy}"
            case low, high:
                return f"{{{low},{high}}}{lazy}"

    def _atom(self, piece: Piece) -> str:
        match piece.kind:
            case "char":
                return self._char(piece.value)
            case "any":
                return "."
            case "class":
                return self._class(piece.value)
            case "group":
                return f"(?:{self.alternatives(piece.value)})"
            case "start":
                return "^"
            case "end":
                return "$"
            case "boundary":
                return f"\\{piece.value}"
        raise Unreadable(_WHY["lookaround" if piece.kind == "look" else "backreference"])

    def _char(self, char: str) -> str:
        return f"\\{char}" if char in _META else _shown(char)

    def _class(self, each: CharacterClass) -> str:
        if not each.items:
            return _full_or_refuse(each)
        if len(each.items) == 1 and isinstance(each.items[0], Shorthand) and not each.negated:
            return self._shorthand(each.items[0])
        text = "".join(
            self._shorthand(item) if isinstance(item, Shorthand) else _range(item, _shown) for item in each.items
        )
        return f"[{'^' if each.negated else ''}{text}]"

    def _shorthand(self, shorthand: Shorthand) -> str:
        if len(shorthand.name) > 1 and not _RE2_PROPERTY.fullmatch(shorthand.name):
            raise Unreadable(_WHY["property"])
        return f"\\{shorthand.name}"


class _GrammarWriter(_Writer):
    """Writes pieces so that llama.cpp's converter reads them correctly."""

    def _repetition(self, piece: Piece) -> str:
        # Which of several ways to match comes first makes no difference for a whole text.
        return super()._repetition(Piece(piece.kind, low=piece.low, high=piece.high))

    def _atom(self, piece: Piece) -> str:
        match piece.kind:
            case "group":
                return f"({self.alternatives(piece.value)})"  # older versions do not know (?:
            case "start" | "end":
                raise Unreadable("it has ^ or $ in the middle")
            case "char" if piece.value > "~" and (piece.low, piece.high) != (1, 1):
                return f"[{piece.value}]"  # the converter would repeat the last byte of the character
        return super()._atom(piece)

    def _char(self, char: str) -> str:
        if char in _META or char < " " or char in '"\x7f':
            return f"[{_in_class(char, self._shown)}]"
        return self._shown(char)

    def _class(self, each: CharacterClass) -> str:
        if not each.items:
            return _full_or_refuse(each)
        negated, ranges = each.negated, [item for item in each.items if not isinstance(item, Shorthand)]
        names = [item.name for item in each.items if isinstance(item, Shorthand)]
        if names and not ranges and len(names) == 1 and names[0].isupper():
            negated, names = not negated, [names[0].lower()]
        for name in names:
            ranges += _SETS[name] if name in _SETS else _complement(_SETS[name.lower()])
        if any(name.isupper() for name in names):
            ranges = _merged(ranges)
        texts = [_range(each, self._shown) for each in ranges if each != ("-", "-")]
        hyphen = "-" if ("-", "-") in ranges else ""
        return f"[{'^' if negated else ''}{''.join(texts)}{hyphen}]"

    def _shown(self, char: str) -> str:
        return _shown(char) if char.isprintable() or char > "\uffff" or char < "\x80" else f"\\u{ord(char):04X}"


def _full_or_refuse(empty: CharacterClass) -> str:
    if not empty.negated:
        raise Unreadable("[] matches no character")
    return f"[\\x00-{_LAST}]"


def _range(ends: tuple[str, str], shown: Callable[[str], str]) -> str:
    first, last = (_in_class(char, shown) for char in ends)
    return first if ends[0] == ends[1] else f"{first}-{last}"


def _in_class(char: str, shown: Callable[[str], str]) -> str:
    if char in "-^":
        return f"\\x{ord(char):02X}"
    return f"\\{char}" if char in _META_IN_CLASS else shown(char)


def _shown(char: str) -> str:
    """Returns a character, as an escape if it is invisible."""
    if char in "\t\n\r":
        return {"\t": "\\t", "\n": "\\n", "\r": "\\r"}[char]
    return f"\\x{ord(char):02X}" if char < " " or "\x7f" <= char <= "\xa0" else char


def _merged(ranges: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    merged: list[tuple[str, str]] = []
    for first, last in sorted(ranges):
        if merged and ord(first) <= ord(merged[-1][1]) + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _complement(ranges: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    rest: list[tuple[str, str]] = []
    start = 0
    for first, last in _merged(ranges):
        if start < ord(first):
            rest.append((chr(start), chr(ord(first) - 1)))
        start = ord(last) + 1
    return [*rest, (chr(start), _LAST)]
