"""Exports tools in the format of a model provider, and searches them where there are too many to offer.

Both use the view: a tool that a user sees here can be called by an invoke with the same user. Converting
hundreds of schemas takes a while, so it is done on a thread, once for each catalog revision and set of parameters.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import AfterValidator, BaseModel, Field

from toolbus.bus.access.identity import Principal
from toolbus.bus.catalog.catalog_view import CatalogView, PerBlock
from toolbus.bus.gateway.contract_models import Level, UserId
from toolbus.bus.gateway.gateway_parts import parts_of, principal_of
from toolbus.bus.gateway.json_response import json_bytes_response, write_json
from toolbus.bus.gateway.tool_routes import REFUSALS, UNKNOWN_ROLE
from toolbus.common.newest import NewestCache
from toolbus.common.text import quote
from toolbus.parts.models.dialects.names import DIALECTS, find_dialect
from toolbus.parts.models.dialects.wire_names import stem_of
from toolbus.parts.models.search import MAX_QUERY_CHARACTERS, MAX_RESULTS, MODES, IndexCache
from toolbus.protocol.tool import Tool

PARTS = 5  # of an export that are JSON texts
MAX_EXPORTS = 16  # in the cache, one for each dialect, role and user: one of a large catalog takes megabytes


def _known_dialect(name: str) -> str:
    if name not in DIALECTS:
        raise ValueError(f"there is no dialect {quote(name)}: use one of {', '.join(DIALECTS)}")
    return name


DialectName = Annotated[
    str, AfterValidator(_known_dialect), Query(description="Whose format.", json_schema_extra={"enum": [*DIALECTS]})
]
RoleQuery = Annotated[str, Query(description="Only this role's tools; empty means all.")]


class ExportLoss(BaseModel):
    """What a schema lost on its way into a dialect."""

    tool: str
    path: Annotated[str, Field(description="Where in its schema, as a JSON pointer; empty is the root.")]
    keyword: str
    why: str


class ExportLeftOut(BaseModel):
    """A tool that is not among those exported, and why."""

    tool: str
    why: str


class Exported(BaseModel):
    """Tools as one provider's API takes them, in the order of the catalog."""

    ok: bool
    dialect: str
    revision: Annotated[int, Field(description="Of the catalog.")]
    tools: Annotated[list[dict[str, Any]], Field(description="For the provider, as they are.")]
    names: Annotated[dict[str, str], Field(description="The way back: from the name that a model writes to the bus's.")]
    hashes: Annotated[dict[str, str], Field(description="By the bus's name: to be sent with a call as `schema_hash`.")]
    losses: list[ExportLoss]
    left_out: list[ExportLeftOut]
    tokens: Annotated[int, Field(description="What they cost a model, as an estimate.")]


class FoundTool(BaseModel):
    """A tool that was found."""

    name: str
    description: str
    parameters: Annotated[dict[str, Any] | None, Field(description="Only with `include_parameters`.")] = None
    score: Annotated[float, Field(description="Higher is better, within one answer.")]


class FoundTools(BaseModel):
    """What was found, best first; `success` is false, with `error`, where the mode does not exist."""

    success: bool
    mode: Annotated[str, Field(description="The one that answered.")]
    fallback: Annotated[bool, Field(description="Whether that is not the requested one.")]
    query: str
    result_count: int
    results: list[FoundTool]
    error: str | None = None


def router() -> APIRouter:
    """Returns the endpoints."""
    routes = APIRouter(prefix="/api/tools", tags=["models"], responses={**REFUSALS, **UNKNOWN_ROLE})

    @routes.get("/export", responses={200: {"model": Exported}, 304: {"description": "It is what you have."}})
    async def export(
        dialect: DialectName,
        request: Request,
        role: RoleQuery = "",
        user_id: UserId = "",
        level: Level = 0,
        names: Annotated[
            list[str] | None, Query(description="Only these, divided by commas or given several times.")
        ] = None,
        if_none_match: Annotated[str | None, Header(description="The ETag of the answer that is known.")] = None,
    ) -> Response:
        """Writes tools as one provider's API takes them.

        The ETag changes with the catalog and with the rules about users, and with nothing else.
        """
        principal = principal_of(request, user_id, level)
        query = _ExportQuery(dialect, role, user_id, level, tuple(names or ()), principal)
        parts = parts_of(request)
        export = await parts.cache(_ExportCache).find(parts.core.catalog.view, query)
        headers = {"ETag": export.etag, "Cache-Control": "no-cache"}
        if if_none_match is not None and _matches(if_none_match, export.etag):
            return Response(status_code=304, headers=headers)
        return json_bytes_response(export.body, headers=headers)

    @routes.get("/search", responses={200: {"model": FoundTools}})
    async def search(
        request: Request,
        q: Annotated[str, Query(description=f"What the tool should do; {MAX_QUERY_CHARACTERS} characters count.")],
        mode: Annotated[
            str,
            Query(description=f"One of {', '.join(MODES)}; the last two need the extra `semantic`. Empty: the best."),
        ] = "",
        top_k: Annotated[int, Query(description=f"How many at most; taken as 1 to {MAX_RESULTS}.")] = 10,
        include_parameters: Annotated[bool, Query(description="Whether to include their JSON Schemas.")] = False,
        role: RoleQuery = "",
        user_id: UserId = "",
        level: Level = 0,
    ) -> Response:
        """Finds tools by what they do."""
        parts, principal = parts_of(request), principal_of(request, user_id, level)
        view = parts.core.catalog.view
        key = (role, user_id if view.permissions else "", level, principal.identity.scopes)
        indexes = parts.core.rooms.provider(IndexCache)
        assert indexes is not None  # of the room that serves this endpoint

        def find() -> bytes:
            index = indexes.index_of_blocks(key, view.listed(role or None, user_id, level, principal=principal).blocks)
            return write_json(index.search(q, mode=mode, top_k=top_k, include_parameters=include_parameters))

        return json_bytes_response(await asyncio.to_thread(find))

    return routes


