"""Servers that are not ideal: unusable answers to the probe, requests during the start, lists without an end."""

# ruff: noqa: F401, F811  # fixtures are imported by name and asked for by name

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from tests.parts.mcp.client.mount_cases import House, house
from tests.parts.mcp.client.remote_server import EVENTS, NOT_MODERN, RemoteServer, answer_with, connected, serving
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.parts.mcp.client.connection import MAX_EMPTY_PAGES, ServerInfo, name_of_written, read_lists
from toolbus.parts.mcp.client.entries import MountEntry
from toolbus.parts.mcp.client.mount import Mount, MountState
from toolbus.parts.mcp.messages.jsonrpc import RpcError

SCRIPT = Path(__file__).parents[3] / "support" / "mcp_script.py"

TOOL = '{"name":"echo","inputSchema":{"type":"object"}}'
INITIALIZED = (
    '{"jsonrpc":"2.0","id":$ID,"result":{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},'
    '"serverInfo":{"name":"s","version":"1"}}}'
)
DISCOVERED = (
    '{"jsonrpc":"2.0","id":$ID,"result":{"supportedVersions":["2026-07-28"],"capabilities":{"tools":{}},'
    '"resultType":"complete"}}'
)
LISTED = f'{{"jsonrpc":"2.0","id":$ID,"result":{{"tools":[{TOOL}]}}}}'
UNKNOWN = '{"jsonrpc":"2.0","id":$ID,"error":{"code":-32601,"message":"Method not found"}}'
CALLED = '{"jsonrpc":"2.0","id":$ID,"result":{"content":[{"type":"text","text":"done"}]}}'
LEGACY: dict[str, Any] = {
    "initialize": [INITIALIZED], "tools/list": [LISTED], "tools/call": [CALLED], "ping": [
        '{"jsonrpc":"2.0","id":$ID,"result":{}}'
    ], "": [UNKNOWN],
}  # fmt: skip


# -- the probe ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "kind", "body"), NOT_MODERN)
async def test_a_server_that_is_not_modern_beyond_doubt_is_asked_with_initialize(
    status: int, kind: str | None, body: str
) -> None:
    async with serving(modern=False) as server:
        server.on["server/discover"] = answer_with(status, kind, body)
        async with connected(server) as connection:
            assert connection.peer is not None
            assert not connection.peer.modern
    assert server.methods()[:2] == ["server/discover", "initialize"]


