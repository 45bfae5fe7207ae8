"""Parses the responses of a main server (REST-2, REST-4, REST-8): untrusted bytes in, records out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from toolbus.common.text import clean_line, shorten

MAX_SHOWN = 300  # characters of a main server's text in our errors and logs


class UpstreamError(Exception):
    """The main server does not respond, or breaks the REST contract; the message says how."""


@dataclass(frozen=True, slots=True)
class UpstreamTool:
    """A tool as the main server lists it."""

    source: str
    callback_url: str
    description: str


@dataclass(frozen=True, slots=True)
class UpstreamListing:
    """The list of a main server: its roles in order, and its tools by name and role."""

    roles: tuple[str, ...] = ()
    names: dict[str, dict[str, UpstreamTool]] = field(default_factory=dict)

    def holders(self, name: str) -> dict[str, UpstreamTool]:
        """Returns the tools of a name, by role."""
        return self.names.get(name, {})


@dataclass(frozen=True, slots=True)
class ChangeResponse:
    """The response to a register, unregister or clear.

    Attributes:
        ok: whether it succeeded, for one role at least.
        problem: what failed and why; "" where all succeeded.
        failed: the roles in which it failed.
    """

    ok: bool
    problem: str = ""
    failed: frozenset[str] = frozenset()


def read_listing(status: int, body: bytes) -> UpstreamListing:
    """Parses the response of GET /api/tools.

    Raises:
        UpstreamError: it breaks the contract.
    """
    response = _parse(body)
    if status != 200 or not isinstance(response, dict) or response.get("ok") is not True:
        raise UpstreamError(f"GET /api/tools was answered with {_describe(status, body, response)}")
    by_role = response.get("tools_by_role")
    if not isinstance(by_role, dict) or not all(isinstance(tools, list) for tools in by_role.values()):
        raise UpstreamError(f"GET /api/tools was answered without lists in tools_by_role: {clean(body)}")
    names: dict[str, dict[str, UpstreamTool]] = {}
    for role, tools in by_role.items():
        for tool in tools:
            if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
                raise UpstreamError(f"GET /api/tools lists something that is not a tool: {clean(tool)}")
            fields = (str(tool.get(key) or "") for key in ("source", "callback_url", "description"))
            names.setdefault(tool["name"], {})[role] = UpstreamTool(*fields)
    return UpstreamListing(tuple(by_role), names)


def read_change_response(status: int, body: bytes) -> ChangeResponse:
    """Parses the response of a register, unregister or clear."""
    response = _parse(body)
    if status != 200 or not isinstance(response, dict) or not isinstance(response.get("ok"), bool):
        return ChangeResponse(False, _describe(status, body, response))
    failed = _failed(response.get("failed_roles"))
    errors = "; ".join(f"role {clean(role)!r}: {error}" for role, error in failed.items())
    if response["ok"]:
        return ChangeResponse(True, f"not accepted in every role: {errors}" if failed else "", frozenset(failed))
    error = clean(response["error"]) if response.get("error") else ""
    problem = "; ".join(part for part in (error, errors) if part)
    return ChangeResponse(False, problem or "ok is false, without a reason", frozenset(failed))


def clean(value: object) -> str:
    """Returns foreign text as a log line may show it: one line, printable, short."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return shorten(clean_line(text[: 4 * MAX_SHOWN]), MAX_SHOWN)


def _parse(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except ValueError:
        return None


def _failed(listed: Any) -> dict[str, str]:
    items = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    return {str(item.get("role")): clean(item.get("error") or "no reason given") for item in items}


def _describe(status: int, body: bytes, response: Any) -> str:
    """Returns the error in a response that is not a success."""
    detail = response.get("detail") or response.get("error") if isinstance(response, dict) else None
    if isinstance(detail, list):  # REST-2: one for each field
        parts = [part for part in detail if isinstance(part, dict)]
        detail = "; ".join(f"{_place(part.get('loc'))}: {part.get('msg')}" for part in parts)
    if detail:
        return f"HTTP {status}: {clean(detail)}"
    if status == 200:
        return f"HTTP 200 and a body that breaks the REST contract: {clean(body) or 'empty'}"
    return f"HTTP {status}: {clean(body)}" if body.strip() else f"HTTP {status}"


def _place(loc: Any) -> str:
    return ".".join(str(step) for step in loc if step != "body") if isinstance(loc, list) else "request"
