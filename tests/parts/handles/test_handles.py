"""Large results become handles: read by their owner, given to other tools, kept across restarts, never wrong."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.contract.callers import CALLERS
from tests.parts.mcp.server.http_client import HttpClient
from tests.support.processes import environment
from tests.support.waiting import until, within
from toolbus import Bus
from toolbus.bus.calls.call_records import RecordFilter
from toolbus.bus.local import LocalCaller
from toolbus.bus.serve_settings import settle
from toolbus.errors import Code, InvalidRequest, SetupError
from toolbus.functions.reply import Reply, image
from toolbus.functions.scope import ToolScope
from toolbus.parts.handles.reading import MAX_LINE, MAX_READ, read_part
from toolbus.parts.handles.result_store import MAX_STORED, URI, Gone, ResultStore
from toolbus.parts.handles.settings import ResultRules
from toolbus.protocol.tool import Result
from toolbus.sdk import CallContext
from toolbus.testing import running_bus
from toolbus.v1 import tool_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

LINES = "\n".join(f"line {number}" for number in range(2_000))
ROWS = [{"name": f"row {number}", "number": number} for number in range(1_000)]
LARGE = 5 << 20  # bytes: above `result_bytes`, so that a bus without handles refuses it


def offer(bus: Bus) -> None:
    @bus.tool
    def lines() -> str:
        return LINES

    @bus.tool
    def rows() -> list[dict[str, Any]]:
        return ROWS

    @bus.tool
    def huge(letter: str = "x", size: int = LARGE) -> str:
        return letter * size

    @bus.tool
    def small() -> str:
        return "small"

    @bus.tool
    def whole() -> str:
        return "w" * 20_000

    @bus.tool(output_schema={"type": "object"})  # type: ignore[untyped-decorator]
    def typed() -> dict[str, str]:
        return {"text": LINES}

    @bus.tool
    def picture() -> Reply:
        return Reply(output="a picture", content=[image(b"\x89PNG" + b"0" * 10_000, "image/png")])

    @bus.tool
    def count(text: str, rows: list[dict[str, Any]] | None = None) -> dict[str, int]:
        return {"characters": len(text), "rows": len(rows or [])}

    @bus.tool
    async def relay(scope: ToolScope) -> int:
        return len((await scope.call("lines")).output)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bus() -> AsyncIterator[Bus]:
    rules = ResultRules(above=4_096, tools={"whole": 0})
    async with running_bus(http="127.0.0.1:0", results=rules, offered=("results",)) as bus:
        offer(bus)
        yield bus


async def call(bus: Bus, name: str, arguments: Any = None, user: str = "ann") -> Result:
    return await within(bus.call(name, arguments, context=CallContext(user_id=user)))


async def handle_of(bus: Bus, name: str, user: str = "ann", **arguments: Any) -> str:
    result = await call(bus, name, arguments, user)
    (link,) = [block.resource_link for block in result.content if block.HasField("resource_link")]
    assert link.uri in json.dumps([result.output, [block.text.text for block in result.content]])
    return str(link.uri)


async def read(bus: Bus, handle: str, user: str = "ann", **part: str) -> Any:
    return (await call(bus, "toolbus:read_result", {"handle": handle, **part}, user)).output


# -- what a caller gets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", CALLERS)
async def test_every_way_in_gets_the_beginning_and_a_link(bus: Bus, way: str) -> None:
    async with CALLERS[way](bus) as caller:
        result = await within(caller.call("lines"))
    assert result.output.startswith("line 0\nline 1\n")
    assert f"the beginning of {len(LINES)} characters in 2000 lines" in result.output
    assert len(result.output) < 3_000


async def test_an_mcp_client_reads_the_resource_that_the_result_links_to(bus: Bus) -> None:
    client = HttpClient(bus)
    content = (await client.call("lines")).result["content"]
    (link,) = [block for block in content if block["type"] == "resource_link"]
    assert (link["mimeType"], link["name"]) == ("text/plain", "result of lines")
    (body,) = (await client.ask("resources/read", {"uri": link["uri"]})).result["contents"]
    assert body["text"] == LINES
    stranger = (await client.ask("resources/read", {"uri": await handle_of(bus, "lines")})).error
    assert "Unknown resource" in stranger["message"]
    templates = (await client.ask("resources/templates/list")).result["resourceTemplates"]
    assert [each["uriTemplate"] for each in templates] == ["toolbus://results/{id}"]


async def test_a_result_above_the_limit_of_results_is_kept_too(bus: Bus) -> None:
    handle = await handle_of(bus, "huge")
    assert (await read(bus, handle, lines="1"))["text"] == "x" * MAX_LINE


async def test_small_results_exempted_tools_output_schemas_and_calls_of_tools_stay_whole(bus: Bus) -> None:
    assert (await call(bus, "small")).output == "small"
    assert (await call(bus, "whole")).output == "w" * 20_000
    assert (await call(bus, "typed")).output == {"text": LINES}
    assert (await call(bus, "relay")).output == len(LINES)


async def test_content_beside_the_output_becomes_a_handle_of_its_own(bus: Bus) -> None:
    result = await call(bus, "picture")
    assert result.output == "a picture"
    assert [block.WhichOneof("kind") for block in result.content] == ["text", "resource_link"]
    handle = result.content[1].resource_link.uri
    assert "it is image/png, not text" in (await call(bus, "toolbus:read_result", {"handle": handle})).text


# -- reading ---------------------------------------------------------------------------------------------------------


async def test_the_owner_reads_a_path_lines_and_what_grep_finds(bus: Bus) -> None:
    text, rows = await handle_of(bus, "lines"), await handle_of(bus, "rows")
    assert await read(bus, text, lines="11-12") == {"text": "line 10\nline 11", "lines": 2000}
    assert (await read(bus, text, grep="LINE 199"))["text"].split("\n")[1] == "1991: line 1990"
    assert await read(bus, rows, path="7.name") == {"value": "row 7"}


async def test_nobody_else_reads_it(bus: Bus) -> None:
    handle = await handle_of(bus, "lines")
    for user in ("bob", ""):
        assert "there is no result" in (await call(bus, "toolbus:read_result", {"handle": handle}, user)).text
        refused = await call(bus, "count", {"text": handle}, user)
        assert refused.error is not None
        assert refused.error.code is Code.INVALID_ARGUMENTS


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"lines": "x"}, "must be a range such as"),
        ({"lines": "0-5"}, "counted from 1"),
        ({"lines": "9-5"}, "not above the last"),
        ({"lines": "5000"}, "has 3 lines"),
        ({"path": "a", "grep": "b"}, "path goes without"),
        ({"path": "a.9"}, "a is a list of 2 items, it has no '9'"),
        ({"path": "b"}, "an object with the keys a"),
    ],
)
async def test_a_part_that_is_not_there_is_refused_with_what_is(part: dict[str, str], problem: str) -> None:
    text = json.dumps({"a": [1, 2]}) + "\n\n" if "path" in part else "a\nb\nc"
    with pytest.raises(InvalidRequest, match=problem):
        read_part(text, part.get("path", ""), part.get("lines", ""), part.get("grep", ""))


async def test_a_part_is_never_longer_than_an_answer_may_be() -> None:
    text = "\n".join("y" * 100 for _ in range(1_000))
    first = read_part(text, "", "", "")
    assert len(first["text"]) <= MAX_READ
    assert first["more"].endswith("go on with lines = '325-'")
    assert read_part(text, "", "325-", "")["text"].startswith("yyy")
    assert "an object with the keys big" in read_part(json.dumps({"a": {"big": "z" * MAX_READ}}), "a", "", "")["shape"]


# -- handles as arguments --------------------------------------------------------------------------------------------


async def test_a_handle_is_an_argument_of_another_tool_as_text_and_as_json(bus: Bus) -> None:
    text, rows = await handle_of(bus, "huge"), await handle_of(bus, "rows")
    assert (await call(bus, "count", {"text": text})).output == {"characters": LARGE, "rows": 0}
    assert (await call(bus, "count", {"text": rows, "rows": rows})).output == {
        "characters": len(json.dumps(ROWS, separators=(",", ":"))),
        "rows": 1_000,
    }
    notes = bus.records.newest(RecordFilter(name="count"), 1)[0].notes
    assert notes in ((), ("handles in the arguments were replaced by their results",))
    assert bus.dispatcher.in_flight.held == 0
    assert (await call(bus, "count", {"text": f"see {text}"})).output["characters"] == len(text) + 4


async def test_a_handle_that_is_gone_is_refused_and_the_tool_is_not_run(bus: Bus) -> None:
    result = await call(bus, "count", {"text": f"{URI}{'a' * 22}"})
    assert "text: there is no result" in result.text


async def test_records_and_explanations_say_what_became_a_handle(bus: Bus) -> None:
    await call(bus, "lines")
    assert bus.records.newest(RecordFilter(name="lines"), 1)[0].notes == ("1 large parts of the result became handles",)
    explained = (await within(bus.call("toolbus:explain", {"tool": "lines"}))).unwrap()
    assert {"step": "large results", "passed": None, "why": "results above 4096 bytes become handles"} in (
        explained["steps"]
    )


async def test_a_secret_of_an_untrusted_source_is_blocked_and_not_stored() -> None:
    async with running_bus(results=ResultRules(above=4_096), guarded=("local",)) as bus:

        @bus.tool
        def leak() -> dict[str, str]:
            return {"password": "hunter2", "text": LINES}

        result = await within(bus.call("leak"))
        assert result.error is not None
        assert result.error.code is Code.SECRET_BLOCKED
        assert "stored=0" in repr(bus.dispatcher.seams.interceptors[0])


# -- the store -------------------------------------------------------------------------------------------------------


def store_of(folder: Path | None, clock: Any = time.time, **rules: Any) -> ResultStore:
    store = ResultStore(ResultRules(**{"above": 4_096, **rules}), folder, clock)
    store.open()
    return store


def put(store: ResultStore, content: bytes, owner: str = "ann", source: str = "s") -> str:
    stored = store.add(owner, source, "t", "text/plain", content)
    assert stored is not None
    return stored.uri


def got(store: ResultStore, uri: str, owner: str = "ann") -> bytes | None:
    try:
        return store.read(store.find(uri, owner))
    except Gone:
        return None


async def test_what_is_above_the_memory_goes_to_files_and_lives_on(tmp_path: Path) -> None:
    store = store_of(tmp_path / "results", memory_bytes=100)
    first, second = put(store, b"1" * 90), put(store, b"2" * 90)
    await until(lambda: len(list((tmp_path / "results").glob("[!.]*"))) == 1, "a file")
    assert (got(store, first), got(store, second)) == (b"1" * 90, b"2" * 90)
    killed = store_of(tmp_path / "results")  # of a bus that was killed: what was in memory is gone
    assert (got(killed, first), got(killed, second)) == (b"1" * 90, None)
    await store.close()
    stopped = store_of(tmp_path / "results")
    assert (got(stopped, first), got(stopped, second)) == (b"1" * 90, b"2" * 90)
    assert [path.stat().st_mode & 0o77 for path in (tmp_path / "results").iterdir()] == [0, 0]


async def test_a_result_that_does_not_fit_onto_the_disk_is_gone_and_leaves_nothing_there(tmp_path: Path) -> None:
    store = store_of(tmp_path / "results", memory_bytes=0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        uri = put(store, b"1" * 60_000)
        await store.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert got(store, uri) is None
    assert list((tmp_path / "results").iterdir()) == []


@pytest.mark.parametrize("damage", [b"", b"{}\n", b"not a header", None])
async def test_a_damaged_file_is_gone_never_wrong(tmp_path: Path, damage: bytes | None) -> None:
    store = store_of(tmp_path / "results", memory_bytes=0)
    uri = put(store, b"right bytes")
    await store.close()
    (file,) = (tmp_path / "results").iterdir()
    content = file.read_bytes()
    file.write_bytes(content.replace(b"right", b"wrong") if damage is None else damage)
    assert got(store, uri) is None
    assert got(store_of(tmp_path / "results"), uri) is None


async def test_a_folder_among_the_files_is_left_alone(tmp_path: Path) -> None:
    store = store_of(tmp_path / "results", memory_bytes=0)
    uri = put(store, b"right bytes")
    await store.close()
    (tmp_path / "results" / "lost+found").mkdir()
    assert got(store_of(tmp_path / "results"), uri) == b"right bytes"
    assert (tmp_path / "results" / "lost+found").is_dir()


async def test_quotas_drop_the_oldest_of_the_owner_and_of_the_source() -> None:
    store = store_of(None, user_bytes=100, source_bytes=150, memory_bytes=1_000)
    first, second = put(store, b"1" * 60), put(store, b"2" * 60)
    assert (got(store, first), got(store, second)) == (None, b"2" * 60)
    put(store, b"3" * 60, owner="bob")
    assert got(store, second) is not None
    put(store, b"4" * 60, owner="cy")
    assert got(store, second) is None
    assert store.add("ann", "s", "t", "text/plain", b"5" * 101) is None
    small = store_of(None, memory_bytes=100)
    first, second = put(small, b"1" * 60), put(small, b"2" * 60, owner="bob", source="other")
    assert got(small, first) is None


async def test_results_end_with_their_time_and_are_bounded_in_number(tmp_path: Path) -> None:
    now = 1_000.0
    store = store_of(tmp_path / "results", lambda: now, ttl_seconds=10, memory_bytes=5)
    uri = put(store, b"content")
    await store.close()
    now = 1_011.0
    assert got(store, uri) is None
    store.expire()
    assert list((tmp_path / "results").iterdir()) == []
    many = store_of(None)
    uris = [put(many, b"x") for _ in range(MAX_STORED + 1)]
    assert (got(many, uris[0]), got(many, uris[-1])) == (None, b"x")


async def test_a_shorter_time_holds_for_results_of_earlier_runs_and_a_longer_one_only_for_new_ones(
    tmp_path: Path,
) -> None:
    now, uris = 1_000.0, list[str]()

    def clock() -> float:
        return now

    for ttl in (100, 10, 50):
        store = store_of(tmp_path / "results", clock, ttl_seconds=ttl, memory_bytes=0)
        uris.append(put(store, b"content"))
        await store.close()
        now += 1.0
    for moment, left in ((1_010.5, [True, True, True]), (1_011.5, [True, False, True]), (1_060.0, [False] * 3)):
        now = moment
        store.expire()
        assert [got(store, uri) is not None for uri in uris] == left
        assert len(list((tmp_path / "results").iterdir())) == sum(left)


KILLED = """
import asyncio, itertools, sys
from pathlib import Path
from toolbus.parts.handles.settings import ResultRules
from toolbus.testing import running_bus

