"""Accounts for every keyword of a tool's schema: it is on the wire at its place, or its loss is told.

A place is a place of arguments (`filter`, `tags[]`, `limits.*`), so that a schema may be written in another form there:
references resolved, parts merged, alternatives as a list of types. Which forms count as the same, `wire_forms` says;
which words count, `wire_words`. Nothing here knows how an export is made.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from tests.support.wire_capture import SentTool
from tests.support.wire_facts import Fact, told_by
from tests.support.wire_forms import (
    KEPT,
    NEUTRAL,
    ORGANIZING,
    allows_null,
    apart,
    ends_after_the_first,
    is_null,
    plain_schema,
    same,
)
from tests.support.wire_words import added_text, says
from toolbus.dialects import Loss

Json = dict[str, Any]

_SINGLE = ("additionalProperties", "unevaluatedProperties", "additionalItems", "unevaluatedItems", "items", "contains")
_ONE_SCHEMA = (*_SINGLE, "propertyNames", "not", "if", "then", "else", "contentSchema")
_STEPS = {"items": "[]", "additionalItems": "[]", "contains": "[]", "unevaluatedItems": "[]"}
_GROUPS = ("anyOf", "oneOf")


@dataclass(slots=True)
class Account:
    """What became of the keywords of one tool.

    Attributes:
        kept: how many are on the wire.
        in_words, reported, unreported: the lost ones; those in words may be reported too.
    """

    kept: int = 0
    in_words: list[Fact] = field(default_factory=list)
    reported: list[Fact] = field(default_factory=list)
    unreported: list[Fact] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """How many keywords the wire does not have as keywords."""
        return len(self.in_words) + len(self.reported) + len(self.unreported)


def account(parameters: Json, sent: SentTool, losses: Iterable[Loss], description: str = "") -> Account:
    """Returns what became of the keywords of a schema.

    Args:
        losses: of this tool.
        description: of the tool, so that what the export added to it can be read.
    """
    comparison = _Comparison(parameters, plain_schema(sent), sent.description.replace(description, "", 1), sent.name)
    facts = comparison.root()
    result = Account(kept=comparison.kept)
    told = told_by(facts, list(losses))
    for fact in facts:
        if fact.in_words:
            result.in_words.append(fact)
        elif told(fact):
            result.reported.append(fact)
        else:
            result.unreported.append(fact)
    return result


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A schema that applies to a place.

    Attributes:
        pointer: where it stands; `via` are the places of the references that led to it.
    """

    schema: Json
    pointer: str = ""
    via: tuple[str, ...] = ()


class _Side:
    """One of the two schemas, with its references."""

    def __init__(self, root: Json) -> None:
        self.root = root

    def flat(self, parts: Iterable[_Part]) -> list[_Part]:
        """Returns parts with their references and allOf followed."""
        flat: list[_Part] = []
        seen: set[int] = set()
        pending = list(parts)[::-1]
        while pending:
            part = pending.pop()
            if id(part.schema) in seen:
                continue
            seen.add(id(part.schema))
            flat.append(part)
            inner = part.schema.get("allOf")
            if isinstance(inner, list):
                pending += [
                    _Part(each, f"{part.pointer}/allOf/{index}", part.via)
                    for index, each in enumerate(inner)
                    if isinstance(each, dict)
                ]
            reference = part.schema.get("$ref")
            if isinstance(reference, str):
                pointer, target = self._target(reference)
                if isinstance(target, dict):
                    pending.append(_Part(target, pointer, (*part.via, part.pointer)))
        return flat

    def _target(self, reference: str) -> tuple[str, Any]:
        pointer = unquote(reference.removeprefix("#"))
        if not reference.startswith("#"):
            return "", None
        if pointer and not pointer.startswith("/"):
            return next(_anchored(self.root, pointer), ("", None))
        value: Any = self.root
        for step in pointer.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and step in value:
                value = value[step]
            elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
                value = value[int(step)]
            else:
                return "", None
        return pointer, value


