"""The commands for what models and users get: records, exports, search, tasks, permissions. Real processes, one bus."""

import json
import re
import shlex
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, Running, toolbus, until
from toolbus.bus.calls.call_records import MAX_RECORDS
from toolbus.cli import calls_command, export_command, search_command, tasks_command, terminal
from toolbus.dialects import DIALECTS
from toolbus.search import MAX_RESULTS, MODES
from toolbus.testing import running_bus

PLUGIN = '''
import asyncio
from toolbus.sdk import Plugin

plugin = Plugin("weather")
released = asyncio.Event()

@plugin.tool(name="get.weather")
def get_weather(city: str, api_key: str = "") -> dict:
    """Tells the weather of a city."""
    return {"city": city}

@plugin.tool
def forecast(城市: str) -> str:
    """Tells the weather of tomorrow."""
    return 城市

@plugin.tool
async def report(year: int) -> str:
    """Writes a report; goes on until it is released."""
    await released.wait()
    if year == 13:
        raise ValueError("no report of 13")
    return f"report of {year}"

@plugin.tool(min_level=50)
def restart() -> str:
    """Restarts the station."""
    return "restarted"

@plugin.tool
async def release(again: bool = False) -> None:
    """Lets reports end."""
    released.clear() if again else released.set()
'''


def _serving(folder: Path, *words: str | Path, **env: str) -> Running:
    running = Running(folder, "serve", "--grpc", "127.0.0.1:0", "--http", "off", *words, **env)
    running.says("ready")
    return running


def _address(running: Running) -> str:
    return str(re.findall(r"127\.0\.0\.1:\d+", running.out)[0])


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a bus that keeps contents, on which the plugin above offers its tools."""
    folder = tmp_path_factory.mktemp("bus")
    (folder / "weather.py").write_text(PLUGIN, "utf-8")
    with (
        _serving(folder, "--ephemeral", "--record-contents", "--offer", "tasks", "--offer", "search") as serving,
        Running(folder, "run", folder / "weather.py", TOOLBUS_ADDRESS=_address(serving)) as plugin,
    ):
        plugin.says("with 5 tools")
        yield _address(serving)


@pytest.fixture
def unused_address() -> str:
    """An address where no server listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def _json(bus: str, *words: str) -> Any:
    ended = toolbus(*words, "--json", "--bus", bus)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


# -- calls ---------------------------------------------------------------------------------------------------------


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
    toolbus("call", "get.weather", "city=1", "--user", "bob", "--bus", bus)
    found = _json(bus, "calls", "--outcome", "invalid_arguments", "--caller", "toolbus-cli", "--user", "bob")
    assert [(each["name"], each["outcome"], each["user_id"]) for each in found] == [
        ("get.weather", "INVALID_ARGUMENTS", "bob")
    ]
    assert _json(bus, "calls", "--caller", "nobody") == []


def test_an_unknown_outcome_is_wrong_usage(bus: str) -> None:
    ended = toolbus("calls", "--outcome", "bad", "--bus", bus)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "'bad'" in ended.stderr
    assert "OK, TOOL," in ended.stderr


def test_contents_are_printed_on_request_without_secrets(bus: str) -> None:
    toolbus("call", "get.weather", "city=Lima", "api_key=abc123", "--user", "eve", "--bus", bus)
    (bare,) = _json(bus, "calls", "--user", "eve")
    assert "arguments" not in bare
    (found,) = _json(bus, "calls", "--user", "eve", "--contents")
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


def test_follow_prints_each_call_as_it_ends_until_ctrl_c(bus: str, tmp_path: Path) -> None:
    words = ("calls", "--follow", "--user", "fay", "--bus", bus)
    toolbus("call", "get.weather", "city=Before", "--user", "fay", "--bus", bus)
    with Running(tmp_path, *words) as people, Running(tmp_path, *words, "--contents", "--json") as pipe:
        for following in (people, pipe):
            following.says("get.weather")
        for city in ("Rome", "Kyiv"):
            toolbus("call", "get.weather", f"city={city}", "--user", "fay", "--bus", bus)
        until(lambda: "Kyiv" in pipe.out and people.out.count("get.weather") == 3, "the calls")
        for following in (people, pipe):
            following.send(signal.SIGINT)
            assert following.code() == 130
            assert following.err == ""
    found = [json.loads(line) for line in pipe.out.splitlines()]
    assert [json.loads(each["arguments"])["city"] for each in found] == ["Before", "Rome", "Kyiv"]
    assert people.out.splitlines()[0].split()[0] == "OUTCOME"
    assert [line.split()[-1] for line in people.out.splitlines()[1:]] == ["get.weather"] * 3


