"""Serves the council over HTTP: members that run tools before the main model is called, for hosts in any language.

A tool that fails is part of the response, never an error of the request. A client that disconnects before the response
ends its run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from toolbus.bus.catalog.policy import MAX_USER
from toolbus.bus.catalog.schema import is_deeper
from toolbus.bus.gateway.call_response import call_body
from toolbus.bus.gateway.contract_models import Invoked, Level, Problem, Text, UserId
from toolbus.bus.gateway.event_stream import (
    RETRY,
    EventStream,
    disconnected_response,
    event,
    unless_disconnected,
    wants_events,
)
from toolbus.bus.gateway.gateway_parts import parts_of, principal_of
from toolbus.bus.gateway.json_response import json_bytes_response, json_response, write_json
from toolbus.bus.gateway.tool_routes import REFUSALS
from toolbus.common.mailbox import Mailbox
from toolbus.common.text import quote
from toolbus.errors import PeerLost, SetupError
from toolbus.functions.call_context import CallContext
from toolbus.parts.council.room import CouncilRoom
from toolbus.parts.models.dialects.names import find_dialect
from toolbus.protocol.tool import level_of

if TYPE_CHECKING:
    from toolbus.parts.council.inline_tools import InlineTarget, InlineTools
    from toolbus.parts.council.service import CouncilService, Start


# Request bodies use snake_case, as everywhere in the gateway. Records of a run, its tools and its events use camelCase,
# as hosts of role-play systems know them.

MAX_MEMBERS = 100  # of a run
MAX_DEPTH = 16  # of members and settings
MAX_ID = 256  # characters of a chat's or a run's id

_MEMBER: Any = {"id": "m1", "name": "Ada", "tools": ["memory:recall"], "role": "Archivist", "chance": 100}
_MESSAGES: Any = [{"role": "user", "content": "Who lives at the lighthouse?"}]


def _shallow(value: Any) -> Any:
    """Refuses a value that is nested too deeply for members and settings."""
    if is_deeper(value, MAX_DEPTH):
        raise PydanticCustomError(
            "too_deep", "Input should not be nested deeper than {most} levels", {"most": MAX_DEPTH}
        )
    return value


# The dialects of requests to a model; those of realtime sessions and MCP are not.
CHAT_DIALECTS = ("openai", "openai-responses", "anthropic", "gemini", "ollama")


def known_chat_dialect(name: str) -> str:
    """Refuses a dialect that does not write tools for a request to a model."""
    if name not in CHAT_DIALECTS:
        raise ValueError(f"there is no dialect {quote(name)} for requests: use one of {', '.join(CHAT_DIALECTS)}")
    return name


Shallow = Annotated[dict[str, Any], AfterValidator(_shallow)]


class _Body(BaseModel):
    """A request; unknown fields are ignored, and the response names them."""

    model_config = ConfigDict(extra="allow")

    @property
    def unknown(self) -> list[str]:
        """The names of the fields that are ignored."""
        return list(self.model_extra or ())

    def known(self) -> dict[str, Any]:
        """Returns the fields that the model knows."""
        return self.model_dump(include=set(type(self).model_fields), by_alias=True)


class _CouncilBody(_Body):
    """What a council's members know, and who they are."""

    messages: Annotated[
        list[dict[str, Any]],
        Field(description="The conversation, oldest first, as providers write it: `role`, `content`, `name`."),
    ] = []
    persona: Annotated[Text, Field(description="Who the user plays.")] = ""
    character: Annotated[Text, Field(description="Who the main model plays.")] = ""
    world_info: Annotated[Text, Field(description="What is known of the world.")] = ""
    user_id: Annotated[str, Field(max_length=MAX_USER, description="For which user.")] = ""
    attributes: Annotated[
        dict[Text, Text],
        Field(description="What tools may know; `level` is the user's access level.", examples=[{"level": "50"}]),
    ] = {}
    members: Annotated[
        list[Shallow] | None, Field(max_length=MAX_MEMBERS, description="Instead of those of the council file.")
    ] = None
    settings: Annotated[
        Shallow | None, Field(description="In the place of those in force, as `GET /api/council` shows them.")
    ] = None


class InlineBody(_CouncilBody):
    """Asks for the members' tools as the main model is offered them."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"dialect": "openai", "members": [_MEMBER]}]})

    dialect: Annotated[
        str,
        AfterValidator(known_chat_dialect),
        Field(description="Whose format.", json_schema_extra={"enum": [*CHAT_DIALECTS]}),
    ] = "openai"


class InlineInvokeBody(InlineBody):
    """A call of the main model, by the name that it was offered."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"name": "m1_memory_recall", "arguments": {"query": "door"}, "members": [_MEMBER]}]
        }
    )

    name: Annotated[str, Field(min_length=1, max_length=MAX_ID, description="As the model wrote it.")]
    arguments: Annotated[
        dict[str, Any] | str, Field(description="An object; or text: the arguments as the model wrote them.")
    ] = {}
    schema_hash: Annotated[str, Field(description="Of the tool as it was offered; a changed tool is refused.")] = ""
    timeout_seconds: Annotated[
        float | None, Field(gt=0, description="How long it may take; null: as long as the tool says.")
    ] = None


