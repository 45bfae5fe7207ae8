"""Answers requests: one table for each era has the function of each method.

Each is ``async def method(server, request) -> bytes``: it returns the text of the result object, usually by
`McpRequest.complete`, or raises `RpcError`. Any other exception becomes an internal error.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec

from toolbus.bus.keys.seal import BrokenSeal
from toolbus.common.text import dump_json, quote, shorten
from toolbus.errors import INTERNAL_DETAIL, Code, LimitExceeded, Stage
from toolbus.parts.mcp.messages import jsonrpc
from toolbus.parts.mcp.messages.eras import (
    BUS_INFO,
    LEGACY_VERSIONS,
    LIST_CHANGES,
    META_SUBSCRIPTION,
    MODERN_VERSIONS,
    NEWEST_LEGACY,
    TASKS_EXTENSION,
)
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError
from toolbus.parts.mcp.server import feature_methods
from toolbus.parts.mcp.server.calls import (
    ProgressReport,
    call_of,
    missing_capability,
    seconds_of,
    unknown_tool,
    write_result,
)
from toolbus.parts.mcp.server.input import NotAnswered, Questions, run_with_input
from toolbus.parts.mcp.server.mcp_listing import TTL_MS, declare, page_of
from toolbus.parts.mcp.server.mcp_request import CallParams, McpRequest, encode
from toolbus.parts.mcp.server.server import McpServer
from toolbus.parts.mcp.server.sessions import UPDATED, ClientCapabilities, McpSession
from toolbus.parts.mcp.server.subscriptions import MAX_WATCHED, Json, Listener, Notify
from toolbus.parts.tasks import HomeAway, Status, Task, owner_of
from toolbus.protocol.input_requests import InvalidInput, read_requests
from toolbus.protocol.limits import MAX_SEARCH_RESULTS
from toolbus.protocol.questions import ACCEPTS, NEEDS_INPUT
from toolbus.protocol.tool import Annotations, CallError, Result, Tool

# Answers a call that continues in the background with a task, and the later requests about that task.
#
# This is the extension `io.modelcontextprotocol/tasks` on top of the bus's tasks. Their ids are signed for the profile
# and the user, so no client can guess or use the id of another client's task.

TASK = "task"  # the purpose of a signed id
_ENVELOPE = '{"status":"running","task_id":"'  # begins the output of a call that became a task
POLL_MS = 500


# -- a call that becomes a task --------------------------------------------------------------------------------------


def task_of(server: McpServer, request: McpRequest, result: Result) -> Task | None:
    """Returns the task that a call became; None if the call has a result."""
    text = result.output_json
    if not text.startswith(_ENVELOPE):
        return None
    task_id = text[len(_ENVELOPE) :].partition('"')[0]
    return server.tasks.get_result(task_id, owner(server, request))


async def write_created(server: McpServer, request: McpRequest, task: Task) -> bytes:
    """Returns the answer of a call that became a task, after the task is persisted: clients may then read it."""
    await server.tasks.flush()
    return request.complete(_describe(server, request, task), kind="task")


def check_tasks(request: McpRequest) -> None:
    """Checks that the client supports tasks.

    Raises:
        RpcError: it did not declare the extension.
    """
    if not request.has_tasks:
        raise RpcError(
            McpCode.MISSING_CAPABILITY,
            "this needs a client that supports tasks: declare the extension io.modelcontextprotocol/tasks in "
            "clientCapabilities",
            {"requiredCapabilities": {"extensions": EXTENSIONS}},
        )


# -- methods ---------------------------------------------------------------------------------------------------------


async def get_task(server: McpServer, request: McpRequest) -> bytes:
    """Shows a task, with its questions or its result."""
    return request.complete(describe_fully(server, request, await _find(server, request)))


async def update_task(server: McpServer, request: McpRequest) -> bytes:
    task = await _find(server, request)
    answers = request.fields.get("inputResponses")
    if not isinstance(answers, dict):
        raise RpcError(McpCode.INVALID_PARAMS, "tasks/update needs params.inputResponses, an object")
    try:
        server.tasks.answer(task.task_id, answers)
    except InvalidInput as error:
        raise RpcError(McpCode.INVALID_PARAMS, str(error)) from None
    return request.complete({})


async def cancel_task(server: McpServer, request: McpRequest) -> bytes:
    """Cancels a task; one that has ended stays as it is."""
    server.tasks.cancel((await _find(server, request)).task_id)
    return request.complete({})


def owner(server: McpServer, request: McpRequest) -> str:
    """Returns the owner of the tasks that a client of a profile sees."""
    return owner_of(request.profile.user, server.calls.caller(request).principal.account)


def find_task(server: McpServer, request: McpRequest, signed: str) -> Task | None:
    """Returns the task of an id; None if this client has no such task at this bus."""
    task_id = _unsigned(server, request, signed)
    return None if task_id is None else server.tasks.get_result(task_id, owner(server, request))


def _unsigned(server: McpServer, request: McpRequest, signed: str) -> str | None:
    try:
        return server.sealer.verify(signed, TASK, request.profile.name, owner(server, request))
    except BrokenSeal:
        return None


def describe_fully(server: McpServer, request: McpRequest, task: Task) -> Json:
    """Returns a task with its questions, its result or its error."""
    described = _describe(server, request, task)
    if task.running:
        if task.questions:
            described["inputRequests"] = dict(task.questions)
    elif task.status is not Status.CANCELLED:
        try:
            described["result"] = msgspec.Raw(write_result(_result_of(task), request))
            described["status"] = Status.COMPLETED.value  # also for a failed tool: the model reads the failure
        except RpcError as error:
            described["status"] = Status.FAILED.value
            described["error"] = {"code": error.code, "message": error.message}
    return described


async def _find(server: McpServer, request: McpRequest) -> Task:
    check_tasks(request)
    signed = request.text("taskId")
    task_id = _unsigned(server, request, signed)
    try:
        task = None if task_id is None else await server.tasks.find(task_id, owner(server, request))
    except HomeAway as away:
        raise RpcError(McpCode.INTERNAL, str(away)) from None
    if task is None:
        raise RpcError(McpCode.INVALID_PARAMS, f"there is no task {quote(signed)}; a finished task expires later")
    return task


def _describe(server: McpServer, request: McpRequest, task: Task) -> Json:
    """Returns the fields that each message about a task has (SEP-2663)."""
    described: Json = {
        "taskId": server.sealer.sign(task.task_id, TASK, request.profile.name, task.owner),
        "status": "working" if task.status is Status.RUNNING else task.status.value,
        "createdAt": moment(task.started),
        "lastUpdatedAt": moment(max(task.started, task.updated)),
        "ttlMs": max(1, int(server.tasks.limits.finished_seconds * 1000)),
        "pollIntervalMs": POLL_MS,
    }
    message = (task.progress.message if task.progress is not None else "") or task.error
    return {**described, "statusMessage": message} if message else described


def moment(seconds: float) -> str:
    """Returns seconds since the epoch as the extension writes them."""
    written = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return written.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _result_of(task: Task) -> Result:
    """Returns the result of the call of a finished task."""
    result = task.result or Result()
    if task.status is Status.COMPLETED and task.result is not None:
        return result
    code = Code[task.code] if task.code in Code.__members__ else Code.INTERNAL
    error = CallError(code, task.error, Stage.ACCEPTED, reason=task.reason)
    return Result(task.task_id, result.output_json, True, error, result.content)


# Lists and resources come from `Subscriptions`; the states of tasks are added here.
async def listen(server: McpServer, request: McpRequest) -> bytes:
    """Notifies a client of changes, until it disconnects or the bus stops."""
    if not request.channel.takes_messages:
        raise RpcError(
            McpCode.INVALID_REQUEST, "subscriptions/listen needs a stream: send Accept: text/event-stream as well"
        )
    kinds = request.fields.get("notifications")
    if not isinstance(kinds, dict):
        raise RpcError(McpCode.INVALID_PARAMS, "subscriptions/listen needs params.notifications, an object")
    lists = {name: kind for kind, name in LIST_CHANGES.items() if kinds.get(name) is True}
    uris, task_ids = _texts(kinds, "resourceSubscriptions"), _texts(kinds, "taskIds")
    meta = {META_SUBSCRIPTION: request.id}

    def notify(method: str, params: Json) -> None:
        request.notify(method, {**params, "_meta": meta})

    listener = Listener(request.profile, request.identity, notify, modern=True)
    ends: list[Callable[[], object]] = [lambda: server.subscriptions.remove(listener)]
    if lists:
        await server.listings.refresh(request.profile, request.identity, modern=True)
    try:
        server.subscriptions.add(listener, lists.values())
        honored: Json = dict.fromkeys(lists, True)
        # The acknowledgement goes first: notifications of changes wait for the next turn of the loop.
        watched = [uri for uri in uris if _watch(server, request, uri, notify, ends)]
        if uris:
            honored["resourceSubscriptions"] = watched
        if task_ids:
            honored["taskIds"] = _follow_tasks(server, request, task_ids, notify, ends)
        notify("notifications/subscriptions/acknowledged", {"notifications": honored})
        if server.returning.may_have_missed(request.profile):
            for kind in lists.values():
                notify(f"notifications/{kind}/list_changed", {})
        await listener.ended.wait()
    except LimitExceeded as error:
        raise RpcError(McpCode.INTERNAL, str(error)) from None
    finally:
        for end in ends:
            end()
    return request.complete({"_meta": meta})


def _watch(server: McpServer, request: McpRequest, uri: str, notify: Notify, ends: list[Callable[[], object]]) -> bool:
    def updated(uri: str) -> None:
        notify(UPDATED, {"uri": uri})

    end = server.subscriptions.watch_resource(request.profile, request.identity, uri, updated)
    if end is not None:
        ends.append(end)
    return end is not None


def _follow_tasks(
    server: McpServer, request: McpRequest, signed: list[str], notify: Notify, ends: list[Callable[[], object]]
) -> list[str]:
    """Notifies of each change of some tasks. Returns the ids of those that exist."""
    check_tasks(request)
    tasks = {id: task for id in signed if (task := find_task(server, request, id)) is not None}
    followed = {task.task_id for task in tasks.values()}
    loop = asyncio.get_running_loop()

    def report(task: Task) -> None:
        notify("notifications/tasks", describe_fully(server, request, task))

    def changed(task: Task) -> None:  # on any thread
        if task.task_id in followed:
            loop.call_soon_threadsafe(report, task)

    ends.append(server.tasks.follow(changed, owner(server, request)))
    for task in tasks.values():  # the current state, since earlier changes were not reported
        loop.call_soon(report, task)
    return list(tasks)


def _texts(kinds: Mapping[str, Any], name: str) -> list[str]:
    texts = kinds.get(name) or []
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts) or len(texts) > MAX_WATCHED:
        raise RpcError(McpCode.INVALID_PARAMS, f"notifications.{name} must be a list of at most {MAX_WATCHED} strings")
    return list(dict.fromkeys(texts))


# Offers three tools with which a model finds and calls all others, for profiles with hundreds of tools.
#
# The three are always the same, because a list must not differ between connections. Two of them call, so that users can
# always allow the one for read-only tools.

SEARCH_TOOLS = "search_tools"
CALL_TOOL = "call_tool"
CALL_READ_ONLY = "call_read_only_tool"
RESULTS = 5  # of a search without `top_k`
_CALLED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": f"The name of a tool, as {SEARCH_TOOLS} returned it"},
        "arguments": {"type": "object", "description": "Its arguments, by its parameters"},
    },
    "required": ["name"],
}
_QUERY = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "description": "What the tool should do, e.g. `send email`"},
        "top_k": {"type": "integer", "minimum": 1, "maximum": MAX_SEARCH_RESULTS, "default": RESULTS},
    },
    "required": ["query"],
}
TOOLS = (
    Tool(
        name=SEARCH_TOOLS,
        description=(
            "Find tools by what they do. There are many more tools than these three. Returns names, descriptions and "
            f"parameters; call one with {CALL_READ_ONLY} where it is read_only, else with {CALL_TOOL}. If no result "
            "fits, try other words once, then say that there is no such tool."
        ),
        parameters_json=json.dumps(_QUERY),
        annotations=Annotations(read_only=True, idempotent=True, open_world=False),
    ),
    Tool(
        name=CALL_TOOL,
        description=f"Call a tool that {SEARCH_TOOLS} found. It may change things.",
        parameters_json=json.dumps(_CALLED),
        annotations=Annotations(read_only=False),
    ),
    Tool(
        name=CALL_READ_ONLY,
        description=f"Call a tool that {SEARCH_TOOLS} found and that is read_only. Other tools are refused.",
        parameters_json=json.dumps(_CALLED),
        annotations=Annotations(read_only=True),
    ),
)


class _Search(msgspec.Struct):
    query: str
    top_k: int = RESULTS


def list_page(server: McpServer, request: McpRequest) -> bytes:
    texts = (encode(declare(tool.name, tool, server.listings.bus_id, modern=request.modern)) for tool in TOOLS)
    return page_of(b",".join(texts), modern=request.modern, private=False)


async def answer_search(server: McpServer, request: McpRequest, params: CallParams) -> CallParams | bytes:
    """Returns the result of a search, or the call that `call_tool` and `call_read_only_tool` stand for.

    Raises:
        RpcError: the tool is not one of the three.
    """
    match params.name:
        case "search_tools":
            return await _search(server, request, bytes(params.arguments))
        case "call_tool" | "call_read_only_tool":
            return _called(server, request, params)
    raise RpcError(McpCode.INVALID_PARAMS, f"Unknown tool: {params.name!r:.80}; find tools with {SEARCH_TOOLS}")


class Index(Protocol):
    """Finds tools of one catalog."""

    def search(self, query: str, *, top_k: int, include_parameters: bool) -> dict[str, object]:
        """Returns what a query finds, best first."""


@runtime_checkable
class Indexes(Protocol):
    """The indexes of the bus."""

    def index_of(self, revision: Hashable, tools: Iterable[Tool]) -> Index:
        """Returns the index of a catalog, built where its revision is new."""


async def _search(server: McpServer, request: McpRequest, arguments: bytes) -> bytes:
    try:
        search = msgspec.json.decode(arguments, type=_Search)
    except (msgspec.DecodeError, RecursionError) as error:
        return _failed(request, f"the arguments of {SEARCH_TOOLS}: {error}")
    if not 1 <= search.top_k <= MAX_SEARCH_RESULTS:
        return _failed(request, f"top_k is {search.top_k}, it must be from 1 to {MAX_SEARCH_RESULTS}")
    indexes = server.core.rooms.provider(Indexes)
    if indexes is None:
        return _failed(request, "this bus was made without a search: call a tool by its name")
    await server.listings.refresh(request.profile, request.identity, modern=request.modern)
    catalog = server.listings.catalog(request.profile, request.identity, modern=request.modern)
    await server.save_names()

    def find() -> dict[str, object]:
        tools = [listing.tool.renamed(wire) for wire, listing in catalog.listings.items()]
        index = indexes.index_of(("mcp", catalog.digest), tools)
        return index.search(search.query, top_k=search.top_k, include_parameters=True)

    try:
        answer = await asyncio.to_thread(find)  # a new catalog takes some time to index
    except ValueError as error:
        return _failed(request, str(error))
    results = answer["results"]
    assert isinstance(results, list)  # `ToolIndex.search` says so
    tools = [{**each, "read_only": catalog.listings[each["name"]].tool.reads_only} for each in results]
    output = {"tools": tools}
    content = [{"type": "text", "text": encode(output).decode()}]
    return request.complete({"content": content, "structuredContent": output, "isError": False})


def _called(server: McpServer, request: McpRequest, params: CallParams) -> CallParams | bytes:
    try:
        inner = jsonrpc.read(params.arguments, CallParams, "the arguments")
    except RpcError as error:
        return _failed(request, error.message)
    target = server.listings.find(request.profile, request.identity, inner.name)
    if target is None:
        return _failed(request, f"there is no tool {inner.name!r:.80}: find one with {SEARCH_TOOLS}")
    if params.name == CALL_READ_ONLY and not target.tool.reads_only:
        why = "its source is not believed to be" if target.tool.annotations.read_only else "is not"
        return _failed(request, f"tool {inner.name!r:.80} {why} read_only: use {CALL_TOOL}")
    if bytes(inner.arguments)[:1] != b"{":
        return _failed(request, "arguments must be an object")
    return msgspec.structs.replace(params, name=inner.name, arguments=inner.arguments)


def _failed(request: McpRequest, text: str) -> bytes:
    return request.complete({"content": [{"type": "text", "text": text}], "isError": True})


log = logging.getLogger("toolbus.mcp")

Handler = Callable[[McpServer, McpRequest], Awaitable[bytes]]

# The capabilities of the endpoint, in both eras.
CAPABILITIES: dict[str, Any] = {
    "tools": {"listChanged": True},
    "prompts": {"listChanged": True},
    "resources": {"listChanged": True, "subscribe": True},
    "completions": {},
    "logging": {},
}
EXTENSIONS: dict[str, Any] = {TASKS_EXTENSION: {}}  # of the modern era
MAX_INSTRUCTIONS = 16_384  # characters of one mounted server's instructions
INSTRUCTIONS = "Tools of a toolbus. Names begin with the source of a tool; the list changes as sources come and go."


async def initialize(server: McpServer, request: McpRequest) -> bytes:
    """Begins a session with the client's revision if the bus knows it, else with the newest one that has sessions."""
    fields = request.fields
    version = fields.get("protocolVersion")
    if not isinstance(version, str):
        raise RpcError(McpCode.INVALID_PARAMS, "initialize needs params.protocolVersion, a string")
    capabilities = fields.get("capabilities")
    client = ClientCapabilities.of(capabilities if isinstance(capabilities, dict) else {})
    version = version if version in LEGACY_VERSIONS else NEWEST_LEGACY
    request.session = server.sessions.begin(version, client, request.profile, request.identity)
    return request.complete(
        {
            "protocolVersion": version,
            "capabilities": CAPABILITIES,
            "serverInfo": BUS_INFO,
            "instructions": _instructions(server, request),
        }
    )


