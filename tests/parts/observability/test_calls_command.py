"""``toolbus calls``: records, filters, contents and --follow."""

import asyncio
import json
import re
import signal
from pathlib import Path

import pytest

from tests.support.processes import Running, toolbus
from tests.support.served_bus import address_of, in_flight, run_json, start_grpc_bus
from tests.support.waiting import until, until_sync, within
from toolbus import Host
from toolbus.bus.calls.call_records import MAX_RECORDS
from toolbus.cli.command_line import app
from toolbus.parts.observability import calls_command
from toolbus.testing import running_bus


@pytest.fixture
def bus(recording_bus: str) -> str:
    """The bus that records contents."""
    return recording_bus


def test_calls_prints_the_newest_first(bus: str) -> None:
    toolbus("call", "get.weather", "city=Rome", "--bus", bus)
    lines = toolbus("calls", "--source", "weather", "--bus", bus).stdout.splitlines()
    assert lines[0].split() == ["OUTCOME", "MS", "SOURCE", "CALLER", "USER", "ROUND", "IN", "OUT", "CALL", "NAME"]
    assert lines[1].split()[0] == "ok"
    assert lines[1].split()[-1] == "get.weather"


def test_calls_shows_the_user_and_the_round_of_a_call(bus: str) -> None:
    context = ("--user", "ada", "--context", "round=2", "--context", "order=1")
    toolbus("call", "get.weather", "city=Oslo", *context, "--bus", bus)
    shown = toolbus("calls", "--user", "ada", "--name", "get.weather", "--bus", bus).stdout.splitlines()
    assert shown[0].split() == ["OUTCOME", "MS", "SOURCE", "CALLER", "USER", "ROUND", "IN", "OUT", "CALL", "NAME"]
    cells = shown[1].split()
    assert (cells[0], *cells[2:8], cells[-1]) == (
        *("ok", "weather", "toolbus-cli", "ada", "2.1", str(len('{"city": "Oslo"}'))),
        *(str(len('{"city":"Oslo"}')), "get.weather"),
    )


def test_calls_are_found_by_caller_and_outcome(bus: str) -> None:
    toolbus("call", "get.weather", '{"city": {}}', "--user", "bob", "--bus", bus)
    found = run_json(bus, "calls", "--outcome", "invalid_arguments", "--caller", "toolbus-cli", "--user", "bob")
    assert [(each["name"], each["outcome"], each["user_id"]) for each in found] == [
        ("get.weather", "INVALID_ARGUMENTS", "bob")
    ]
    assert run_json(bus, "calls", "--caller", "nobody") == []
    assert run_json(bus, "calls", "--outcome", "input_required") == []


def test_an_unknown_outcome_is_wrong_usage(bus: str) -> None:
    ended = toolbus("calls", "--outcome", "bad", "--bus", bus)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "'bad'" in ended.stderr
    assert "OK, INPUT_REQUIRED, TOOL," in ended.stderr


async def test_a_call_that_runs_is_cancelled_by_its_id() -> None:
    async with running_bus() as bus:

        @bus.tool
        async def wait() -> None:
            await asyncio.Event().wait()

        calling = asyncio.create_task(bus.call("wait"))
        await until(lambda: bool(bus.core.calls.dispatcher.in_flight.oldest(1)), "the call")
        words = ("calls", "cancel", bus.core.calls.dispatcher.in_flight.oldest(1)[0].id, "--bus", bus.grpc_addresses[0])
        done = await asyncio.to_thread(toolbus, *words)
        result = await within(calling)
        again = await asyncio.to_thread(toolbus, *words)
    assert (done.returncode, done.stdout) == (0, f"cancelled call {words[2]} of local to wait\n")
    assert "an operator cancelled the call" in result.text
    assert (again.returncode, again.stdout) == (1, "")
    assert "it has ended" in again.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "needs the ID of a call"),
        (("1", "--user", "u-17"), "cancel goes with --json only"),  # it cancels calls of any user
        (("1", "--slow"), "cancel goes with --json only"),
    ],
)
def test_cancel_takes_the_id_of_one_call_and_no_filter(
    words: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["calls", "cancel", *words, "--bus", "127.0.0.1:1"])
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out) == (2, "")
    assert error in shown.err


def test_contents_are_printed_on_request_without_secrets(bus: str) -> None:
    toolbus("call", "get.weather", "city=Lima", "api_key=abc123", "--user", "eve", "--bus", bus)
    (bare,) = run_json(bus, "calls", "--user", "eve")
    assert "arguments" not in bare
    (found,) = run_json(bus, "calls", "--user", "eve", "--contents")
    assert json.loads(found["arguments"]) == {"city": "Lima", "api_key": "[hidden]"}
    assert found["output"] == '{"city":"Lima"}'
    table = toolbus("calls", "--user", "eve", "--contents", "--bus", bus).stdout.splitlines()
    assert table[0].split()[-2:] == ["ARGUMENTS", "OUTPUT"]
    assert table[1].endswith('{"city":"Lima"}')


