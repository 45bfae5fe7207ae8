r"""Reads the patterns of schemas, which are regular expressions of ECMAScript, into pieces that others can write.

What plugins in Python write instead (`(?P<name>…)`, `\A`, `\Z`) is read as well. Reading takes time in proportion to
the length, whatever the pattern: nothing is matched here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, TypeAlias

from toolbus.common.text import shorten

MAX_DEPTH = 50  # of groups in groups
_REPETITION = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")
_AMBIGUOUS = re.compile(r"\{,([0-9]*)\}")
_NAME = re.compile(r"[^\W0-9]\w{0,99}>")
_HEX = {"x": re.compile("[0-9a-fA-F]{2}"), "u": re.compile("[0-9a-fA-F]{4}")}
_CODE_POINT = re.compile(r"\{([0-9a-fA-F]{1,6})\}")
_PROPERTY = re.compile(r"\{([A-Za-z0-9_=]{1,60})\}")
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_FOREIGN = {"A": "start", "Z": "end", "z": "end"}
_LOOK = ("=", "!", "<=", "<!")

Kind: TypeAlias = Literal["char", "any", "class", "group", "start", "end", "boundary", "look", "back"]


class Unreadable(ValueError):
    """A pattern cannot be read, or not be written for a provider; the text says why, as a clause."""


@dataclass(frozen=True, slots=True)
class Shorthand:
    """A set of characters with a name: ``d``, ``W``, or a property such as ``p{Lu}``."""

    name: str


ClassItem: TypeAlias = "tuple[str, str] | Shorthand"


@dataclass(frozen=True, slots=True)
class CharacterClass:
    """Characters in brackets: ranges and sets with a name."""

    items: tuple[ClassItem, ...]
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a pattern, with how often it may stand in its place.

    Attributes:
        kind: its kind.
        value: the character, the `CharacterClass`, or the alternatives of a group.
        low: how often at least.
        high: how often at most, None without a limit.
        lazy: whether it takes as few as possible.
    """

    kind: Kind
    value: Any = None
    low: int = 1
    high: int | None = 1
    lazy: bool = False