def test_a_bus_ends_although_a_command_follows_its_calls(tmp_path: Path) -> None:
    with (
        _serving(tmp_path, "--ephemeral") as serving,
        Running(tmp_path, "calls", "--follow", "--contents", "--bus", _address(serving)) as following,
    ):
        until(lambda: _in_flight(_address(serving), "toolbus:calls") == 1, "the follower's question")
        serving.send(signal.SIGINT)
        assert serving.code() == 0
        assert following.process.poll() is None  # it waits for the bus to come back
        following.send(signal.SIGINT)
        assert following.code() == 130


@pytest.mark.parametrize("contents", [False, True])
async def test_requests_for_records_are_not_recorded_and_evict_none(contents: bool) -> None:
    async with running_bus(record_contents=contents) as bus:
        await bus.call("toolbus:stats")
        for _ in range(MAX_RECORDS + 1):
            await bus.call("toolbus:calls", {"limit": 0})
        for asked in ({}, {"since": 0, "wait_seconds": 0.05}):
            assert [each["name"] for each in (await bus.call("toolbus:calls", asked)).output] == ["toolbus:stats"]
        assert (await bus.call("toolbus:calls", {"since": 1})).output == []
        assert (await bus.call("toolbus:calls", {"name": "toolbus:calls"})).output == []
        assert (await bus.call("toolbus:stats")).output["outcomes"] == {"OK": 1}
        assert (await bus.call("toolbus:calls", {"limit": "x"})).error is not None
        assert [(record.number, record.name) for record in bus.records] == [
            *((3, "toolbus:calls"), (2, "toolbus:stats"), (1, "toolbus:stats"))  # a refused request is recorded
        ]


async def test_a_number_of_an_earlier_bus_returns_all_records() -> None:
    async with running_bus() as bus:
        await bus.call("toolbus:stats")
        found = (await bus.call("toolbus:calls", {"since": 1000})).output
        assert [each["number"] for each in found] == [1]


def test_contents_of_a_bus_that_records_none_are_a_note(tmp_path: Path) -> None:
    with _serving(tmp_path, "--ephemeral") as serving:
        toolbus("call", "toolbus:stats", "--bus", _address(serving))
        ended = toolbus("calls", "--contents", "--bus", _address(serving))
    assert ended.returncode == 0
    assert "--record-contents" in ended.stderr


# -- export and search ---------------------------------------------------------------------------------------------


def test_export_prints_names_on_the_wire_tokens_and_losses(bus: str) -> None:
    ended = toolbus("export", "get.weather", "list_tasks", "--dialect", "gemini", "--bus", bus)
    assert (ended.returncode, ended.stderr) == (0, "")
    *rows, total = ended.stdout.splitlines()[1:]
    own, weather = sorted(rows, reverse=True)
    assert re.fullmatch(r"get\.weather +get\.weather +\d+", weather)
    assert re.match(r"list_tasks +list_tasks +\d+ +/properties/status: ", own)
    assert total == f"about {sum(int(row.split()[2]) for row in rows)} tokens in all"
    assert "get_weather" in toolbus("export", "get.weather", "--dialect", "openai", "--bus", bus).stdout


def test_export_prints_the_tools_of_a_request_and_lists_what_is_left_out(bus: str) -> None:
    ended = toolbus("export", "forecast", "get.weather", "--dialect", "anthropic", "--json", "--bus", bus)
    assert ended.returncode == 0
    assert [tool["name"] for tool in json.loads(ended.stdout)] == ["get_weather"]
    left_out = ended.stderr.splitlines()
    assert left_out[0].split() == ["LEFT", "OUT", "WHY"]
    assert left_out[1].startswith("forecast")
    assert "城市" in left_out[1]


