"""Reads the annotations beside a hint (`Annotated[int, Field(ge=1)]`) as keywords of JSON Schema.

Texts and mappings of keywords are read as they are. All others are recognized by their attributes, so no library is
imported: `annotated_types` (`Ge`, `Len` …), `typing_extensions.Doc`, pydantic's `Field` and `StringConstraints`, and
similar classes. A `Field` may also be the default of a parameter, and hold the default of its argument.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Default = Callable[[], Any]

_KEYWORDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
_TEXTS = ("description", "documentation")
_PATTERNS = ("pattern", "regex")
_LENGTHS = {"min_length": "min", "max_length": "max"}
_COUNTED = {"string": "Length", "array": "Items", "object": "Properties"}
_UNDEFINED = ("PydanticUndefinedType", "UndefinedType", "ellipsis")


def constrain(schema: dict[str, Any], extras: Iterable[Any]) -> dict[str, Any]:
    """Adds the annotations beside a hint to its schema, and returns the schema."""
    for extra in _flat(extras):
        if isinstance(extra, Mapping):
            schema.update(_json_members(extra))
            continue
        for text in (extra, *(getattr(extra, name, None) for name in _TEXTS)):
            if isinstance(text, str) and text:
                schema["description"] = text
        if isinstance(extra, str):
            continue
        for attribute, keyword in _KEYWORDS.items():
            if isinstance(bound := getattr(extra, attribute, None), int | float) and _is_json(bound):
                schema[keyword] = bound
        for attribute in _PATTERNS:
            pattern = getattr(extra, attribute, None)
            if isinstance(pattern := getattr(pattern, "pattern", pattern), str):
                schema["pattern"] = pattern
        counted = _counted(schema)
        for attribute, prefix in _LENGTHS.items():
            if counted and isinstance(bound := getattr(extra, attribute, None), int):
                schema[prefix + counted] = bound
        if isinstance(examples := getattr(extra, "examples", None), list) and _is_json(examples):
            schema["examples"] = examples
        if isinstance(more := getattr(extra, "json_schema_extra", None), Mapping):
            schema.update(_json_members(more))
    return schema


def is_field(value: object) -> bool:
    """Tells whether a parameter's default is a description of the argument: pydantic's `Field()`."""
    return any(each.__name__ == "FieldInfo" for each in type(value).__mro__)


def default_of(field: Any) -> Default | None:
    """Returns a function that makes the default of a field; None if the field has no default."""
    if callable(factory := getattr(field, "default_factory", None)):
        return factory  # type: ignore[no-any-return]
    default = getattr(field, "default", ...)
    if type(default).__name__ in _UNDEFINED:
        return None
    return lambda: copy.copy(default)


def is_made(field: Any) -> bool:
    """Tells whether a factory makes the default of a field anew for each call, so that no schema can show it."""
    return callable(getattr(field, "default_factory", None))


def _flat(extras: Iterable[Any]) -> Iterator[Any]:
    """Yields annotations, each after its own parts."""
    for extra in extras:
        parts = getattr(extra, "metadata", None)
        if isinstance(parts, list | tuple):
            yield from _flat(parts)
        yield extra


def _counted(schema: Mapping[str, Any]) -> str:
    """Returns the unit of a length in a schema's keywords; empty if its values have no length, or several kinds."""
    branches = [each for each in schema.get("anyOf", ()) if isinstance(each, Mapping)]
    counted = {_COUNTED[kind] for each in (schema, *branches) if (kind := str(each.get("type"))) in _COUNTED}
    return counted.pop() if len(counted) == 1 else ""


def _json_members(keywords: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the keywords that JSON can hold; a plugin must start although its author wrote others."""
    return {key: value for key, value in keywords.items() if _is_json({key: value})}


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
