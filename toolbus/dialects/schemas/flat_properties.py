"""Writes schemas for providers that keep few fields of a property, and drop all others without an error.

That is Ollama: of a property its official client sends ``type``, ``items``, ``description`` and ``enum`` (`ollama`
0.6, `Tool.Function.Parameters.Property`), and of the parameters ``type``, ``properties``, ``required``, ``items`` and
``$defs``. Its server also keeps ``anyOf`` and ``properties`` of a property (`api.ToolProperty`), which do not reach it
through that client. Both pass on ``items`` and ``$defs`` unchanged, so these have whole schemas. All else is stated
in words.
"""

from __future__ import annotations

from typing import Any

from toolbus.dialects.schemas.losses import LossReport, excerpt
from toolbus.dialects.schemas.merged import Merger, implied_type, types_of_values
from toolbus.dialects.schemas.words import Words
from toolbus.schema_grammar import TYPES

_OF_ROOT = frozenset(("type", "properties", "required"))
_OF_PROPERTY = frozenset(("type", "items", "enum"))
_ABOUT = frozenset(("title", "description", "default", "examples", "example", "deprecated"))


class FlatProperties:
    """Writes the root's properties with few fields each.

    What concerns the root itself stands in its ``description``, for the description of the tool: no client sends it.
    """

    def __call__(self, root: dict[str, Any], report: LossReport) -> dict[str, Any]:
        """Returns the schema of a plain root."""
        merger = Merger(report)
        merged = merger.root(root)
        words = Words(report, merger.definitions)
        schema: dict[str, Any] = {"type": "object", "properties": {}}
        for name, value in merged["properties"].items():
            if value is False:
                report.lose(merged, "properties", f"{excerpt(name)}: false allows nothing, it was left out")
            else:
                schema["properties"][name] = _property(name, {} if value is True else value, words, report)
        if required := merged.get("required"):
            schema["required"] = required
        if merger.definitions and any(_refers(each.get("items")) for each in schema["properties"].values()):
            schema["$defs"] = merger.definitions
        if description := words.describe(merged, _OF_ROOT, report.tool):
            schema["description"] = description
        return schema


def _refers(value: Any) -> bool:
    """Tells whether a schema refers to a definition, at any depth."""
    if isinstance(value, list):
        return any(map(_refers, value))
    return isinstance(value, dict) and ("$ref" in value or any(map(_refers, value.values())))


def _property(name: str, schema: dict[str, Any], words: Words, report: LossReport) -> dict[str, Any]:
    if "anyOf" in schema or "oneOf" in schema:
        schema = _chosen(schema, report)
    written: dict[str, Any] = {}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    types = schema.get("type") or implied_type(schema)
    if types:
        written["type"] = types
    if "items" in schema and "prefixItems" not in schema:
        written["items"] = schema["items"]
    if values is not None:
        written["enum"] = values
    known = _OF_PROPERTY | {"const"} if "const" in schema else _OF_PROPERTY
    if "prefixItems" in schema:
        known -= {"items"}
    if description := words.describe(schema, known, name):
        written["description"] = description
    return written


def _chosen(schema: dict[str, Any], report: LossReport) -> dict[str, Any]:
    """Returns a schema whose alternatives are written with the available fields, as far as possible."""
    keyword = "anyOf" if "anyOf" in schema else "oneOf"
    base = {key: value for key, value in schema.items() if key != keyword}
    branches = [{} if branch is True else branch for branch in schema[keyword] if branch is not False]
    others = [branch for branch in branches if branch.get("type") != "null"]
    nullable = len(others) < len(branches)
    if len(others) == 1 and base.keys() & others[0].keys() <= _ABOUT:
        base = _united(others[0], base)
    elif others and not base.keys() - _ABOUT and all(_lists_values(branch) for branch in others):
        base["enum"] = list(dict.fromkeys(value for branch in others for value in _values(branch)))
        base["type"] = types_of_values(base["enum"])
    else:
        types = {kind for branch in others for kind in _types_of(branch)}
        if "type" not in base and all(map(_types_of, others)):
            base["type"] = [kind for kind in TYPES if kind in types]
        arrays = [branch for branch in others if "array" in (_types_of(branch) or TYPES)]
        if len(arrays) == 1 and "prefixItems" not in arrays[0] and "items" in arrays[0]:
            base.setdefault("items", arrays[0]["items"])
        if any(branch.keys() - {"type"} for branch in others) or "type" not in base:
            base[keyword] = others if nullable and "type" in base and len(others) > 1 else schema[keyword]
    if nullable:
        _allow_null(base)
    if isinstance(base.get("type"), list) and len(base["type"]) == 1:
        base["type"] = base["type"][0]
    return report.generated(base, report.path(schema))


def _allow_null(base: dict[str, Any]) -> None:
    if "const" in base:
        base["enum"] = [base.pop("const")]
    if "type" in base and "null" not in base["type"]:
        base["type"] = [*_listed(base["type"]), "null"]
    if None not in base.get("enum", [None]):
        base["enum"] = [*base["enum"], None]


def _united(branch: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Returns the only alternative together with the keywords beside it, which take precedence."""
    united = {**branch, **base}
    texts = dict.fromkeys(each["description"] for each in (base, branch) if "description" in each)
    if texts:
        united["description"] = "\n".join(texts)
    return united


def _lists_values(branch: dict[str, Any]) -> bool:
    """Tells whether an alternative is nothing but a list of values."""
    return bool(_values(branch)) and not branch.keys() - {"const", "enum", "type"}


def _types_of(branch: dict[str, Any]) -> list[str]:
    """Returns the types of an alternative; may be empty."""
    return _listed(branch.get("type") or types_of_values(_values(branch)))


def _values(branch: dict[str, Any]) -> list[Any]:
    return [branch["const"]] if "const" in branch else branch.get("enum", [])


def _listed(types: Any) -> list[str]:
    return [types] if isinstance(types, str) else types
