"""Tests what MCP clients see: names that never flip, profiles, pages, and the search instead of a list."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.parts.mcp.server.asking import Scripted
from tests.parts.mcp.server.http_client import HttpClient, serving
from tests.support.core_model import PeerDouble, offered, tool
from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus, Config
from toolbus.bus.access.identity import Globs, Identity, Scopes
from toolbus.bus.calls.call_records import RecordFilter
from toolbus.bus.catalog.entry import compile_tool
from toolbus.bus.catalog.policy import AccessRules
from toolbus.bus.storage.store import Store
from toolbus.errors import SetupError
from toolbus.functions.tool_spec import llm_tool, spec_of
from toolbus.parts.mcp.messages.jsonrpc import McpCode
from toolbus.parts.mcp.server import mcp_listing
from toolbus.parts.mcp.server.mcp_listing import ToolNames, declare
from toolbus.parts.mcp.server.server import McpServer
from toolbus.parts.mcp.settings import McpSettings, Profile
from toolbus.protocol.tool import Annotations, Limits, Tool

DEFAULT = Profile()


def offer(bus: Bus, source: str, name: str, *, qualified: bool = True, **options: Any) -> None:
    """Offers a tool that returns its full name."""

    async def tool() -> str:
        return f"{source}:{name}"

    bus.offer(source, spec_of(llm_tool(name=name, **options)(tool)), qualified=qualified)


# -- names -----------------------------------------------------------------------------------------------------------


def name_of(names: ToolNames, name: str, profile: Profile = DEFAULT) -> str:
    source, _, bare = name.rpartition(":")
    return names.name_of(profile, name, bare, source)


def test_a_name_is_that_of_the_source_and_the_tool_in_characters_that_every_model_takes() -> None:
    names = ToolNames()
    assert name_of(names, "files:read.all") == "files_read_all"
    assert name_of(names, "add") == "add"
    assert names.listed_as(DEFAULT, "files_read_all") == "files:read.all"


def test_the_first_tool_keeps_a_name_that_two_would_have() -> None:
    names = ToolNames()
    first, second = name_of(names, "a:b"), name_of(names, "a_b")
    assert (first, second != first) == ("a_b", True)
    assert (name_of(names, "a_b"), name_of(names, "a:b")) == (second, first)
    assert [names.listed_as(DEFAULT, each) for each in (first, second)] == ["a:b", "a_b"]


def test_a_name_is_never_longer_than_its_profile_allows() -> None:
    names, short = ToolNames(), Profile(name="short", longest_name=16)
    long = [f"{'x' * 60}{number}:{'y' * 60}" for number in range(20)]
    wires = [name_of(names, name, short) for name in long]
    assert all(len(wire) <= 16 for wire in wires)
    assert len(set(wires)) == 20
    assert len(name_of(names, long[0])) == 50


def test_a_source_that_is_bare_is_not_in_the_names_of_its_tools() -> None:
    names, bare = ToolNames(), Profile(name="bare", bare=("files",))
    assert name_of(names, "files:read", bare) == "read"
    assert name_of(names, "other:read", bare) == "other_read"


def test_a_name_means_the_same_tool_after_a_restart_in_any_order() -> None:
    store = Store.of(None)
    names = ToolNames(store)
    before = [name_of(names, "a:b"), name_of(names, "a_b")]
    names.save()
    names = ToolNames(store)
    assert [name_of(names, "a_b"), name_of(names, "a:b")] == before[::-1]
    assert not names.unsaved


def test_a_new_name_writes_few_rows_however_many_names_there_are() -> None:
    store, written = Store.of(None), list[dict[str, Any]]()
    write = store.write

    def noting(kind: Any, rows: Any, deleted: Any = ()) -> None:
        written.append({key: dict(names) for key, names in rows.items()})
        write(kind, rows, deleted)

    store.write = noting  # type: ignore[method-assign]
    names = ToolNames(store)
    for number in range(2_500):
        name_of(names, f"t:{number}")
    names.save()
    assert [len(each) for each in written[0].values()] == [1_000, 1_000, 500]
    for number in range(2 * mcp_listing.MAX_ROWS):
        written.clear()
        name_of(names, f"u:{number}")
        names.save()
        names.save()
        (rows,) = written
        assert sum(map(len, rows.values())) == 1 or len(rows) == 3, "all of them seldom, as full rows"
    assert len(store.load(mcp_listing.NAMES)) <= mcp_listing.MAX_ROWS + 5
    names = ToolNames(store)
    assert names.listed_as(DEFAULT, "u_7") == "u:7"
    assert names.listed_as(DEFAULT, "t_2499") == "t:2499"
    assert names.had_names(DEFAULT)


class Held(Store):
    """A store whose writes wait until they may go on."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.writing, self.may_go_on = threading.Event(), threading.Event()

    def write(self, *arguments: Any, **options: Any) -> None:
        self.writing.set()
        assert self.may_go_on.wait(WAIT_SECONDS)
        super().write(*arguments, **options)


