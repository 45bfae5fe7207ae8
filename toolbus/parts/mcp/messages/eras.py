"""Tells which era of MCP a message belongs to: for each message anew, since clients may send both over one pipe.

*Legacy*: revisions up to 2025-11-25, with a handshake and a session. *Modern*: 2026-07-28, where each request carries
its version and what its client can do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from toolbus.common.version import VERSION

LEGACY_VERSIONS: Final = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN_VERSIONS: Final = ("2026-07-28",)
NEWEST_LEGACY: Final = LEGACY_VERSIONS[-1]
NEWEST: Final = MODERN_VERSIONS[-1]

# Keys of `_meta`, of requests and results of the modern era.
META_VERSION: Final = "io.modelcontextprotocol/protocolVersion"
META_CAPABILITIES: Final = "io.modelcontextprotocol/clientCapabilities"
META_CLIENT: Final = "io.modelcontextprotocol/clientInfo"
META_LOG_LEVEL: Final = "io.modelcontextprotocol/logLevel"
META_SERVER: Final = "io.modelcontextprotocol/serverInfo"
META_SUBSCRIPTION: Final = "io.modelcontextprotocol/subscriptionId"
TASKS_EXTENSION: Final = "io.modelcontextprotocol/tasks"

BUS_INFO: Final[dict[str, Any]] = {"name": "toolbus", "title": "toolbus", "version": VERSION}  # as server and as client
SAMPLING_TOOLS: Final = "sampling.tools"  # accepted, as `sampling`, by callers whose model may be given tools
# Lists that change, and the name under which a modern client subscribes to the changes of each.
LIST_CHANGES: Final = {
    "tools": "toolsListChanged",
    "prompts": "promptsListChanged",
    "resources": "resourcesListChanged",
}


def gives_tools(params: Mapping[str, Any]) -> bool:
    """Tells whether a `sampling/createMessage` gives the model tools."""
    return "tools" in params or "toolChoice" in params


def is_modern(
    method: str, *, meta_version: str | None, header_version: str | None = None, session: bool = False
) -> bool:
    """Tells whether what a client sent is of the modern era.

    Args:
        method: "" for a response, which only legacy clients send.
        meta_version: the version in `_meta`; None where it names none.
        header_version: MCP-Protocol-Version; None over a pipe, and where it is missing.
        session: whether the request names a session (Mcp-Session-Id).
    """
    if session or header_version in LEGACY_VERSIONS or (method == "initialize" and meta_version is None):
        return False
    return meta_version is not None or header_version is not None or method == "server/discover"
