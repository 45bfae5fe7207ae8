"""Rewrites the root of a schema as the plain object schema that providers require.

Arguments are always an object, so a root that describes one indirectly (a reference, allOf, alternatives) can be
written as one. Other rules are widened, never narrowed: the bus still checks arguments against the whole schema.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from toolbus.parts.models.dialects.schemas.losses import Inexpressible, LossReport, escaped, excerpt

_MAX_STEPS = 64  # of references and combinations on the way to a root's properties
_MAX_PARTS = 2000
COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "enum", "const", "not")
_ALWAYS_KEPT = ("$schema", "$id", "$defs", "definitions")
_NO_OBJECT = 'the root of its schema does not allow an object, which arguments always are: give it "type": "object"'


@dataclass(slots=True)
class _Shape:
    """An object as a part of the root describes it: its properties with all schemas that apply to each."""

    properties: dict[str, list[Any]] = field(default_factory=dict)
    required: list[str] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)


def typed_root(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema whose root has the type object.

    Raises:
        Inexpressible: it has another type.
    """
    if not _may_be_object(schema):
        raise Inexpressible(_NO_OBJECT)
    return schema if schema.get("type") == "object" else {**schema, "type": "object"}


def plain_root(schema: dict[str, Any], report: LossReport) -> dict[str, Any]:
    """Returns a schema whose root is a plain object schema with `properties`.

    Raises:
        Inexpressible: the root does not allow an object.
    """
    own = {key: value for key, value in schema.items() if key != "nullable"}
    if not any(key in own for key in COMBINING) and isinstance(own.get("properties", {}), dict):
        return {**typed_root(own), "properties": own.get("properties", {})}
    shape = _Root(report).read(schema, frozenset(), 0)
    if shape is None:
        raise Inexpressible(_NO_OBJECT)
    definitions = {key: schema[key] for key in _ALWAYS_KEPT if key in schema}
    root = {**shape.others, **definitions, "type": "object"}
    root["properties"] = {
        name: _joined(schemas, "allOf", report, f"/properties/{escaped(name)}")
        for name, schemas in shape.properties.items()
    }
    if shape.required:
        root["required"] = list(dict.fromkeys(shape.required))
    return root


