"""``toolbus list``, ``watch`` and ``tools``: tables, JSON and changes."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.processes import Running, toolbus
from tests.support.served_bus import addresses_of, post, register, start_http_bus
from tests.support.waiting import HANG_SECONDS, until_sync
from toolbus.cli import catalog_commands
from toolbus.protocol.tool import Tool
from toolbus.sdk.listing import ListedTool


def test_list_prints_an_aligned_table_outside_of_a_terminal(bus: str) -> None:
    lines = toolbus("list", "get_weather", "nap", "--bus", bus).stdout.splitlines()
    assert lines[0].split() == ["NAME", "STATE", "SOURCE", "ROLES", "SESSIONS", "IN", "FLIGHT", "DESCRIPTION"]
    assert lines[1].split()[:6] == ["get_weather", "live", "weather", "default", "1", "0"]
    assert lines[1].endswith("Tells the weather of a city.")
    assert lines[2].startswith("nap          live   weather")


def test_list_prints_one_json_document(bus: str) -> None:
    found = json.loads(toolbus("list", "--source", "weather", "--json", TOOLBUS_ADDRESS=bus).stdout)
    assert found["revision"] > 0
    first = found["tools"][0]
    assert (first["name"], first["state"], first["source"]) == ("get_weather", "live", "weather")
    assert first["parameters"]["required"] == ["city"]
    assert toolbus("list", "--source", "nobody", "--json", "--bus", bus).stdout.count('"name"') == 0


def test_lists_and_calls_go_over_the_lane_and_import_no_grpc(bus: str) -> None:
    shows = "import sys, toolbus.cli\ntry: toolbus.cli.main()\nfinally: print('grpc' in sys.modules, file=sys.stderr)"
    for words in (["list"], ["tools"], ["call", "get_weather", '{"city": "Oslo"}']):
        command = [sys.executable, "-c", shows, *words, "--bus", bus]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr.splitlines()[-1] == "False", words


def test_only_tools_lists_the_buss_own_tools(bus: str) -> None:
    names = [tool["name"] for tool in json.loads(toolbus("tools", "--json", "--bus", bus).stdout)["tools"]]
    assert "toolbus:drain" in names
    assert "toolbus:" not in toolbus("list", "--all", "--bus", bus).stdout


def test_watch_prints_all_tools_and_then_changes_until_ctrl_c(bus: str, tmp_path: Path) -> None:
    file = tmp_path / "more.py"
    file.write_text("from toolbus.sdk import llm_tool\n@llm_tool(description='')\ndef more() -> int:\n    return 1\n")
    with Running(tmp_path, "watch", "--bus", bus) as people, Running(tmp_path, "watch", "--json", "--bus", bus) as pipe:
        people.says("+ get_weather live weather\n")
        pipe.says('"full":true')
        with Running(tmp_path, "run", file, "--bus", bus):
            people.says("+ more live plugin:more\n")
        people.says("- more gone plugin:more\n")
        until_sync(lambda: '"removed":[{"name":"more"' in pipe.out, "the last change")
        for watching in (people, pipe):
            watching.send(signal.SIGINT)
            assert watching.code() == 130
            assert watching.err == ""
    changes = [json.loads(line) for line in pipe.out.splitlines()]
    assert [change["full"] for change in changes] == [True, *[False] * (len(changes) - 1)]


def test_callback_tools_are_listed_with_their_url_and_offline_after_three_failures(
    tmp_path: Path, dead_url: str
) -> None:
    home = tmp_path / "home"
    with start_http_bus(tmp_path, "--ephemeral", HOME=str(home), XDG_DATA_HOME=str(home / "share")) as serving:
        grpc, http = addresses_of(serving)
        register(http, "天気", dead_url)
        found = json.loads(toolbus("list", "--json", "--bus", grpc).stdout)["tools"]
        assert [(each["name"], each["state"], each["source"], each["callback_url"]) for each in found] == [
            ("天気", "live", "legacy", dead_url)
        ]
        assert found[0]["warnings"] == []
        for _ in range(3):
            post(http, "/api/tools/invoke", {"name": "天気"})
        assert "天気" not in toolbus("list", "--bus", grpc).stdout
        lines = toolbus("list", "--all", "--bus", grpc).stdout.splitlines()
        assert lines[1].split()[:3] == ["天気", "offline", "legacy"]
        assert "accepts no connection" in lines[1]
    assert not home.exists()  # nothing was stored


def _listed(**more: Any) -> ListedTool:
    return ListedTool(Tool("t", "Does it."), "s", "live", ("default",), "hash", sessions=1, **more)


def test_warnings_come_before_the_description_and_the_last_error() -> None:
    assert catalog_commands._row(_listed())[-1] == "Does it."
    assert catalog_commands._row(_listed(warnings=("a", "b")))[-1] == "(warning: a) (warning: b) Does it."
    assert catalog_commands._row(_listed(warnings=("a",), last_error="lost"))[-1] == "(warning: a) (lost) Does it."
    assert catalog_commands.as_record(_listed(warnings=("a",)))["warnings"] == ("a",)