def test_long_contents_are_shortened_in_a_table() -> None:
    record = dict.fromkeys(("outcome", "source", "caller", "user_id", "call_id", "name"), "x")
    sizes = {"seconds": 0.0, "round": 0, "order": 0, "arguments_size": 1, "output_size": 1}
    row = calls_command._row({**record, **sizes, "arguments": "a" * 99, "output": "b"}, contents=True)
    assert (len(row[-2]), row[-2][-1], row[-1]) == (calls_command.MAX_SHOWN, "…", "b")
    assert calls_command._row({**record, **sizes}, contents=True)[-2:] == ("-", "-")


def test_what_was_repaired_stands_after_the_name() -> None:
    record = dict.fromkeys(("outcome", "source", "caller", "user_id", "call_id", "name"), "x")
    sizes = {"seconds": 0.0, "round": 0, "order": 0, "arguments_size": 1, "output_size": 1}
    repairs = [{"path": "days", "from": "string", "to": "integer"}, {"path": "x", "from": "absent", "to": "null"}]
    row = calls_command._row({**record, **sizes, "repairs": repairs}, contents=False)
    assert row[-1] == "x (repaired days: string to integer)"


def test_follow_prints_each_call_as_it_ends_until_ctrl_c(bus: str, tmp_path: Path) -> None:
    words = ("calls", "--follow", "--user", "fay", "--bus", bus)
    toolbus("call", "get.weather", "city=Before", "--user", "fay", "--bus", bus)
    with Running(tmp_path, *words) as people, Running(tmp_path, *words, "--contents", "--json") as pipe:
        for following in (people, pipe):
            following.says("get.weather")
        for city in ("Rome", "Kyiv"):
            toolbus("call", "get.weather", f"city={city}", "--user", "fay", "--bus", bus)
        until_sync(lambda: "Kyiv" in pipe.out and people.out.count("get.weather") == 3, "the calls")
        for following in (people, pipe):
            following.send(signal.SIGINT)
            assert following.code() == 130
            assert following.err == ""
    found = [json.loads(line) for line in pipe.out.splitlines()]
    assert [json.loads(each["arguments"])["city"] for each in found] == ["Before", "Rome", "Kyiv"]
    assert people.out.splitlines()[0].split()[0] == "OUTCOME"
    assert [line.split()[-1] for line in people.out.splitlines()[1:]] == ["get.weather"] * 3


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_follow_prints_how_many_calls_it_lost(words: tuple[str, ...], tmp_path: Path) -> None:
    ended = 2 * MAX_RECORDS

    async def call_often(address: str) -> None:
        async with Host(address) as host:
            for _ in range(ended // 100):
                await asyncio.gather(*(host.call("toolbus:list_tasks") for _ in range(100)))

    with (
        start_grpc_bus(tmp_path, "--ephemeral") as serving,
        Running(tmp_path, "calls", "--follow", "--bus", address_of(serving), *words) as following,
    ):
        until_sync(lambda: in_flight(address_of(serving), "toolbus:calls") == 1, "the follower's question")
        following.send(signal.SIGSTOP)
        asyncio.run(call_often(address_of(serving)))
        following.send(signal.SIGCONT)
        until_sync(lambda: _told_and_lost(following) == ended, "every call, or its loss")
    assert following.out.count("toolbus:list_tasks") < ended


def _told_and_lost(following: Running) -> int:
    """Returns for how many calls of permissions a follower printed a line, or that they are lost."""
    lost = re.findall(r'"lost":(\d+)', following.out) + re.findall(r"toolbus: (\d+) calls lost", following.err)
    return following.out.count("toolbus:list_tasks") + sum(int(count) for count in lost)


def test_a_bus_ends_although_a_command_follows_its_calls(tmp_path: Path) -> None:
    with (
        start_grpc_bus(tmp_path, "--ephemeral") as serving,
        Running(tmp_path, "calls", "--follow", "--contents", "--bus", address_of(serving)) as following,
    ):
        until_sync(lambda: in_flight(address_of(serving), "toolbus:calls") == 1, "the follower's question")
        serving.send(signal.SIGINT)
        assert serving.code() == 0
        assert following.process.poll() is None  # it waits for the bus to come back
        following.send(signal.SIGINT)
        assert following.code() == 130


async def test_a_follower_gets_the_calls_that_end_while_the_bus_drains() -> None:
    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:
        release = asyncio.Event()

        @bus.tool
        async def slow() -> None:
            await release.wait()

        calls = [asyncio.create_task(bus.call("slow")) for _ in range(2)]
        request = {"follow": True, "since": 0, "wait_seconds": 30.0}
        following = asyncio.create_task(host.call("toolbus:calls", request))
        await until(lambda: bus.dispatcher.in_flight.active == 3, "both calls, and the follower's request")
        draining = asyncio.create_task(bus.drain(30.0))
        await until(lambda: bus.core.sessions.presence.draining, "the drain")
        calls[0].cancel()
        await asyncio.sleep(0.2)  # the follower looks at the first call meanwhile
        release.set()
        assert [call["outcome"] for call in (await following).unwrap()["calls"]] == ["CANCELLED", "OK"]
        await draining


async def test_a_follower_gets_the_calls_that_ended_where_another_runs_until_the_end_of_the_drain() -> None:
    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:

        @bus.tool
        async def endless() -> None:
            await asyncio.Event().wait()

        calls = [asyncio.create_task(bus.call("endless")) for _ in range(2)]
        request = {"follow": True, "since": 0, "wait_seconds": 30.0}
        following = asyncio.create_task(host.call("toolbus:calls", request))
        await until(lambda: bus.dispatcher.in_flight.active == 3, "both calls, and the follower's request")
        draining = asyncio.create_task(bus.drain(1.0))
        await until(lambda: bus.core.sessions.presence.draining, "the drain")
        calls[0].cancel()
        await draining
        assert [call["outcome"] for call in (await following).unwrap()["calls"]] == ["CANCELLED"]


@pytest.mark.parametrize("contents", [False, True])
async def test_requests_for_records_are_not_recorded_and_evict_none(contents: bool) -> None:
    async with running_bus(record_contents=contents) as bus:
        await bus.call("toolbus:list_tasks")
        for _ in range(MAX_RECORDS + 1):
            await bus.call("toolbus:calls", {"limit": 0})
        for request in ({}, {"since": 0, "wait_seconds": 0.05}):
            assert [each["name"] for each in (await bus.call("toolbus:calls", request)).output] == [
                "toolbus:list_tasks"
            ]
        assert (await bus.call("toolbus:calls", {"since": 1})).output == []
        assert (await bus.call("toolbus:calls", {"name": "toolbus:calls"})).output == []
        assert (await bus.call("toolbus:stats")).output["outcomes"] == {"OK": 1}
        assert (await bus.call("toolbus:calls", {"limit": "x"})).error is not None
        assert [(record.number, record.name) for record in bus.records] == [
            *((2, "toolbus:calls"), (1, "toolbus:list_tasks"))  # a refused request is recorded
        ]


async def test_a_number_of_an_earlier_bus_returns_all_records() -> None:
    async with running_bus() as bus:
        await bus.call("toolbus:list_tasks")
        found = (await bus.call("toolbus:calls", {"since": 1000})).output
        assert [each["number"] for each in found] == [1]


def test_contents_of_a_bus_that_records_none_are_a_note(tmp_path: Path) -> None:
    with start_grpc_bus(tmp_path, "--ephemeral") as serving:
        toolbus("call", "toolbus:list_tasks", "--bus", address_of(serving))
        ended = toolbus("calls", "--contents", "--bus", address_of(serving))
    assert ended.returncode == 0
    assert "--record-contents" in ended.stderr


async def test_the_slowest_calls_are_shown_and_levels_of_the_log_changed_for_a_while() -> None:
    async with running_bus(slow_seconds=1e-9) as bus:
        bus.tool(name="wait")(lambda: 1)
        await bus.call("wait")
        address = bus.grpc_addresses[0]
        shown = await asyncio.to_thread(toolbus, "calls", "--slow", "--bus", address)
        assert [line.split()[1:] for line in shown.stdout.splitlines()] == [
            ["OUTCOME", "SOURCE", "CALLER", "CALL", "TOOL"],
            ["ok", "local", "local", "local-1", "wait"],
        ]
        wrong = await asyncio.to_thread(toolbus, "calls", "--slow", "--follow", "--bus", address)
        assert wrong.returncode == 2
        changed = await asyncio.to_thread(
            toolbus, "log-level", "toolbus.calls", "ERROR", "--for", "60", "--bus", address
        )
        _, row = (line.split() for line in changed.stdout.splitlines())  # no other logger
        assert row[:5] == ["toolbus.calls", "error", "as", "above", "it"]
        back = await asyncio.to_thread(toolbus, "log-level", "toolbus.calls", "back", "--json", "--bus", address)
        assert json.loads(back.stdout)["changed"] == {}
        assert (await asyncio.to_thread(toolbus, "log-level", "toolbus.calls", "--bus", address)).returncode == 2