def test_export_names_tools_that_are_not_offered_on_standard_error(bus: str) -> None:
    words = ("export", "get.weather", "nothing", "nothing", "--dialect", "openai", "--bus", bus)
    ended = toolbus(*words, "--user", "kim")
    assert ended.returncode == 0
    assert ended.stderr == "toolbus: not offered to user 'kim': 'nothing'; `toolbus list` shows the tools\n"
    assert "not offered: 'nothing'; " in toolbus(*words, "--json").stderr


def test_an_unknown_dialect_is_wrong_usage_that_lists_the_known_ones(unused_address: str) -> None:
    ended = toolbus("export", "--dialect", "morse", "--bus", unused_address)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "'morse'" in ended.stderr
    assert all(name in ended.stderr for name in DIALECTS)


def test_help_names_every_dialect_and_mode() -> None:
    shown = export_command.EPILOG.replace(",", " ").replace(".", " ").split()
    assert set(DIALECTS) <= set(shown)
    assert all(mode in search_command.EPILOG for mode in MODES)
    assert search_command.MAX_RESULTS == MAX_RESULTS


def test_search_finds_tools_by_what_they_do(bus: str) -> None:
    lines = toolbus("search", "weather in a city", "--top-k", "1", "--bus", bus).stdout.splitlines()
    assert lines[0].split() == ["SCORE", "NAME", "DESCRIPTION"]
    assert len(lines) == 2
    assert lines[1].split(maxsplit=2)[1:] == ["get.weather", "Tells the weather of a city."]
    found = _json(bus, "search", "tomorrow", "--mode", "keyword")
    assert [each["name"] for each in found["results"]] == ["forecast"]


def test_search_notes_when_another_mode_was_used(bus: str) -> None:
    ended = toolbus("search", "tomorrow", "--mode", "semantic", "--bus", bus)
    assert ended.returncode == 0
    assert "cannot rank by semantic, so it ranked by bm25" in ended.stderr
    assert toolbus("search", "x", "--mode", "magic", "--bus", bus).returncode == 2


# -- tasks ---------------------------------------------------------------------------------------------------------


def _start_task(bus: str, year: int, *words: str) -> str:
    """Starts a report that becomes a task; returns its id."""
    toolbus("call", "release", "again=true", "--bus", bus)
    ended = toolbus("call", "report", f"year={year}", "--background-after", "0.1", *words, "--bus", bus)
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(r"task_[0-9a-f]+\n", ended.stdout)
    assert f"`toolbus tasks await {shlex.join([ended.stdout.strip(), *words])}`" in ended.stderr
    return ended.stdout.strip()


def test_a_call_continues_as_a_task_and_is_awaited(bus: str) -> None:
    task = _start_task(bus, 2026)
    assert toolbus("tasks", "--bus", bus).stdout.splitlines()[1].split()[:2] == [task, "running"]
    running = toolbus("tasks", "check", task, "--bus", bus)
    assert running.returncode == 0
    assert re.search(rf"^{task} +running +[\d.]+ +report$", running.stdout, re.MULTILINE)
    late = toolbus("tasks", "await", task, "--timeout", "0.1", "--bus", bus)
    assert (late.returncode, late.stdout) == (1, "")
    assert f"{task} did not end in time and continues" in late.stderr
    toolbus("call", "release", "--bus", bus)
    done = toolbus("tasks", "await", task, "--bus", bus)
    assert (done.returncode, done.stdout, done.stderr) == (0, '"report of 2026"\n', "")
    assert _json(bus, "tasks", "check", task)["status"] == "completed"


def test_a_task_is_printed_with_its_latest_progress_or_its_error() -> None:
    task = {"task_id": "task_1", "status": "running", "seconds": 2.04, "tool": "report"}
    assert tasks_command._row(task) == ("task_1", "running", "2.0", "report", "")
    progress = {"done": 1.0, "total": 3.0, "message": "counting"}
    assert tasks_command._row({**task, "progress": progress})[-1] == "1/3 counting"
    assert tasks_command._row({**task, "progress": {**progress, "total": 0.0}})[-1] == "1 counting"
    assert tasks_command._row({**task, "error": "lost"})[-1] == "lost"


