"""Schemas for providers that take all of JSON Schema but refuse a request for one fault in it."""

from __future__ import annotations

import re
from typing import Any

from toolbus.dialects.schemas.grammar import CHECKS, LISTS, MAPS, SINGLE
from toolbus.dialects.schemas.losses import Inexpressible, LossReport, escaped, shown

_KNOWN = {*MAPS, *LISTS, *SINGLE, *CHECKS}  # none of them may be null


def tidy(schema: dict[str, Any], property_names: str, report: LossReport) -> dict[str, Any]:
    """Returns a schema without what is malformed, with what providers miss where JSON Schema does not.

    Args:
        property_names: pattern of the property names that the provider accepts; "" means any.

    Raises:
        Inexpressible: a property that has to be given has another name.
    """
    return _Tidy(re.compile(property_names, re.ASCII) if property_names else None, report).schema(schema)


class _Tidy:
    def __init__(self, names: re.Pattern[str] | None, report: LossReport) -> None:
        self._names = names
        self._report = report

    def schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        written: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword == "items" and isinstance(value, list):
                # Of drafts up to 7; what follows the listed ones is `additionalItems` there.
                written["prefixItems"] = self._list(schema, keyword, value)
                written["items"] = self._single(schema, "additionalItems", schema.get("additionalItems", {}))
            elif keyword == "additionalItems" and isinstance(schema.get("items"), list):
                continue
            else:
                written[keyword] = self._keyword(schema, keyword, value)
        written = {keyword: value for keyword, value in written.items() if value is not None or keyword not in _KNOWN}
        types = written.get("type")
        if types == "object" or (isinstance(types, list) and "object" in types):
            written.setdefault("properties", {})
        if types == "array" or (isinstance(types, list) and "array" in types):
            written.setdefault("items", {})
        return written

    def _keyword(self, schema: dict[str, Any], keyword: str, value: Any) -> Any:
        """Returns the value of a keyword, None where it has to go."""
        if keyword in MAPS:
            return self._map(schema, keyword, value)
        if keyword in LISTS:
            return self._list(schema, keyword, value)
        if keyword in SINGLE:
            return self._single(schema, keyword, value)
        if keyword in CHECKS and not CHECKS[keyword](value):
            self._report.lose(schema, keyword, f"{shown(value)} is nothing that {keyword} may be and was dropped")
            return None
        if keyword == "$ref" and self._report.target(value) is None:
            self._report.lose(schema, keyword, f"{shown(value)} points to no schema in here and was dropped")
            return None
        return value

    def _single(self, schema: dict[str, Any], keyword: str, value: Any) -> Any:
        if isinstance(value, dict):
            return self.schema(value)
        if isinstance(value, bool):
            return value
        self._report.lose(schema, keyword, f"{shown(value)} is no schema and was dropped")
        return None

    def _list(self, schema: dict[str, Any], keyword: str, value: Any) -> list[Any] | None:
        if not isinstance(value, list) or not value:
            self._report.lose(schema, keyword, f"{shown(value)} is no list of schemas and was dropped")
            return None
        written = [self._single(schema, keyword, item) for item in value]
        return [item for item in written if item is not None] or None

    def _map(self, schema: dict[str, Any], keyword: str, value: Any) -> dict[str, Any] | None:
        if not isinstance(value, dict):
            self._report.lose(schema, keyword, f"{shown(value)} is no object of schemas and was dropped")
            return None
        written: dict[str, Any] = {}
        for name, item in value.items():
            if keyword == "properties" and self._names is not None and not self._names.fullmatch(name):
                self._refuse(schema, name)
            elif (inner := self._single(schema, keyword, item)) is not None:
                written[name] = inner
        return written

    def _refuse(self, schema: dict[str, Any], name: str) -> None:
        """Leaves out a property for its name."""
        assert self._names is not None
        rule = f"the provider's rule {self._names.pattern}"
        required = schema.get("required")
        if isinstance(required, list) and name in required:
            place = f"{self._report.path(schema)}/properties/{escaped(name)}"
            raise Inexpressible(f"the property {shown(name)} at {place} has to be given and breaks {rule}: rename it")
        self._report.lose(schema, "properties", f"the property {shown(name)} breaks {rule} and was left out")
