"""Defines what a wire lost of a schema, and tells which of it the losses of an export name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolbus.dialects import Loss

# What alternatives lose where they were merged into one schema, which one loss tells.
_STRUCTURE = frozenset(("required", "const", "enum", "type", "additionalProperties", "minProperties", "title", "not"))


@dataclass(frozen=True, slots=True)
class Fact:
    """A keyword of a tool's schema that the wire does not have at its place.

    Attributes:
        place: of the argument, in steps.
        pointer: of the schema that has the keyword, as a JSON pointer.
        via: the places of the references on the way to it, the nearest last.
        value: what was lost of it: of `required` and `properties` one name.
        inside: the lost or merged keyword that this one stands under; None where there is none.
    """

    place: tuple[str, ...]
    pointer: str
    keyword: str
    value: str
    via: tuple[str, ...] = ()
    inside: Fact | None = None
    in_words: bool = False

    def __str__(self) -> str:
        return f"{'.'.join(self.place) or 'the root'}: {self.keyword} {self.value} ({self.pointer or '/'})"


def told_by(facts: Sequence[Fact], losses: Sequence[Loss]) -> Callable[[Fact], bool]:
    """Returns what tells whether losses name a fact, or what it stands under.

    One loss names one value: where several were lost of one keyword, each is named or counted.
    """
    entries: dict[tuple[str, str], list[str]] = defaultdict(list)
    for loss in losses:
        entries[loss.path, loss.keyword].append(loss.why)
    lost: dict[tuple[str, str], set[str]] = defaultdict(set)
    for fact in facts:
        if not fact.in_words:
            lost[fact.pointer, fact.keyword].add(fact.value)

    def named(fact: Fact) -> bool:
        whys = [why for pointer in (fact.pointer, *fact.via[-1:]) for why in entries.get((pointer, fact.keyword), ())]
        if not whys:
            return False
        values = lost[fact.pointer, fact.keyword]
        unnamed = [value for value in values if not any(_bare(value)[:40] in why for why in whys)]
        if fact.value not in unnamed:
            return True
        naming = sum(any(_bare(value)[:40] in why for why in whys) for value in values)
        return len(unnamed) <= len(whys) - naming

    def told(fact: Fact) -> bool:
        if any((pointer, "$ref") in entries for pointer in fact.via):
            return True
        within: Fact | None = fact
        while within is not None:
            if named(within) and (within is fact or within.value != "merged" or fact.keyword in _STRUCTURE):
                return True
            within = within.inside
        return False

    return told


def _bare(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value