def test_a_task_is_shown_to_its_user_only(bus: str) -> None:
    task = _start_task(bus, 2027, "--user", "gus")
    assert [each["task_id"] for each in _json(bus, "tasks", "--user", "gus")["tasks"]] == [task]
    foreign = toolbus("tasks", "check", task, "--bus", bus)
    assert (foreign.returncode, foreign.stdout) == (1, "")
    assert foreign.stderr.startswith(f"toolbus: unknown task '{task}': `toolbus tasks` lists tasks")
    assert toolbus("tasks", "cancel", task, "--user", "gus", "--bus", bus).stdout == f"cancelled {task}\n"
    again = toolbus("tasks", "cancel", task, "--user", "gus", "--bus", bus)
    assert (again.returncode, again.stdout) == (1, "")
    assert "is failed already" in again.stderr


def test_a_failed_task_is_exit_code_1_with_its_error_text(bus: str) -> None:
    task = _start_task(bus, 13)
    toolbus("call", "release", "--bus", bus)
    ended = toolbus("tasks", "await", task, "--bus", bus)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "no report of 13" in ended.stderr


@pytest.mark.parametrize("verb", ["check", "await", "cancel"])
def test_an_unknown_task_is_one_error_in_words_of_the_command_line(verb: str, bus: str) -> None:
    ended = toolbus("tasks", verb, "task_x", "--user", "lea", "--bus", bus)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("toolbus: unknown task 'task_x' of user 'lea': `toolbus tasks --user lea` lists")
    assert ended.stderr.count("\n") == 1
    as_json = toolbus("tasks", verb, "task_x", "--json", "--bus", bus)
    assert (as_json.returncode, json.loads(as_json.stdout)["error"]["code"]) == (1, "TOOL")


def test_an_error_text_is_printed_once(bus: str) -> None:
    ended = toolbus("call", "toolbus:check_task", "task_id=task_x", "--bus", bus)
    assert ended.stderr.count("you have no task") == 1
    assert "reason=" not in ended.stderr


def test_ctrl_c_ends_the_wait_and_not_the_task(bus: str, tmp_path: Path) -> None:
    task = _start_task(bus, 2028)
    with Running(tmp_path, "tasks", "await", task, "--bus", bus) as waiting:
        until(lambda: _in_flight(bus, "toolbus:await_task") == 1, "the question")
        waiting.send(signal.SIGINT)
        assert waiting.code() == 130
        assert waiting.err == ""
    assert _json(bus, "tasks", "check", task)["status"] == "running"
    toolbus("tasks", "cancel", task, "--bus", bus)


def _in_flight(bus: str, name: str) -> int:
    tools = _json(bus, "tools")["tools"]
    return sum(each["in_flight"] for each in tools if each["name"] == name)


def test_a_call_that_ends_in_time_does_not_become_a_task(bus: str) -> None:
    ended = toolbus("call", "get.weather", "city=Oslo", "--background-after", "20", "--bus", bus)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(ended.stdout) == {"city": "Oslo"}
    assert _json(bus, "call", "get.weather", "city=Oslo", "--background-after", "20")["is_error"] is False


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("tasks", "check"), "check needs the ID of a task"),
        (("tasks", "--timeout", "1"), "--timeout needs await"),
        (("tasks", "await", "x", "--timeout", "nan"), "a number of seconds above 0"),
        (("tasks", "forget", "x"), "forget"),
        (("call", "x", "--background-after", "0"), "--background-after is 0"),
        (("call", "x", "--user", "a", "--context", "user_id=b"), "set the same field"),
        (("permit", "tools", "x"), "use exactly one of --user"),
        (("permit", "tools", "x", "--user", "a", "--nobody"), "use exactly one of --user"),
        (("permit", "tools", "x", "--user", ""), "--user is empty"),
        (("permit", "tools", "", "--nobody"), "NAME is empty"),
        (("permit", "doors", "x", "--nobody"), "doors"),
    ],
)
def test_contradicting_or_invalid_options_are_wrong_usage(
    words: tuple[str, ...], error: str, unused_address: str
) -> None:
    ended = toolbus(*words, "--bus", unused_address)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert error in ended.stderr


