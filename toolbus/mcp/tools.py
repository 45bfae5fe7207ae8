"""Writes and reads declarations of tools, as `tools/list` has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolbus.errors import InvalidTool
from toolbus.text import dump_json, parse_json, quote, read_foreign_json
from toolbus.tool import Annotations, Tool

Json = dict[str, Any]

METADATA_KEY = "mcp"  # of `Tool.metadata_json`: what of a declaration has no field of its own
_KEPT = {"icons": list, "_meta": dict, "execution": dict}
_HINTS = {
    "read_only": "readOnlyHint",
    "destructive": "destructiveHint",
    "idempotent": "idempotentHint",
    "open_world": "openWorldHint",
}


def write_declaration(name: str, tool: Tool, schema: Json | None = None) -> Json:
    """Returns the declaration of a tool.

    Args:
        name: under which it is offered.
        schema: of its arguments, if it is not written as declared.
    """
    parameters = tool.parameters if schema is None else schema
    entry: Json = {
        "name": name,
        "description": tool.description,
        "inputSchema": {**parameters, "type": "object"},  # clients refuse a schema without it
    }
    if tool.display_name:
        entry["title"] = tool.display_name
    if tool.output_schema_json:
        entry["outputSchema"] = parse_json(tool.output_schema_json)
    if hints := _hints(tool.annotations):
        entry["annotations"] = hints
    return entry | _kept(tool.metadata_json)


def read_declaration(declaration: Mapping[str, Any], name: str) -> Tool:
    """Reads a declaration of a mounted server.

    Args:
        name: which the tool gets on the bus; a server may use characters that names here do not have.

    Raises:
        InvalidTool: it breaks a rule of tools, every one is named.
    """
    faults = [
        f"tool {quote(name)}: {key} must be a {kind.__name__}"
        for key, kind in (("description", str), ("title", str), ("inputSchema", dict), ("outputSchema", dict))
        if declaration.get(key) is not None and not isinstance(declaration[key], kind)
    ]
    if faults:
        raise InvalidTool(faults)
    hints = declaration.get("annotations")
    hints = hints if isinstance(hints, Mapping) else {}
    kept = {key: declaration[key] for key in _KEPT if key in declaration}
    output_schema = declaration.get("outputSchema")
    return Tool(
        name=name,
        description=declaration.get("description") or "",
        parameters_json=dump_json(declaration.get("inputSchema") or {"type": "object"}),
        output_schema_json=dump_json(output_schema) if output_schema else "",
        display_name=declaration.get("title") or _title(hints),
        annotations=Annotations(**{ours: _flag(hints.get(theirs)) for ours, theirs in _HINTS.items()}),
        metadata_json=dump_json({METADATA_KEY: kept}) if kept else "",
    )


def _hints(annotations: Annotations) -> Json:
    values = {theirs: getattr(annotations, ours) for ours, theirs in _HINTS.items()}
    return {theirs: value for theirs, value in values.items() if value is not None}


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _title(hints: Mapping[str, Any]) -> str:
    title = hints.get("title")  # where it stood before 2025-06-18
    return title if isinstance(title, str) else ""


def _kept(metadata_json: str) -> Json:
    """Returns what metadata keep of a declaration of another server."""
    if f'"{METADATA_KEY}"' not in metadata_json:
        return {}
    metadata = read_foreign_json(metadata_json)
    kept = metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
    if not isinstance(kept, dict):
        return {}
    return {key: kept[key] for key, kind in _KEPT.items() if isinstance(kept.get(key), kind)}
