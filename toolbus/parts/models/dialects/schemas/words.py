"""States schemas in words, for providers that have no keyword for a rule: a model reads them in a description.

Works on merged schemas (`merged`). Fields of objects become a nested list, each with its type, its rules and its own
description. Texts are bounded; parts that do not fit are reported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from toolbus.parts.models.dialects.schemas.losses import LossReport, excerpt
from toolbus.parts.models.dialects.schemas.parts import Part, inferred

_json = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps would make an encoder each time
MAX_CHARACTERS = 12_000  # of the words for one tool: 3,000 tokens
_MAX_LEVELS = 6  # of nested lists
_MAX_VALUES = 50  # of an enum
_MAX_JSON = 600  # characters of a keyword that is stated as JSON
_ABOUT = frozenset(("title", "description"))
_ALTERNATIVES = {"anyOf": "at least one of", "oneOf": "exactly one of"}
_PHRASES = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "multipleOf": "a multiple of {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "minProperties": "at least {} fields",
    "maxProperties": "at most {} fields",
    "pattern": "matching the pattern {}",
    "format": "format {}",
    "const": "always {}",
    "default": "default {}",
    "example": "for example {}",
}
_COUNTS = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
_FLAGS = {
    "uniqueItems": "no item twice",
    "deprecated": "deprecated",
    "readOnly": "read-only",
    "writeOnly": "write-only",
}
# Keywords that the other methods state, or that say nothing to a model.
_ELSEWHERE = frozenset(
    (
        *("type", "enum", "title", "description", "required", "properties", "propertyOrdering", "items", "anyOf"),
        *("oneOf", "prefixItems", "additionalProperties", "patternProperties", "$ref", "$comment", "$defs"),
    )
)

_LISTED = frozenset(
    ("anyOf", "oneOf", "properties", "required", "patternProperties", "additionalProperties", "prefixItems")
)


class Words:
    """States the schemas of one tool.

    Args:
        definitions: the schemas of references in these schemas, by name.
    """

    def __init__(self, report: LossReport, definitions: Mapping[str, Any]) -> None:
        self._report = report
        self._definitions = definitions
        self._left = MAX_CHARACTERS
        self._named: list[str] = []  # definitions that a text names

    def describe(self, schema: dict[str, Any], known: frozenset[str], name: str) -> str:
        """Returns a schema as a description: its own one, its rules as a sentence, its fields as a list.

        Args:
            known: keywords that the provider knows, which are not stated.
            name: of the field or tool that it describes.
        """
        texts = [] if "title" in known else telling_title(schema, name)
        texts += [schema["description"]] if "description" in schema else []
        if schema.keys() - known <= _ABOUT:
            return "\n".join(texts)
        self._named = []
        stated = {keyword: value for keyword, value in schema.items() if keyword not in known}
        self._report.generated(stated, self._report.path(schema))
        facts = self._rules(stated)
        lines = self._lists(stated, facts, 0, has_fields="properties" in schema and "properties" in known)
        for name in self._named:  # grows meanwhile
            lines += self._definition(name)
        if facts:
            texts.append(_sentence(facts))
        if lines:
            texts.append("\n".join(["Fields:", *lines] if "properties" in stated else lines))
        return "\n".join(texts)

    # -- one schema ----------------------------------------------------------------------------------------------------

    def _phrase(self, schema: Any, level: int) -> tuple[list[str], list[str]]:
        """Returns a schema as facts, the first of which is its type, and as the lines of a list."""
        if not isinstance(schema, dict):
            return (["anything"] if schema else ["nothing"]), []
        facts = [self._kind(schema)]
        if "prefixItems" not in schema and schema.get("items") not in (None, True, False, {}):
            (kind, *rules), lines = self._phrase(schema["items"], level)
            facts = [f"{facts[0] or 'array'} of {_with_rules(kind, rules)}"]
            if text := _about(schema["items"]):
                lines = [f"each item: {text}", *lines] if lines else lines
                facts += [] if lines else [f"each item: {text}"]
        else:
            lines = []
        facts += self._rules(schema)
        lines += self._lists(schema, facts, level)
        facts = [fact for fact in facts if fact]
        return facts or ["one of these" if lines else "anything"], lines

    def _kind(self, schema: dict[str, Any]) -> str:
        if "$ref" in schema:
            name = schema["$ref"].removeprefix("#/$defs/")
            if name not in self._named:
                self._named.append(name)
            return f"{name} (see below)"
        types = schema.get("type")
        if types is None:
            return "" if "enum" in schema or "const" in schema else inferred([Part(schema)])
        return types if isinstance(types, str) else " or ".join(types)

    def _rules(self, schema: dict[str, Any]) -> list[str]:
        """Returns the rules that stand in keywords without schemas, and those that no other method states."""
        rules = []
        if "enum" in schema:
            rules.append(self._values(schema))
        for keyword, value in schema.items():
            if keyword in _ELSEWHERE:
                continue
            if keyword in _PHRASES and value is not None:
                rules.append(_phrase(keyword, value))
            elif keyword == "default" and value is None:
                continue  # the same as to leave it out
            elif keyword == "discriminator" and isinstance(value, dict) and "propertyName" in value:
                # Its mapping refers to schemas that are not referred to any more; those name their values.
                rules.append(f"the field {value['propertyName']} says which one of them")
            elif keyword in _FLAGS:
                rules += [_FLAGS[keyword]] if value else []
            elif keyword == "examples":
                rules += [f"for example {', '.join(map(_json, value))}"] if value else []
            elif len(text := f"{keyword}: {_json(value)}") <= _MAX_JSON:
                rules.append(text)
            else:
                self._report.lose(schema, keyword, f"{excerpt(value)} is too long to be stated in the description")
        return rules

    def _values(self, schema: dict[str, Any]) -> str:
        values = schema["enum"]
        shown = ", ".join(map(_json, values[:_MAX_VALUES]))
        if len(values) <= _MAX_VALUES:
            return f"one of {shown}"
        self._report.lose(schema, "enum", f"only {_MAX_VALUES} of its {len(values)} values are stated")
        return f"one of {shown}, …"

    # -- schemas inside ------------------------------------------------------------------------------------------------

    def _lists(self, schema: dict[str, Any], facts: list[str], level: int, *, has_fields: bool = False) -> list[str]:
        """Returns the schemas inside a schema as the lines of a list; short ones are added to the facts.

        Args:
            has_fields: whether the provider knows fields of this object.
        """
        if _LISTED.isdisjoint(schema):
            return []
        lines: list[str] = []
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                lines += self._alternatives(schema, keyword, facts, level)
        fields = dict(schema.get("properties") or {})
        required = schema.get("required") or ()
        if missing := [name for name in required if name not in fields]:
            facts.append(f"required: {', '.join(map(_json, missing))}")
        entries: list[tuple[str, Any, bool]] = [(name, each, name in required) for name, each in fields.items()]
        for pattern, each in (schema.get("patternProperties") or {}).items():
            entries.append((f"any name that matches {pattern}" if pattern else "any name", each, False))
        others = schema.get("additionalProperties")
        if others is False:
            facts.append("no other fields" if entries or has_fields else "no fields")
        elif isinstance(others, dict) and others:
            entries.append(("any other name" if entries or has_fields else "any name", others, False))
        if "prefixItems" in schema:
            facts.append("items in this order")
            entries += [(f"item {place}", each, False) for place, each in enumerate(schema["prefixItems"], 1)]
            if schema.get("items") is False:
                facts.append("no further items")
            elif isinstance(schema.get("items"), dict) and schema["items"]:
                entries.append(("further items", schema["items"], False))
        return lines + self._entries(schema, entries, level)

    def _entries(self, schema: dict[str, Any], entries: list[tuple[str, Any, bool]], level: int) -> list[str]:
        lines: list[str] = []
        for place, (name, each, required) in enumerate(entries):
            if level >= _MAX_LEVELS or self._left <= 0:
                names = ", ".join(name for name, *_ in entries[place:])
                why = f"{excerpt(names)} did not fit into the description"
                self._report.lose(schema, "prefixItems" if name.startswith("item ") else "properties", why)
                return [*lines, "- …"]
            (kind, *rules), inner = self._phrase(each, level + 1)
            text = _about(each, name)
            facts = ", ".join([kind, *(["required"] if required else []), *rules])
            line = f"- {name} ({facts}){': ' if text else ''}{text}"
            self._left -= len(line) + 2 * level
            lines += [line, *(f"  {one}" for one in inner)]
        return lines

    def _alternatives(self, schema: dict[str, Any], keyword: str, facts: list[str], level: int) -> list[str]:
        branches = schema[keyword]
        names: list[list[str]] = [
            one["required"] for one in branches if isinstance(one, dict) and one.keys() - _ABOUT == {"required"}
        ]
        if len(names) == len(branches) and all(names):
            sets = "; ".join(", ".join(each) for each in names)
            facts.append(f"give {_ALTERNATIVES[keyword]}: {sets}")
            return []
        if level >= _MAX_LEVELS or self._left <= 0:
            self._report.lose(schema, keyword, f"{len(branches)} alternatives did not fit into the description")
            return []
        phrases = [self._phrase(branch, level + 1) for branch in branches]
        about = [_about(one) for one in branches]
        if not any(lines for _, lines in phrases) and not any(about):
            facts.append(
                " or ".join(f"{kind} ({', '.join(rules)})" if rules else kind for (kind, *rules), _ in phrases)
            )
            self._left -= len(facts[-1])
            return []
        lines: list[str] = []
        for place, (((kind, *rules), inner), text) in enumerate(zip(phrases, about, strict=True)):
            line = f"- {'or' if place else 'either'} {_with_rules(kind, rules)}{': ' if text else ''}{text}"
            self._left -= len(line) + 2 * level
            lines += [line, *(f"  {one}" for one in inner)]
        return lines

    def _definition(self, name: str) -> list[str]:
        (kind, *rules), lines = self._phrase(self._definitions[name], 0)
        text = _about(self._definitions[name], name)
        return [f"{name} is: {', '.join([kind, *rules])}{'. ' if text else ''}{text}", *lines]


def rule_in_words(keyword: str, value: Any) -> str:
    """Returns a keyword that `_PHRASES` has as a sentence."""
    return _sentence([_phrase(keyword, value)])


def _phrase(keyword: str, value: Any) -> str:
    text = _PHRASES[keyword].format(value if keyword in ("pattern", "format") else _json(value))
    return text[:-1] if value == 1 and keyword in _COUNTS else text


def _with_rules(kind: str, rules: list[str]) -> str:
    return f"{kind} ({', '.join(rules)})" if rules else kind


def _sentence(facts: list[str]) -> str:
    text = ", ".join(facts)
    return f"{text[:1].upper()}{text[1:]}."


def _about(schema: Any, name: str = "") -> str:
    """Returns the description of a schema as one line of a list."""
    if not isinstance(schema, dict):
        return ""
    return " ".join(". ".join(filter(None, (*telling_title(schema, name), schema.get("description")))).split())


def telling_title(schema: dict[str, Any], name: str) -> list[str]:
    """Returns the title of a schema, unless its name or its description says the same."""
    title = schema.get("title")
    if not title:
        return []
    repeats = title in schema.get("description", "") or (_letters(name) and _letters(name) in _letters(title))
    return [] if repeats else [title]


def _letters(text: str) -> str:
    return "".join(character for character in text.lower() if character.isalnum())