# -- permissions ---------------------------------------------------------------------------------------------------


def test_permit_applies_at_once_to_lists_and_calls(bus: str) -> None:
    def names(*words: str) -> set[str]:
        return {each["name"] for each in _json(bus, "list", *words)["tools"]}

    permitted = toolbus("permit", "tools", "forecast", "--user", "hal", "--user", "ida", "--bus", bus)
    assert (permitted.returncode, permitted.stdout, permitted.stderr) == (0, "tools forecast: hal, ida\n", "")
    rows = [line.split() for line in toolbus("permissions", "--bus", bus).stdout.splitlines()]
    assert rows == [["KIND", "NAME", "USERS"], ["tools", "forecast", "hal,", "ida"]]
    assert "forecast" not in names()
    assert "forecast" not in names("--user", "jim")
    assert "forecast" in names("--user", "ida")
    assert "PERMISSION_DENIED" in toolbus("call", "forecast", "城市=Oslo", "--user", "jim", "--bus", bus).stderr
    assert toolbus("call", "forecast", "城市=Oslo", "--user", "hal", "--bus", bus).stdout == '"Oslo"\n'
    assert _json(bus, "search", "tomorrow", "--user", "jim")["results"] == []
    for option, users, who in (("--nobody", [], "(nobody)"), ("--everyone", ["*"], "(everyone)")):
        assert toolbus("permit", "tools", "forecast", option, "--bus", bus).stdout == f"tools forecast: {who}\n"
        assert _json(bus, "permissions")["tools"] == {"forecast": users}
    assert _json(bus, "permit", "tools", "forecast", "--no-rule") == {"tools": {}, "roles": {}, "sources": {}}
    assert "forecast" in names()


def test_a_rule_for_an_unknown_tool_is_noted(bus: str) -> None:
    for option in ("--nobody", "--everyone", "--user=hal"):
        permitted = toolbus("permit", "tools", "nothing", option, "--bus", bus)
        assert permitted.returncode == 0
        assert permitted.stderr == (
            "toolbus: no source offers such a tool now: the rule for 'nothing' applies as soon as one does\n"
        )
    for words in (
        ("tools", "nothing", "--no-rule"),
        ("sources", "nobody", "--nobody"),
        ("sources", "nobody", "--no-rule"),
    ):
        assert toolbus("permit", *words, "--bus", bus).stderr == ""