async def test_no_client_sees_a_new_name_before_it_is_persisted_also_where_the_request_of_another_does_that() -> None:
    async with Bus(Config(http="off"), rooms=()) as bus:
        server, store = McpServer(bus.core), Held.of(None)
        assert isinstance(store, Held)
        server.names = ToolNames(store)
        name_of(server.names, "files:read")
        first = asyncio.create_task(server.save_names())
        assert await asyncio.to_thread(store.writing.wait, WAIT_SECONDS)
        second = asyncio.create_task(server.save_names())
        await asyncio.wait((second,), timeout=0.05)
        assert not second.done()
        store.may_go_on.set()
        await asyncio.gather(first, second)


def test_names_that_an_earlier_release_wrote_are_read_and_go_on() -> None:
    store = Store.of(None)
    store.write(mcp_listing.NAMES, {"default": {"a_b": "a:b"}})
    names = ToolNames(store)
    assert name_of(names, "a:b") == "a_b"
    assert name_of(names, "c:d") == "c_d"
    names.save()
    assert [ToolNames(store).listed_as(DEFAULT, wire) for wire in ("a_b", "c_d")] == ["a:b", "c:d"]


def test_the_name_of_a_tool_that_is_gone_stays_taken_after_a_restart() -> None:
    store = Store.of(None)
    names = ToolNames(store)
    assert name_of(names, "a:b") == "a_b"
    names.save()
    assert name_of(ToolNames(store), "a_b") != "a_b"


@pytest.mark.parametrize("text", ["{", "[]", '{"default": 1}'])
def test_a_file_of_names_that_cannot_be_read_is_no_reason_not_to_serve(tmp_path: Path, text: str) -> None:
    (tmp_path / "mcp-names.json").write_text(text)
    with closing(Store.of(tmp_path)) as store:
        store.open()
        assert name_of(ToolNames(store), "a:b") == "a_b"


def test_names_of_tools_that_are_gone_are_forgotten_only_where_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ToolNames()
    monkeypatch.setattr(mcp_listing, "MAX_NAMES", 3)
    for name in ("a", "b", "c", "d"):
        name_of(names, name)
    names.save([("default", "a")])
    assert [names.listed_as(DEFAULT, name) for name in ("a", "b", "c", "d")] == ["a", None, "c", "d"]


async def test_a_client_that_remembers_a_name_calls_the_same_tool_after_a_restart(tmp_path: Path) -> None:
    async with serving(data_dir=tmp_path) as bus:
        offer(bus, "a", "b")
        offer(bus, "local", "a_b", qualified=False)
        client = HttpClient(bus)
        names = await client.names()
        told = [(await client.call(name)).result["content"][0]["text"] for name in names]
    async with serving(data_dir=tmp_path) as bus:
        offer(bus, "local", "a_b", qualified=False)
        offer(bus, "a", "b")
        client = HttpClient(bus)
        assert [(await client.call(name)).result["content"][0]["text"] for name in names] == told


# -- profiles --------------------------------------------------------------------------------------------------------


