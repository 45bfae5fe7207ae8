"""Sanitizes schemas for providers that accept all of JSON Schema but refuse a request for one error in it."""

from __future__ import annotations

import copy
import re
from typing import Any

from toolbus.parts.models.dialects.schemas.losses import Inexpressible, LossReport, escaped, excerpt
from toolbus.parts.models.dialects.schemas.words import rule_in_words
from toolbus.protocol.json_schema import CHECKS, LISTS, MAPS, SINGLE, draft_of, is_number, type_of_values
from toolbus.protocol.patterns import MAX_REPETITIONS, PatternRule, Unreadable, common_pattern, in_words

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_EXCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_FLAG_OF = {bound: flag for flag, bound in _EXCLUSIVE.items()}  # draft 4: it excludes the bound, and is written for it
_RESTS = ("additionalProperties", "unevaluatedProperties")
_KNOWN = {*MAPS, *LISTS, *SINGLE, *CHECKS}  # none of them may be null
_NEGATING = frozenset(("not", "if"))  # they forbid or require more when their schema allows more
_BOUNDS = frozenset(("minLength", "maxLength", "minItems", "maxItems"))
_PLAIN_REFERENCE = re.compile(r"#(/[^/~%]+)+")
_OUTER = frozenset(("$defs", "definitions", "$schema", "$id", "$anchor"))
_ALL_TYPES = ("string", "number", "boolean", "object", "array", "null")
_IN_GRAMMARS = frozenset(
    (
        *("properties", "additionalProperties", "items", "prefixItems", "additionalItems"),
        *("$defs", "definitions", "anyOf", "oneOf"),
    )
)
_TYPED = frozenset(
    ("type", "$ref", "anyOf", "oneOf", "allOf", "const", "enum", "properties", "items", "prefixItems", "pattern")
)
_FLAGS = frozenset(("additionalProperties", "unevaluatedProperties", "unevaluatedItems", "additionalItems"))


class Sanitizer:
    """Removes malformed keywords and patterns that the provider cannot read, and adds keywords that providers require.

    Args:
        property_names: pattern of the property names that the provider accepts; "" means any.
        patterns: writes the values of `pattern`.
        grammar: whether servers may turn schemas into grammars as llama.cpp does, which refuses a whole request for a
            schema that is true or false, for a reference that is not a plain path, and for a bound of 2,000 or more.
    """

    def __init__(
        self,
        property_names: str = "",
        *,
        patterns: PatternRule = common_pattern,
        grammar: bool = False,
    ) -> None:
        self.names = re.compile(property_names, re.ASCII) if property_names else None
        self.patterns = patterns
        self.grammar = grammar

    def __call__(self, root: dict[str, Any], report: LossReport) -> dict[str, Any]:
        """Returns the sanitized schema.

        Raises:
            Inexpressible: a required property has a name that the provider does not accept.
        """
        first = _Sanitizing(self, report)
        sanitized = first.root(root)
        # The first pass may have dropped the target of a reference.
        return _Sanitizing(self, report.over(sanitized)).root(sanitized) if first.refers else sanitized