def test_the_permissions_of_the_documents_apply_and_permit_is_kept_over_a_restart(tmp_path: Path) -> None:
    (text,) = re.findall(
        r"^```toml\n(.*?)^```$", (ROOT / "docs/start/permissions.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    file = tmp_path / "toolbus.toml"
    file.write_text(text, "utf-8")
    words = ("--config", file, "--data-dir", tmp_path / "data")
    with _serving(tmp_path, *words) as serving:
        tables = _json(_address(serving), "permissions")
        assert tables.pop("silenced") == []
        assert all(tables.values())
        offered = [each["name"] for each in _json(_address(serving), "list")["tools"]]
        assert offered == ["check_task", "await_task", "list_tasks", "cancel_task", "search_tools"]
        toolbus("permit", "sources", "more", "--nobody", "--bus", _address(serving))
        serving.send(signal.SIGTERM)
        assert serving.code() == 0
    with _serving(tmp_path, *words) as serving:
        again = _json(_address(serving), "permissions")
    assert again == {**tables, "sources": {**tables["sources"], "more": []}, "silenced": []}


def test_an_unknown_group_of_tools_is_wrong_usage() -> None:
    ended = toolbus("serve", "--ephemeral", "--offer", "drain")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "'drain'" in ended.stderr
    assert "tasks and search" in ended.stderr


# -- every command --------------------------------------------------------------------------------------------

COMMANDS = (
    *(("export", "--dialect", "mcp"), ("search", "x"), ("tasks",), ("tasks", "await", "x"), ("permissions",)),
    *(("permit", "tools", "x", "--nobody"), ("calls", "--follow")),
)


@pytest.mark.parametrize("words", COMMANDS)
def test_no_bus_is_exit_code_3(words: tuple[str, ...], unused_address: str) -> None:
    ended = toolbus(*words, "--bus", unused_address)
    assert ended.returncode == 3
    assert f"no bus at {unused_address}" in ended.stderr


@pytest.mark.parametrize("command", ["export", "search", "tasks", "permissions", "permit", "calls"])
def test_help_shows_examples_and_exit_codes(command: str) -> None:
    shown = toolbus(command, "--help").stdout
    assert all(part in shown for part in ("Examples", "Exit codes:", "--json", f"toolbus {command}"))


@pytest.mark.parametrize("words", [("list", "--user"), ("call", "x", "--user"), ("export", "--dialect", "mcp")])
def test_options_that_are_not_utf_8_are_wrong_usage(words: tuple[str, ...], bus: str) -> None:
    ended = toolbus(*words, "\udcff", "--bus", bus)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "toolbus: '\\udcff' is not UTF-8: write it in the terminal's encoding\n"


def test_control_characters_in_a_row_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_row(["a\x1b[31m", "b\nc"], [8, 0])
    assert capsys.readouterr().out == "a\N{REPLACEMENT CHARACTER}[31m    b c\n"


# -- levels ----------------------------------------------------------------------------------------------------------


def test_a_tool_with_a_min_level_is_found_with_that_level_only(bus: str) -> None:
    for words, visible in (((), False), (("--level", "49"), False), (("--level", "50"), True)):
        listed = [each["name"] for each in _json(bus, "list", *words)["tools"]]
        found = [each["name"] for each in _json(bus, "search", "restart the station", *words)["results"]]
        called = toolbus("call", "restart", *words, "--bus", bus)
        exported = toolbus("export", "restart", "--dialect", "openai", *words, "--bus", bus).stdout
        assert ["restart" in each for each in (listed, found, called.stdout, exported)] == [visible] * 4
        assert called.returncode == (0 if visible else 1)


def test_a_level_that_is_set_twice_or_invalid_is_refused(bus: str) -> None:
    for words in (("--level", "5", "--context", "level=3"), ("--level", "-1"), ("--level", "high")):
        assert toolbus("call", "restart", *words, "--bus", bus).returncode == terminal.USAGE


# -- grant and revoke -----------------------------------------------------------------------------------------------


def test_a_source_loses_its_tools_and_gets_them_back(bus: str) -> None:
    revoked = toolbus("revoke", "weather", "--bus", bus)
    assert (revoked.stdout, revoked.stderr) == ("weather may not offer tools; 5 withdrawn\n", "")
    assert [each["source"] for each in _json(bus, "list")["tools"] if each["source"] == "weather"] == []
    assert "may not offer tools" in toolbus("permissions", "--bus", bus).stdout
    called = toolbus("call", "forecast", "城市=x", "--bus", bus)
    assert (called.returncode, "is withdrawn" in called.stderr) == (1, True)
    assert toolbus("grant", "weather", "--bus", bus).stdout == "weather may offer tools\n"
    until(lambda: len([each for each in _json(bus, "list")["tools"] if each["source"] == "weather"]) == 4, "its tools")


def test_revoking_from_an_absent_source_is_noted_and_from_an_invalid_one_refused(bus: str) -> None:
    revoked = toolbus("revoke", "wether", "--bus", bus)
    assert (revoked.returncode, "source 'wether' is not attached now" in revoked.stderr) == (0, True)
    assert _json(bus, "permissions")["silenced"] == ["wether"]
    assert toolbus("grant", "wether", "--bus", bus).returncode == 0
    refused = toolbus("revoke", "dropin:*", "--bus", bus)
    assert (refused.returncode, "breaks the rule" in refused.stderr) == (1, True)