class InlineName(BaseModel):
    """What one offered name stands for."""

    tool: Annotated[str, Field(description="The tool as the bus lists it.")]
    member_id: Annotated[str, Field(description="Empty: a tool of no member.")]
    member_name: str
    schema_hash: str


class InlineOffer(BaseModel):
    """The members' tools as the main model is offered them."""

    ok: bool
    dialect: str
    tools: Annotated[list[dict[str, Any]], Field(description="For the request to the model.")]
    names: Annotated[dict[str, InlineName], Field(description="By the names that the model sees.")]
    missing: Annotated[
        list[dict[str, str]], Field(description="Assigned tools that are not there: `memberId` and `toolName`.")
    ]
    ignored: Annotated[list[str] | None, Field(description="Keys of the request that mean nothing here.")] = None


class CouncilRunBody(_CouncilBody):
    """A run of the council."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"messages": _MESSAGES, "chat_id": "chat-1", "members": [_MEMBER]}]}
    )

    chat_id: Annotated[
        str, Field(max_length=MAX_ID, description="The conversation; without it earlier results are not stored.")
    ] = ""
    regenerates: Annotated[
        bool,
        Field(
            description="Whether the reply is made again: with the setting `retain_results_for_regens` an earlier run "
            "is used, where nothing has changed."
        ),
    ] = False


class FailedTool(BaseModel):
    """One tool of one member, as `COUNCIL_TOOLS_FAILED` names it; whatever else stands there is ignored."""

    model_config = ConfigDict(alias_generator=to_camel)

    member_id: Text
    tool_name: Text


class CouncilRetryBody(_Body):
    """A run whose failed tools are to run again."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"run_id": "0123456789abcdef", "only": [{"memberId": "m1", "toolName": "memory:recall"}]}]
        }
    )

    run_id: Annotated[str, Field(min_length=1, max_length=MAX_ID, description="`runId` of its answer.")]
    only: Annotated[
        list[FailedTool] | None, Field(description="Some of those that failed; null or left out: all of them.")
    ] = None


class _Record(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)


class CouncilTool(_Record):
    """A tool that members can be assigned."""

    name: Annotated[str, Field(description="As it is assigned.")]
    qualified_name: str
    display_name: str
    description: str
    source: Annotated[str, Field(description="Whose it is; empty for prompt tools.")]
    category: str
    kind: Annotated[str, Field(examples=["extension", "prompt"])]
    available: Annotated[bool, Field(description="Whether it can run now.")]
    reason: Annotated[str, Field(description="Why it cannot; empty where it can.")]


class CouncilTools(_Record):
    """The tools that members can be assigned: those of the bus that are made for it, then prompt tools."""

    ok: bool
    count: int
    tools: list[CouncilTool]


class CouncilShown(BaseModel):
    """Settings and members in force, spelled so that a run takes them as its own."""

    ok: bool
    settings: dict[str, Any]
    members: list[dict[str, Any]]
    sidecar: Annotated[
        dict[str, Any],
        Field(description="The model of prompt tools: its settings, `available`, and `reason` where it is not."),
    ]


class CouncilResult(_Record):
    """The result of one tool of one member."""

    member_id: str
    member_name: str
    tool_name: str
    tool_display_name: str
    success: bool
    content: str
    duration_ms: int
    error: Annotated[str | None, Field(description="Only where it failed.")] = None
    timeout_ms: Annotated[int | None, Field(description="The time that it had; only where that ran out.")] = None
    result_variable: Annotated[str | None, Field(description="Only where the content is stored by name.")] = None


class SkippedTool(_Record):
    """A tool of a member who takes part that was not there."""

    member_id: str
    tool_name: str
    why: str


class CouncilRunLine(_Record):
    """A run in a list: who took part and how their tools ended."""

    run_id: str
    chat_id: Annotated[str, Field(description="Of the conversation; empty where the request named none.")]
    ended: Annotated[float, Field(description="Seconds since the epoch; retries do not change it.")]
    members: Annotated[list[str], Field(description="Names of those who took part; ids where none of their tools ran.")]
    total_duration_ms: int
    success_count: int
    failed_count: int
    skipped_count: int


class CouncilRuns(BaseModel):
    """The newest runs, the newest first."""

    ok: bool
    count: int
    runs: list[CouncilRunLine]