async def discover(server: McpServer, request: McpRequest) -> bytes:
    """Describes the versions and capabilities of the endpoint."""
    instructions = _instructions(server, request)
    return request.complete(
        {
            "supportedVersions": list(MODERN_VERSIONS),
            "capabilities": {**CAPABILITIES, "extensions": EXTENSIONS},
            "serverInfo": BUS_INFO,
            "instructions": instructions,
            "ttlMs": TTL_MS,
            "cacheScope": "public" if instructions == INSTRUCTIONS else "private",
        }
    )


def _instructions(server: McpServer, request: McpRequest) -> str:
    """Returns the bus's instructions, and those of mounted servers that share theirs, each under its name."""
    profile, identity = request.profile, request.identity

    def sources() -> set[str]:
        catalog = server.listings.catalog(profile, identity, modern=request.modern)
        return {each.source for each in catalog.listings.values()}

    texts = [
        f"Instructions of {provider.source}, for its tools:\n{shorten(provider.instructions, MAX_INSTRUCTIONS)}"
        for provider in server.features.instructing(profile, identity, sources)
    ]
    return "\n\n".join((INSTRUCTIONS, *texts))


async def ping(server: McpServer, request: McpRequest) -> bytes:
    return b"{}"


async def set_level(server: McpServer, request: McpRequest) -> bytes:
    """Sets the lowest level of log messages for a session."""
    if request.session is not None:
        request.session.set_level(request.text("level"))
        await server.sessions.save(request.session)
    return b"{}"