async def main():
    rules = ResultRules(above=4_096, memory_bytes=60_000)
    async with running_bus(results=rules, data_dir=Path(sys.argv[1])) as bus:
        @bus.tool
        def many(number: int) -> str:
            return f"{number} " * 5_000
        for number in itertools.count():
            result = await bus.call("many", {"number": number})
            (link,) = [each.resource_link.uri for each in result.content if each.HasField("resource_link")]
            print(number, link, flush=True)

asyncio.run(main())
"""


async def test_after_a_kill_each_handle_has_the_right_bytes_or_is_gone(tmp_path: Path) -> None:
    words = (sys.executable, "-c", KILLED, str(tmp_path))
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, env=environment({}))
    assert process.stdout is not None
    lines = [await within(process.stdout.readline()) for _ in range(40)]
    process.kill()  # while it writes
    rest = await within(process.stdout.read())  # it went on until then, and the newest of all is looked at
    lines += [line for line in rest.splitlines(keepends=True) if line.endswith(b"\n")]
    await process.wait()
    (tmp_path / "results" / "unfinished.new").write_bytes(b"{")
    async with running_bus(results=ResultRules(above=4_096), data_dir=tmp_path) as bus:
        states = []
        for line in lines:
            number, handle = line.decode().split()
            result = await call_locally(bus, handle)
            states.append(result.error is None)
            assert result.error is not None or result.output["text"].startswith(f"{number} " * 500), number
        assert True in states  # those in files
        assert states[-1] is False  # the newest was in memory


async def call_locally(bus: Bus, handle: str) -> Result:
    return await within(bus.call("toolbus:read_result", {"handle": handle, "lines": "1"}))


async def test_a_stream_is_stored_as_it_comes_and_its_handle_then_stands_for_the_whole(tmp_path: Path) -> None:
    going_on = asyncio.Event()
    async with running_bus(results=ResultRules(above=4_096), data_dir=tmp_path) as bus:

        @bus.tool
        async def stream(scope: ToolScope, fails: bool = False) -> str:
            for _ in range(50):
                scope.progress(chunk="x" * 100)
            await going_on.wait()
            if fails:
                raise ValueError("it broke")
            return "x" * 5_000 + "end"

        async def begin(**arguments: Any) -> tuple[asyncio.Task[Result], str]:
            seen: list[str] = []
            caller = LocalCaller("host", bus.dispatcher)
            message = pb.ToolCall(name="stream", arguments_json=json.dumps(arguments))
            task = asyncio.create_task(caller.call(message, lambda progress: seen.append(progress.message)))
            await until(lambda: any(seen), "the handle")
            (text,) = filter(None, seen)
            return task, text.rpartition(" ")[2]

        async def read_it(handle: str) -> str:
            message = pb.ToolCall(name="toolbus:read_result", arguments_json=json.dumps({"handle": handle}))
            result = await within(LocalCaller("host", bus.dispatcher).call(message))
            return str(result.output["text"] if result.error is None else result.text)

        task, handle = await begin()
        assert set((await read_it(handle)).replace("\n", "")) == {"x"}
        going_on.set()
        done = await within(task)
        assert [each.resource_link.uri for each in done.content if each.HasField("resource_link")] == [handle]
        assert (await read_it(handle)).endswith("end")
        going_on.clear()
        task, handle = await begin(fails=True)
        going_on.set()
        failed = await within(task)
        assert failed.is_error
        assert [each.resource_link.uri for each in failed.content if each.HasField("resource_link")] == [handle]
        assert "x" * 100 in await read_it(handle)
        going_on.clear()
        task, cut = await begin()
        task.cancel()
        assert "x" * 100 in await read_it(cut)  # also of a call that never had a result


async def test_a_stream_beyond_a_quota_is_dropped_and_the_result_still_comes() -> None:
    async with running_bus(results=ResultRules(above=4_096, user_bytes=8_000)) as bus:

        @bus.tool
        async def stream(scope: ToolScope) -> str:
            for _ in range(100):
                scope.progress(chunk="x" * 100)
            return "small"

        result = await within(bus.call("stream"))
        assert (result.output, list(result.content)) == ("small", [])


async def test_a_restarted_bus_serves_handles_of_before(tmp_path: Path) -> None:
    async with running_bus(results=ResultRules(above=4_096), data_dir=tmp_path) as bus:
        offer(bus)
        handle = await handle_of(bus, "lines")
    async with running_bus(results=ResultRules(above=4_096), data_dir=tmp_path) as bus:
        assert (await read(bus, handle, lines="5"))["text"] == "line 4"


async def test_a_bus_without_a_bound_has_no_interceptor_and_no_tool() -> None:
    async with running_bus(offered=("results",)) as bus:
        assert bus.dispatcher.seams.interceptors == ()
        assert [listing.tool.name for listing in bus.list()] == []
        assert (await within(bus.call("toolbus:read_result", {"handle": URI}))).error is not None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("above = 100", "it must be at least 4096"),
        ("above = -1", "a whole number"),
        ("tools = {lines = 'x'}", "tools.lines"),
        ("above = 8192\nmemory_bytes = 0\ndisk_bytes = 0", "nothing can be stored"),
        ("ttl_seconds = 0", "ttl_seconds"),
        ("over = 1", "unknown key"),
    ],
)
async def test_a_rule_that_is_wrong_is_refused_with_its_place(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "toolbus.toml"
    file.write_text(f"[results]\n{text}\n")
    with pytest.raises(SetupError, match=problem):
        settle({}, {}, file)


async def test_concurrent_users_get_their_own_bytes(bus: Bus) -> None:
    async def of(number: int) -> None:
        user = f"user {number % 20}"
        letter = chr(ord("a") + number % 20)
        handle = await handle_of(bus, "huge", user, letter=letter, size=8_192)
        assert (await read(bus, handle, user, lines="1"))["text"] == letter * MAX_LINE

    await asyncio.gather(*(of(number) for number in range(20)))
