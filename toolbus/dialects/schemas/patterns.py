r"""Reads the patterns of schemas, which are regular expressions of ECMAScript, into pieces that others can write.

What plugins in Python write instead (`(?P<name>…)`, `\A`, `\Z`) is read as well. Reading takes time in proportion to
the length, whatever the pattern: nothing is matched here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, TypeAlias

MAX_DEPTH = 50  # of groups in groups
_REPETITION = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")
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
            ``spelling`` (the same can be written in another way), ``foreign`` (it is not ECMAScript).
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
        return self._character(char)