Alternatives: TypeAlias = tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern that was read.

    Attributes:
        alternatives: its pieces.
        features: parts that not every engine knows: ``lookaround``, ``backreference``, ``boundary``, ``property``,
            ``spelling`` (the same can be written in another way), ``loose`` (ECMAScript reads it, unless it is strict:
            with the flag u or v), ``ambiguous`` (engines read it in two ways),
            ``foreign`` (it is not ECMAScript).
        rules: how many rules a grammar for it needs, with each limited repetition written out.
    """

    alternatives: Alternatives
    features: frozenset[str]
    rules: int = 0


def read_pattern(text: str) -> Pattern:
    """Reads a pattern.

    Raises:
        Unreadable: it is not a regular expression of ECMAScript.
    """
    reader = _Reader(text)
    alternatives = reader.alternatives(0)
    if reader.place < len(text):
        raise Unreadable("a parenthesis is closed that was not opened")
    return Pattern(alternatives, frozenset(reader.features), reader.rules)


@dataclass(slots=True)
class _Reader:
    text: str
    place: int = 0
    features: set[str] = field(default_factory=set)
    rules: int = 0

    def alternatives(self, depth: int) -> Alternatives:
        """Reads up to the parenthesis that closes a group, or to the end."""
        if depth > MAX_DEPTH:
            raise Unreadable(f"its groups are nested deeper than {MAX_DEPTH} levels")
        rows: list[list[Piece]] = [[]]
        while self.place < len(self.text) and self.text[self.place] != ")":
            if self._take("|"):
                rows.append([])
            else:
                rows[-1].append(self._repeated(self._piece(depth)))
        return tuple(map(tuple, rows))

    def _take(self, text: str) -> bool:
        found = self.text.startswith(text, self.place)
        if found:
            self.place += len(text)
        return found

    def _next(self) -> str:
        if self.place >= len(self.text):
            raise Unreadable("it ends in the middle")
        self.place += 1
        return self.text[self.place - 1]

    def _piece(self, depth: int) -> Piece:
        char = self._next()
        match char:
            case "^":
                return Piece("start")
            case "$":
                return Piece("end")
            case ".":
                return Piece("any")
            case "(":
                return self._group(depth)
            case "[":
                return Piece("class", self._class())
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise Unreadable(f"there is nothing before {char} to repeat")
            case "{":
                if _REPETITION.match(self.text, self.place - 1):
                    raise Unreadable("there is nothing before { to repeat")
                self.features.add("spelling")
            case "]" | "}":
                self.features.add("loose")
        return Piece("char", char)

    def _repeated(self, piece: Piece) -> Piece:
        low = 1
        limit: int | None
        if self._take("*"):
            low, limit = 0, None
        elif self._take("+"):
            low, limit = 1, None
        elif self._take("?"):
            low, limit = 0, 1
        elif match := _REPETITION.match(self.text, self.place):
            self.place = match.end()
            if max(len(match[1]), len(match[3] or "")) > 6:
                raise Unreadable("a number of repetitions is too large")
            low = int(match[1])
            limit = low if match[2] is None else int(match[3]) if match[3] else None
            if limit is not None and limit < low:
                raise Unreadable(f"{match[0]} has its limits in the wrong order")
        else:
            if _AMBIGUOUS.match(self.text, self.place):
                self.features.add("ambiguous")
            return piece
        if piece.kind in ("start", "end", "boundary", "look"):
            raise Unreadable("what matches no character is repeated")
        self.rules += max(low, limit or 1)
        return replace(piece, low=low, high=limit, lazy=self._take("?"))

    def _group(self, depth: int) -> Piece:
        self.rules += 1
        kind: Kind = "group"
        if self._take("?"):
            if self._take(":"):
                pass
            elif any(self._take(look) for look in _LOOK):
                kind = "look"
                self.features.add("lookaround")
            else:
                self._group_name()
        alternatives = self.alternatives(depth + 1)
        if not self._take(")"):
            raise Unreadable("a parenthesis is not closed")
        return Piece(kind, alternatives)

    def _group_name(self) -> None:
        self.features.add("spelling")
        if self._take("P"):
            self.features.add("foreign")
        match = _NAME.match(self.text, self.place + 1) if self.text.startswith("<", self.place) else None
        if match is None:
            raise Unreadable(f"(?{self.text[self.place : self.place + 1]} is not a group of ECMAScript")
        self.place = match.end()

    def _escape(self) -> Piece:
        char = self._next()
        if char in "dDwWsS":
            return Piece("class", CharacterClass((Shorthand(char),)))
        if char in "pP":
            return Piece("class", CharacterClass((self._property(char),)))
        if char in "bB":
            self.features.add("boundary")
            return Piece("boundary", char)
        if char in _FOREIGN:
            self.features.add("foreign")
            return Piece("start" if char == "A" else "end")
        if char in "123456789k":
            self.features.add("backreference")
            if char == "k" and not (self._take("<") and (name := _NAME.match(self.text, self.place))):
                raise Unreadable("\\k has no name")
            if char == "k" and name:
                self.place = name.end()
            return Piece("back")
        if char not in _META and char not in "/" and not char.isalnum():
            self.features.add("loose")
        return Piece("char", self._character(char))

    def _property(self, letter: str) -> Shorthand:
        self.features.add("property")
        match = _PROPERTY.match(self.text, self.place)
        if match is None:
            raise Unreadable(f"\\{letter} has no property in braces")
        self.place = match.end()
        return Shorthand(letter + match[0])

    def _character(self, char: str) -> str:
        """Returns the character for which an escape stands."""
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char in _HEX:
            return self._code_point(char)
        if char == "0" and not self.text[self.place : self.place + 1].isdigit():
            self.features.add("spelling")
            return "\0"
        if char == "c" and self.text[self.place : self.place + 1].isalpha():
            self.features.add("spelling")
            return chr(ord(self._next()) % 32)
        if char.isalnum():
            self._refuse(char)
        if char == "_" or char > "~":
            self.features.add("spelling")
        return char

    def _code_point(self, letter: str) -> str:
        if letter == "u":
            self.features.add("spelling")
            if braces := _CODE_POINT.match(self.text, self.place):
                self.place = braces.end()
                return self._chr(int(braces[1], 16))
        match = _HEX[letter].match(self.text, self.place)
        if match is None:
            self._refuse(letter)
        self.place = match.end()
        code = int(match[0], 16)
        if 0xD800 <= code < 0xDC00 and self._take("\\u"):
            low = _HEX["u"].match(self.text, self.place)
            if low is not None and 0xDC00 <= int(low[0], 16) < 0xE000:
                self.place = low.end()
                return chr(0x10000 + (code - 0xD800) * 0x400 + int(low[0], 16) - 0xDC00)
        return self._chr(code)

    def _chr(self, code: int) -> str:
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise Unreadable(f"U+{code:04X} is not a character")
        return chr(code)

    def _refuse(self, letter: str) -> NoReturn:
        raise Unreadable(f"\\{letter} is not an escape of ECMAScript")

    def _class(self) -> CharacterClass:
        negated = self._take("^")
        items: list[ClassItem] = []
        while not self._take("]"):
            first = self._class_item()
            if not self.text.startswith("-", self.place) or self.text.startswith("-]", self.place):
                items.append((first, first) if isinstance(first, str) else first)
                continue
            self.place += 1
            last = self._class_item()
            if isinstance(first, Shorthand) or isinstance(last, Shorthand):
                self.features.add("spelling")  # the hyphen stands for itself
                items += [(each, each) if isinstance(each, str) else each for each in (first, "-", last)]
            elif first > last:
                raise Unreadable(f"{first}-{last} is in the wrong order")
            else:
                items.append((first, last))
        if not items:
            self.features.add("spelling")
        return CharacterClass(tuple(items), negated)

    def _class_item(self) -> str | Shorthand:
        char = self._next()
        if char == "[":
            self.features.add("spelling")  # Python's `re` warns of it, since a set in a set may come
        if char != "\\":
            return char
        char = self._next()
        if char in "dDwWsS":
            return Shorthand(char)
        if char in "pP":
            return self._property(char)
        if char == "b":
            self.features.add("spelling")
            return "\b"
        if char not in _META and char not in "/-" and not char.isalnum():
            self.features.add("loose")
        return self._character(char)


# Writes patterns so that a provider can read them, with the same meaning, or says why that is not possible.
#
# Each rule takes a pattern as it stands in a schema and returns one for the provider. It stays as it is where the
# provider can read it.

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
    "ambiguous": "{,n} is up to n times for Python and these characters themselves for ECMAScript: write {0,n}",
}


def in_words(pattern: str, keyword: str = "pattern") -> str:
    """Returns a pattern for a description; of patternProperties, a key."""
    subject = "Matches" if keyword == "pattern" else "Names of further properties match"
    return f"{subject} the pattern {shorten(pattern, _MAX_WORDS)}"


def common_pattern(text: str) -> str:
    """Writes patterns for Python's `re`, RE2 and engines that build automata."""
    pattern = read_pattern(text)
    _refuse(pattern, "ambiguous", "lookaround", "backreference", "property")
    return _Writer().alternatives(pattern.alternatives) if "spelling" in pattern.features else _unless(pattern, text)


def portable_pattern(text: str) -> str:
    """Writes patterns for strict ECMAScript, Python's `re` and RE2: clients of MCP compile them with all of these."""
    written = common_pattern(text)
    return (
        _Writer().alternatives(read_pattern(text).alternatives) if "loose" in read_pattern(text).features else written
    )


def re2_pattern(text: str) -> str:
    """Writes patterns for RE2."""
    pattern = read_pattern(text)
    _refuse(pattern, "ambiguous", "lookaround", "backreference")
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
    _refuse(pattern, "ambiguous", "lookaround", "backreference", "boundary", "property")
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