class _Root:
    """Reads everything that applies to the root into one shape."""

    def __init__(self, report: LossReport) -> None:
        self._report = report
        self._parts = 0

    def read(self, schema: Any, references: frozenset[str], steps: int) -> _Shape | None:
        """Returns the object that a schema describes; None if it does not allow one."""
        self._parts += 1
        if steps > _MAX_STEPS or self._parts > _MAX_PARTS:
            raise Inexpressible("the root of its schema is combined of too many parts: write it as one object schema")
        if not isinstance(schema, dict):
            return None if schema is False else _Shape()
        if not _may_be_object(schema):
            return None
        shape = self._own(schema)
        for part, part_references in self._all_of(schema, references):
            more = self.read(part, part_references, steps + 1)
            if more is None:
                return None
            self._add(shape, more, schema)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(keyword), list) and branches:
                alternatives = [(branch, self.read(branch, references, steps + 1)) for branch in branches]
                shapes = [alternative for _, alternative in alternatives if alternative is not None]
                if not shapes:
                    return None
                if len(shapes) > 1:
                    why = "its alternatives were merged into one object that allows all of them"
                    self._report.lose(schema, keyword, f"the root may not have {keyword}: {why}")
                    for branch, alternative in alternatives:
                        self._report_rules(branch, alternative)
                self._add(shape, self._either(shapes, schema, keyword), schema)
        return shape

    def _report_rules(self, branch: Any, shape: _Shape | None) -> None:
        """Reports rules of one alternative for the whole object, which do not apply to the others."""
        for keyword in shape.others if shape is not None and isinstance(branch, dict) else ():
            if keyword in branch:
                why = f"it holds for one of the root's alternatives only, {excerpt(branch[keyword])} was dropped"
                self._report.lose(branch, keyword, why)

    def _own(self, schema: dict[str, Any]) -> _Shape:
        """Returns the object that a schema describes without its references and combinations."""
        for keyword in ("enum", "const", "not"):
            if keyword in schema:
                why = f"the root may not have {keyword}, {excerpt(schema[keyword])} was dropped"
                self._report.lose(schema, keyword, why)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            self._report.drop(schema, "properties", properties, "an object of schemas")
            properties = {}
        if not isinstance(required, list):
            self._report.drop(schema, "required", required, "a list of names")
            required = []
        known = {*COMBINING, *_ALWAYS_KEPT, "type", "properties", "required", "nullable"}
        return _Shape(
            properties={name: [value] for name, value in properties.items()},
            required=[name for name in required if isinstance(name, str)],
            others={key: value for key, value in schema.items() if key not in known},
        )

    def _all_of(self, schema: dict[str, Any], references: frozenset[str]) -> list[tuple[Any, frozenset[str]]]:
        """Returns the schemas that also apply, with the references that led there."""
        parts: list[tuple[Any, frozenset[str]]] = []
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in references:
            target = self._report.target(reference)
            if target is None:
                self._report.drop_reference(schema, reference)
            else:
                parts.append((target, references | {reference}))
        if isinstance(all_of := schema.get("allOf"), list):
            parts += [(part, references) for part in all_of]
        return parts

    def _add(self, shape: _Shape, more: _Shape, schema: dict[str, Any]) -> None:
        """Adds a shape that also applies."""
        closed = [one for one in (shape, more) if one.others.get("additionalProperties") is False]
        if closed and shape.properties and more.properties:
            why = "false would forbid the properties of the other parts of the root, so it was dropped"
            self._report.lose(schema, "additionalProperties", why)
            for one in closed:
                del one.others["additionalProperties"]
        for name, schemas in more.properties.items():
            own_schemas = shape.properties.setdefault(name, [])
            own_schemas += [value for value in schemas if value not in own_schemas]
        shape.required += more.required
        for keyword, value in more.others.items():
            own = shape.others.setdefault(keyword, value)
            if keyword == "description" and own != value:
                shape.others[keyword] = f"{own}\n{value}"
            elif keyword != "title" and own != value:
                why = f"two parts of the root differ, {excerpt(value)} was dropped"
                self._report.lose(schema, keyword, why)

    def _either(self, shapes: list[_Shape], schema: dict[str, Any], keyword: str) -> _Shape:
        """Returns the common rules of alternatives, with the properties of each."""
        if len(shapes) == 1:
            return shapes[0]
        either = _Shape(required=[name for name in shapes[0].required if all(name in one.required for one in shapes)])
        for name in dict.fromkeys(name for one in shapes for name in one.properties):
            path = f"{self._report.path(schema)}/properties/{escaped(name)}"
            schemas = [
                _joined(one.properties[name], "allOf", self._report, path) for one in shapes if name in one.properties
            ]
            different = [value for index, value in enumerate(schemas) if value not in schemas[:index]]
            either.properties[name] = [_joined(different, "anyOf", self._report, path)]
        sets = [", ".join(one.required) for one in shapes]
        if all(sets) and not either.properties:  # only required names differ, which a description can state
            count = "exactly" if keyword == "oneOf" else "at least"
            either.others["description"] = f"Give {count} one of: {'; '.join(dict.fromkeys(sets))}."
        return either


def _may_be_object(schema: dict[str, Any]) -> bool:
    """Tells whether a schema's own type and values allow an object; an invalid type is ignored."""
    types = schema.get("type", "object")
    if isinstance(types, str | list) and "object" not in ([types] if isinstance(types, str) else types):
        return False
    if "const" in schema and not isinstance(schema["const"], dict):
        return False
    values = schema.get("enum")
    return not (isinstance(values, list) and values and not any(isinstance(value, dict) for value in values))


def _joined(schemas: list[Any], keyword: str, report: LossReport, path: str) -> Any:
    return schemas[0] if len(schemas) == 1 else report.generated({keyword: schemas}, path)
