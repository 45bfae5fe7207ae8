"""Converts JSON Schemas into the part of JSON Schema that a provider accepts, with a report of what was lost."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from toolbus.dialects.schemas.losses import Inexpressible, Loss, LossReport
from toolbus.dialects.schemas.rewrite import rewrite
from toolbus.dialects.schemas.root import plain_root, typed_root
from toolbus.dialects.schemas.sanitizer import sanitize

__all__ = [
    "ANTHROPIC_SCHEMAS",
    "ANY_SCHEMAS",
    "GEMINI_SCHEMAS",
    "OPENAI_SCHEMAS",
    "Inexpressible",
    "Loss",
    "SchemaRules",
    "convert",
]


@dataclass(frozen=True, slots=True)
class SchemaRules:
    """Which part of JSON Schema a provider accepts.

    Attributes:
        keywords: keywords that it accepts; None means all. With a set, schemas are rewritten with one type each.
        inline_refs: whether `$ref` must be replaced by its target; always so where `keywords` are given.
        plain_root: whether the root must be a plain object schema, without anyOf, oneOf, allOf, enum or not.
        property_names: pattern of property names that it accepts, "" means any.
    """

    keywords: frozenset[str] | None = None
    inline_refs: bool = False
    plain_root: bool = True
    property_names: str = ""


# The fields of a schema in a Gemini function declaration (google.genai.types.Schema, without what its API refuses).
_GEMINI_KEYWORDS = frozenset(
    (
        *("type", "format", "title", "description", "nullable", "enum", "default", "example", "anyOf"),
        *("properties", "required", "propertyOrdering", "minProperties", "maxProperties"),
        *("items", "minItems", "maxItems", "minLength", "maxLength", "pattern", "minimum", "maximum"),
    )
)

ANY_SCHEMAS = SchemaRules(plain_root=False)
OPENAI_SCHEMAS = SchemaRules()
ANTHROPIC_SCHEMAS = SchemaRules(property_names=r"[a-zA-Z0-9_.-]{1,64}")
GEMINI_SCHEMAS = SchemaRules(keywords=_GEMINI_KEYWORDS, inline_refs=True)


def convert(parameters: dict[str, Any], rules: SchemaRules, tool: str) -> tuple[dict[str, Any], list[Loss]]:
    """Returns the schema for a provider, and what was lost. The given schema is not changed.

    A schema becomes wider, never narrower, with one exception: where keywords imply one type and none is named, that
    type is added. The bus checks arguments against the whole schema when the call comes. A root without a type gets
    the type object, which is not reported, since arguments are always an object.

    Raises:
        Inexpressible: the tool cannot be offered to that provider.
    """
    report = LossReport(parameters, tool)
    if not rules.plain_root:
        return copy.deepcopy(typed_root(parameters)), []
    root = plain_root(parameters, report)
    if rules.keywords is not None:
        return rewrite(root, rules.keywords, report), report.losses
    sanitized = sanitize(root, rules.property_names, report)
    # The first pass may have dropped the target of a reference.
    second = LossReport(sanitized, tool)
    return sanitize(sanitized, rules.property_names, second), [*report.losses, *second.losses]
