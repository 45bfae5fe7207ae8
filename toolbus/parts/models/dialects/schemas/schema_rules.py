"""Converts JSON Schemas into the part of JSON Schema that a provider accepts, with a report of losses.

A `SchemaRules` describes the schemas that a provider accepts. Its main part is a rewriting: a callable that gets the
root of a schema and a report, and returns a schema that the provider accepts. A dialect may have its own rewriting.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from toolbus.parts.models.dialects.schemas.json_subset import json_subset
from toolbus.parts.models.dialects.schemas.losses import Inexpressible as Inexpressible
from toolbus.parts.models.dialects.schemas.losses import Loss as Loss
from toolbus.parts.models.dialects.schemas.losses import LossReport as LossReport
from toolbus.parts.models.dialects.schemas.merged import flat_properties
from toolbus.parts.models.dialects.schemas.rewrite import rewrite
from toolbus.parts.models.dialects.schemas.root import plain_root, typed_root
from toolbus.parts.models.dialects.schemas.sanitizer import Sanitizer
from toolbus.parts.models.dialects.schemas.strict import StrictSchema as StrictSchema
from toolbus.parts.models.dialects.schemas.strict import rewritten_schema, strict_schema
from toolbus.protocol.patterns import grammar_pattern, re2_pattern

Rewriting: TypeAlias = Callable[[dict[str, Any], LossReport], dict[str, Any]]
"""Returns a new schema for a root, and reports what it lost; the root is not changed.

Its places are known to the report by the identity of their objects. A second rewriting over the result of a first one
needs `LossReport.over` that result. Raises `Inexpressible` if the tool cannot be offered.
"""


@dataclass(frozen=True, slots=True)
class SchemaRules:
    """Which part of JSON Schema a provider accepts.

    Attributes:
        rewriting: writes schemas that the provider accepts; None means that it accepts every schema.
        plain_root: whether the root must be a plain object schema, without anyOf, oneOf, allOf, enum or not. The
            rewriting then gets one.
    """

    rewriting: Rewriting | None = None
    plain_root: bool = True


# The fields of a schema in a Gemini function declaration (google.genai.types.Schema, without those refused).
_GEMINI_KEYWORDS = frozenset(
    (
        *("type", "format", "title", "description", "nullable", "enum", "default", "example", "anyOf"),
        *("properties", "required", "propertyOrdering", "minProperties", "maxProperties"),
        *("items", "minItems", "maxItems", "minLength", "maxLength", "pattern", "minimum", "maximum"),
    )
)

ANY_SCHEMAS = SchemaRules(plain_root=False)
# Also for the many servers that speak OpenAI's formats. OpenAI itself compiles patterns with Python's `re`, as the
# meta-schema's format "regex", and its strict mode refuses lookaround.
_OPENAI = Sanitizer(patterns=grammar_pattern, grammar=True)
OPENAI_SCHEMAS = SchemaRules(_OPENAI)
# Anthropic itself compiles patterns of ECMAScript. Servers with its format refuse the whole request for `\p{…}`
# (z.ai) and for whatever else Python's `re` does not know.
ANTHROPIC_SCHEMAS = SchemaRules(Sanitizer(property_names=r"[a-zA-Z0-9_.-]{1,64}"))
GEMINI_SCHEMAS = SchemaRules(partial(rewrite, keywords=_GEMINI_KEYWORDS, patterns=re2_pattern))
GEMINI_JSON_SCHEMAS = SchemaRules(json_subset)
OLLAMA_SCHEMAS = SchemaRules(flat_properties)


def _for_grammars(root: dict[str, Any], report: LossReport) -> dict[str, Any]:
    subset = json_subset(root, report, grammar=True)
    return _OPENAI(subset, report.over(subset))


GRAMMAR_SCHEMAS = SchemaRules(_for_grammars)


def convert(parameters: dict[str, Any], rules: SchemaRules, tool: str) -> tuple[dict[str, Any], list[Loss]]:
    """Returns the schema for a provider, and the losses. The given schema is not changed.

    A schema becomes wider, never narrower, with one exception: where keywords imply one type and none is named, that
    type is added. The bus checks arguments against the whole schema when the call comes. A root without a type gets
    the type object, which is not reported, since arguments are always an object.

    Raises:
        Inexpressible: the tool cannot be offered to that provider.
    """
    report = LossReport(parameters, tool)
    return _converted(parameters, rules, report), report.losses


def convert_strictly(
    parameters: dict[str, Any], rules: SchemaRules, tool: str, *, rewrite: bool
) -> tuple[StrictSchema | None, dict[str, Any], list[Loss]]:
    """Returns the schema for strict mode, None if it does not qualify, and the results of `convert`.

    Args:
        rewrite: whether a schema that does not qualify may be rewritten (`rewritten_schema`).

    Raises:
        Inexpressible: the tool cannot be offered to that provider.
    """
    report = LossReport(parameters, tool)
    schema = _converted(parameters, rules, report)
    strict = strict_schema(schema)
    if strict is None and rewrite:
        strict = rewritten_schema(schema, report.over(schema))
    return strict, schema, report.losses


def _converted(parameters: dict[str, Any], rules: SchemaRules, report: LossReport) -> dict[str, Any]:
    root = plain_root(parameters, report) if rules.plain_root else typed_root(parameters)
    try:
        return copy.deepcopy(root) if rules.rewriting is None else rules.rewriting(root, report)
    except RecursionError:
        raise Inexpressible("the schema is nested too deep with its references followed: flatten it") from None
