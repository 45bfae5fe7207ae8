"""Recordings: what a tool got and answered goes into a file, and is played against another build."""

from __future__ import annotations

import json
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.processes import Running, toolbus
from tests.support.waiting import until, until_sync
from toolbus import Bus, Host, Plugin
from toolbus.errors import InvalidRequest
from toolbus.parts.guards.settings import GuardRule
from toolbus.parts.recordings import recording as recording_module
from toolbus.parts.recordings.comparison import FORMAT, Volatile, differences, read_recording
from toolbus.testing import running_bus

OLD = '''
import toolbus

plugin = toolbus.Plugin("weather")

@plugin.tool
def get_weather(city: str) -> dict:
    """Weather of a city."""
    if city == "Atlantis":
        raise ValueError("no such city")
    return {"city": city, "sky": "sunny", "at": 1, "api_key": "abc"}

@plugin.tool(destructive=True)
def drop(name: str) -> str:
    """Drops a table."""
    return f"dropped {name}"
'''
NEW = OLD.replace("sunny", "grey").replace('"at": 1', '"at": 2')
BROKEN = OLD.replace('if city == "Atlantis"', 'if city != "Atlantis"')


@contextmanager
def recorded_bus(tmp_path: Path, *words: str) -> Iterator[tuple[str, Running, Path]]:
    """Runs a bus with the old plugin and a recorder in processes of their own."""
    plugin, file = tmp_path / "weather.py", tmp_path / "calls.jsonl"
    plugin.write_text(OLD, "utf-8")
    with Running(tmp_path, "dev", "run", plugin, "--grpc", "127.0.0.1:0", "--json") as bus:
        bus.says("attached")
        address = json.loads(bus.out.splitlines()[0])["grpc"][0]
        with Running(tmp_path, "record", file, "--bus", address, *words) as recorder:
            recorder.says("recording;")
            yield address, recorder, file


@pytest.fixture(scope="module")
def calls_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    with recorded_bus(folder, "--count", "4") as (address, recorder, file):
        for words in (("get_weather", "city=Oslo"), ("get_weather", "city=Atlantis"), ("drop", "name=t")):
            toolbus("call", *words, "--bus", address)
        toolbus("call", "get_weather", "city=Oslo", "--bus", address, "--user", "u-7")
        assert recorder.code() == 0
        assert "4 calls recorded" in recorder.err
    return file


def test_a_recording_has_what_tools_got_and_answered_and_no_secrets(calls_file: Path) -> None:
    first, *lines = map(json.loads, calls_file.read_text("utf-8").splitlines())
    assert (first["format"], first["version"]) == (FORMAT, 1)
    assert [each["arguments"].get("city") for each in lines] == ["Oslo", "Atlantis", None, "Oslo"]
    assert lines[0]["result"]["output"] == {"city": "Oslo", "sky": "sunny", "at": 1, "api_key": "[hidden]"}
    assert lines[1]["result"]["error"]["code"] == "TOOL"
    assert lines[3]["user_id"] == "u-7"
    assert stat.S_IMODE(calls_file.stat().st_mode) == 0o600
    again = toolbus("record", calls_file)
    assert (again.returncode, "is there already" in again.stderr) == (2, True)
    without_bus = calls_file.with_name("without_bus.jsonl")
    assert toolbus("record", without_bus, "--bus", "127.0.0.1:1").returncode == 3
    assert not without_bus.exists(), "it stands in the way of the next attempt"


def test_the_same_build_is_equal_and_another_one_is_shown_with_its_differences(
    calls_file: Path, tmp_path: Path
) -> None:
    plugin = tmp_path / "weather.py"
    plugin.write_text(OLD, "utf-8")
    same = toolbus("replay", calls_file, plugin)
    assert same.returncode == 0, same.stderr
    assert "marked destructive" in same.stderr
    plugin.write_text(NEW, "utf-8")
    other = toolbus("replay", calls_file, plugin, "--destructive")
    assert other.returncode == 1
    assert 'get_weather, line 2: changed\n  output.sky: "sunny" became "grey"\n' in other.stdout
    assert "output.at: 1 became 2" in other.stdout
    assert "left out" not in other.stderr
    ignored = ("--ignore", "sky", "--ignore", "*.at")
    described = json.loads(toolbus("replay", calls_file, plugin, *ignored, "--json").stdout)
    assert described["equal"]
    assert [(each["tool"], each["equal"], each["skipped"]) for each in described["tools"]] == [
        ("get_weather", 3, 0),
        ("drop", 0, 1),
    ]
    plugin.write_text(BROKEN, "utf-8")
    broken = json.loads(toolbus("replay", calls_file, plugin, "--json").stdout)
    assert broken["tools"][0]["failed"] == 3
    assert broken["tools"][0]["not_equal"][0]["notes"][0].startswith("output")


