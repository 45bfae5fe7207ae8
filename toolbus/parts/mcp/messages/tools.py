"""Writes and reads declarations of tools in the form of `tools/list`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolbus.common.text import dump_json, parse_json, quote, read_foreign_json
from toolbus.errors import InvalidTool
from toolbus.parts.mcp.messages.portable import portable
from toolbus.protocol.tool import Annotations, Tool

Json = dict[str, Any]

METADATA_KEY = "mcp"  # of `Tool.metadata_json`: fields of a declaration that `Tool` does not have
_METADATA = {"icons": list, "_meta": dict}  # not `execution`: the tasks of a server are not those of the bus
_HINTS = {
    "read_only": "readOnlyHint",
    "destructive": "destructiveHint",
    "idempotent": "idempotentHint",
    "open_world": "openWorldHint",
}


def write_declaration(name: str, tool: Tool, schema: Json | None = None) -> Json:
    """Returns the declaration of a tool.

    Args:
        name: towards clients.
        schema: of its arguments, in place of the declared one as `portable` writes it.
    """
    parameters = portable(tool.parameters, tool.parameters_json) if schema is None else schema
    entry: Json = {
        "name": name,
        "description": tool.description,
        "inputSchema": {**parameters, "type": "object"},  # clients refuse a schema without it
    }
    if tool.display_name:
        entry["title"] = tool.display_name
    if tool.output_schema_json:
        written = tool.output_schema_json
        entry["outputSchema"] = portable(parse_json(written), written, of_results=True)
    if hints := _hints(tool.annotations):
        entry["annotations"] = hints
    return entry | _metadata(tool.metadata_json)


def read_declaration(declaration: Mapping[str, Any], name: str) -> Tool:
    """Reads a declaration of a mounted server.

    Args:
        name: of the tool on the bus, where fewer characters are allowed than on servers.

    Raises:
        InvalidTool: it breaks rules of tools; the error names each of them.
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
    metadata = {key: declaration[key] for key in _METADATA if key in declaration}
    output_schema = declaration.get("outputSchema")
    return Tool(
        name=name,
        description=declaration.get("description") or "",
        parameters_json=dump_json(declaration.get("inputSchema") or {"type": "object"}),
        output_schema_json=dump_json(output_schema) if output_schema else "",
        display_name=declaration.get("title") or _title(hints),
        annotations=Annotations(**{ours: _flag(hints.get(theirs)) for ours, theirs in _HINTS.items()}),
        metadata_json=dump_json({METADATA_KEY: metadata}) if metadata else "",
    )


# Fields of `Tool` that a declaration of MCP does not have.
_NATIVE = (
    *("role", "min_level", "timeout_seconds", "idle_timeout_seconds", "needs", "no_background", "always_background"),
    *("allow_repeat", "council_eligible", "inline_available", "direct_reply", "no_repair", "hints_trusted"),
)
NATIVE_KEY = "toolbus"  # of a declaration that a bus got from another one: the fields above, the author's metadata


def write_native(name: str, tool: Tool, *, hints_trusted: bool) -> Json:
    """Returns the declaration of another bus's tool, with all that `with_native` reads again."""
    native = {key: getattr(tool, key) for key in _NATIVE if getattr(tool, key)} | {"hints_trusted": hints_trusted}
    document = read_foreign_json(tool.metadata_json) if tool.metadata_json else None
    if isinstance(document, dict):
        native["metadata"] = {key: value for key, value in document.items() if key != METADATA_KEY}
    return {**write_declaration(name, tool, tool.parameters), NATIVE_KEY: native}


def with_native(tool: Tool, declaration: Mapping[str, Any]) -> Tool:
    """Returns a tool with what `write_native` wrote beside its declaration."""
    native = dict(declaration.get(NATIVE_KEY) or {})
    native["needs"] = tuple(native.get("needs", ()))
    if metadata := native.pop("metadata", None):
        native["metadata_json"] = dump_json({**metadata, **(parse_json(tool.metadata_json or "{}"))})
    return replace(tool, **native)


def _hints(annotations: Annotations) -> Json:
    values = {theirs: getattr(annotations, ours) for ours, theirs in _HINTS.items()}
    return {theirs: value for theirs, value in values.items() if value is not None}


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _title(hints: Mapping[str, Any]) -> str:
    title = hints.get("title")  # its place before 2025-06-18
    return title if isinstance(title, str) else ""


def _metadata(metadata_json: str) -> Json:
    """Returns the fields of a mounted server's declaration that `read_declaration` stored in a tool's metadata."""
    if f'"{METADATA_KEY}"' not in metadata_json:
        return {}
    document = read_foreign_json(metadata_json)
    metadata = document.get(METADATA_KEY) if isinstance(document, dict) else None
    if not isinstance(metadata, dict):
        return {}
    return {key: metadata[key] for key, kind in _METADATA.items() if isinstance(metadata.get(key), kind)}