async def test_a_server_that_drops_the_connection_of_the_probe_is_asked_with_initialize() -> None:
    async with serving(modern=False) as server:

        async def discover(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()

        server.on["server/discover"] = discover
        async with connected(server) as connection:
            assert connection.peer is not None
            assert not connection.peer.modern


@pytest.mark.parametrize("result", [{"capabilities": {"tools": {}}}, {"supportedVersions": ["2026-07-28"]}])
async def test_a_server_that_refuses_initialize_too_is_taken_as_it_was_discovered(result: dict[str, Any]) -> None:
    async with serving(modern=True) as server:

        async def discover(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            return server.result(message, result)

        server.on["server/discover"] = discover
        if "capabilities" not in result:  # nothing of what it offers is known
            result["capabilities"] = None
        async with connected(server) as connection:
            assert connection.peer is not None
            assert connection.peer.modern


async def test_a_modern_server_that_named_its_version_while_it_started_is_discovered_again() -> None:
    async with serving(modern=True) as server:
        found = server._handshake

        async def discover(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            first = server.methods().count("server/discover") == 1
            return web.Response(status=503) if first else found("server/discover", message)

        async def initialize(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            error = {"code": -32022, "message": "unsupported", "data": {"supported": ["2026-07-28"]}}
            return web.json_response({"jsonrpc": "2.0", "id": message["id"], "error": error}, status=400)

        server.on |= {"server/discover": discover, "initialize": initialize}
        async with connected(server) as connection:
            assert connection.peer is not None
            assert connection.peer.modern


async def scripted(house: House, script: Mapping[str, Any], **entry: Any) -> Mount:
    """Mounts a server that writes what a script says."""
    arguments = ("-I", "-S", str(SCRIPT), json.dumps(script))
    await house.mounts.apply({"small": MountEntry("small", command=sys.executable, args=arguments, **entry)})
    mount = house.mounts.get("small")
    assert mount is not None
    await until(lambda: mount.state in (MountState.LIVE, MountState.DEGRADED, MountState.FAILED))
    return mount


@pytest.mark.parametrize(
    "lines",
    [
        ['{"jsonrpc":"2.0","id":$ID,"result":{}}'],
        ['{"jsonrpc":"2.0","id":$ID,"result":null}'],
        ['{"jsonrpc":"2.0","id":$ID,"result":{"supportedVersions":[]}}'],
        ['{"jsonrpc":"2.0","id":987654,"result":{"supportedVersions":["2026-07-28"],"capabilities":{}}}'],
        ['[{"jsonrpc":"2.0","id":$ID,"result":{}}]'],
        ["{}"],
        [""],
        ["ready"],
        [],
    ],
)
async def test_a_program_that_is_not_modern_beyond_doubt_is_asked_with_initialize(
    house: House, lines: list[str]
) -> None:
    mount = await scripted(house, {**LEGACY, "server/discover": lines})
    assert (mount.state, mount.status().era) == (MountState.LIVE, "legacy")
    assert (await house.call("echo")).unwrap() == "done"


async def test_a_server_that_became_modern_since_its_last_start_is_detected_again(house: House) -> None:
    mount = await scripted(house, {**LEGACY, "server/discover": [UNKNOWN]}, command_digest="the same command")
    assert mount.status().era == "legacy"
    script = {"server/discover": [DISCOVERED], "tools/list": [LISTED], "tools/call": [CALLED], "": [UNKNOWN]}
    mount = await scripted(house, script, command_digest="the same command", eager=True)
    assert (await house.call("echo")).unwrap() == "done"
    assert mount.status().era == "modern"


@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_a_server_that_changes_the_type_of_ids_is_understood(house: House, era: str) -> None:
    script = LEGACY if era == "legacy" else {**LEGACY, "server/discover": [DISCOVERED]}
    progress = '{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":$OTHER,"progress":1}}'
    turned: dict[str, Any] = {
        method: [line.replace("$ID", "$OTHER") for line in lines] for method, lines in script.items()
    }
    turned["tools/call"] = [progress, *turned["tools/call"]]
    mount = await scripted(house, turned)
    assert mount.status().era == era
    seen: list[float] = []
    assert (await house.call("echo", on_progress=lambda each: seen.append(each.progress))).unwrap() == "done"
    assert seen == [1]


async def test_a_server_that_changes_the_type_of_ids_is_understood_over_http() -> None:
    async with serving(modern=True) as server:
        result = server.result

        def turned(message: Mapping[str, Any], *rest: Any) -> web.Response:
            given = message["id"]
            return result({**message, "id": str(given) if isinstance(given, int) else int(given)}, *rest)

        server.result = turned  # type: ignore[assignment,method-assign]
        async with connected(server) as connection:
            assert (await connection.request("tools/call", {"name": "add"}, name="add"))["content"]


# -- eras that an operator demands -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("era", "spoken"), [("auto", "modern"), ("modern", "modern"), ("legacy", "legacy")])
async def test_the_era_of_a_mount_is_demanded_of_a_server_that_speaks_both(house: House, era: str, spoken: str) -> None:
    mount = await house.live("both", era=era)
    assert mount.status().era == spoken
    assert (await house.call("echo", {"text": "x"})).unwrap() == "x"


@pytest.mark.parametrize(("switch", "era"), [("modern", "legacy"), ("legacy", "modern")])
async def test_a_server_that_does_not_speak_the_demanded_era_fails_and_says_so(
    house: House, switch: str, era: str
) -> None:
    mount = await house.mount(switch, era=era)
    await until(lambda: mount.state is MountState.FAILED)
    assert ("era = modern" if era == "modern" else "Method not found") in mount.reason


# -- requests during the start -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "params", "code"),
    [
        ("roots/list", {}, -32601),
        ("sampling/createMessage", {"messages": [], "maxTokens": 1}, -32600),
        ("elicitation/create", {"message": "?", "requestedSchema": {}}, -32600),
        ("elicitation/create", {"mode": "url", "url": "https://a.example", "message": "?"}, -32600),
        ("tools/list", {}, -32601),
        ("x/unknown", None, -32601),
    ],
)
@pytest.mark.parametrize("when", ["initialize", "notifications/initialized"])
async def test_a_servers_request_during_its_start_is_refused_at_once_with_its_code(
    house: House, method: str, params: Any, code: int, when: str
) -> None:
    asks = {"jsonrpc": "2.0", "id": "q", "method": method, **({} if params is None else {"params": params})}
    script = {**LEGACY, "server/discover": [UNKNOWN], "holds": {"tools/list": "q"}}
    script[when] = [json.dumps(asks), *script.get(when, [])]
    mount = await scripted(house, script)
    assert mount.state is MountState.LIVE
    [answer] = [json.loads(line.removeprefix("answered ")) for line in mount.log_lines if line.startswith("answered")]
    assert (answer["id"], answer["error"]["code"]) == ("q", code)


async def test_a_ping_during_the_start_is_answered(house: House) -> None:
    asks = '{"jsonrpc":"2.0","id":7,"method":"ping"}'
    script = {**LEGACY, "notifications/initialized": [asks], "holds": {"tools/list": 7}}
    mount = await scripted(house, script)
    assert mount.state is MountState.LIVE


async def test_a_request_on_the_stream_of_initialize_is_refused_over_http_too(house: House) -> None:
    async with serving(modern=False) as server:
        refused = asyncio.Event()

        async def initialize(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            server.sessions.append("s1")
            response = web.StreamResponse(headers={"Content-Type": EVENTS, "Mcp-Session-Id": "s1"})
            await response.prepare(request)
            await response.write(b'data: {"jsonrpc":"2.0","id":"q","method":"roots/list"}\n\n')
            async with asyncio.timeout(WAIT_SECONDS):
                await refused.wait()
            await response.write(f"data: {INITIALIZED.replace('$ID', json.dumps(message['id']))}\n\n".encode())
            return response

        async def answered(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            assert message["error"]["code"] == -32601
            refused.set()
            return web.Response(status=202)

        async def listed(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            return server.result(message, {"tools": [json.loads(TOOL)]})

        server.on |= {"initialize": initialize, "": answered, "tools/list": listed}
        house.mounts._open_remote = lambda entry: _remote(server)
        await house.mounts.apply({"small": MountEntry("small", url=server.url)})
        await until(lambda: "small:echo" in house.names())


def _remote(server: RemoteServer) -> Any:
    from tests.parts.mcp.client.remote_server import QUICK
    from toolbus.parts.mcp.client.http import HttpTransport

    return HttpTransport("small", server.url, {}, None, QUICK)


# -- lists without an end ----------------------------------------------------------------------------------------------

Page = tuple[list[str], Any]  # names of tools, and the next cursor


class PagedServer:
    """Answers `tools/list` by pages.

    Args:
        pages: by the cursor; a function makes those of any cursor.
    """

    def __init__(self, pages: Callable[[Any], Page]) -> None:
        self.asked: list[Any] = []
        self._pages = pages

    async def request(self, method: str, params: Mapping[str, Any], *, unread: str) -> dict[str, Any]:
        cursor = params.get("cursor")
        self.asked.append(cursor)
        names, after = self._pages(cursor)
        page: dict[str, Any] = {unread: [_raw({"name": name} if name else None) for name in names]}
        return page if after is None else {**page, "nextCursor": after}


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


async def listed(pages: Callable[[Any], Page], *, declares: bool = True) -> tuple[list[str], list[Any], str]:
    """Returns the names that are read, the cursors that were sent, and what operators are told."""
    server: Any = PagedServer(pages)
    peer = ServerInfo(False, "2025-11-25", {"tools": {}} if declares else {}, {})
    listing = await read_lists(server, peer, ("tools",))
    names = [name for each in listing.entries["tools"] if (name := name_of_written(each))]
    return names, server.asked, "; ".join(listing.notices["tools/list"])


CYCLES: dict[str, Callable[[Any], Page]] = {
    "one page that leads to itself": lambda cursor: (["a"], "A"),
    "A B A": lambda cursor: {None: (["a"], "A"), "A": (["b"], "B"), "B": (["c"], "A")}[cursor],
    "A B C A": lambda cursor: {None: (["a"], "A"), "A": (["b"], "B"), "B": (["c"], "C"), "C": (["d"], "A")}[cursor],
    "a cycle with the same tools": lambda cursor: {None: (["a"], "A"), "A": (["b"], "B"), "B": (["a"], "A")}[cursor],
    "a rising cursor": lambda cursor: (["a", "b"], str(int(cursor or 0) + 1)),
    "a rising number": lambda cursor: (["a", "b"], (cursor or 0) + 1),
    "empty pages": lambda cursor: ([] if cursor else ["a"], str(int(cursor or 0) + 1)),
    "a rising cursor of entries without names": lambda cursor: (["a", ""], str(int(cursor or 0) + 1)),
    "an object as cursor": lambda cursor: (["a"], {"page": 2}),
    "true as cursor": lambda cursor: (["a"], True),
}


@pytest.mark.parametrize("pages", CYCLES.values(), ids=CYCLES.keys())
async def test_a_list_without_an_end_is_read_until_it_repeats_itself_and_that_is_said(
    pages: Callable[[Any], Page],
) -> None:
    names, asked, notice = await listed(pages)
    assert len(names) == len(set(names))
    assert {"a"} <= set(names)
    assert len(asked) <= 2 + MAX_EMPTY_PAGES
    assert notice


async def test_pages_that_are_in_order_are_read_to_their_end_without_a_word() -> None:
    pages = {None: (["a"], "1"), "1": ([], "2"), "2": (["b"], "3"), "3": (["c"], "")}
    assert await listed(lambda cursor: pages[cursor]) == (["a", "b", "c"], [None, "1", "2", "3"], "")
    assert await listed(lambda cursor: (["a"], None), declares=False) == (["a"], [None], "")


async def test_a_tool_that_moved_to_the_next_page_meanwhile_is_offered_once() -> None:
    pages = {None: (["a", "b"], "1"), "1": (["b", "c"], None)}
    names, _, notice = await listed(lambda cursor: pages[cursor])
    assert names == ["a", "b", "c"]
    assert "more than one page" in notice


async def test_a_list_whose_cursor_ends_because_it_changes_is_read_again() -> None:
    reads = 0

    def pages(cursor: Any) -> Page:
        nonlocal reads
        reads += cursor is None
        if cursor and reads == 1:
            raise RpcError(-32602, "the cursor is no longer valid")
        return (["b"], None) if cursor else (["a"], "1")

    assert (await listed(pages))[0] == ["a", "b"]
    with pytest.raises(RpcError):
        await listed(lambda cursor: _fail())


def _fail() -> Page:
    raise RpcError(-32602, "no")


async def test_operators_see_that_a_list_repeats_itself(house: House) -> None:
    page = f'{{"jsonrpc":"2.0","id":$ID,"result":{{"tools":[{TOOL}],"nextCursor":"x"}}}}'
    mount = await scripted(house, {**LEGACY, "tools/list": [page]})
    assert house.names() == {"small:echo"}
    assert "tools/list: page 2" in mount.status().warnings[0]


async def test_tools_are_listed_also_by_a_server_that_does_not_declare_them(house: House) -> None:
    silent = INITIALIZED.replace('"capabilities":{"tools":{}}', '"capabilities":{}')
    await scripted(house, {**LEGACY, "initialize": [silent]})
    assert house.names() == {"small:echo"}