def _anchored(value: Any, anchor: str, pointer: str = "") -> Iterator[tuple[str, Json]]:
    if isinstance(value, dict):
        if value.get("$anchor") == anchor:
            yield pointer, value
        for key, each in value.items():
            yield from _anchored(each, anchor, f"{pointer}/{_escaped(key)}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _anchored(each, anchor, f"{pointer}/{index}")


@dataclass(frozen=True, slots=True)
class _Context:
    """Where a comparison is: the place, what was lost around it, and texts that the export added above.

    Attributes:
        texts: each with the place that it stands at.
        branch: whether the wire may join this schema with its alternatives.
    """

    place: tuple[str, ...] = ()
    inside: Fact | None = None
    texts: tuple[tuple[tuple[str, ...], str], ...] = ()
    branch: bool = False
    open: tuple[tuple[frozenset[str], frozenset[int]], ...] = ()


class _Comparison:
    """Walks through a schema and the wire's together."""

    def __init__(self, original: Json, wire: Json, added: str, name: str) -> None:
        self._original = _Side(original)
        self._wire = _Side(wire)
        self._added = added
        self._name = name
        self._seen: set[tuple[tuple[str, ...], str, str, str]] = set()
        self.kept = 0

    def root(self) -> list[Fact]:
        """Returns the keywords that are not on the wire."""
        context = _Context(texts=(((), self._added),))
        facts = self._node([_Part(self._original.root)], [_Part(self._wire.root)], context)
        return list(dict.fromkeys(facts))

    # ── one place

    def _node(self, original: Sequence[_Part], wire: Sequence[_Part], context: _Context) -> list[Fact]:
        parts, base = self._original.flat(original), self._wire.flat(wire)
        key = (frozenset(part.pointer for part in parts), frozenset(id(part.schema) for part in base))
        if key in context.open or len(context.place) > 24:
            return []
        every = [*base, *self._branch_parts(base)]
        context = _Context(
            context.place,
            context.inside,
            (*context.texts, (context.place, added_text(every_schema(every), every_schema(parts)))),
            context.branch,
            (*context.open, key),
        )
        facts: list[Fact] = []
        for part in parts:
            for keyword, value in part.schema.items():
                facts += self._keyword(keyword, value, part, parts, base, every, context)
        return facts

    def _branch_parts(self, base: Sequence[_Part]) -> list[_Part]:
        """Returns the alternatives of the wire at a place, which may repeat what stands beside alternatives."""
        found: list[_Part] = []
        pending = [*base]
        while pending:
            part = pending.pop()
            for keyword in _GROUPS:
                for each in part.schema.get(keyword) or ():
                    if isinstance(each, dict):
                        flat = self._wire.flat([_Part(each)])
                        fresh = [one for one in flat if all(one.schema is not other.schema for other in found)]
                        found += fresh
                        pending += fresh
        return found

    def _keyword(
        self,
        keyword: str,
        value: Any,
        part: _Part,
        parts: list[_Part],
        base: list[_Part],
        every: list[_Part],
        context: _Context,
    ) -> list[Fact]:
        if keyword in ORGANIZING or keyword in ("$ref", "allOf"):
            return []
        if any(value == each and type(value) is type(each) for each in NEUTRAL.get(keyword, ())):
            return []
        if keyword == "title" and self._repeats_a_name(str(value), part, context.place):
            return []
        if keyword in _GROUPS and isinstance(value, list):
            return self._alternatives(keyword, value, part, base, every, context)
        if keyword in ("properties", "patternProperties", "dependentSchemas") and isinstance(value, dict):
            return self._named(keyword, value, part, every, context)
        if keyword == "required" and isinstance(value, list):
            required = {name for each in every for name in each.schema.get("required") or ()}
            return [
                fact
                for name in value
                for fact in self._check(
                    name in required, "required", json.dumps(name, ensure_ascii=False), part, context
                )
            ]
        if keyword == "prefixItems" or (keyword == "items" and isinstance(value, list)):
            return self._tuple(keyword, value, part, every, context)
        if value is False and ends_after_the_first(keyword, part.schema, every_schema(every)):
            return self._check(True, keyword, "false", part, context)
        if keyword in _ONE_SCHEMA:
            return self._one(keyword, value, part, every, context)
        kept = KEPT.get(keyword, same)(keyword, value, every_schema(parts), every_schema(every), context.branch)
        return self._check(kept, keyword, json.dumps(value, ensure_ascii=False), part, context)

    def _check(self, kept: bool, keyword: str, value: str, part: _Part, context: _Context) -> list[Fact]:
        identity = (context.place, part.pointer, keyword, value)
        if kept:
            self.kept += identity not in self._seen
            self._seen.add(identity)
            return []
        return [self._fact(keyword, value, part, context)]

    def _fact(self, keyword: str, value: str, part: _Part, context: _Context) -> Fact:
        in_words = says(context.texts, context.place, keyword, value)
        return Fact(context.place, part.pointer, keyword, value, part.via, context.inside, in_words)

    def _repeats_a_name(self, title: str, part: _Part, place: tuple[str, ...]) -> bool:
        """Tells whether a title only repeats the name of its argument, definition or tool, as generators write them."""
        names = [place[-1] if place else self._name, part.pointer.rpartition("/")[2]]
        names += [pointer.rpartition("/")[2] for pointer in part.via]
        bare = _letters(title)
        return any(bare == _letters(name) for name in names) or (
            not place and bare.startswith(_letters(self._name)) and bool(self._name)
        )

    # ── keywords that hold schemas

    def _named(self, keyword: str, value: Json, part: _Part, every: list[_Part], context: _Context) -> list[Fact]:
        facts: list[Fact] = []
        for name, inner in value.items():
            wire = [each.schema[keyword][name] for each in every if name in (each.schema.get(keyword) or {})]
            shown = json.dumps(name, ensure_ascii=False)
            lost = self._check(bool(wire), keyword, shown, part, context)
            step = name if keyword == "properties" else "*" if keyword == "patternProperties" else ""
            facts += lost
            inside = _below(context, step, lost)
            facts += self._schema(inner, f"{part.pointer}/{keyword}/{_escaped(name)}", part, wire, inside)
        return facts

    def _one(self, keyword: str, value: Any, part: _Part, every: list[_Part], context: _Context) -> list[Fact]:
        wire = [each.schema[keyword] for each in every if keyword in each.schema]
        if keyword == "additionalItems" and not isinstance(part.schema.get("items"), list):
            return []
        ordered = [each.schema for each in every if "prefixItems" in each.schema]
        if keyword == "additionalItems":  # of tuples up to draft 7; later drafts write the rest as `items`
            wire += [each["items"] for each in ordered or every_schema(every) if "items" in each]
        kept = bool(wire) and (value is not False or False in wire or {"not": {}} in wire)
        if keyword == "items":
            wire = [each for each in wire if not isinstance(each, list)]
        lost = self._check(kept, keyword, json.dumps(value, ensure_ascii=False), part, context)
        step = _STEPS.get(keyword, "*" if keyword in ("additionalProperties", "unevaluatedProperties") else "")
        inside = _below(context, step, lost, branch=keyword == "additionalItems" and not ordered)
        return lost + self._schema(value, f"{part.pointer}/{keyword}", part, wire, inside)

    def _tuple(self, keyword: str, value: Any, part: _Part, every: list[_Part], context: _Context) -> list[Fact]:
        if not isinstance(value, list):
            return []
        lists: list[Any] = [each.schema.get("prefixItems", each.schema.get("items")) for each in every]
        lists = [each for each in lists if isinstance(each, list) and len(each) == len(value)]
        lost = self._check(bool(lists), keyword, json.dumps(value, ensure_ascii=False), part, context)
        facts = [*lost]
        # Without the order, what each item may be can still stand in the one schema for all of them.
        common = [each.schema["items"] for each in every if isinstance(each.schema.get("items"), dict)]
        for index, inner in enumerate(value):
            wire = [each[index] for each in lists] or common
            inside = _below(context, "[]" if not lists else f"[{index}]", lost, branch=not lists)
            facts += self._schema(inner, f"{part.pointer}/{keyword}/{index}", part, wire, inside)
        return facts

    def _schema(self, inner: Any, pointer: str, part: _Part, wire: Sequence[Any], context: _Context) -> list[Fact]:
        if not isinstance(inner, dict):
            return []
        written = [_Part(each) for each in wire if isinstance(each, dict)]
        return self._node([_Part(inner, pointer, part.via)], written, context)

    # ── alternatives

    def _alternatives(
        self, keyword: str, value: list[Any], part: _Part, base: list[_Part], every: list[_Part], context: _Context
    ) -> list[Fact]:
        facts: list[Fact] = []
        branches = [
            (_Part(each, f"{part.pointer}/{keyword}/{index}", part.via), each)
            for index, each in enumerate(value)
            if isinstance(each, dict)
        ]
        plain = [(own, each) for own, each in branches if not is_null(each)]
        if len(plain) < len(branches):
            facts += self._check(allows_null([each.schema for each in every]), keyword, "null", part, context)
        groups = [each.schema[group] for each in every for group in _GROUPS if isinstance(each.schema.get(group), list)]
        choices = [one for group in groups for one in group if isinstance(one, dict) and not is_null(one)]
        candidates: list[list[_Part]] = [[*base, _Part(one)] for one in choices] or [list(base)]
        places = []
        for index, (own, _) in enumerate(plain):
            inside = _Context(context.place, context.inside, context.texts, len(plain) > 1, context.open)
            missing, kept = self._best(own, candidates, index, inside)
            places.append((own, missing, kept))
        merged = len(plain) > 1 and not choices
        for own, missing, kept in places:
            self.kept += kept
            if not missing:
                continue
            why = "merged" if kept else json.dumps(own.schema, ensure_ascii=False)
            cover = self._fact(keyword, why, part, context)
            if not kept:
                facts.append(cover)
            facts += [_under(fact, cover, context.inside) for fact in missing]
        if merged and any(_has_shape(own) for own, *_ in places):
            cover = self._fact(keyword, "merged", part, context)
            facts.append(cover)
        elif keyword == "oneOf" and not self._says_one(every) and not _disjoint([each for _, each in plain], self):
            facts += self._check(False, keyword, "exactly one", part, context)
        return facts

    def _best(
        self, own: _Part, candidates: Sequence[list[_Part]], index: int, context: _Context
    ) -> tuple[list[Fact], int]:
        """Returns what the wire's nearest alternative lacks, and how much it has. Its own place comes first."""
        found: list[tuple[int, list[Fact], int]] = []
        first = index if index < len(candidates) else 0
        for candidate in (candidates[first], *candidates[:first], *candidates[first + 1 :]):
            missing, kept = self._tried(own, candidate, context)
            found.append((sum(not fact.in_words for fact in missing), missing, kept))
            if not found[-1][0]:
                break
        _, missing, kept = min(found, key=lambda each: (each[0], len(each[1])))
        return missing, kept

    def _tried(self, own: _Part, candidate: list[_Part], context: _Context) -> tuple[list[Fact], int]:
        kept_before, seen_before = self.kept, set(self._seen)
        facts = self._node([own], candidate, context)
        kept, self.kept = self.kept - kept_before, kept_before
        self._seen = seen_before
        return facts, kept

    def _says_one(self, every: list[_Part]) -> bool:
        return any(isinstance(each.schema.get("oneOf"), list) for each in every)

    def resolved(self, schema: Json) -> Json:
        """Returns a schema of the tool with its references and allOf joined, for a look at its own keywords."""
        joined: Json = {}
        for part in self._original.flat([_Part(schema)]):
            for key, value in part.schema.items():
                joined.setdefault(key, value)
        return joined


def every_schema(parts: Iterable[_Part]) -> list[Json]:
    """Returns the schemas of parts."""
    return [part.schema for part in parts]


def _below(context: _Context, step: str, lost: Sequence[Fact], *, branch: bool = False) -> _Context:
    """Returns the context of an inner schema."""
    place = (*context.place, step) if step else context.place
    return _Context(place, lost[0] if lost else context.inside, context.texts, branch, context.open)


def _under(fact: Fact, cover: Fact, outer: Fact | None) -> Fact:
    """Returns a fact with what covers it put between it and what is around both."""
    if fact.inside is outer:
        inside: Fact = cover
    else:
        assert fact.inside is not None
        inside = _under(fact.inside, cover, outer)
    return Fact(fact.place, fact.pointer, fact.keyword, fact.value, fact.via, inside, fact.in_words)


def _has_shape(part: _Part) -> bool:
    return any(key in part.schema for key in ("properties", "required", "$ref", "allOf", "items"))


def _disjoint(branches: Sequence[Json], comparison: _Comparison) -> bool:
    """Tells whether no value can match two alternatives, so that any of them means the same as one of them."""
    joined = [comparison.resolved(each) for each in branches]
    return all(apart(one, other) for index, one in enumerate(joined) for other in joined[index + 1 :])


def _letters(text: str) -> str:
    return "".join(each for each in text.lower() if each.isalnum())


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