async def test_a_profile_shows_and_calls_only_what_it_has() -> None:
    desk = Profile(name="desk", sources=("files", "mail*"), deny=("files:delete", "mail.in:*"))
    async with serving(desk) as bus:
        for source, name in (
            ("files", "read"),
            ("files", "delete"),
            ("mail.in", "get"),
            ("mail.out", "send"),
            ("x", "y"),
        ):
            offer(bus, source, name)
        client = HttpClient(bus, "/mcp/desk")
        assert await client.names() == ["files_read", "mail_out_send"]
        assert (await client.call("files_read")).result["isError"] is False
        everything = HttpClient(bus)
        for hidden in ("files_delete", "x_y"):
            await everything.call(hidden)  # it has its name there
            assert (await client.call(hidden)).error["code"] == McpCode.INVALID_PARAMS


async def test_the_bus_s_own_tools_are_in_a_profile_that_names_them_and_in_no_other() -> None:
    async with serving(Profile(name="ops", sources=("toolbus",))) as bus:

        @bus.tool
        async def mine() -> None: ...

        offer(bus, "toolbus", "stats")
        assert await HttpClient(bus).names() == ["mine"]
        assert "toolbus_stats" in await HttpClient(bus, "/mcp/ops").names()
        assert (await HttpClient(bus, "/mcp/ops").call("toolbus_stats")).result["isError"] is False
        assert (await HttpClient(bus).call("toolbus_stats")).error["code"] == McpCode.INVALID_PARAMS


async def test_a_profile_calls_on_behalf_of_its_user() -> None:
    async with serving(Profile(name="ann", user="ann", level=3)) as bus:
        offer(bus, "x", "hers")
        offer(bus, "x", "high", min_level=3)
        bus.core.catalog.view.permit(AccessRules.read({"tools": {"x:hers": ["ann"]}}))
        assert await HttpClient(bus).names() == []
        assert (await HttpClient(bus).call("x_hers")).error["code"] == McpCode.INVALID_PARAMS
        ann = HttpClient(bus, "/mcp/ann")
        assert await ann.names() == ["x_hers", "x_high"]
        assert (await ann.call("x_hers")).result["isError"] is False
        assert (await ann.call("x_high")).result["isError"] is False
        assert (await ann.ask("tools/list")).result["cacheScope"] == "private"


async def test_a_key_sees_of_a_profile_what_its_scopes_allow_and_cannot_be_another_user() -> None:
    chat = Identity("chat", Scopes(call=Globs(["a:*"]), users=Globs(["bob"])))
    async with serving(Profile(name="ann", user="ann"), Profile(name="bob", user="bob")) as bus:
        offer(bus, "a", "b")
        offer(bus, "c", "d")
        await HttpClient(bus).names()
        client = HttpClient(bus, identity=chat)
        assert await client.names() == ["a_b"]
        assert (await client.call("c_d")).error["code"] == McpCode.INVALID_PARAMS
        assert not bus.records.newest(RecordFilter(), 1)  # it is no call, which might wait for a plugin to come back
        assert await HttpClient(bus, "/mcp/bob", chat).names() == ["a_b"]
        assert (await HttpClient(bus, "/mcp/ann", chat).ask("tools/list")).status == 403


@pytest.mark.parametrize(
    "profile",
    [
        {"name": "A"},
        {"name": ""},
        {"longest_name": 15},
        {"longest_name": 129},
        {"level": -1},
        {"show": "some"},
        {"timeout_seconds": 301},
        {"timeout_seconds": float("nan")},
    ],
)
def test_a_profile_that_breaks_a_rule_is_refused(profile: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match=r"mcp\.profiles"):
        Profile(**profile)


def test_there_are_at_most_a_hundred_profiles() -> None:
    with pytest.raises(SetupError, match="100"):
        McpSettings(profiles={str(number): Profile(name=f"p{number}") for number in range(101)})


# -- lists -----------------------------------------------------------------------------------------------------------


