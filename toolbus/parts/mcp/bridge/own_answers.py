"""Writes the bridge's own answers while no bus is connected."""

from __future__ import annotations

import json
from typing import Any

from toolbus.parts.mcp.messages.eras import (
    BUS_INFO,
    LEGACY_VERSIONS,
    LIST_CHANGES,
    META_SERVER,
    MODERN_VERSIONS,
    NEWEST_LEGACY,
)

Json = dict[str, Any]

INTERNAL = -32603
ERROR_META = "dev.toolbus/error"
DRAINING = "the bus is draining"  # in the error of a call that such a bus refuses
# Methods that list, and the key of their entries.
LISTS = {
    "tools/list": "tools",
    "prompts/list": "prompts",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
}


def handshake(method: str, params: Json, known: Json, why: str) -> Json:
    """Returns the result of `initialize` or `server/discover`.

    Args:
        known: the last result of a bus; empty before the first.
        why: why no bus is connected.
    """
    version = params.get("protocolVersion")
    blank: dict[str, Json] = {
        "initialize": {"protocolVersion": version if version in LEGACY_VERSIONS else NEWEST_LEGACY},
        "server/discover": {
            "resultType": "complete",
            "supportedVersions": list(MODERN_VERSIONS),
            "_meta": {META_SERVER: BUS_INFO},
        },
    }
    answer = {
        **blank[method],
        "capabilities": {kind: {"listChanged": True} for kind in LIST_CHANGES},
        "serverInfo": BUS_INFO,
        **known,
        "instructions": f"There are no tools now: {why}. They appear when a bus runs (toolbus serve).",
    }
    return {**answer, "ttlMs": 0, "cacheScope": "private"} if method == "server/discover" else answer


def empty_list(method: str, modern: bool) -> Json:
    more: Json = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"} if modern else {}
    return {LISTS[method]: [], **more}


def failure(request: Json, modern: bool, text: str, stage: str, *, retry_safe: bool) -> Json:
    """Returns the failure of a request: a result that a model can read for a call, else a JSON-RPC error."""
    error = {"code": "UNAVAILABLE", "stage": stage, "retry_safe": retry_safe}
    if request.get("method") != "tools/call":
        return {"id": request["id"], "error": {"code": INTERNAL, "message": text, "data": {ERROR_META: error}}}
    result: Json = {"content": [{"type": "text", "text": text}], "isError": True, "_meta": {ERROR_META: error}}
    if modern:
        result["resultType"] = "complete"
    return {"id": request["id"], "result": result}


def is_draining(answer: Json) -> bool:
    """Tells whether a bus refused a call because it is about to end: nothing has run, and the next bus may take it."""
    result = answer.get("result")
    meta = result.get("_meta") if isinstance(result, dict) else None
    error = meta.get(ERROR_META) if isinstance(meta, dict) else None
    if not isinstance(error, dict) or (error.get("code"), error.get("stage")) != ("UNAVAILABLE", "NOT_DISPATCHED"):
        return False
    return DRAINING in json.dumps(answer)
