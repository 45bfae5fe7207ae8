"""Registers, unregisters, clears and lists tools: the contract's endpoints below ``/api/tools`` (REST-1 to REST-12)."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from toolbus.bus.access.identity import Principal, Scopes
from toolbus.bus.callback_url import CallbackUrl, parse_callback_url
from toolbus.bus.catalog.catalog_view import CatalogView, PerBlock
from toolbus.bus.catalog.changes import ChangeOutcome
from toolbus.bus.catalog.entry import Block, ToolListing
from toolbus.bus.catalog.schema import SchemaFault, compile_output_schema, is_deeper
from toolbus.bus.gateway.callback_context import WANTS_CONTEXT
from toolbus.bus.gateway.contract_models import (
    ClearBody,
    Cleared,
    Invalid,
    Level,
    Listed,
    Problem,
    RegisterBody,
    Registered,
    UnregisterBody,
    Unregistered,
    UserId,
    ignored_fields,
)
from toolbus.bus.gateway.gateway_parts import GatewayParts, parts_of, principal_of
from toolbus.bus.gateway.json_response import json_bytes_response
from toolbus.common.newest import NewestCache
from toolbus.common.text import dump_json, is_utf8
from toolbus.errors import InvalidTool
from toolbus.functions.tool_spec import cut_description
from toolbus.protocol.tool import HINTS, Annotations, Limits, Tool

CALLBACK_PATH = "/api/llm-tools/callback/"  # REST-50
LIST_PATH = "/api/tools"
MAX_CACHED_LISTS = 32  # by last use: one of a large catalog takes megabytes

REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The request cannot be read: not UTF-8, nested too deep, or two lengths."},
    403: {
        "model": Problem,
        "description": "Not permitted: another machine, a web page, a source without the permission.",
    },
    413: {"model": Problem, "description": "The body is longer than the limit `http_body_bytes`."},
    415: {"model": Problem, "description": "A web page of another server sends a body without saying that it is JSON."},
    422: {"model": Invalid, "description": "The request breaks rules; all of them are listed."},
}
UNKNOWN_ROLE: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "That role is not configured."}}
NOT_KEPT: dict[int | str, dict[str, Any]] = {503: {"model": Problem, "description": "It could not be written down."}}


def router() -> APIRouter:
    """Returns the endpoints."""
    routes = APIRouter(prefix=LIST_PATH, tags=["tools"], responses=REFUSALS)

    @routes.post("/register", responses={200: {"model": Registered}, **UNKNOWN_ROLE, **NOT_KEPT})
    async def register(body: RegisterBody, request: Request) -> Response:
        """Offers a tool whose calls are posted to a URL of this machine; the same name is replaced."""
        parts = parts_of(request)
        target = parse_callback_url(body.callback_url)
        if CALLBACK_PATH not in target.url:  # where it runs a plugin's tool, it may
            refuse_own_address(parts, "callback_url", target)
        try:
            read, size = partial(_tool, body, parts.core.config.limits), len(await request.body())
            outcome = await parts.register(body.source, read, size, target, body.callback_secret or "")
        except InvalidTool as error:  # only one whose arguments are to be validated
            raise _invalid("parameters", str(error), None) from None
        response: dict[str, Any] = {
            "ok": bool(outcome.roles),
            "registered": body.name,
            "affected_roles": outcome.roles,
            "failed_roles": [{"role": role, "error": error} for role, _, error in outcome.failed if role],
        }
        if not outcome.roles:
            response["error"] = "no role accepted the registration"
        if ignored := ignored_fields(await request.json()):
            response["ignored"] = ignored
        return JSONResponse(response)

    @routes.post("/unregister", responses={200: {"model": Unregistered}, **UNKNOWN_ROLE, **NOT_KEPT})
    async def unregister(body: UnregisterBody, request: Request) -> Response:
        """Unregisters a tool, of any source; an unknown tool is not an error."""
        parts = parts_of(request)
        outcome = parts.core.sessions.presence.review.unregister(
            body.name, body.role or "", None, principal_of(request)
        )
        parts.persist()
        return JSONResponse({"ok": True, "removed": outcome.count > 0, "name": body.name, **_roles(outcome)})

    @routes.post("/clear", responses={200: {"model": Cleared}, **UNKNOWN_ROLE, **NOT_KEPT})
    async def clear(body: ClearBody, request: Request) -> Response:
        """Withdraws every tool of a source."""
        parts = parts_of(request)
        outcome = parts.core.sessions.presence.review.clear(body.source, body.role or "", principal_of(request))
        parts.persist()
        return JSONResponse({"ok": True, "removed": outcome.count, "source": body.source, **_roles(outcome)})

    @routes.get("", responses={200: {"model": Listed}, **UNKNOWN_ROLE})
    async def list_tools(
        request: Request,
        role: Annotated[str | None, Query(description="Only this role; empty means all.")] = None,
        user_id: UserId = "",
        level: Level = 0,
    ) -> Response:
        """Lists what a user may call, by role."""
        return json_bytes_response(await list_body(request, role or "", user_id, level))

    return routes


async def list_body(request: Request, role: str = "", user_id: str = "", level: int = 0) -> bytes:
    """Returns the body of a list.

    Raises:
        UnknownRole: the role is not configured.
        NotPermitted: the identity may not act for that user, or not state that level.
    """
    parts = parts_of(request)
    principal = principal_of(request, user_id, level)
    lists = parts.cache(_ListCache)
    return await parts.read(lambda: lists.find(parts.core.catalog.view, principal, role, user_id, level))


class _ListCache:
    """Caches lists as bytes, by block: main servers and plugins poll every few seconds."""

    def __init__(self) -> None:
        # By role, user, level and scopes.
        self._lists: NewestCache[tuple[str, str, int, Scopes | None], PerBlock[bytes]] = NewestCache(MAX_CACHED_LISTS)

    def find(self, view: CatalogView, principal: Principal, role: str, user_id: str, level: int) -> bytes:
        """Returns the response body for one role, or with "" for all.

        Raises:
            UnknownRole: the role is not configured.
        """
        user = user_id if view.permissions else ""  # without permissions all users share a list
        roles = []
        for each in (role,) if role else view.roles(principal):
            blocks = view.listed(each, user_id, level, principal=principal).blocks
            key = (each, user, level, principal.identity.scopes)
            self._lists[key] = texts = self._lists.get(key) or PerBlock(_described)
            roles.append(b"%b:[%b]" % (dump_json(each).encode(), b",".join(texts.of(blocks))))
        return b'{"ok":true,"tools_by_role":{%b}}' % b",".join(roles)


def _described(block: Block) -> bytes:
    return dump_json([describe_tool(listing) for listing in block])[1:-1].encode()


def refuse_own_address(parts: GatewayParts, field: str, target: CallbackUrl) -> None:
    """Refuses a URL at which this bus would post to itself.

    Raises:
        RequestValidationError: naming the field of the body.
    """
    if parts.own_url is not None and target.meets(parts.own_url):
        raise _invalid(field, "it leads to this bus: give the URL at which your own program listens", target.shown)


def describe_tool(listing: ToolListing) -> dict[str, Any]:
    """Returns a tool with exactly the keys of REST-8."""
    return {
        "name": listing.tool.name,
        "description": listing.tool.description,
        "source": listing.source,
        "callback_url": listing.tool.callback_url or None,
        "is_remote": any(handler.remote for handler in listing.entry.handlers()),
    }


def _roles(outcome: ChangeOutcome) -> dict[str, Any]:
    return {"affected_roles": outcome.roles, "failed_roles": []}


def _tool(body: RegisterBody, limits: Limits) -> Tool:
    """Returns the tool of a registration.

    Raises:
        RequestValidationError: it breaks a limit of this bus.
    """
    try:
        parameters_json = dump_json(body.parameters)
        if not is_utf8(parameters_json):
            parameters_json = json.dumps(body.parameters, separators=(",", ":"))  # with escapes UTF-8 can carry it
    except (ValueError, RecursionError) as error:
        raise _invalid("parameters", f"JSON cannot hold it: {error}", None) from None
    if (size := len(parameters_json.encode())) > limits.schema_bytes:
        text = f"it has {size} bytes, more than the limit schema_bytes = {limits.schema_bytes}: shorten it"
        raise _invalid("parameters", text, None)
    if is_deeper(body.parameters, limits.schema_depth):
        raise _invalid("parameters", f"it is nested deeper than the limit schema_depth = {limits.schema_depth}", None)
    output_schema_json = _output_schema(body, limits)
    via = [str(each)[:200] for each in body.via] if isinstance(body.via, list) else []
    metadata: dict[str, Any] = {"via": via[:8]} if via else {}
    if body.context_headers:
        metadata[WANTS_CONTEXT] = True
    hints = body.annotations
    try:
        return Tool(
            name=body.name,
            description=cut_description(body.name, body.description, limits.description_bytes),
            parameters_json=parameters_json,
            role=body.role or None,
            timeout_seconds=body.timeout_seconds,
            callback_url=parse_callback_url(body.callback_url).shown,
            display_name=body.display_name or "",
            annotations=Annotations(**{each: getattr(hints, each) for each in HINTS}) if hints else Annotations(),
            validate=body.validate_arguments or None,  # as the contract has it: not checked
            council_eligible=body.council_eligible or False,
            inline_available=body.inline_available or False,
            min_level=body.min_level or 0,
            metadata_json=json.dumps(metadata) if metadata else "",
            output_schema_json=output_schema_json,
            validate_output=body.validate_output or False,
            needs=tuple(body.needs or ()),
            always_background=body.always_background or False,
        )
    except InvalidTool as error:
        raise _invalid("parameters", str(error), None) from None


def _output_schema(body: RegisterBody, limits: Limits) -> str:
    """Returns the schema of a tool's output as text; "" where it has none.

    Raises:
        RequestValidationError: it breaks a rule.
    """
    if body.output_schema is None:
        return ""
    try:
        return compile_output_schema(dump_json(body.output_schema), limits).text
    except (SchemaFault, ValueError, RecursionError) as fault:
        raise _invalid("output_schema", str(fault), None) from None


def _invalid(field: str, message: str, value: object) -> RequestValidationError:
    return RequestValidationError([{"type": "value_error", "loc": ("body", field), "msg": message, "input": value}])
