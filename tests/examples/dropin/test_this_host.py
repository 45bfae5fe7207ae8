"""`this_host` shows the bus, and of it what the caller may see."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.examples.dropin.conftest import Folder

NOW = 1_700_000_000.0


def row(name: str, source: str, description: str = "Does it.", read_only: bool | None = None) -> dict[str, Any]:
    return {"name": name, "source": source, "description": description, "read_only": read_only}


def ended(name: str, source: str, user_id: str, outcome: str = "OK") -> dict[str, Any]:
    said = {"name": name, "source": source, "user_id": user_id, "outcome": outcome}
    return said | {"seconds": 0.25, "ended": NOW - 120, "arguments_size": 20, "output_size": 3_500_000_000}


PLUGINS = [
    {"source": "weather", "state": "attached", "sessions": 2, "in_flight": 1},
    {"source": "weather-old", "state": "offline", "sessions": 0, "in_flight": 0},
    {"source": "vault", "state": "attached", "sessions": 1, "in_flight": 0},
]
SEEN = [row("get_sun_times", "weather", read_only=True), row("get_local_time", "weather"), row("sun", "weather-old")]
CALLS = [
    ended("get_sun_times", "weather", "ann"),
    ended("get_sun_times", "weather", "ann", "TOOL"),
    ended("open", "vault", "bob"),
    ended("open", "vault", ""),
]
STATS = {"sessions": 3, "outcomes": {"OK": 38, "TOOL": 2}, "up_seconds": 7200, "held_bytes": 3_500_000_000}


@pytest.fixture
def ask(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(time, "time", lambda: NOW)
    bus = {"plugins": PLUGINS, "tools": SEEN, "recent_calls": CALLS, "stats": STATS}

    def asked(user_id: str = "ann", level: int = 0, shown: dict[str, Any] | None = None, **args: Any) -> Any:
        ways = {key: (lambda rows=rows: rows) for key, rows in {**bus, **(shown or {})}.items()}
        return folder.call("this_host", args, user_id=user_id, level=level, bus=ways)

    return asked


def test_without_a_kind_the_tools_are_shown(ask: Any) -> None:
    answer = ask()
    assert (answer["kind"], answer["count"], answer["shown"]) == ("tools", 3, 3)
    assert answer["tools"][0] == {
        "name": "get_sun_times",
        "plugin": "weather",
        "does": "Does it.",
        "only_reads": True,
    }


def test_an_unknown_kind_is_refused_with_the_known_ones(ask: Any) -> None:
    assert ask(kind="sessions") == {
        "error": "There is no kind 'sessions'. Call this_host again with one of: plugins, tools, stats, recent_calls."
    }


@pytest.mark.parametrize("kind", ["plugins", "tools", "recent_calls"])
@pytest.mark.parametrize(("limit", "shown"), [(None, 20), (0, 1), (5, 5), (500, 50)])
def test_20_rows_are_shown_and_never_more_than_50_and_all_are_counted(
    ask: Any, kind: str, limit: int | None, shown: int
) -> None:
    many = {
        "tools": [row(f"t{number}", f"s{number}") for number in range(60)],
        "plugins": [{"source": f"s{number}"} for number in range(60)],
        "recent_calls": [ended("t", "s", "ann")] * 60,
    }
    answer = ask(kind=kind, limit=limit, shown=many)
    assert (answer["count"], answer["shown"], len(answer[kind])) == (60, shown, shown)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *(("WEATHER", ["weather"]), ("weath", ["weather", "weather-old"])),
        *(("the weather plugin", ["weather"]), ("snow", [])),
    ],
)
def test_a_plugin_is_found_by_its_name_then_by_a_part_of_it(ask: Any, name: str, found: list[str]) -> None:
    answer = ask(kind="plugins", name=name)
    assert [each["plugin"] for each in answer["plugins"]] == found
    assert ("_note" in answer) is (not found)


def test_a_tool_is_found_by_its_name(ask: Any) -> None:
    assert [each["name"] for each in ask(name="sun")["tools"]] == ["sun"]
    assert [each["name"] for each in ask(name="_time")["tools"]] == ["get_sun_times", "get_local_time"]


def test_tools_of_one_plugin_are_chosen_by_its_name(ask: Any) -> None:
    assert [each["name"] for each in ask(plugin="weather")["tools"]] == ["get_sun_times", "get_local_time"]
    assert [each["name"] for each in ask(plugin="old")["tools"]] == ["sun"]


@pytest.mark.parametrize("plugin", ["vault", "nowhere"])
def test_a_hidden_plugin_and_an_unknown_one_have_the_same_answer(ask: Any, plugin: str) -> None:
    answer = ask(plugin=plugin)
    assert answer["kind"] == "plugins"
    assert [each["plugin"] for each in answer["plugins"]] == ["weather", "weather-old"]
    assert answer["_note"] == f"No plugin {plugin!r} is here. These are the plugins that there are."


@pytest.mark.parametrize(
    ("args", "fix"),
    [
        ({"kind": "tools", "outcome": "OK"}, "kind='recent_calls' and the same `outcome`, or leave `outcome` out."),
        ({"kind": "stats", "name": "sun"}, "kind='plugins' or kind='tools' and the same `name`, or leave `name` out."),
        ({"kind": "plugins", "plugin": "sun"}, "kind='tools' or kind='recent_calls' and the same `plugin`,"),
    ],
)
def test_an_argument_of_another_kind_is_refused_with_the_call_to_make_instead(
    ask: Any, args: dict[str, Any], fix: str
) -> None:
    assert fix in ask(**args)["error"]


def test_a_plugin_of_which_the_caller_may_call_nothing_is_for_operators(ask: Any) -> None:
    assert [each["plugin"] for each in ask(kind="plugins")["plugins"]] == ["weather", "weather-old"]
    everything = ask(kind="plugins", level=90)
    assert everything["count"] == 3
    assert everything["plugins"][2] == {
        "plugin": "vault",
        "state": "attached",
        "connections": 1,
        "calls_running": 0,
        "tools": 0,
    }


def test_the_calls_of_others_are_for_operators(ask: Any) -> None:
    assert [each["outcome"] for each in ask(kind="recent_calls")["recent_calls"]] == ["OK", "TOOL"]
    everyones = ask(kind="recent_calls", user_id="root", level=90)["recent_calls"]
    assert [each["for_user"] for each in everyones] == ["ann", "ann", "bob", "nobody named"]


def test_without_a_user_no_calls_are_shown(ask: Any) -> None:
    answer = ask(kind="recent_calls", user_id="")
    assert (answer["count"], answer["recent_calls"]) == (0, [])
    assert answer["_note"] == "The host did not say who is asking, so no calls are shown."


def test_arguments_cannot_set_the_caller(ask: Any, folder: Folder) -> None:
    claimed = {"kind": "recent_calls", "user": "bob", "level": 90}
    env = {"user_id": "ann", "level": 0, "bus": {"recent_calls": lambda: CALLS}}
    assert folder.call("this_host", claimed, **env)["count"] == 2
    assert "bob" not in str(folder.call("this_host", claimed, **env))


@pytest.mark.parametrize(
    ("filters", "outcomes"),
    [
        *(({"outcome": "failed"}, ["TOOL"]), ({"outcome": "ok"}, ["OK"]), ({"outcome": "tool"}, ["TOOL"])),
        *(({"plugin": "Weather"}, ["OK", "TOOL"]), ({"plugin": "vault"}, []), ({"outcome": "INTERNAL"}, [])),
    ],
)
def test_calls_are_filtered_by_outcome_and_plugin(ask: Any, filters: dict[str, str], outcomes: list[str]) -> None:
    answer = ask(kind="recent_calls", **filters)
    assert [each["outcome"] for each in answer["recent_calls"]] == outcomes
    assert answer["count"] == len(outcomes)
    assert ("_note" in answer) is (not outcomes)


def test_sizes_and_times_are_short_texts(ask: Any) -> None:
    assert ask(kind="recent_calls", limit=1)["recent_calls"] == [
        {
            "tool": "get_sun_times",
            "plugin": "weather",
            "outcome": "OK",
            "took": "250 ms",
            "ended": "2 min ago",
            "arguments": "20 bytes",
            "answer": "3.3 GiB",
        }
    ]


def test_counts_count_what_the_caller_may_see(ask: Any) -> None:
    answer = ask(kind="stats")
    assert (answer["plugins"], answer["tools"]) == (2, 3)
    assert answer["your_recent_calls"] == {"OK": 1, "TOOL": 1}
    assert "calls_since_start" not in answer


def test_operators_see_the_counts_of_the_whole_bus_and_programs_are_not_called_users(ask: Any) -> None:
    answer = ask(kind="stats", level=90)
    assert (answer["plugins"], answer["connected_programs"], answer["calls_since_start"]) == (3, 3, 40)
    assert (answer["running_for"], answer["memory_held"]) == ("2 h", "3.3 GiB")
    assert answer["_note"] == "connected_programs are programs, not people."
    fewer = ask(kind="stats", level=90, shown={"stats": {"sessions": 3, "outcomes": {}}})
    assert not {"running_for", "memory_held"} & set(fewer), "what the bus does not say is not made up"


def test_a_long_description_is_shortened_at_a_word(ask: Any) -> None:
    does = ask(shown={"tools": [row("t", "s", "Says  something\nlong. " * 30)]})["tools"][0]["does"]
    assert len(does) <= 162
    assert does.endswith(" long. Says …")


def test_without_a_bus_it_is_an_error(folder: Folder) -> None:
    assert folder.call("this_host", {"kind": "stats"}) == {
        "error": "this_host cannot see the bus from here. Tell the user so; calling it again does not help."
    }


@pytest.mark.parametrize("level", [0, 100])
def test_calls_that_read_the_bus_are_left_out(ask: Any, level: int) -> None:
    looks = [ended("toolbus:this_bus", "toolbus", "ann"), ended("this_bus", "toolbus", "ann")]
    looks += [ended("this_host", "dropin", "ann"), ended("dropin:this_host", "dropin", "ann")]
    shown = {"recent_calls": [*looks, ended("sun", "weather", "ann")]}
    answer = ask(kind="recent_calls", level=level, shown=shown)
    assert [each["tool"] for each in answer["recent_calls"]] == ["sun"]
    assert level or ask(kind="stats", shown=shown)["your_recent_calls"] == {"OK": 1}
