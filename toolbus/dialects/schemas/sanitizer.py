"""Sanitizes schemas for providers that accept all of JSON Schema but refuse a request for one error in it."""

from __future__ import annotations

import re
from typing import Any

from toolbus.dialects.schemas.losses import Inexpressible, LossReport, escaped, excerpt
from toolbus.schema_grammar import CHECKS, LISTS, MAPS, SINGLE

_KNOWN = {*MAPS, *LISTS, *SINGLE, *CHECKS}  # none of them may be null


class Sanitizer:
    """Leaves out malformed keywords, and adds those that only providers require.

    Args:
        property_names: pattern of the property names that the provider accepts; "" means any.
    """

    def __init__(self, property_names: str = "") -> None:
        self._names = re.compile(property_names, re.ASCII) if property_names else None

    def __call__(self, root: dict[str, Any], report: LossReport) -> dict[str, Any]:
        """Returns the sanitized schema.

        Raises:
            Inexpressible: a required property has a name that the provider does not accept.
        """
        sanitized = _Sanitizing(self._names, report).schema(root)
        # The first pass may have dropped the target of a reference.
        return _Sanitizing(self._names, report.over(sanitized)).schema(sanitized)


class _Sanitizing:
    def __init__(self, names: re.Pattern[str] | None, report: LossReport) -> None:
        self._names = names
        self._report = report

    def schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        sanitized: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword == "items" and isinstance(value, list):
                # Drafts up to 7 list the first items here, and `additionalItems` applies to the rest.
                sanitized["prefixItems"] = self._list(schema, keyword, value)
                sanitized["items"] = self._single(schema, "additionalItems", schema.get("additionalItems", {}))
            elif keyword == "additionalItems" and isinstance(schema.get("items"), list):
                continue
            else:
                sanitized[keyword] = self._keyword(schema, keyword, value)
        valid = {keyword: value for keyword, value in sanitized.items() if value is not None or keyword not in _KNOWN}
        types = valid.get("type")
        if types == "object" or (isinstance(types, list) and "object" in types):
            valid.setdefault("properties", {})
        if types == "array" or (isinstance(types, list) and "array" in types):
            valid.setdefault("items", {})
        return valid

    def _keyword(self, schema: dict[str, Any], keyword: str, value: Any) -> Any:
        """Returns the value of a keyword, None where it must be dropped."""
        if keyword in MAPS:
            return self._map(schema, keyword, value)
        if keyword in LISTS:
            return self._list(schema, keyword, value)
        if keyword in SINGLE:
            return self._single(schema, keyword, value)
        if keyword in CHECKS and not CHECKS[keyword](value):
            self._report.lose(schema, keyword, f"{excerpt(value)} is not a valid value of {keyword} and was dropped")
            return None
        if keyword == "$ref" and self._report.target(value) is None:
            self._report.lose(
                schema, keyword, f"{excerpt(value)} does not point to a schema of this tool and was dropped"
            )
            return None
        return value

    def _single(self, schema: dict[str, Any], keyword: str, value: Any) -> Any:
        if isinstance(value, dict):
            return self.schema(value)
        if isinstance(value, bool):
            return value
        self._report.lose(schema, keyword, f"{excerpt(value)} is not a schema and was dropped")
        return None

    def _list(self, schema: dict[str, Any], keyword: str, value: Any) -> list[Any] | None:
        if not isinstance(value, list) or not value:
            self._report.lose(schema, keyword, f"{excerpt(value)} is not a list of schemas and was dropped")
            return None
        schemas = [self._single(schema, keyword, item) for item in value]
        return [item for item in schemas if item is not None] or None

    def _map(self, schema: dict[str, Any], keyword: str, value: Any) -> dict[str, Any] | None:
        if not isinstance(value, dict):
            self._report.lose(schema, keyword, f"{excerpt(value)} is not an object of schemas and was dropped")
            return None
        schemas: dict[str, Any] = {}
        for name, item in value.items():
            if keyword == "properties" and self._names is not None and not self._names.fullmatch(name):
                self._drop_property(schema, name)
            elif (inner := self._single(schema, keyword, item)) is not None:
                schemas[name] = inner
        return schemas

    def _drop_property(self, schema: dict[str, Any], name: str) -> None:
        """Leaves out a property because of its name."""
        assert self._names is not None
        rule = f"the provider's rule {self._names.pattern}"
        required = schema.get("required")
        if isinstance(required, list) and name in required:
            place = f"{self._report.path(schema)}/properties/{escaped(name)}"
            raise Inexpressible(f"the property {excerpt(name)} at {place} is required and breaks {rule}: rename it")
        self._report.lose(schema, "properties", f"the property {excerpt(name)} breaks {rule} and was left out")