@dataclass(frozen=True, slots=True)
class _ExportQuery:
    """The parameters of an export; ``names`` as in the query, () meaning all."""

    dialect: str
    role: str
    user_id: str
    level: int
    names: tuple[str, ...]
    principal: Principal


@dataclass(frozen=True, slots=True)
class _CachedExport:
    """The body of one export.

    Attributes:
        writer: made the body; for the next revision it converts and counts only the tools that have changed.
    """

    revision: int
    writer: _Writer
    body: bytes
    etag: str


class _ExportCache:
    """Caches exports as bytes, each written once per revision."""

    def __init__(self) -> None:
        self._exports = NewestCache[_ExportQuery, _CachedExport](MAX_EXPORTS)  # by last use

    async def find(self, view: CatalogView, query: _ExportQuery) -> _CachedExport:
        """Returns an export of the catalog as it is now.

        Raises:
            UnknownRole: the role is not configured.
        """
        revision = view.revision
        export = self._exports.pop(query, None)  # while it is rewritten, another request makes one of its own
        if export is None or export.revision != revision:
            writer = await asyncio.to_thread(_Writer, query) if export is None else export.writer
            body = await asyncio.to_thread(writer.write, view, revision)
            export = _CachedExport(revision, writer, body, _etag(revision, query))
        self._exports[query] = export
        return export


class _Piece(NamedTuple):
    """The export of some tools.

    Attributes:
        texts: tools, names, hashes, losses and left_out as JSON text without the brackets.
        taken: the names that no other piece may have.
    """

    texts: list[bytes]
    tokens: int
    taken: frozenset[str]


class _Writer:
    """Writes the exports for one query, revision after revision: each block of the catalog once."""

    def __init__(self, query: _ExportQuery) -> None:
        # As long as an export itself.
        from toolbus.parts.models.dialects.token_usage import estimate_tokens

        self._query = query
        self._dialect = find_dialect(query.dialect)
        self._estimate = estimate_tokens
        self._pieces = PerBlock(lambda block: self._piece([listing.tool for listing in block]))

    def write(self, view: CatalogView, revision: int) -> bytes:
        """Returns the body.

        Raises:
            UnknownRole: the role is not configured.
        """
        query = self._query
        blocks = view.listed(query.role or None, query.user_id, query.level, principal=query.principal).blocks
        if query.names:
            pieces = [self._piece(*_select([listing.tool for block in blocks for listing in block], query.names))]
        else:
            pieces = self._pieces.of(blocks)
            if len(frozenset().union(*(each.taken for each in pieces))) < sum(len(each.taken) for each in pieces):
                # Names of two blocks meet on the wire: they are told apart together.
                pieces = [self._piece([listing.tool for block in blocks for listing in block])]
        tools, names, hashes, losses, left_out = (
            b",".join(text for piece in pieces if (text := piece.texts[place])) for place in range(PARTS)
        )
        return b'{"ok":true,"dialect":%b,"revision":%d,"tools":[%b],"names":{%b},"hashes":{%b},"losses":[%b],' % (
            *(write_json(query.dialect), revision, tools, names, hashes, losses),
        ) + b'"left_out":[%b],"tokens":%d}' % (left_out, sum(each.tokens for each in pieces))

    def _piece(self, tools: Sequence[Tool], unknown: Iterable[str] = ()) -> _Piece:
        export = self._dialect.export(tools)
        missing = "no tool of this name is offered to this user"
        left_out = [*map(asdict, export.left_out), *({"tool": name, "why": missing} for name in unknown)]
        values: tuple[Any, ...] = (
            *(export.tools, dict(export.names.to_bus), dict(export.hashes)),
            *([asdict(loss) for loss in export.losses], left_out),
        )
        texts = [write_json(value)[1:-1] for value in values]
        tokens = sum(map(self._estimate, export.tools))
        stems = (stem_of(tool.name, export.names.rule) for tool in tools)
        return _Piece(texts, tokens, frozenset((*export.names.to_bus, *filter(None, stems))))


def _select(tools: Sequence[Tool], names: Iterable[str]) -> tuple[Sequence[Tool], list[str]]:
    """Returns the tools of these names, and the names that no tool has."""
    offered = {tool.name for tool in tools}
    # A name may hold a comma itself.
    selected = dict.fromkeys(
        name for value in names for name in ((value,) if value in offered else value.split(",")) if name
    )
    if not selected:
        return tools, []
    return [tool for tool in tools if tool.name in selected], [name for name in selected if name not in offered]


def _etag(revision: int, query: _ExportQuery) -> str:
    scopes = query.principal.identity.scopes
    seen = (query.dialect, query.role, query.user_id, query.level, query.names, scopes and scopes.as_table())
    return f'"{hashlib.sha256(repr((revision, seen)).encode("utf-8", "replace")).hexdigest()[:32]}"'


def _matches(if_none_match: str, etag: str) -> bool:
    """Returns whether an If-None-Match names an ETag; weak ones count too (RFC 9110, section 13.1.2)."""
    return any(each.strip().removeprefix("W/") in ("*", etag) for each in if_none_match.split(","))