async def test_a_tool_is_declared_with_all_that_its_author_said() -> None:
    async with serving() as bus:

        @bus.tool(display_name="Adds", read_only=True, destructive=False)  # type: ignore[untyped-decorator]
        async def add(a: int) -> int:
            """Adds one."""
            return a + 1

        [tool] = (await HttpClient(bus).ask("tools/list")).result["tools"]
        assert tool["title"] == "Adds"
        assert tool["description"] == "Adds one."
        assert tool["annotations"] == {"readOnlyHint": True, "destructiveHint": False}
        assert tool["inputSchema"]["properties"] == {"a": {"type": "integer"}}


async def pages(client: HttpClient) -> AsyncIterator[list[str]]:
    """Yields the names of each page of a list."""
    cursor: str | None = None
    while True:
        page = (await client.ask("tools/list", {} if cursor is None else {"cursor": cursor})).result
        yield [tool["name"] for tool in page["tools"]]
        cursor = page.get("nextCursor")
        if cursor is None:
            return


async def test_thousands_of_tools_are_one_page_since_some_clients_ask_for_the_first_only() -> None:
    async with serving() as bus:
        tools = [compile_tool(Tool(f"t{number}", "Does something. " * 10), Limits()) for number in range(2_500)]
        bus.registry.register(Scripted("x", bus, lambda call: None), tools)
        assert [len(page) async for page in pages(HttpClient(bus))] == [2_500]


@pytest.mark.parametrize("modern", [True, False])
async def test_a_list_of_several_pages_is_complete_while_tools_come_and_go_between_them(
    monkeypatch: pytest.MonkeyPatch, modern: bool
) -> None:
    monkeypatch.setattr(mcp_listing, "MAX_PAGE_BYTES", 400)
    async with serving() as bus:
        staying = [f"x_t{number}" for number in range(20)]
        for name in staying:
            offer(bus, "x", name.removeprefix("x_"))
        client = HttpClient(bus)
        if not modern:
            await client.initialize()
        for _ in range(10):
            listed: list[str] = []
            turns = 0
            async for page in pages(client):
                listed += page
                turns += 1
                offer(bus, "moving", f"m{turns % 3}")  # names in the middle, at pages that were and that come
                offer(bus, "x", f"t1{turns % 5}_")
                bus.remove_tool(f"m{(turns + 1) % 3}", "moving")
                bus.remove_tool(f"t1{(turns + 2) % 5}_", "x")
            assert turns > 3
            assert len(set(listed)) == len(listed)
            assert set(staying) <= set(listed)


async def test_a_cursor_outlives_the_tool_that_it_names_and_the_bus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mcp_listing, "MAX_PAGE_BYTES", 200)
    async with serving(data_dir=tmp_path) as bus:
        for number in range(5):
            offer(bus, "x", f"t{number}")
        page = (await HttpClient(bus).ask("tools/list")).result
        last = page["tools"][-1]["name"]
    async with serving(data_dir=tmp_path) as bus:
        for number in range(5):
            if f"x_t{number}" != last:
                offer(bus, "x", f"t{number}")
        rest = (await HttpClient(bus).ask("tools/list", {"cursor": page["nextCursor"]})).result["tools"]
        assert rest[0]["name"] == f"x_t{int(last[-1]) + 1}"


async def test_a_cursor_of_another_list_or_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_listing, "MAX_PAGE_BYTES", 200)
    async with serving(Profile(name="other")) as bus:
        for number in range(5):
            offer(bus, "x", f"t{number}")
        client = HttpClient(bus)
        cursor = (await client.ask("tools/list")).result["nextCursor"]
        other = await HttpClient(bus, "/mcp/other").ask("tools/list", {"cursor": cursor})
        assert other.error["code"] == McpCode.INVALID_PARAMS
        for forged in ("x", f"A{cursor}"):
            assert (await client.ask("tools/list", {"cursor": forged})).error["code"] == McpCode.INVALID_PARAMS


async def test_a_client_that_caches_lists_sees_a_new_tool_within_a_second() -> None:
    async with serving() as bus:
        assert (await HttpClient(bus).ask("tools/list")).result["ttlMs"] <= 1_500


async def test_one_list_is_the_same_text_until_something_in_it_changes() -> None:
    async with serving(Profile(name="files", sources=("files",))) as bus:
        offer(bus, "files", "read")
        client = HttpClient(bus, "/mcp/files")
        before = (await client.ask("tools/list")).body
        offer(bus, "x", "y")
        assert (await client.ask("tools/list")).body == before
        offer(bus, "files", "write")
        assert (await client.ask("tools/list")).body != before


