"""Defines `ToolDefinition`, a tool of the host's own process as N.E.K.O. registers it (REST-63)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolbus.functions.declaration import describe
from toolbus.functions.tool_spec import ToolSpec, spec_of


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A tool of the host's own process, with its handler (REST-63).

    Attributes:
        handler: takes the arguments as one dict; sync or async.
        metadata: `source` in it says whose tool it is.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    handler: Callable[[dict[str, Any]], Any] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """Whose tool it is; `external` if the metadata do not state it."""
        return str(self.metadata.get("source") or "external")

    def spec(self) -> ToolSpec:
        """Returns how to offer and run it.

        Raises:
            TypeError: it has no handler, or `parameters` is not a dict.
            ValueError: a name that breaks its rule.
        """
        if self.handler is None:
            raise TypeError(f"ToolDefinition {self.name!r} has no handler: pass handler=, a function of one dict")
        parameters = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        meta = describe(
            self.handler,
            name=self.name,
            description=self.description,
            parameters=parameters,
            metadata=self.metadata or None,
        )
        return spec_of(self.handler, meta, takes_dict=True)
