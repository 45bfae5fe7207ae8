"""Tools for a model: the catalog as one provider's API takes it, and a search where it is too long to be shown whole.

Both go through the view: what a user is shown here can be called by an invoke with the same user. Converting hundreds
of schemas takes a while, so it is done on a thread, once for each revision and question.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from pydantic import AfterValidator

from toolbus.bus.gateway import callback_messages
from toolbus.bus.gateway.host_models import Exported, FoundTools, Level, UserId
from toolbus.bus.gateway.parts import GatewayParts
from toolbus.bus.gateway.tool_routes import REFUSALS, UNKNOWN_ROLE
from toolbus.dialects import DIALECTS, find_dialect
from toolbus.dialects.token_cost import CostCache
from toolbus.search import MAX_QUERY_CHARACTERS, MAX_RESULTS, MODES, IndexCache
from toolbus.tool import Tool

EXPORTS_KEPT = 16  # for each dialect, role and user in use: of a large catalog one takes megabytes


def _known(name: str) -> str:
    if name not in DIALECTS:
        raise ValueError(f"there is no dialect {name[:80]!r}: there are {', '.join(DIALECTS)}")
    return name


DialectName = Annotated[
    str,
    AfterValidator(_known),
    Query(description="Whose format.", json_schema_extra={"enum": [*DIALECTS]}),
]
RoleQuery = Annotated[str, Query(description="Only this role's tools; empty means all.")]


def router(parts: GatewayParts) -> APIRouter:
    """Returns the endpoints over one bus."""
    routes = APIRouter(prefix="/api/tools", tags=["models"], responses={**REFUSALS, **UNKNOWN_ROLE})
    exports, indexes = _Exports(parts), IndexCache()

    @routes.get("/export", responses={200: {"model": Exported}, 304: {"description": "It is what you have."}})
    async def export(
        dialect: DialectName,
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
        asked = _Asked(dialect, role, user_id, level, tuple(names or ()))
        exported = await exports.of(asked)
        headers = {"ETag": exported.etag, "Cache-Control": "no-cache"}
        if if_none_match is not None and _matches(if_none_match, exported.etag):
            return Response(status_code=304, headers=headers)
        return Response(exported.body, media_type="application/json", headers=headers)

    @routes.get("/search", responses={200: {"model": FoundTools}})
    async def search(
        q: Annotated[str, Query(description=f"What the tool should do; {MAX_QUERY_CHARACTERS} characters count.")],
        mode: Annotated[str, Query(description=f"One of {', '.join(MODES)}.")] = "bm25",
        top_k: Annotated[int, Query(description=f"How many at most; taken as 1 to {MAX_RESULTS}.")] = 10,
        include_parameters: Annotated[bool, Query(description="Whether their JSON Schemas are told too.")] = False,
        role: RoleQuery = "",
        user_id: UserId = "",
        level: Level = 0,
    ) -> Response:
        """Finds tools by what they do."""
        revision = (parts.core.view.revision, role, user_id if parts.core.view.permissions else "", level)
        tools = [listing.tool for listing in parts.core.view.listings(role or None, user_id, level)]

        def find() -> bytes:
            index = indexes.index_of(revision, tools)
            found = index.search(q, mode=mode, top_k=top_k, include_parameters=include_parameters)
            return callback_messages.write_json(found)

        return Response(await asyncio.to_thread(find), media_type="application/json")

    return routes


@dataclass(frozen=True, slots=True)
class _Asked:
    """What an export is of; ``names`` as they were given, none meaning all."""

    dialect: str
    role: str
    user_id: str
    level: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Exported:
    """One answer.

    Attributes:
        writer: what wrote it: of the next revision it converts and counts only what has changed.
    """

    revision: int
    writer: _Writer
    body: bytes
    etag: str


class _Exports:
    """Exports as bytes, each written once a revision; those asked for last are kept."""

    def __init__(self, parts: GatewayParts) -> None:
        self._view = parts.core.view
        self._kept: dict[_Asked, _Exported] = {}  # the one asked for last stands last

    async def of(self, asked: _Asked) -> _Exported:
        """Returns an export of what there is now.

        Raises:
            UnknownRole: the role is not configured.
        """
        revision = self._view.revision
        tools = [listing.tool for listing in self._view.listings(asked.role or None, asked.user_id, asked.level)]
        kept = self._kept.pop(asked, None)
        if kept is None or kept.revision != revision:
            writer = _Writer(asked.dialect) if kept is None else kept.writer
            body = await asyncio.to_thread(writer.write, revision, tools, asked.names)
            kept = _Exported(revision, writer, body, _etag(revision, asked))
        self._kept[asked] = kept
        if len(self._kept) > EXPORTS_KEPT:
            del self._kept[next(iter(self._kept))]
        return kept


class _Writer:
    """Writes the answers to one question, one after the other."""

    def __init__(self, dialect: str) -> None:
        self._dialect = find_dialect(dialect)
        self._costs = CostCache()

    def write(self, revision: int, tools: Sequence[Tool], names: Iterable[str]) -> bytes:
        wanted, unknown = _chosen(tools, names)
        export = self._dialect.export(wanted)
        missing = "no tool of this name is offered to this user"
        answer: dict[str, Any] = {
            "ok": True,
            "dialect": export.dialect,
            "revision": revision,
            "tools": export.tools,
            "names": dict(export.names.to_bus),
            "hashes": dict(export.hashes),
            "losses": [asdict(loss) for loss in export.losses],
            "left_out": [
                *(asdict(each) for each in export.left_out),
                *({"tool": name, "why": missing} for name in unknown),
            ],
            "tokens": sum(self._costs.of(export).values()),
        }
        return callback_messages.write_json(answer)


def _chosen(tools: Sequence[Tool], names: Iterable[str]) -> tuple[Sequence[Tool], list[str]]:
    """Returns the tools that were asked for, and the names of which there is none."""
    offered = {tool.name for tool in tools}
    # A name may hold a comma itself.
    asked = dict.fromkeys(
        name for given in names for name in ((given,) if given in offered else given.split(",")) if name
    )
    if not asked:
        return tools, []
    return [tool for tool in tools if tool.name in asked], [name for name in asked if name not in offered]


def _etag(revision: int, asked: _Asked) -> str:
    return f'"{hashlib.sha256(repr((revision, astuple(asked))).encode("utf-8", "replace")).hexdigest()[:32]}"'


def _matches(given: str, etag: str) -> bool:
    """Whether an If-None-Match names an ETag; weak ones count as others do (RFC 9110, section 13.1.2)."""
    return any(each.strip().removeprefix("W/") in ("*", etag) for each in given.split(","))
