"""Keeps buses that mount each other from offering the same declaration without end.

Each tool, prompt and resource that a bus lists for MCP clients carries in `_meta` the ids of the buses that it came
through, that bus last; a bus that mounts another one over gRPC adds the id of that one's run. Servers in between that
pass `_meta` on do not break the path, and earlier releases do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PATH_META = "dev.toolbus/path"
MAX_HOPS = 4  # buses that a declaration comes through; sites of sites of sites still fit


def path_of(declaration: Any) -> Sequence[Any]:
    """Returns the buses that a declaration came through; empty for one that no bus has listed."""
    meta = declaration.get("_meta") if isinstance(declaration, Mapping) else None
    path = meta.get(PATH_META) if isinstance(meta, Mapping) else None
    return path if isinstance(path, list) else ()


def with_hop(declaration: Mapping[str, Any], bus_id: str) -> dict[str, Any]:
    """Returns a declaration with a bus at the end of its path."""
    meta = declaration.get("_meta")
    path = [*path_of(declaration), bus_id]
    return {**declaration, "_meta": {**(meta if isinstance(meta, Mapping) else {}), PATH_META: path}}


def only_path(meta: Any) -> dict[str, Any]:
    """Returns the fields of `_meta` that must not be lost."""
    path = path_of({"_meta": meta})
    return {PATH_META: path[: MAX_HOPS + 1]} if path else {}


def why_refused(declaration: Any, *bus_ids: str) -> str:
    """Returns why a declaration must not be offered by a bus, by all ids that it has; "" where it may."""
    path = path_of(declaration)
    if not path:
        return ""
    if any(bus_id in path for bus_id in bus_ids):
        return "came from this bus, or through it, and would go round in a circle"
    if len(path) > MAX_HOPS:
        return f"came through more than {MAX_HOPS} buses: mount one that is nearer to its server"
    return ""