async def test_a_long_list_of_which_little_changed_is_the_one_that_a_new_client_gets() -> None:
    fresh = [Profile(name=f"fresh{number}") for number in range(3)]
    async with serving(*fresh) as bus:
        tools = [compile_tool(Tool(f"t{number}", "Does something."), Limits()) for number in range(2_500)]
        bus.registry.register(Scripted("x", bus, lambda call: None), tools)
        client = HttpClient(bus)
        for number, profile in enumerate(fresh):
            await client.names()  # what changes after it is little
            offer(bus, "y", f"late{number}")
            offer(bus, "y", "again", description=f"Has changed {number} times.")
            if number:
                bus.remove_tool(f"late{number - 1}", "y")
            as_whole = (await HttpClient(bus, f"/mcp/{profile.name}").ask("tools/list")).result
            assert (await client.ask("tools/list")).result["tools"] == as_whole["tools"]


async def test_a_thousand_tools_are_listed_in_milliseconds() -> None:
    async with serving() as bus:
        tools = [compile_tool(Tool(f"t{number}", "Does something."), Limits()) for number in range(1000)]
        bus.registry.register(Scripted("x", bus, lambda call: None), tools)
        client = HttpClient(bus)
        assert len(await client.names()) == 1000
        spent = []
        for _ in range(20):
            began = time.thread_time()
            await client.ask("tools/list")
            spent.append(time.thread_time() - began)
        assert min(spent) < 0.003


async def test_structured_output_of_another_kind_than_an_object_is_declared_in_the_modern_era_only() -> None:
    array, table = (Tool("t", output_schema_json=json.dumps({"type": kind})) for kind in ("array", "object"))
    assert "outputSchema" in declare("t", array, "bus", modern=True)
    assert "outputSchema" not in declare("t", array, "bus", modern=False)
    assert "outputSchema" in declare("t", table, "bus", modern=False)


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_no_declaration_for_legacy_clients_has_alternatives_at_its_root(keyword: str) -> None:
    """The APIs of Anthropic and OpenAI refuse a request with one of them, with all of its tools."""
    one, two = ({"properties": {name: {"enum": [name]}}, "required": [name]} for name in ("city", "zip"))
    schema = {"type": "object", "properties": {"days": {"type": "integer"}}, keyword: [one, {"$ref": "#/$defs/two"}]}
    tool = Tool("t", parameters_json=json.dumps(schema | {"$defs": {"two": two}}))
    modern, arguments = (declare("t", tool, "bus", modern=each)["inputSchema"] for each in (True, False))
    assert isinstance(modern, dict)
    assert isinstance(arguments, dict)
    assert len(modern[keyword]) == 2  # as SEP-2106 demands it
    texts = {name: {"type": "string", "enum": [name]} for name in ("city", "zip")}
    assert arguments["properties"] == {"days": {"type": "integer"}, **texts}
    assert arguments.get("required", []) == (["city", "zip"] if keyword == "allOf" else [])
    assert arguments.keys() <= {"type", "properties", "required", "$defs"}


# -- search ----------------------------------------------------------------------------------------------------------


async def test_a_profile_that_searches_lists_three_tools_by_which_the_others_are_found_and_called() -> None:
    async with serving(Profile(name="find", show="search", deny=("x:hidden",))) as bus:
        offer(bus, "x", "look", description="Reads the weather", read_only=True)
        offer(bus, "x", "send", description="Sends a message")
        offer(bus, "x", "hidden", description="Hides the weather")
        for modern in (True, False):
            client = HttpClient(bus, "/mcp/find")
            if not modern:
                await client.initialize()
            assert await client.names() == ["search_tools", "call_tool", "call_read_only_tool"]
            found = (await client.call("search_tools", {"query": "weather"})).result["structuredContent"]["tools"]
            assert [(each["name"], each["read_only"]) for each in found] == [("x_look", True)]
            assert found[0]["parameters"]["type"] == "object"
            for name, tool, failed in (
                ("call_tool", "x_look", False),
                ("call_tool", "x_send", False),
                ("call_read_only_tool", "x_look", False),
                ("call_read_only_tool", "x_send", True),
                ("call_tool", "x_hidden", True),
                ("call_tool", "search_tools", True),
            ):
                result = (await client.call(name, {"name": tool, "arguments": {}})).result
                assert result["isError"] is failed, (name, tool, result)
            assert (await client.call("x_look")).error["code"] == McpCode.INVALID_PARAMS