async def list_tools(server: McpServer, request: McpRequest) -> bytes:
    """Lists the tools that are visible to the client."""
    cursor = request.fields.get("cursor") if b"cursor" in request.raw else None
    if cursor is not None and not isinstance(cursor, str):
        raise RpcError(McpCode.INVALID_PARAMS, "cursor must be the nextCursor of a page, a string")
    if request.profile.show == "search":
        return list_page(server, request)
    await server.listings.refresh(request.profile, request.identity, modern=request.modern)
    await server.returning.wait_for_lists(request.profile, request.identity, modern=request.modern)
    page = server.listings.page(request.profile, request.identity, modern=request.modern, cursor=cursor)
    await server.save_names()
    return page


async def call_tool(server: McpServer, request: McpRequest) -> bytes:
    params = request.params
    assert isinstance(params, CallParams)  # `PARAMS` says so
    if bytes(params.arguments)[:1] != b"{":
        raise RpcError(McpCode.INVALID_PARAMS, "params.arguments must be an object")
    if not server.core.takes_calls:  # its plugins leave, so it does not know their tools any more
        drains = "the bus is draining and takes no new calls"
        error = CallError(Code.UNAVAILABLE, drains, Stage.NOT_DISPATCHED, retry_safe=True)
        return write_result(Result(is_error=True, error=error), request)
    if request.profile.show == "search":
        answered = await answer_search(server, request, params)
        if isinstance(answered, bytes):
            return answered
        request.params = params = answered
    target = await server.returning.find(request.profile, request.identity, params.name)
    if target is None:
        raise unknown_tool(params.name)
    tool = target.tool
    if tool.always_background and not tool.no_background and request.modern:
        check_tasks(request)
    listens = params.meta.progress_token is not None or request.log_level is not None
    report = ProgressReport(request) if listens else None

    async def run(answers: Mapping[str, Any], state: str) -> bytes | Questions:
        call = call_of(request, target)
        if answers or state:
            call.input_responses_json, call.request_state = dump_json(answers), state
        if request.has_tasks:
            call.background_after_seconds = server.settings.task_after_seconds
        result = await server.calls.run(request, call, report, seconds_of(call, target))
        if request.modern and result.error is not None and result.error.reason == NEEDS_INPUT:
            asked_for = result.error.message.rpartition("(accepts ")[2]
            raise missing_capability([word for word in ACCEPTS if word in asked_for])
        if result.input_requests_json or result.request_state:
            requests = result.input_requests_json
            return Questions(read_requests(requests) if requests not in ("", "{}") else {}, result.request_state)
        task = task_of(server, request, result) if request.has_tasks else None
        if task is None:
            return write_result(result, request)
        return await write_created(server, request, task)

    try:
        return await run_with_input(server, request, run)
    except (NotAnswered, InvalidInput) as error:
        text = f"tool {params.name} needs input before it can go on: {error}"
        return write_result(Result(is_error=True, error=CallError(Code.TOOL, text, Stage.ACCEPTED)), request)


