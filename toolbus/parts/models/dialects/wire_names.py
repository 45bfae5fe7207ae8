"""Maps names of tools on the bus to names on the wire that a provider accepts, and back.

The way back is a table, never a guess: names on the bus may hold characters that a provider forbids, and splitting a
mapped name at a separator would find tools that were not offered.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

_HASH_LENGTH = 8  # hexadecimal digits: enough for the few names of one export, and a table detects a collision


@dataclass(frozen=True, slots=True)
class NameRule:
    """Which names a provider accepts.

    Attributes:
        forbidden: matches one forbidden character; each is replaced by `_`.
        first: matches a valid first character; a name that begins otherwise gets `_` in front.
        max_length: characters.
    """

    forbidden: re.Pattern[str]
    first: re.Pattern[str]
    max_length: int = 64

    def accepts(self, name: str) -> bool:
        """Tells whether a name can be used unchanged."""
        return (
            0 < len(name) <= self.max_length
            and self.first.match(name) is not None
            and self.forbidden.search(name) is None
        )


PLAIN_NAMES = NameRule(re.compile(r"[^a-zA-Z0-9_-]"), re.compile(r"[a-zA-Z0-9_-]"))
GEMINI_NAMES = NameRule(re.compile(r"[^a-zA-Z0-9_.:-]"), re.compile(r"[a-zA-Z_]"))


@dataclass(frozen=True, slots=True)
class NameTable:
    """Names on the bus and on the wire, one for one.

    Attributes:
        to_wire, to_bus: the two directions.
        rule: which names this wire accepts.
    """

    to_wire: Mapping[str, str]
    to_bus: Mapping[str, str]
    rule: NameRule = PLAIN_NAMES

    @classmethod
    def build(cls, names: Iterable[str], rule: NameRule) -> NameTable:
        """Returns the table for a set of names. It does not depend on their order.

        A valid name is used unchanged. Another one has its forbidden characters replaced, and gets a hash of itself
        if the result is taken, too long, or meaningless (a name of forbidden characters only).
        """
        unique = list(dict.fromkeys(names))
        stems = {name: stem_of(name, rule) for name in unique}
        counts = Counter(stems.values())
        wires = {
            name: stem for name, stem in stems.items() if rule.accepts(stem) and (stem == name or counts[stem] == 1)
        }
        taken = set(wires.values())
        for name in sorted(stems.keys() - wires.keys()):
            wires[name] = _hashed(name, stems[name], rule, taken)
            taken.add(wires[name])
        to_wire = {name: wires[name] for name in unique}
        return cls(to_wire, {wire: name for name, wire in to_wire.items()}, rule)

    @classmethod
    def empty(cls, rule: NameRule = PLAIN_NAMES) -> NameTable:
        """Returns a table without names: every name that a model writes is unknown."""
        return cls({}, {}, rule)

    def wire(self, name: str) -> str:
        """Returns a tool's name on the wire.

        A name that is no longer offered, or was invented, is made valid, since a provider refuses a whole conversation
        for one invalid name in it. It never becomes the name of a tool that is offered.
        """
        wire_name = self.to_wire.get(name)
        if wire_name is not None:
            return wire_name
        stem = stem_of(name, self.rule)
        if self.rule.accepts(stem) and stem not in self.to_bus:
            return stem
        return _hashed(name, stem, self.rule, self.to_bus.keys())


def stem_of(name: str, rule: NameRule) -> str:
    """Returns a name with forbidden characters replaced; it may be too long. "" if it would be meaningless."""
    if rule.accepts(name):
        return name
    stem = rule.forbidden.sub("_", name)
    if not stem.strip("_-.:") or len(stem.strip("_")) < len(name) / 2:
        return ""
    return stem if rule.first.match(stem) else f"_{stem}"


def _hashed(name: str, stem: str, rule: NameRule, taken: Container[str]) -> str:
    """Returns a name that is not taken: the beginning of the stem and a hash of the whole name."""
    start = (stem or "tool")[: rule.max_length - _HASH_LENGTH - 1]
    texts = (f"{name}\0{attempt}".encode("utf-8", "surrogatepass") for attempt in itertools.count())
    candidates = (f"{start}_{hashlib.sha256(text).hexdigest()[:_HASH_LENGTH]}" for text in texts)
    return next(candidate for candidate in candidates if candidate not in taken)
