"""Merges the keywords of one type from all parts that apply, for providers that know few keywords.

A rule without a keyword there goes into the description, which the model reads, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from toolbus.dialects.schemas.losses import LossReport, excerpt
from toolbus.dialects.schemas.parts import Part, values_of
from toolbus.dialects.schemas.pattern_rules import PatternRule, in_words
from toolbus.dialects.schemas.patterns import Unreadable
from toolbus.schema_grammar import CHECKS, is_number, of_type

_FORMATS = {"string": ("date-time", "enum"), "integer": ("int32", "int64"), "number": ("float", "double")}
_MAX_VALUES = 20  # of an enum, in a description
_BOUNDS = {
    "string": (("minLength", max), ("maxLength", min)),
    "array": (("minItems", max), ("maxItems", min)),
    "object": (("minProperties", max), ("maxProperties", min)),
}


class Keywords:
    """Writes the keywords of one type that do not hold schemas.

    Args:
        patterns: writes the values of `pattern`.
    """

    def __init__(self, report: LossReport, patterns: PatternRule) -> None:
        self._report = report
        self._patterns = patterns

    def write(self, kind: str, parts: list[Part]) -> dict[str, Any]:
        """Returns a schema of one type with the merged keywords of the parts."""
        schema: dict[str, Any] = {"type": kind}
        descriptions = [text for part in parts if (text := self.checked(part, "description"))]
        titles = [text for part in parts if (text := self.checked(part, "title"))]
        if titles:
            schema["title"] = titles[0]  # the nearest; titles of referenced definitions are names of types
        notes = [*self._values(kind, parts, schema), *self._format(kind, parts, schema)]
        for keyword, choose in _BOUNDS.get(kind, ()):
            bounds = [int(value) for part in parts if (value := self.checked(part, keyword)) is not None]
            if bounds:
                schema[keyword] = choose(bounds)
        if kind in ("integer", "number"):
            notes += self._numbers(kind, parts, schema)
        if kind == "string":
            notes += self._pattern(parts, schema)
        if texts := list(dict.fromkeys([*descriptions, *notes])):
            schema["description"] = "\n".join(texts)
        return schema

    def checked(self, part: Part, keyword: str) -> Any:
        """Returns the value of a keyword; None if it is missing. An invalid value is reported."""
        if keyword not in part.schema or keyword in part.done:
            return None
        value = part.schema[keyword]
        if not CHECKS[keyword](value):
            self._report.lose(
                part.schema, keyword, f"{excerpt(value)} is not a valid value of {keyword} and was dropped"
            )
            return None
        return value

    def _values(self, kind: str, parts: list[Part], schema: dict[str, Any]) -> Iterable[str]:
        lists = [(part, values) for part in parts if (values := values_of(part)) is not None]
        for part in parts:
            if "enum" not in part.done and "enum" in part.schema and not CHECKS["enum"](part.schema["enum"]):
                self._report.lose(part.schema, "enum", f"{excerpt(part.schema['enum'])} is not a list of values")
        if not lists:
            return
        part, first = lists[0]
        rest = [values for _, values in lists[1:]]
        allowed = [value for value in first if of_type(value, kind) and all(value in values for values in rest)]
        strings = list(dict.fromkeys(value for value in allowed if isinstance(value, str) and value))
        keyword = "const" if "const" in part.schema else "enum"
        if kind == "string" and strings and len(strings) == len(set(map(str, allowed))):
            schema["enum"] = strings
        elif kind == "boolean" and True in allowed and False in allowed:
            return
        elif allowed:
            texts = [json.dumps(value, ensure_ascii=False) for value in allowed[:_MAX_VALUES]]
            more = ", …" if len(allowed) > _MAX_VALUES else ""
            why = "an enum may hold only texts that are not empty; the values are listed in the description"
            self._report.lose(part.schema, keyword, f"{excerpt(allowed)} was dropped: {why}")
            yield f"Allowed values: {', '.join(texts)}{more}."
        else:
            self._report.lose(part.schema, keyword, f"{excerpt(first)} leaves no {kind} and was dropped")

    def _format(self, kind: str, parts: list[Part], schema: dict[str, Any]) -> Iterable[str]:
        for part in parts:
            name = self.checked(part, "format")
            if name is None or kind not in _FORMATS:
                continue
            if name in _FORMATS[kind] and (name != "enum" or "enum" in schema):
                schema.setdefault("format", name)
            elif kind == "string" or name not in sum(_FORMATS.values(), ()):
                self._report.lose(part.schema, "format", f"the provider has no format {excerpt(name)} for a {kind}")
                yield f"Format: {name}."

    def _pattern(self, parts: list[Part], schema: dict[str, Any]) -> Iterable[str]:
        for part in parts:
            pattern = self.checked(part, "pattern")
            if pattern is None:
                continue
            try:
                written = self._patterns(pattern)
                if schema.setdefault("pattern", written) == written:
                    continue
                why = "only one pattern is possible"
            except Unreadable as error:
                why = str(error)
            dropped = f"{excerpt(pattern)} was dropped and is stated in the description: {why}"
            self._report.lose(part.schema, "pattern", dropped)
            yield in_words(pattern)

    def _numbers(self, kind: str, parts: list[Part], schema: dict[str, Any]) -> Iterable[str]:
        yield from self._bound(kind, parts, schema, "minimum", "exclusiveMinimum")
        yield from self._bound(kind, parts, schema, "maximum", "exclusiveMaximum")
        for part in parts:
            step = self.checked(part, "multipleOf")
            if step is not None and not (kind == "integer" and step == 1):
                self._report.lose(part.schema, "multipleOf", f"{step} was dropped and is stated in the description")
                yield f"A multiple of {step}."

    def _bound(
        self, kind: str, parts: list[Part], schema: dict[str, Any], keyword: str, exclusive: str
    ) -> Iterable[str]:
        choose = max if keyword == "minimum" else min
        bounds: list[int | float] = []
        for part in parts:
            if (inclusive := self.checked(part, keyword)) is not None:
                bounds.append(inclusive)
            edge = part.schema.get(exclusive)
            if edge is True:
                edge = inclusive  # draft 4 has a flag beside the bound
            if edge is None or edge is False:
                continue
            if not is_number(edge):
                self._report.lose(part.schema, exclusive, f"{excerpt(edge)} is not a number and was dropped")
            elif kind == "integer":
                bounds.append(math.floor(edge) + 1 if keyword == "minimum" else math.ceil(edge) - 1)
            else:
                bounds.append(edge)
                word = "More" if keyword == "minimum" else "Less"
                why = f"{edge} became {keyword}, which includes it; the description states that it is excluded"
                self._report.lose(part.schema, exclusive, why)
                yield f"{word} than {edge}."
        if bounds:
            schema[keyword] = choose(bounds)