class CouncilAnswer(_Record):
    """The result of a run. Most fields are set only where at least one member took part."""

    ok: bool
    active: Annotated[bool, Field(description="Whether any member took part, with a tool that was there.")]
    reason: Annotated[str | None, Field(description="Why no member took part.")] = None
    results: Annotated[list[CouncilResult], Field(description="In the order of members and of their tools.")]
    run_id: str | None = None
    generation_id: Annotated[str | None, Field(description="The same, as events name it.")] = None
    deliberation: Annotated[str | None, Field(description="Markdown for the main model.")] = None
    history: Annotated[str | None, Field(description="The same of earlier runs of the chat; may be empty.")] = None
    named_results: dict[str, str] | None = None
    total_duration_ms: int | None = None
    success_count: int | None = None
    failed_count: int | None = None
    reused: Annotated[bool | None, Field(description="Whether it is an earlier run's, since nothing had changed.")] = (
        None
    )
    skipped: Annotated[
        list[SkippedTool] | None, Field(description="Tools of those who take part that were not there.")
    ] = None
    ignored: Annotated[
        list[str] | None, Field(description="Keys of the request that mean nothing here; only where there are some.")
    ] = None


MAX_RUN_EVENTS = 1_000  # that wait for a slow client: a run has one for each of its 100 members, and a few more
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"model": CouncilAnswer, "content": {"text/event-stream": {}}},
    503: {"model": Problem, "description": "The bus stopped meanwhile."},
}
_NO_RUN: dict[int | str, dict[str, Any]] = {
    404: {"model": Problem, "description": "The run is unknown, or newer runs have replaced it."}
}


def router() -> APIRouter:
    """Returns the endpoints, for buses that have a council."""
    routes = APIRouter(prefix="/api/council", tags=["council"], responses=REFUSALS)
    for add in (_shows, _runs, _inline, _follows):
        add(routes)
    return routes


def _shows(routes: APIRouter) -> None:
    @routes.get("", responses={200: {"model": CouncilShown}})
    async def get_council(request: Request) -> Response:
        """Shows settings and members in force: those of the council file."""
        return json_response({"ok": True, **(await _council_of(request)).described()})

    @routes.get("/tools", responses={200: {"model": CouncilTools}})
    async def list_council_tools(request: Request, user_id: UserId = "", level: Level = 0) -> Response:
        """Lists what members can be assigned for a user: tools made for councils, and prompt tools."""
        principal_of(request, user_id, level)
        tools = await (await _council_of(request)).tools(user_id, {"level": str(level)})
        return json_response({"ok": True, "count": len(tools), "tools": tools})

    @routes.get("/runs", responses={200: {"model": CouncilRuns}})
    async def list_council_runs(request: Request) -> Response:
        """Lists the runs that are stored, the newest first, without what their tools gave."""
        runs = (await _council_of(request)).runs()
        return json_response({"ok": True, "count": len(runs), "runs": runs})

    @routes.get("/runs/{run_id}", responses={200: {"model": CouncilAnswer}, **_NO_RUN})
    async def get_council_run(
        run_id: Annotated[str, Path(description="`runId` of its answer.", examples=["0123456789abcdef"])],
        request: Request,
    ) -> Response:
        """Shows the result of a run, retries included. Only the newest runs are stored."""
        run = (await _council_of(request)).find(run_id)
        return _not_found(run_id) if run is None else json_response(run)


def _runs(routes: APIRouter) -> None:
    @routes.post("/run", responses=_RESPONSES)
    async def run_council(body: CouncilRunBody, request: Request) -> Response:
        """Rolls the dice and runs the tools of the members that take part. A failed tool is a result like any other.

        With `Accept: text/event-stream` the answer is a stream: the run's events as they happen, then one event
        `result`. Closing the connection ends the run and cancels its calls.
        """
        fields = body.known()
        principal_of(request, body.user_id, level_of(body.attributes))
        try:
            run = (await _council_of(request)).begin({**fields, "unknown": body.unknown})
        except SetupError as error:
            raise _invalid(error, fields) from None
        return await _run_response(request, run)

    @routes.post("/retry", responses={**_RESPONSES, **_NO_RUN})
    async def retry_council(body: CouncilRetryBody, request: Request) -> Response:
        """Runs again what failed in a run, without dice, and answers with the whole run.

        The answer is a stream where a run's is.
        """
        only = None if body.only is None else [(each.member_id, each.tool_name) for each in body.only]
        try:
            run = (await _council_of(request)).begin_retry(body.run_id, only, body.unknown)
        except SetupError as error:
            raise _invalid(error, body.known()) from None
        return _not_found(body.run_id) if run is None else await _run_response(request, run)


