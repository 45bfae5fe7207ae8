"""The keywords of one type, merged from all parts that apply, in the words of providers with a small vocabulary.

What has no word there is said in the description, where a model reads it just as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from toolbus.dialects.schemas.grammar import CHECKS, is_number, of_type
from toolbus.dialects.schemas.losses import LossReport, shown
from toolbus.dialects.schemas.parts import Part, values_of

_FORMATS = {"string": ("date-time", "enum"), "integer": ("int32", "int64"), "number": ("float", "double")}
_MAX_VALUES = 20  # of an enum, in a description
_BOUNDS = {
    "string": (("minLength", max), ("maxLength", min)),
    "array": (("minItems", max), ("maxItems", min)),
    "object": (("minProperties", max), ("maxProperties", min)),
}


class Keywords:
    """Writes the keywords of one type that hold no schemas."""

    def __init__(self, report: LossReport) -> None:
        self._report = report

    def write(self, kind: str, parts: list[Part]) -> dict[str, Any]:
        """Returns a schema of one type with what the parts say about it."""
        written: dict[str, Any] = {"type": kind}
        said = [text for part in parts if (text := self.checked(part, "description"))]
        titles = [text for part in parts if (text := self.checked(part, "title"))]
        if titles:
            written["title"] = titles[0]  # the nearest; those of referenced definitions are names of types
        notes = [*self._values(kind, parts, written), *self._format(kind, parts, written)]
        for keyword, choose in _BOUNDS.get(kind, ()):
            found = [int(value) for part in parts if (value := self.checked(part, keyword)) is not None]
            if found:
                written[keyword] = choose(found)
        if kind in ("integer", "number"):
            notes += self._numbers(kind, parts, written)
        if kind == "string":
            self._pattern(parts, written)
        if texts := list(dict.fromkeys([*said, *notes])):
            written["description"] = "\n".join(texts)
        return written

    def checked(self, part: Part, keyword: str) -> Any:
        """Returns the value of a keyword, None where there is none; a value that cannot be is reported."""
        if keyword not in part.schema or keyword in part.taken:
            return None
        value = part.schema[keyword]
        if not CHECKS[keyword](value):
            self._report.lose(part.schema, keyword, f"{shown(value)} is nothing that {keyword} may be and was dropped")
            return None
        return value

    def _values(self, kind: str, parts: list[Part], written: dict[str, Any]) -> Iterable[str]:
        lists = [(part, values) for part in parts if (values := values_of(part)) is not None]
        for part in parts:
            if "enum" not in part.taken and "enum" in part.schema and not CHECKS["enum"](part.schema["enum"]):
                self._report.lose(part.schema, "enum", f"{shown(part.schema['enum'])} is no list of values")
        if not lists:
            return
        part, first = lists[0]
        rest = [values for _, values in lists[1:]]
        allowed = [value for value in first if of_type(value, kind) and all(value in values for values in rest)]
        words = list(dict.fromkeys(value for value in allowed if isinstance(value, str) and value))
        keyword = "const" if "const" in part.schema else "enum"
        if kind == "string" and words and len(words) == len(set(map(str, allowed))):
            written["enum"] = words
        elif kind == "boolean" and True in allowed and False in allowed:
            return
        elif allowed:
            texts = [json.dumps(value, ensure_ascii=False) for value in allowed[:_MAX_VALUES]]
            more = ", …" if len(allowed) > _MAX_VALUES else ""
            why = "an enum holds texts that are not empty and nothing else; the values are named in the description"
            self._report.lose(part.schema, keyword, f"{shown(allowed)} was dropped: {why}")
            yield f"Allowed values: {', '.join(texts)}{more}."
        else:
            self._report.lose(part.schema, keyword, f"{shown(first)} leaves no {kind} and was dropped")

    def _format(self, kind: str, parts: list[Part], written: dict[str, Any]) -> Iterable[str]:
        for part in parts:
            name = self.checked(part, "format")
            if name is None or kind not in _FORMATS:
                continue
            if name in _FORMATS[kind] and (name != "enum" or "enum" in written):
                written.setdefault("format", name)
            elif kind == "string" or name not in sum(_FORMATS.values(), ()):
                self._report.lose(part.schema, "format", f"the provider has no format {shown(name)} for a {kind}")
                yield f"Format: {name}."

    def _pattern(self, parts: list[Part], written: dict[str, Any]) -> None:
        for part in parts:
            pattern = self.checked(part, "pattern")
            if pattern is not None and written.setdefault("pattern", pattern) != pattern:
                self._report.lose(part.schema, "pattern", f"only one pattern is possible, {shown(pattern)} was dropped")

    def _numbers(self, kind: str, parts: list[Part], written: dict[str, Any]) -> Iterable[str]:
        yield from self._bound(kind, parts, written, "minimum", "exclusiveMinimum")
        yield from self._bound(kind, parts, written, "maximum", "exclusiveMaximum")
        for part in parts:
            step = self.checked(part, "multipleOf")
            if step is not None and not (kind == "integer" and step == 1):
                self._report.lose(part.schema, "multipleOf", f"{step} was dropped and is named in the description")
                yield f"A multiple of {step}."

    def _bound(
        self, kind: str, parts: list[Part], written: dict[str, Any], keyword: str, exclusive: str
    ) -> Iterable[str]:
        choose = max if keyword == "minimum" else min
        found: list[int | float] = []
        for part in parts:
            if (inclusive := self.checked(part, keyword)) is not None:
                found.append(inclusive)
            edge = part.schema.get(exclusive)
            if edge is True:
                edge = inclusive  # of draft 4: a flag beside the bound
            if edge is None or edge is False:
                continue
            if not is_number(edge):
                self._report.lose(part.schema, exclusive, f"{shown(edge)} is no number and was dropped")
            elif kind == "integer":
                found.append(math.floor(edge) + 1 if keyword == "minimum" else math.ceil(edge) - 1)
            else:
                found.append(edge)
                word = "More" if keyword == "minimum" else "Less"
                why = f"{edge} became {keyword}, which includes it; that it is excluded is said in the description"
                self._report.lose(part.schema, exclusive, why)
                yield f"{word} than {edge}."
        if found:
            written[keyword] = choose(found)