_FEATURES: Mapping[str, Handler] = {
    "prompts/list": feature_methods.lists("prompts", "prompts"),
    "prompts/get": feature_methods.get_prompt,
    "resources/list": feature_methods.lists("resources", "resources"),
    "resources/templates/list": feature_methods.lists("templates", "resourceTemplates"),
    "resources/read": feature_methods.read_resource,
    "completion/complete": feature_methods.complete,
}
# The methods of the era of sessions, and of the stateless one.
LEGACY: Mapping[str, Handler] = {
    "initialize": initialize,
    "ping": ping,
    "logging/setLevel": set_level,
    "tools/list": list_tools,
    "tools/call": call_tool,
    "resources/subscribe": feature_methods.subscribe,
    "resources/unsubscribe": feature_methods.unsubscribe,
    **_FEATURES,
}
MODERN: Mapping[str, Handler] = {
    "server/discover": discover,
    "tools/list": list_tools,
    "tools/call": call_tool,
    "subscriptions/listen": listen,
    "tasks/get": get_task,
    "tasks/update": update_task,
    "tasks/cancel": cancel_task,
    **_FEATURES,
}


async def answer(server: McpServer, request: McpRequest) -> tuple[int, bytes]:
    """Answers a request: returns the HTTP status and the message."""
    try:
        handler = (MODERN if request.modern else LEGACY).get(request.method)
        if handler is None:
            raise RpcError(McpCode.METHOD_NOT_FOUND, f"there is no method {request.method!r:.80}")
        session = request.session
        if session is None:
            result = await handler(server, request)
        else:
            result = await _in_session(server, session, request, handler)
    except RpcError as error:
        return server.refuse(request, error)
    except LimitExceeded as error:
        return server.refuse(request, RpcError(McpCode.INTERNAL, str(error)))
    except Exception:
        log.exception("internal error in MCP method %.80r", request.method)
        return server.refuse(request, RpcError(McpCode.INTERNAL, INTERNAL_DETAIL))
    return 200, b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (encode(request.id), result)


async def _in_session(server: McpServer, session: McpSession, request: McpRequest, handler: Handler) -> bytes:
    """Answers a request of a session, which its client can cancel by its id."""
    task = asyncio.current_task()
    assert task is not None  # it runs in one
    session.running.add(request.id, task)
    if request.method == "tools/call":  # other requests list, or are answered in a fixed form by some clients
        session.catch_up(request.channel)
    try:
        return await handler(server, request)
    finally:
        session.running.discard(request.id, task)