async def test_a_hint_of_a_source_that_is_not_believed_makes_no_read_only_call() -> None:
    async with serving(Profile(name="find", show="search")) as bus:
        rogue = PeerDouble("rogue")
        wipe = tool("wipe", "Wipes the disk", annotations=Annotations(read_only=True), hints_trusted=False)
        bus.registry.register(rogue, offered(wipe))
        client = HttpClient(bus, "/mcp/find")
        found = (await client.call("search_tools", {"query": "wipes"})).result["structuredContent"]["tools"]
        assert [(each["name"], each["read_only"]) for each in found] == [("wipe", False)]
        result = (await client.call("call_read_only_tool", {"name": "wipe", "arguments": {}})).result
        assert result["isError"]
        assert "its source is not believed to be read_only: use call_tool" in result["content"][0]["text"]
        assert not rogue.waiting


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("search_tools", {}),
        ("search_tools", {"query": 1}),
        ("search_tools", {"query": "x", "top_k": 0}),
        ("call_tool", {"name": 5}),
        ("call_tool", {"name": "x_y", "arguments": []}),
    ],
)
async def test_wrong_arguments_of_the_three_tools_are_told_to_the_model(name: str, arguments: dict[str, Any]) -> None:
    async with serving(Profile(name="find", show="search")) as bus:
        offer(bus, "x", "y")
        assert (await HttpClient(bus, "/mcp/find").call(name, arguments)).result["isError"] is True


async def test_a_found_tool_with_marked_arguments_needs_no_headers() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "x-mcp-header": "N"}}}
    async with serving(Profile(name="find", show="search")) as bus:

        @bus.tool(parameters=schema)  # type: ignore[untyped-decorator]
        async def marked(n: int = 0) -> int:
            return n

        client = HttpClient(bus, "/mcp/find")
        assert (await client.call("call_tool", {"name": "marked", "arguments": {"n": 5}})).result["isError"] is False


# -- after a restart -------------------------------------------------------------------------------------------------


async def test_a_client_of_a_bus_that_restarts_loses_no_tool(tmp_path: Path) -> None:
    async with serving(data_dir=tmp_path) as bus:
        offer(bus, "files", "read")
        assert await HttpClient(bus).names() == ["files_read"]
    async with serving(data_dir=tmp_path) as bus:
        client = HttpClient(bus)
        listed, called = client.begin("tools/list"), client.begin("tools/call", {"name": "files_read", "arguments": {}})
        offer(bus, "other", "new")  # what comes first is not all
        assert (await client.call("nowhere")).error["code"] == McpCode.INVALID_PARAMS
        assert (listed.status, called.status) == (0, 0)
        offer(bus, "files", "read")
        assert (await called.done()).result["content"] == [{"type": "text", "text": "files:read"}]
        assert [tool["name"] for tool in (await listed.done()).result["tools"]] == ["other_new", "files_read"]


async def test_a_tool_that_does_not_come_back_is_waited_for_until_the_bus_has_settled(tmp_path: Path) -> None:
    async with serving(data_dir=tmp_path) as bus:
        offer(bus, "files", "read")
        assert await HttpClient(bus).names() == ["files_read"]
    async with serving(data_dir=tmp_path) as bus:
        client = HttpClient(bus)
        bus.dispatcher.admission.settled_at = time.monotonic() + 0.05
        assert await client.names() == []
        bus.dispatcher.admission.settled_at = time.monotonic() + 0.05
        assert (await client.call("files_read")).error["code"] == McpCode.INVALID_PARAMS
