"""Names of tools as a provider accepts them, and the way back.

The way back is a table, never a guess: names of the bus may hold what a provider forbids, and splitting a mapped name
at some mark would find tools that nobody offered.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

_HASH_LENGTH = 8


@dataclass(frozen=True, slots=True)
class NameRule:
    """Which names a provider accepts.

    Attributes:
        forbidden: what one forbidden character looks like; each is replaced by `_`.
        first: what the first character has to look like; a name that begins otherwise gets `_` in front.
        longest: characters.
    """

    forbidden: re.Pattern[str]
    first: re.Pattern[str]
    longest: int = 64

    def accepts(self, name: str) -> bool:
        """Whether a name can be used as it is."""
        return (
            0 < len(name) <= self.longest and self.first.match(name) is not None and self.forbidden.search(name) is None
        )


PLAIN_NAMES = NameRule(re.compile(r"[^a-zA-Z0-9_-]"), re.compile(r"[a-zA-Z0-9_-]"))
GEMINI_NAMES = NameRule(re.compile(r"[^a-zA-Z0-9_.:-]"), re.compile(r"[a-zA-Z_]"))
ANY_NAMES = NameRule(re.compile(r"(?!)"), re.compile(r"(?s:.)"), longest=1 << 30)


@dataclass(frozen=True, slots=True)
class NameTable:
    """Names of the bus and of the wire, one for one.

    Attributes:
        to_wire, to_bus: the two directions.
        rule: what names on this wire have to look like.
    """

    to_wire: Mapping[str, str]
    to_bus: Mapping[str, str]
    rule: NameRule = PLAIN_NAMES

    @classmethod
    def build(cls, names: Iterable[str], rule: NameRule) -> NameTable:
        """Returns the table for a set of names. It does not depend on their order.

        A name that fits is used as it is. Another one is made to fit, and gets a hash of itself where the result is
        taken, too long, or says nothing (a name all in characters that are forbidden).
        """
        wanted = list(dict.fromkeys(names))
        stems = {name: _stem(name, rule) for name in wanted}
        times = Counter(stems.values())
        wires = {
            name: stem for name, stem in stems.items() if rule.accepts(stem) and (stem == name or times[stem] == 1)
        }
        taken = set(wires.values())
        for name in sorted(stems.keys() - wires.keys()):
            wires[name] = _hashed(name, stems[name], rule, taken)
            taken.add(wires[name])
        to_wire = {name: wires[name] for name in wanted}
        return cls(to_wire, {wire: name for name, wire in to_wire.items()}, rule)

    @classmethod
    def empty(cls, rule: NameRule = PLAIN_NAMES) -> NameTable:
        """Returns a table without names: every name a model writes is unknown."""
        return cls({}, {}, rule)

    def wire(self, name: str) -> str:
        """Returns a name as the provider knows it.

        One that is not offered any more, or was invented, is made to fit: a provider refuses a whole conversation for
        one name in it. It never becomes the name of a tool that is offered.
        """
        known = self.to_wire.get(name)
        if known is not None:
            return known
        stem = _stem(name, self.rule)
        if self.rule.accepts(stem) and stem not in self.to_bus:
            return stem
        return _hashed(name, stem, self.rule, self.to_bus.keys())


def _stem(name: str, rule: NameRule) -> str:
    """Returns a name with what is forbidden replaced: still too long at times, and "" where it would say nothing."""
    if rule.accepts(name):
        return name
    fitted = rule.forbidden.sub("_", name)
    if not fitted.strip("_-.:") or len(fitted.strip("_")) < len(name) / 2:
        return ""
    return fitted if rule.first.match(fitted) else f"_{fitted}"


def _hashed(name: str, stem: str, rule: NameRule, taken: Container[str]) -> str:
    """Returns a name that nobody has: made of what fits of it and a hash of all of it."""
    start = (stem or "tool")[: rule.longest - _HASH_LENGTH - 1]
    attempt = 0
    while (tried := f"{start}_{_digest(name, attempt)}") in taken:
        attempt += 1
    return tried


def _digest(name: str, attempt: int) -> str:
    return hashlib.sha256(f"{name}\0{attempt}".encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_LENGTH]