def _inline(routes: APIRouter) -> None:
    @routes.post("/inline", responses={200: {"model": InlineOffer}})
    async def offer_inline(body: InlineBody, request: Request) -> Response:
        """Offers the members' tools to the main model itself: each once for every member that has it, without dice.

        Tools that are `inline_available` are offered too, with or without members. The same members and tools give the
        same names.
        """
        dialect, (inline, _, ignored) = find_dialect(body.dialect), await _inline_of(body, request)
        offered = await inline.export()
        export = dialect.export(offered.tools)
        hashes = {tool.name: tool.schema_hash for tool in offered.tools}
        answer: dict[str, Any] = {
            "ok": True,
            "dialect": body.dialect,
            "tools": list(export.tools),
            "names": {name: _target(target, hashes[name]) for name, target in offered.targets.items()},
            "missing": [{"memberId": member, "toolName": name} for member, name in offered.missing],
        }
        return json_response({**answer, "ignored": ignored} if ignored else answer)

    @routes.post("/inline/invoke", responses={200: {"model": Invoked}})
    async def invoke_inline(body: InlineInvokeBody, request: Request) -> Response:
        """Calls what a name of the main model stands for, on behalf of its member.

        Give the members, settings, dialect and user with which the name was offered. A failed call is an answer like
        any other, also that of an unknown name.
        """
        inline, context, _ = await _inline_of(body, request)
        arguments = body.arguments if isinstance(body.arguments, str) else write_json(body.arguments).decode()
        timeout = body.timeout_seconds
        calling = inline.call(body.name, arguments, context=context, schema_hash=body.schema_hash, timeout=timeout)
        result = await unless_disconnected(request, calling)
        return disconnected_response() if result is None else json_bytes_response(await call_body(result))


async def _inline_of(body: InlineBody, request: Request) -> tuple[InlineTools, CallContext, list[str]]:
    fields = body.known()
    principal_of(request, body.user_id, level_of(body.attributes))
    try:
        rule = find_dialect(body.dialect).name_rule
        return (await _council_of(request)).inline({**fields, "unknown": body.unknown}, rule)
    except SetupError as error:
        raise _invalid(error, fields) from None


def _target(target: InlineTarget, schema_hash: str) -> dict[str, Any]:
    member = target.member
    return {
        "tool": target.tool_name,
        "member_id": member.id if member is not None else "",
        "member_name": member.name if member is not None else "",
        "schema_hash": schema_hash,
    }


def _follows(routes: APIRouter) -> None:
    @routes.get(
        "/events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    )
    async def council_events(
        request: Request,
        chat_id: Annotated[str, Query(max_length=MAX_ID, description="Of this chat only; empty: of all.")] = "",
    ) -> Response:
        """Streams what councils do, as it happens, under the events' own names.

        No event is repeated: a client that reconnects has missed those in between. A client that reads too slowly loses
        the oldest events; `COUNCIL_EVENTS_LOST` says how many.
        """
        council = await _council_of(request)
        return EventStream(_follow(council, chat_id), parts_of(request).core.program.timings.ping_seconds)


async def _council_of(request: Request) -> CouncilService:
    room = parts_of(request).core.rooms.provider(CouncilRoom)
    assert room is not None  # else the application has no such routes
    return await room.find()


async def _run_response(request: Request, run: Start) -> Response:
    if wants_events(request):
        return EventStream(_stream(run), parts_of(request).core.program.timings.ping_seconds)
    result = await unless_disconnected(request, run(None))
    return disconnected_response() if result is None else json_response(result)


async def _stream(run: Start) -> AsyncGenerator[bytes]:
    """Yields the events of a run, then its result; without a result where the bus stopped."""
    events = Mailbox[Mapping[str, Any]](MAX_RUN_EVENTS)
    running = asyncio.ensure_future(run(events.put))
    running.add_done_callback(lambda task: events.close())
    try:
        async for each in events:
            yield _event(each)
        yield event("result", running.result())
    except PeerLost:
        return
    finally:
        running.cancel()


async def _follow(council: CouncilService, chat_id: str) -> AsyncGenerator[bytes]:
    watcher = council.watch(chat_id)
    try:
        yield RETRY  # a client that has read this gets every event from now on
        async for each in watcher:
            yield _event(each)
    finally:
        watcher.close()


def _event(council_event: Mapping[str, Any]) -> bytes:
    return event(council_event["event"], dict(council_event))


def _invalid(error: SetupError, body: Any) -> RequestValidationError:
    """Returns the error for a body that breaks a rule; where a value is missing, it echoes what should have it."""
    for step in error.loc:
        try:
            body = body[step]
        except (LookupError, TypeError):
            break
    fault = {"type": "value_error", "loc": ("body", *error.loc), "msg": str(error), "input": body}
    return RequestValidationError([fault])


def _not_found(run_id: str) -> Response:
    detail = f"there is no run {quote(run_id)}: it has not ended, or newer runs have replaced it. Run the council again"
    return json_response({"detail": detail}, 404)