def test_slower_is_a_difference_where_it_is_asked_for(calls_file: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "weather.py"
    slow = OLD.replace("import toolbus", "import time, toolbus").replace("    if ", "    time.sleep(0.1)\n    if ")
    plugin.write_text(slow, "utf-8")
    assert toolbus("replay", calls_file, plugin).returncode == 0
    slower = toolbus("replay", calls_file, plugin, "--slower", "2")
    assert (slower.returncode, " slower" in slower.stdout) == (1, True)


def test_tools_that_are_gone_and_files_that_are_none_are_told(calls_file: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "weather.py"
    plugin.write_text(OLD.replace("get_weather", "other").replace("drop(", "drop2("), "utf-8")
    gone = toolbus("replay", calls_file, plugin)
    assert gone.returncode == 1  # nothing was played
    assert "no such tool is offered" in gone.stderr
    missing = toolbus("replay", tmp_path / "none.jsonl", plugin)
    assert (missing.returncode, "cannot be read" in missing.stderr) == (2, True)
    both = toolbus("replay", calls_file, plugin, "--bus", "127.0.0.1:1")
    assert (both.returncode, "leave out --bus" in both.stderr) == (2, True)


def test_a_plugin_is_played_on_a_bus_of_its_own_wherever_other_commands_find_theirs(
    calls_file: Path, tmp_path: Path
) -> None:
    (plugin := tmp_path / "weather.py").write_text(OLD, "utf-8")
    assert toolbus("replay", calls_file, plugin, TOOLBUS_ADDRESS="127.0.0.1:1").returncode == 0


def test_a_recording_goes_on_when_the_bus_is_restarted_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    address = f"unix:{tmp_path}/b.sock"
    words = ("serve", "--grpc", address, "--http", "off", "--data-dir", tmp_path / "data")
    plugin = tmp_path / "weather.py"
    plugin.write_text(OLD, "utf-8")
    with Running(tmp_path, "run", plugin, TOOLBUS_ADDRESS=address) as running, Running(tmp_path, *words) as bus:
        running.says(": attached to the bus")  # not: "not attached … yet"
        recorder = Running(tmp_path, "record", file, "--bus", address)
        with recorder:
            recorder.says("recording;")
            toolbus("call", "get_weather", "city=Oslo", "--bus", address)
            until_sync(lambda: len(file.read_text().splitlines()) == 2, "the first call")
            bus.send(signal.SIGKILL)
            bus.code()  # else it may still hold its data
            with Running(tmp_path, *words) as again:
                again.says("ready")
                for _ in range(200):  # the recorder begins anew once it has the new bus
                    toolbus("call", "get_weather", "city=Rome", "--bus", address)
                    if len(file.read_text().splitlines()) > 2:
                        break
                recorder.send(signal.SIGINT)
                assert recorder.code() == 0
    assert [json.loads(line)["arguments"]["city"] for line in file.read_text().splitlines()[1:3]] == ["Oslo", "Rome"]


# -- at the bus ------------------------------------------------------------------------------------------------------


async def read(bus: Bus, **more: Any) -> dict[str, Any]:
    result = await bus.call("toolbus:record_calls", more)
    answer: dict[str, Any] = result.unwrap()
    return answer


async def test_a_recorder_sees_what_the_tool_got_and_answered_once_beside_guards() -> None:
    rule = GuardRule("screen", "refuse", ("mail",), when="both", budget_ms=60_000)
    async with running_bus(guards=(rule,)) as bus:

        @bus.tool
        def mail(body: str) -> str:
            """Sends."""
            return f"sent {body}"

        @bus.tool(read_only=True)  # type: ignore[untyped-decorator]
        def screen(when: str) -> dict[str, Any]:
            """Changes both."""
            return {"verdict": "replace", "arguments": {"body": "clean"}, "output": "[hidden by guard]"}

        name = (await read(bus, tools=["mail"]))["recording"]
        assert (await bus.call("mail", {"body": "dirty"})).output == "[hidden by guard]"
        answer = await read(bus, recording=name)
        assert [(each["arguments"], each["result"]) for each in answer["calls"]] == [
            ({"body": "clean"}, {"output": "sent clean"})
        ]
        assert answer["lost"] == 0


async def test_recordings_are_chosen_bounded_counted_and_end_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_bus() as bus:
        plain = bus.core.calls.dispatcher.seams.interceptors
        async with Plugin("one", address=bus.grpc_addresses[0]) as plugin:

            @plugin.tool
            def big(size: int) -> str:
                """Makes a long text."""
                return "x" * size

            await plugin.ready()
            other = (await read(bus, sources=["two"]))["recording"]
            name = (await read(bus, sources=["one"]))["recording"]
            for size in (10, 20_000):
                (await bus.call("big", {"size": size})).unwrap()
            calls = (await read(bus, recording=name))["calls"]
            assert calls[0]["result"]["output"] == "x" * 10
            assert calls[1]["result"]["output"]["too_long"] == 20_002
            assert (await read(bus, recording=other, wait_seconds=0))["calls"] == []
            monkeypatch.setattr(recording_module, "MAX_WAITING", 1_000)
            for _ in range(3):
                (await bus.call("big", {"size": 700})).unwrap()
            answer = await read(bus, recording=name)
            assert (len(answer["calls"]), answer["lost"]) == (1, 2)
            for _ in range(2):
                await read(bus)
            refused = await bus.call("toolbus:record_calls", {})
            assert refused.error is not None
            assert "4 recordings run already" in refused.error.message
            monkeypatch.setattr("toolbus.parts.recordings.room.READ_SECONDS", -1.0)
            gone = await bus.call("toolbus:record_calls", {"recording": "none"})
            assert gone.error is not None
            assert "there is no recording 'none'" in gone.error.message
            await read(bus)  # drops the unread ones
            assert len(bus.core.calls.dispatcher.seams.interceptors) == len(plain) + 1


async def test_a_recording_that_nobody_ever_reads_ends_and_calls_pay_nothing_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolbus.parts.recordings.room.READ_SECONDS", 0.05)
    monkeypatch.setattr("toolbus.parts.recordings.room.LOOK_SECONDS", 0.02)
    async with running_bus() as bus:
        plain = bus.core.calls.dispatcher.seams.interceptors
        await read(bus)
        assert len(bus.core.calls.dispatcher.seams.interceptors) == len(plain) + 1
        await until(lambda: bus.core.calls.dispatcher.seams.interceptors == plain, "the end of the recording")


async def test_models_and_keys_without_the_scope_cannot_record() -> None:
    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:
        assert "record_calls" not in [each.tool.name for each in await host.list()]


# -- comparing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "ignored", "found"),
    [
        ({"a": 1}, {"a": 1.0}, [], []),
        ({"a": 1}, {"a": True}, [], ["a: 1 became true"]),
        ({"a": [1, 2]}, {"a": [1, 3, 4]}, [], ["a.1: 2 became 3", "a.2: absent became 4"]),
        ({"a": {"id": 1, "b": 2}}, {"a": {"id": 2, "b": 2}}, ["id"], []),
        ({"a": [{"id": 1}, {"id": 2}]}, {"a": [{"id": 3}, {"id": 2}]}, ["a.*.id"], []),
        ({"a": [{"id": 1}]}, {"a": [{"id": 3}]}, ["b.*.id"], ["a.0.id: 1 became 3"]),
        ({"x": {"y": {"z": 1}}}, {"x": {"y": {"z": 2}}}, ["x.**"], []),
        ({"a": None}, {}, [], ["a: null became absent"]),
    ],
)
def test_differences_name_their_place(before: Any, after: Any, ignored: list[str], found: list[str]) -> None:
    assert list(differences(before, after, Volatile(ignored))) == found


@given(st.lists(st.text(max_size=40), max_size=5))
def test_a_file_that_is_no_recording_is_refused_with_its_line(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "calls.jsonl"
    file.write_text("\n".join(lines), "utf-8", errors="replace")
    with pytest.raises(InvalidRequest):
        read_recording(file)


def test_a_line_that_was_cut_off_ends_a_recording(calls_file: Path, tmp_path: Path) -> None:
    whole = calls_file.read_text("utf-8")
    file = tmp_path / "cut.jsonl"
    file.write_text(whole[:-20], "utf-8")
    assert len(read_recording(file)) == 3
    lines = whole.splitlines()
    lines[2] = lines[2].replace('"schema"', '"sch"')
    file.write_text("\n".join(lines), "utf-8")
    with pytest.raises(InvalidRequest, match="line 3: schema is missing"):
        read_recording(file)