class _Sanitizing:
    def __init__(self, rules: Sanitizer, report: LossReport) -> None:
        self._rules = rules
        self._report = report
        self._moved: dict[str, str] = {}  # references that were not plain, and the names in $defs that replace them
        self.refers = False  # whether the written schema has a reference
        self._rewritten = False  # whether a keyword of an older draft was converted to 2020-12

    def root(self, root: dict[str, Any]) -> dict[str, Any]:
        sanitized = self.schema(root)
        if _has_type(sanitized, "object"):
            sanitized.setdefault("properties", {})  # OpenAI and others require it here
        definitions: dict[str, Any] = {}
        while len(definitions) < len(self._moved):  # moved schemas may refer to others that must be moved
            for reference, name in list(self._moved.items())[len(definitions) :]:
                definitions[name] = self._moved_target(reference)
        if definitions:
            sanitized["$defs"] = {**sanitized.get("$defs", {}), **definitions}
        if self._rewritten and "$schema" in sanitized and draft_of(sanitized) != 2020:
            sanitized["$schema"] = _DRAFT
        return sanitized

    def schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        sanitized: dict[str, Any] = {}
        notes: list[str] = []
        for keyword, value in schema.items():
            if keyword == "items" and isinstance(value, list):
                # Drafts up to 7 list the first items here, and `additionalItems` applies to the rest.
                sanitized["prefixItems"] = self._list(schema, keyword, value)
                sanitized["items"] = self._single(schema, "additionalItems", schema.get("additionalItems", {}))
                self._rewritten = True
            elif keyword == "additionalItems" and isinstance(schema.get("items"), list):
                continue
            elif keyword == "oneOf":
                name, branches = self._one_of(schema, value)
                sanitized[name] = branches
            elif keyword in _EXCLUSIVE and isinstance(value, bool) and is_number(schema.get(_EXCLUSIVE[keyword])):
                # Draft 4 has a flag beside the bound.
                sanitized.pop(_EXCLUSIVE[keyword], None)
                sanitized[keyword if value else _EXCLUSIVE[keyword]] = schema[_EXCLUSIVE[keyword]]
                self._rewritten = True
            elif keyword not in sanitized and not (keyword in _FLAG_OF and schema.get(_FLAG_OF[keyword]) is True):
                sanitized[keyword] = self._keyword(schema, keyword, value, notes)
        valid = {keyword: value for keyword, value in sanitized.items() if value is not None or keyword not in _KNOWN}
        self._keep_rest_open(schema, valid, notes)
        if _has_type(valid, "object") and valid.get("additionalProperties") is False:
            valid.setdefault("properties", {})
        elif self._rules.grammar and valid.get("properties") == {}:
            del valid["properties"]  # outlines-core and lm-format-enforcer would admit no other properties
        if _has_type(valid, "array"):
            valid.setdefault("items", _any_value() if self._rules.grammar else {})
        if self._rules.grammar and isinstance(valid.get("items"), bool):
            _open_items(valid)
        if (kind := type_of_values(valid)) not in ("", "null"):
            valid["type"] = kind  # programs that convert schemas take a choice without it for an object
        if notes:
            texts = [valid["description"]] if valid.get("description") else []
            valid["description"] = "\n".join(dict.fromkeys([*texts, *notes]))
        return valid

    def _one_of(self, schema: dict[str, Any], value: Any) -> tuple[str, Any]:
        """Returns the keyword for alternatives of which one must hold, and these."""
        before = self._report.visits
        branches = self._list(schema, "oneOf", value)
        if self._report.visits == before or branches is None:
            return "oneOf", branches
        # If one allows more, two may match: oneOf would refuse arguments that the tool takes.
        if "anyOf" in schema:
            self._report.lose(schema, "oneOf", "it was dropped: a part of it allows more than it says")
            return "oneOf", None
        self._report.lose(schema, "oneOf", "it became anyOf, as a part of it allows more: that only one holds is lost")
        return "anyOf", branches

    def _keep_rest_open(self, schema: dict[str, Any], valid: dict[str, Any], notes: list[str]) -> None:
        """Drops keywords that close an object, if they would forbid names that a pattern allows."""
        patterns, readable = schema.get("patternProperties"), valid.get("patternProperties", {})
        if isinstance(patterns, dict) and len(patterns) > len(readable):
            for keyword in _RESTS:
                if valid.get(keyword, True) is not True:
                    why = f"{excerpt(schema[keyword])} would forbid names that a dropped pattern allows"
                    self._report.lose(schema, keyword, why)
                    del valid[keyword]
        elif readable and self._rules.grammar and valid.get("additionalProperties") is False:
            why = "false became what patternProperties allow: grammars know no patterns of names, and would forbid all"
            self._report.lose(schema, "additionalProperties", why)
            notes += [in_words(pattern, "patternProperties") for pattern in readable]
            every = [*readable.values()]
            values = [copy.deepcopy(value) for index, value in enumerate(every) if value not in every[:index]]
            for each in values:
                _write_types(each)
            valid["additionalProperties"] = values[0] if len(values) == 1 else {"anyOf": values}

    def _keyword(self, schema: dict[str, Any], keyword: str, value: Any, notes: list[str]) -> Any:
        """Returns the value of a keyword; None if it must be dropped; notes get the dropped parts in words."""
        if keyword in MAPS:
            return self._map(schema, keyword, value, notes)
        if keyword in LISTS:
            return self._list(schema, keyword, value)
        if keyword in SINGLE:
            return self._single(schema, keyword, value)
        if keyword in CHECKS and not CHECKS[keyword](value):
            self._report.drop(schema, keyword, value, f"a valid value of {keyword}")
            return None
        if keyword == "$ref":
            return self._reference(schema, value)
        if keyword == "pattern":
            return self._pattern(schema, keyword, value, notes)
        # Of maxItems the parser of llama.cpp counts one more.
        most = MAX_REPETITIONS - (keyword == "maxItems")
        if self._rules.grammar and keyword in _BOUNDS and value >= most:
            why = f"servers that write grammars refuse {most} or more, so the description states {value}"
            self._report.lose(schema, keyword, why)
            notes.append(rule_in_words(keyword, value))
            return None
        return value

    def _pattern(self, schema: dict[str, Any], keyword: str, pattern: str, notes: list[str]) -> str | None:
        rule = self._rules.patterns if keyword == "pattern" else common_pattern
        try:
            return rule(pattern)
        except Unreadable as error:
            self._report.lose(
                schema, keyword, f"{excerpt(pattern)} was dropped and is stated in the description: {error}"
            )
            notes.append(in_words(pattern, keyword))
            return None

    def _reference(self, schema: dict[str, Any], reference: str) -> str | None:
        if self._report.target(reference) is None:
            self._report.drop_reference(schema, reference)
            return None
        self.refers = True
        if not self._rules.grammar or _PLAIN_REFERENCE.fullmatch(reference):
            return reference
        if reference not in self._moved:
            self._moved[reference] = self._report.free_definition("root" if reference == "#" else "ref", self._moved)
        return f"#/$defs/{self._moved[reference]}"

    def _moved_target(self, reference: str) -> Any:
        target = self._report.target(reference)
        if not isinstance(target, dict):
            return self._boolean("$defs", target is not False)
        inner = {keyword: value for keyword, value in target.items() if keyword not in _OUTER}
        return self._single(self._report.generated(inner, self._report.path(target)), "$defs", inner)

    def _single(self, schema: dict[str, Any], keyword: str, value: Any) -> Any:
        if isinstance(value, dict):
            before = self._report.visits
            inner = self.schema(value)
            if self._rules.grammar and keyword in _IN_GRAMMARS and (value or schema.get("type") != [*_ALL_TYPES]):
                _write_types(inner)
            if keyword not in _NEGATING or self._report.visits == before:
                return inner
            why = f"{excerpt(value)} was dropped: without what its schema lost it would forbid more"
            self._report.lose(schema, keyword, why)
            return None
        if isinstance(value, bool):
            return self._boolean(keyword, value)
        self._report.drop(schema, keyword, value, "a schema")
        return None

    def _boolean(self, keyword: str, value: bool) -> Any:
        if not self._rules.grammar or keyword in _FLAGS or keyword == "items":
            return value
        return _any_value() if value else {**_any_value(), "not": {}}

    def _list(self, schema: dict[str, Any], keyword: str, value: Any) -> list[Any] | None:
        if not isinstance(value, list) or not value:
            self._report.drop(schema, keyword, value, "a list of schemas")
            return None
        place = "prefixItems" if keyword == "items" else keyword
        schemas = [
            self._boolean(place, item) if isinstance(item, bool) else self._single(schema, keyword, item)
            for item in value
        ]
        return [item for item in schemas if item is not None] or None

    def _map(self, schema: dict[str, Any], keyword: str, value: Any, notes: list[str]) -> dict[str, Any] | None:
        if not isinstance(value, dict):
            self._report.drop(schema, keyword, value, "an object of schemas")
            return None
        schemas: dict[str, Any] = {}
        for name, item in value.items():
            key: str | None = name
            if keyword == "properties" and self._rules.names is not None and not self._rules.names.fullmatch(name):
                self._drop_property(schema, name)
                continue
            if keyword == "patternProperties":
                key = self._pattern(schema, keyword, name, notes)
            if key is not None and (inner := self._single(schema, keyword, item)) is not None:
                schemas[key] = inner
        return schemas

    def _drop_property(self, schema: dict[str, Any], name: str) -> None:
        """Leaves out a property because of its name."""
        assert self._rules.names is not None
        rule = f"the provider's rule {self._rules.names.pattern}"
        required = schema.get("required")
        if isinstance(required, list) and name in required:
            place = f"{self._report.path(schema)}/properties/{escaped(name)}"
            raise Inexpressible(f"the property {excerpt(name)} at {place} is required and breaks {rule}: rename it")
        self._report.lose(schema, "properties", f"the property {excerpt(name)} breaks {rule} and was left out")


def _open_items(schema: dict[str, Any]) -> None:
    """Writes `items` that are true or false as a schema, with the same meaning."""
    if schema["items"] is False:
        first = len(schema.get("prefixItems", ()))
        schema["maxItems"] = min(first, schema.get("maxItems", first))
    schema["items"] = _any_value()


def _any_value() -> dict[str, Any]:
    return {"type": [*_ALL_TYPES], "additionalProperties": True, "items": {}}


def _has_type(schema: dict[str, Any], kind: str) -> bool:
    types = schema.get("type")
    return types == kind or (isinstance(types, list) and kind in types)


def _write_types(schema: dict[str, Any]) -> None:
    """Writes what a schema leaves open, with the same meaning.

    llama.cpp refuses a schema that says nothing of the type, except an empty one, for which its models can only write
    an object; and where `properties` are listed, they can write no others.
    """
    if _TYPED.isdisjoint(schema) and schema.get("additionalProperties", True) is True:
        for keyword, value in _any_value().items():
            schema.setdefault(keyword, value)
    elif "patternProperties" in schema and "unevaluatedProperties" not in schema:
        schema.setdefault("additionalProperties", True)
