"""Answers questions as a model would that knows the facts and sees only what is on the wire.

It has no knowledge of a tool: the names, types, values, formats, bounds and descriptions on the wire decide where a
fact goes and in which shape. Where they do not say enough, it makes the mistakes that models make: text instead of a
number, a value in the user's words, an invented key, a list as one text. Nothing is random.

Facts are JSON: a text, number or true and false as they are; lists; and objects with one key that says what they are:
`parts` (facts by what they are about), `map` (facts by keys that the user gave), `shapes` (ways to write one fact, the
user's first), `extreme` (`maximum`, `minimum` or `default`: as much as possible …), `none`, and `implied` (what the
user did not say, and only a required argument asks for).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.exports.words import read_words

Json = dict[str, Any]

_FORMATS = {
    "date": r"\d{4}-\d{2}-\d{2}",
    "date-time": r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d+)?(Z|[+-]\d{2}:\d{2})",
    "time": r"\d{2}:\d{2}:\d{2}(\.\d+)?(Z|[+-]\d{2}:\d{2})?",
    "duration": r"P(?=.)(\d+[YMWD])*(T(\d+[HMS])+)?",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": r"[^@\s]+@[^@\s]+",
    "uri": r"[a-z][a-z0-9+.-]*:\S+",
}
_INVENTED = {"maximum": 1000, "minimum": -1000, "default": 1}  # for extremes that the wire does not state
_NUMERIC = frozenset(("integer", "number"))
_GROUPS = ("anyOf", "oneOf")
_WORD = re.compile(r"[^\W_]+")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_MAX_LEVELS = 24


@dataclass(frozen=True, slots=True)
class _SchemaView:
    """What a model sees of one place: keywords, those stated in words included.

    Attributes:
        types: None where the wire does not say.
        choices: alternatives, each with what holds beside them.
    """

    keywords: Json
    types: frozenset[str] | None
    choices: tuple[_SchemaView, ...] = ()

    @property
    def nullable(self) -> bool:
        return (
            "null" in (self.types or ()) or None in (self.values or ()) or any(each.nullable for each in self.choices)
        )

    @property
    def values(self) -> list[Any] | None:
        """The values that it allows, None where it does not list them."""
        if "const" in self.keywords:
            return [self.keywords["const"]]
        values = self.keywords.get("enum")
        return values if isinstance(values, list) else None

    def may_be(self, *types: str) -> bool:
        """Tells whether the wire says that a place may have one of some types."""
        return self.types is not None and bool(self.types & set(types))


class FakeModel:
    """Reads one tool on the wire."""

    def __init__(self, schema: Json) -> None:
        self._root = schema
        self._worded: Json = {}  # definitions that a description gives, by name

    def arguments(self, facts: Any) -> Any:
        return self._fill(self._view(self._root), facts)

    # ── seeing

    def _view(self, schema: Any, level: int = 0) -> _SchemaView:
        keywords: Json = {}
        groups: list[list[Any]] = []
        for part in self._parts(schema):
            part = self._with_words(part)
            for key, value in part.items():
                if key in _GROUPS:
                    groups.append(value)
                elif key == "properties":
                    keywords["properties"] = {**keywords.get("properties", {}), **value}
                elif key == "required":
                    keywords["required"] = [*keywords.get("required", ()), *value]
                elif key != "$ref" or level:
                    keywords.setdefault(key, value)
        own = _SchemaView(keywords, _types(keywords))
        if level > _MAX_LEVELS or not groups:
            return own
        branches = [each for group in groups for each in group if isinstance(each, dict)]
        views = tuple(_beside(keywords, self._view(each, level + 1)) for each in branches)
        return _SchemaView(keywords, own.types, views)

    def _parts(self, schema: Any) -> Iterator[Json]:
        """Yields a schema and what its references and allOf lead to."""
        pending, seen = [schema], set()
        while pending:
            part = pending.pop(0)
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            yield part
            pending += part.get("allOf") or ()
            if isinstance(part.get("$ref"), str):
                pending.append(self._target(part["$ref"]))

    def _target(self, reference: str) -> Any:
        value: Any = self._root
        steps = [step.replace("~1", "/").replace("~0", "~") for step in reference.removeprefix("#").split("/")[1:]]
        for step in steps:
            if isinstance(value, dict) and step in value:
                value = value[step]
            elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
                value = value[int(step)]
            else:
                return self._worded.get(steps[-1]) if steps else None
        return value

    def _with_words(self, schema: Json) -> Json:
        """Returns a schema with what its description says about its form; keywords come first."""
        description = schema.get("description")
        if not isinstance(description, str):
            return schema
        words = read_words(description)
        self._worded.update(words.pop("$defs", {}))
        return {**words, **schema}

    # ── answering

    def _fill(self, view: _SchemaView, fact: Any) -> Any:
        choices = [each for each in view.choices if each.types != frozenset(("null",))]
        if isinstance(fact, Mapping) and "none" in fact:
            return None if view.nullable else "none"
        if choices:
            best = max(range(len(choices)), key=lambda index: (self._fits(choices[index], fact), -index))
            return self._fill(choices[best], fact)
        if isinstance(fact, list):
            return self._list(view, fact)
        if isinstance(fact, Mapping):
            if "implied" in fact:
                return self._fill(view, fact["implied"])
            if "parts" in fact:
                return self._object(view, fact["parts"])
            if "map" in fact:
                return self._map(view, fact["map"])
        return _scalar(view, fact)

    def _list(self, view: _SchemaView, facts: Sequence[Any]) -> Any:
        first = view.keywords.get("prefixItems", view.keywords.get("items"))
        if not view.may_be("array") and first is None:
            return ", ".join(_in_words(each) for each in facts)
        positions = first if isinstance(first, list) else []
        common = view.keywords.get("items") if not isinstance(view.keywords.get("items"), list) else None
        schemas = [positions[index] if index < len(positions) else common for index in range(len(facts))]
        return [self._fill(self._view(schema), fact) for schema, fact in zip(schemas, facts, strict=True)]

    def _map(self, view: _SchemaView, facts: Mapping[str, Any]) -> Any:
        of_all, of_some = view.keywords.get("additionalProperties"), view.keywords.get("patternProperties") or {}
        if not view.may_be("object") and not isinstance(of_all, dict) and not of_some:
            return ", ".join(f"{key}: {_in_words(fact)}" for key, fact in facts.items())
        named = view.keywords.get("properties") or {}
        filled: Json = {}
        for key, fact in facts.items():
            schema = next((each for pattern, each in of_some.items() if _matches(pattern, key)), of_all)
            filled[key] = self._fill(self._view(named.get(key, schema)), fact)
        return filled

    def _object(self, view: _SchemaView, facts: Mapping[str, Any]) -> Any:
        properties = view.keywords.get("properties")
        if not view.may_be("object") and not properties:
            return ", ".join(f"{about}: {_in_words(fact)}" for about, fact in facts.items())
        required = set(view.keywords.get("required") or ())
        keys = self._keys(facts, properties or {})
        filled: Json = {}
        for about, fact in facts.items():
            key = keys.get(about)
            if isinstance(fact, Mapping) and "implied" in fact and key not in required:
                continue
            schema = (properties or {}).get(key) if key else None
            filled[key or _invented(about)] = self._fill(self._view(schema), fact)
        for name in required - filled.keys():
            seen = self._view((properties or {}).get(name))
            if seen.values is not None and len(seen.values) == 1:
                filled[name] = seen.values[0]
            elif seen.nullable:
                filled[name] = None
        return filled

    def _keys(self, facts: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, str]:
        """Returns for each fact the property that its subject fits best; none of them twice."""
        scores = sorted(
            (
                (_likeness(about, name, self._view(schema)), -order, about, name)
                for about in facts
                for order, (name, schema) in enumerate(properties.items())
            ),
            reverse=True,
        )
        keys: dict[str, str] = {}
        for score, _, about, name in scores:
            if score > 0 and about not in keys and name not in keys.values():
                keys[about] = name
        return keys

    def _fits(self, view: _SchemaView, fact: Any) -> float:
        """Returns how well an alternative fits a fact."""
        if view.choices:
            return max(self._fits(each, fact) for each in view.choices)
        if isinstance(fact, list):
            if not view.may_be("array"):
                return -9.0 if view.types else -1.0
            inside = self._view(view.keywords.get("items"))
            return 2 + (sum(self._fits(inside, each) for each in fact) / len(fact) if fact else 0)
        if isinstance(fact, Mapping) and "implied" in fact:
            return self._fits(view, fact["implied"])
        if isinstance(fact, Mapping) and "map" in fact:
            return 2.0 if view.may_be("object") else -9.0
        if isinstance(fact, Mapping) and "parts" in fact:
            return self._fits_parts(view, fact["parts"])
        if view.types and not view.types - {"object", "array", "null"}:
            return -9.0
        shapes = list(_shapes(fact))
        if isinstance(fact, bool | int | float):
            return (2.0 if _allows(view, fact) else -3.0) if view.types else 0.0
        fitting = [_allows(view, shape) for shape in shapes]
        return (2.0 if any(fitting) else -3.0) + (1.0 if view.values is not None and any(fitting) else 0.0)

    def _fits_parts(self, view: _SchemaView, facts: Mapping[str, Any]) -> float:
        properties = view.keywords.get("properties") or {}
        if view.types and not view.may_be("object"):
            return -9.0
        keys = self._keys(facts, properties)
        found = sum(
            1 + min(self._fits(self._view(properties[keys[about]]), fact), 1.0)
            for about, fact in facts.items()
            if about in keys
        )
        missing = set(view.keywords.get("required") or ()) - set(keys.values())
        return found - 2.0 * (len(facts) - len(keys)) - 2.0 * len(missing)


def _beside(base: Json, choice: _SchemaView) -> _SchemaView:
    """Returns an alternative together with what holds beside the alternatives."""
    keywords = {**base, **choice.keywords}
    for key in ("properties", "required"):
        if key in base and key in choice.keywords:
            both = (base[key], choice.keywords[key])
            keywords[key] = {**both[0], **both[1]} if key == "properties" else [*both[0], *both[1]]
    types = choice.types if choice.types is not None else _types(base)
    return _SchemaView(keywords, types, choice.choices)


def _types(keywords: Mapping[str, Any]) -> frozenset[str] | None:
    types = keywords.get("type")
    if isinstance(types, str):
        return frozenset((types,))
    if isinstance(types, list):
        return frozenset(types)
    return frozenset(("object",)) if keywords.get("properties") else None


def _scalar(view: _SchemaView, fact: Any) -> Any:
    if isinstance(fact, Mapping) and "extreme" in fact:
        return _number(view, _extreme(view, fact["extreme"]))
    if isinstance(fact, bool):
        if view.may_be("boolean") or (view.values is not None and fact in view.values):
            return fact
        return ("true" if fact else "false") if view.may_be("string") else ("yes" if fact else "no")
    if isinstance(fact, int | float):
        return _number(view, fact)
    shapes = list(_shapes(fact))
    chosen = next((shape for shape in shapes if _allows(view, shape)), shapes[0])
    return [chosen] if view.types == frozenset(("array",)) else chosen


def _number(view: _SchemaView, number: int | float) -> Any:
    if view.may_be(*_NUMERIC) or any(value == number for value in view.values or ()):
        return number
    return json.dumps(number)


def _extreme(view: _SchemaView, kind: str) -> int | float:
    seen = view.keywords
    if kind in seen and isinstance(seen[kind], int | float):
        return seen[kind]  # type: ignore[no-any-return]
    edge = seen.get("exclusiveM" + kind[1:])
    if isinstance(edge, int | float) and not isinstance(edge, bool):
        return edge - 1 if kind == "maximum" else edge + 1
    return _INVENTED[kind]


def _shapes(fact: Any) -> Iterator[Any]:
    if isinstance(fact, Mapping):
        yield from fact.get("shapes", ())
    else:
        yield fact


def _allows(view: _SchemaView, value: Any) -> bool:
    """Tells whether a value fits everything that the wire says about a place."""
    seen = view.keywords
    kind = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}.get(type(value), "")
    if view.types and kind not in view.types and not (kind == "integer" and "number" in view.types):
        return False
    if view.values is not None and value not in view.values:
        return False
    if isinstance(value, str):
        form = _FORMATS.get(str(seen.get("format", "")))
        if form is not None and not re.fullmatch(form, value):
            return False
        pattern = seen.get("pattern")
        return not isinstance(pattern, str) or _matches(pattern, value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(seen.get("minimum", value) <= value <= seen.get("maximum", value))
    return True


def _matches(pattern: str, text: str) -> bool:
    try:
        return re.search(pattern, text) is not None
    except re.error:  # a model cannot read it either
        return True


def _likeness(about: str, name: str, view: _SchemaView) -> float:
    """Returns how well a property fits what a fact is about: by its name first, then by its title and description."""
    if about == name:
        return 100.0
    wanted, own = _stems(about), _stems(name)
    seen = [view.keywords, *(each.keywords for each in view.choices)]
    described = _stems(" ".join(f"{each.get('title', '')} {_prose(each.get('description'))}" for each in seen))
    named = len(wanted & own)
    return 3.0 * named / max(len(own), 1) + named + len(wanted & described) / (1 + len(described) / 20)


def _prose(description: Any) -> str:
    """Returns a description without the list of fields in it."""
    return re.split(r"\n\s*(?:[-*] |Fields:)", str(description or ""), maxsplit=1)[0]


def _stems(text: str) -> set[str]:
    words = _WORD.findall(_HUMP.sub(" ", text).lower())
    return {word[:5].rstrip("s") for word in words} - {"the", "a", "of", "to", "it", "is", "or", "and", "in", "i"} or {
        *words
    }


def _invented(about: str) -> str:
    return "_".join(_WORD.findall(about.lower()))


def _in_words(fact: Any) -> str:
    if isinstance(fact, Mapping):
        inner = fact.get("parts", fact.get("map"))
        if isinstance(inner, Mapping):
            return ", ".join(f"{key} {_in_words(each)}" for key, each in inner.items())
        return str(next(_shapes(fact), "as usual")) if "implied" not in fact else _in_words(fact["implied"])
    return ", ".join(map(_in_words, fact)) if isinstance(fact, list) else str(fact)
