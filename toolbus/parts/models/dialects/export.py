"""Exports tools in one provider's format: with mapped names, converted schemas, and a report of losses.

Converted schemas are cached by tool, so a change of one tool converts one tool.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from toolbus.parts.models.dialects.conversation import Json
from toolbus.parts.models.dialects.provider_results import NO_IMAGES, ImageRule
from toolbus.parts.models.dialects.schemas.schema_rules import (
    Inexpressible,
    Loss,
    SchemaRules,
    StrictSchema,
    convert,
    convert_strictly,
)
from toolbus.parts.models.dialects.wire_names import NameRule, NameTable
from toolbus.protocol.tool import Tool

MAX_CACHED_SCHEMAS = 500  # a dialect may cache more only for one large export; 3 MB at 1 kB of JSON each


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A tool that is not offered, and the reason as a sentence: a schema that cannot be expressed, or a limit."""

    tool: str
    why: str


@dataclass(frozen=True, slots=True)
class Export:
    """Tools as one dialect offers them.

    Attributes:
        dialect: the name of that dialect.
        tools: the declarations for a request, in the order of the catalog; shared, so the caller must not change them.
        names: maps names on the wire to names on the bus, and back.
        hashes: the schema_hash of each exported tool, by its name on the bus; a call carries it, so that a tool that
            has changed since is not run with old arguments.
        losses: the parts of schemas that could not be expressed.
        left_out: tools that are not in `tools`.
        kept: the exported tools themselves, by their name on the bus.
        strict: the schemas that the provider enforces, by the name of the tool on the bus.
    """

    dialect: str
    tools: tuple[Json, ...]
    names: NameTable
    hashes: Mapping[str, str]
    losses: tuple[Loss, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    kept: Mapping[str, Tool] = field(default_factory=dict)
    strict: Mapping[str, StrictSchema] = field(default_factory=dict)

    def without_added_nulls(self, name: str, arguments: Any) -> Any:
        """Returns the arguments of a call of a tool without the nulls that mean omitted arguments.

        A strict dialect makes the model write every property, and null for an omitted one (`OpenAIChat`).
        """
        strict = self.strict.get(name)
        return arguments if strict is None else strict.without_added_nulls(arguments)


@dataclass(frozen=True, slots=True)
class _Converted:
    """A tool's schema for a dialect; `strict` is None if the provider does not enforce it."""

    schema: Json
    losses: tuple[Loss, ...]
    strict: StrictSchema | None = None


class ToolWriter(ABC):
    """How one provider writes tools, in a request or in a session. Instances hold caches only; threads may share them.

    Class attributes:
        name: its name for users (`openai`, `anthropic` …).
        name_rule: which function names it accepts.
        schema_rules: which part of JSON Schema it accepts; an instance may have its own rules.
        plain_rules: the part that those of its servers accept that refuse more; None if all accept the same.
        max_tools: how many tools it takes in one request or session; None if not published.
        accepted_images: which images in results its models accept.

    Args:
        images: False for a model, or a server that only speaks the dialect, that refuses images: the text of a result
            then describes them.
    """

    name: ClassVar[str]
    name_rule: ClassVar[NameRule]
    schema_rules: SchemaRules
    plain_rules: ClassVar[SchemaRules | None] = None
    max_tools: ClassVar[int | None] = None
    accepted_images: ClassVar[ImageRule] = NO_IMAGES

    def __init__(self, max_cached_schemas: int = MAX_CACHED_SCHEMAS, *, images: bool = True) -> None:
        self.images = self.accepted_images if images else NO_IMAGES
        # Whether the provider enforces schemas: False never; None for schemas that qualify unchanged; True also for
        # those whose optional properties are rewritten. Only dialects of such providers change it.
        self.strict: bool | None = False
        self._max_cached_schemas = max_cached_schemas
        # Converted schemas by the tool they came from; replaced as a whole, since threads share it.
        self._converted: dict[Tool, _Converted | LeftOut] = {}
        self._plain: ToolWriter | None = None  # what `plainly` writes with; None until it is used

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def export(self, tools: Iterable[Tool]) -> Export:
        """Returns tools as this dialect offers them, in the given order.

        A tool that cannot be expressed is left out, with the reason in `Export.left_out`; it never breaks a request.
        """
        unique = list({tool.name: tool for tool in tools}.values())
        converted = self._convert_all(unique)
        exported = [tool for tool in unique if not isinstance(converted[tool], LeftOut)]
        names = NameTable.build((tool.name for tool in exported), self.name_rule)
        declarations: list[Json] = []
        losses: list[Loss] = []
        strict: dict[str, StrictSchema] = {}
        for tool in exported:
            conversion = converted[tool]
            assert not isinstance(conversion, LeftOut)
            wire_name = names.to_wire[tool.name]
            if conversion.strict is None:
                declarations.append(self.write_tool(wire_name, tool, conversion.schema))
            else:
                declarations.append(self.write_strict_tool(wire_name, tool, conversion.strict.schema))
                strict[tool.name] = conversion.strict
            losses.extend(conversion.losses)
        return Export(
            dialect=self.name,
            tools=tuple(declarations),
            names=names,
            hashes={tool.name: tool.schema_hash for tool in exported},
            losses=tuple(losses),
            left_out=tuple(item for item in converted.values() if isinstance(item, LeftOut)),
            kept={tool.name: tool for tool in exported},
            strict=strict,
        )

    def plainly(self, export: Export) -> tuple[Json, ...]:
        """Returns the declarations of an export for a server that refuses more than `plain_rules`; never strict."""
        if self.plain_rules is None or self.schema_rules is self.plain_rules:
            return export.tools
        if self._plain is None:
            self._plain = copy.copy(self)
            self._plain._converted = {}
            self._plain.schema_rules, self._plain.strict = self.plain_rules, False
        plain = self._plain.export(export.kept.values())
        return export.tools if plain.left_out else plain.tools

    def _convert_all(self, tools: Iterable[Tool]) -> dict[Tool, _Converted | LeftOut]:
        current: dict[Tool, _Converted | LeftOut] = {}
        for tool in tools:
            cached = self._converted.get(tool)
            current[tool] = cached if cached is not None else self._convert(tool)
        # Users with different roles alternate, so a tool that is missing from this export may be in the next one.
        merged = self._converted | current
        self._converted = merged if len(merged) <= max(self._max_cached_schemas, 2 * len(current)) else current
        return current

    def _convert(self, tool: Tool) -> _Converted | LeftOut:
        try:
            if self.strict is False:
                schema, losses = convert(tool.parameters, self.schema_rules, tool.name)
                return _Converted(schema, tuple(losses))
            strict, schema, losses = convert_strictly(
                tool.parameters, self.schema_rules, tool.name, rewrite=self.strict is True
            )
        except Inexpressible as error:
            return LeftOut(tool.name, str(error))
        return _Converted(schema, tuple(losses), strict)

    @abstractmethod
    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        """Returns one tool as a request declares it. Exports share the schema, which must not be changed."""

    def write_strict_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        """Returns one tool whose schema the provider enforces; only for dialects with `strict`."""
        return self.write_tool(wire_name, tool, schema)
