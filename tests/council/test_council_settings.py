from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from toolbus.errors import SetupError
from toolbus.extension import CouncilSettings, Member, read_member

# As a host of the original keeps it.
ORIGINAL: dict[str, Any] = {
    "councilMode": True,
    "members": [
        {
            "id": "row-1",
            "packId": "p",
            "packName": "Pack",
            "itemId": "i",
            "itemName": "Ann",
            "tools": ["ext:look", "suggest_direction", "ext:look"],
            "role": "Scout",
            "chance": 75,
            "toolHistoryRetention": {"ext:look": 3},
        }
    ],
    "toolsSettings": {
        "enabled": True,
        "mode": "inline",
        "timeoutMs": 45000,
        "sidecarContextWindow": 8,
        "excludeLatestUserMessage": True,
        "includeUserPersona": False,
        "includeCharacterInfo": False,
        "includeWorldInfo": False,
        "allowUserControl": True,
        "maxWordsPerTool": 0,
        "retainResultsForRegens": True,
        "sidecar": {"model": "read elsewhere"},
    },
}


def test_the_defaults_are_those_of_the_original() -> None:
    said = CouncilSettings()
    assert (said.mode, said.timeout_seconds, said.sidecar_context_window) == ("sidecar", 30.0, 25)
    assert (said.include_user_persona, said.include_character_info, said.include_world_info) == (True, True, True)
    off = (
        "exclude_latest_user_message",
        "allow_user_control",
        "retain_results_for_regens",
        "parallel",
        "plan_arguments",
    )
    assert [name for name in off if getattr(said, name)] == []
    assert (said.max_words_per_tool, said.result_bytes) == (250, 65536)


def test_settings_of_the_original_are_read_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    said = CouncilSettings.read(ORIGINAL)
    assert said == CouncilSettings(
        members=(
            Member(
                id="row-1",
                name="Ann",
                tools=("ext:look", "suggest_direction"),
                role="Scout",
                chance=75.0,
                item_id="i",
                pack_id="p",
                pack_name="Pack",
                history_retention={"ext:look": 3},
            ),
        ),
        mode="inline",
        timeout_seconds=45.0,
        sidecar_context_window=8,
        exclude_latest_user_message=True,
        include_user_persona=False,
        include_character_info=False,
        include_world_info=False,
        allow_user_control=True,
        max_words_per_tool=0,
        retain_results_for_regens=True,
    )
    assert caplog.records == []


def test_our_own_spelling_says_the_same_in_toml_as_in_json(tmp_path: Path) -> None:
    (tmp_path / "council.toml").write_text(
        'mode = "sidecar"\ntimeout_seconds = 20\nparallel = true\n'
        '[[members]]\nname = "Ann"\ntools = ["look"]\ngender_identity = 0\navatar_url = "/a.png"\n'
    )
    (tmp_path / "council.json").write_text(
        "\ufeff"
        + json.dumps(
            {
                "tools_settings": {"timeoutMs": 20_000, "parallel": True, "max_words_per_tool": None},
                "members": [{"name": "Ann", "tools": ["look"], "genderIdentity": 0, "avatarUrl": "/a.png"}],
            }
        )
    )
    said = CouncilSettings.load(tmp_path / "council.toml")
    assert said == CouncilSettings.load(str(tmp_path / "council.json"))
    assert said.members[0] == Member(id="Ann", name="Ann", tools=("look",), gender_identity=0, avatar_url="/a.png")


def test_a_time_below_the_floor_is_raised_to_it_and_the_floor_can_be_lowered() -> None:
    assert CouncilSettings(timeout_seconds=1).timeout_seconds == 15.0
    assert CouncilSettings.read({"timeoutMs": 0}).timeout_seconds == 15.0
    assert CouncilSettings(timeout_seconds=1, least_timeout_seconds=0.5).timeout_seconds == 1.0


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"mode": "loud"}, "council settings: mode: 'loud' is no mode: say sidecar or inline"),
        (
            {"timeoutMs": 300_001},
            "timeout_seconds: 300.001 is not from 0 to 300 seconds: give it 0 to 300, or in ms 0 to 300000",
        ),
        ({"timeoutMs": "30"}, "timeoutMs: '30' is no number: write one, without quotes"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds: nan is no number"),
        ({"timeoutMs": 1, "timeout_seconds": 1}, "timeout_seconds: 1 says timeout_seconds a second time"),
        ({"timeoutMs": 1, "toolsSettings": {"timeoutMs": 1}}, "timeout_seconds: 0.001 is said twice"),
        ({"sidecarContextWindow": 0}, "sidecar_context_window: 0 is less than 1: give it 1 or more"),
        ({"maxWordsPerTool": 2.5}, "maxWordsPerTool: 2.5 is no whole number"),
        ({"result_bytes": 10}, "result_bytes: 10 is less than 1024"),
        ({"parallel": 1}, "parallel: 1 is neither true nor false"),
        ({"members": {"name": "Ann"}}, "members: {'name': 'Ann'} is no list"),
        ({"toolsSettings": []}, "toolsSettings: [] is no object"),
        ([], "council settings: [] is no object"),
        ({"members": [{"name": "Ann"}, {"name": "Ann"}]}, "members: 'Ann' is the id of two members"),
        ({"members": [{"id": "x"}]}, "members[0]: has no name: give it one"),
        ({"members": [{"name": "A"}, 7]}, "members[1]: 7 is no object"),
        (
            {"members": [{"itemName": "Ann", "chance": 101}]},
            "members[0] 'Ann': chance: 101 is not from 0 to 100: give it 0 to 100",
        ),
        ({"members": [{"name": "Ann", "chance": True}]}, "members[0] 'Ann': chance: True is no number"),
        ({"members": [{"name": "Ann", "role": 5}]}, "members[0] 'Ann': role: 5 is no text: put it in quotes"),
        ({"members": [{"name": "Ann", "tools": "look"}]}, "members[0] 'Ann': tools: 'look' is no list"),
        ({"members": [{"name": "Ann", "tools": [""]}]}, "members[0] 'Ann': tools: '' names no tool"),
        ({"members": [{"name": "Ann", "genderIdentity": 4}]}, "genderIdentity: 4 is not from 0 to 3"),
        (
            {"members": [{"name": "Ann", "toolHistoryRetention": {"look": 11}}]},
            "members[0] 'Ann': toolHistoryRetention: look: 11 is not from 0 to 10",
        ),
        ({"members": [{"name": "Ann", "history_retention": 3}]}, "history_retention: 3 is no object"),
    ],
)
def test_a_bad_value_is_refused_with_its_place_its_rule_and_the_cure(said: Any, sentence: str) -> None:
    with pytest.raises(SetupError) as refused:
        CouncilSettings.read(said)
    assert sentence in str(refused.value)
    assert str(refused.value).startswith("council settings: ")


@pytest.mark.parametrize(
    ("said", "loc"),
    [
        ({"mode": "loud"}, ("mode",)),
        ({"timeoutMs": 300_001}, ("timeoutMs",)),
        ({"toolsSettings": {"timeoutMs": 300_001}}, ("toolsSettings", "timeoutMs")),
        ({"toolsSettings": {"parallel": 1}}, ("toolsSettings", "parallel")),
        ({"members": [{"name": "Ann"}, {"name": "Ann"}]}, ("members", 1, "id")),
        ({"members": [{"id": "x"}]}, ("members", 0, "name")),
        ({"members": [{"name": "A"}, 7]}, ("members", 1)),
        ({"members": [{"name": "A", "tools": ["x", ""]}]}, ("members", 0, "tools", 1)),
        ({"members": [{"name": "A", "chance": 101}]}, ("members", 0, "chance")),
        ({"members": [{"name": "A", "toolHistoryRetention": {"x": 11}}]}, ("members", 0, "toolHistoryRetention", "x")),
        ({"timeoutMs": 1, "timeout_seconds": 1}, ("timeout_seconds",)),
        ({"timeoutMs": 1, "toolsSettings": {"timeoutMs": 1}}, ("timeoutMs",)),
    ],
)
def test_a_fault_names_the_keys_that_lead_to_it(said: Any, loc: tuple[str | int, ...]) -> None:
    with pytest.raises(SetupError) as refused:
        CouncilSettings.read(said)
    assert refused.value.loc == loc


def test_unknown_keys_are_left_out_and_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        said = CouncilSettings.read({"members": [{"name": "Ann", "mood": "grim"}], "colour": 1, "fontSize": 2})
    assert said == CouncilSettings(members=(Member(id="Ann", name="Ann"),))
    assert [each.getMessage() for each in caplog.records] == [
        "members[0] 'Ann': nothing is known of mood; they are left out",
        "council settings: nothing is known of colour, fontSize; they are left out",
    ]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("none.json", None, "No such file"),
        ("bad.json", b"{", "cannot be read"),
        ("bad.toml", b"mode", "cannot be read"),
        ("bytes.json", b"\xff\xfe", "cannot be read"),
        ("deep.json", b"[" * 200_000, "nested too deep"),
        ("mode.json", b'{"mode": "loud"}', "council settings: mode: 'loud' is no mode"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(
    tmp_path: Path, name: str, content: bytes | None, sentence: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SetupError) as refused:
        CouncilSettings.load(file)
    assert str(refused.value).startswith(f"{file}: ")
    assert sentence in str(refused.value)


def test_a_member_can_be_read_by_itself() -> None:
    assert read_member({"memberId": "row", "name": "Ann", "role": None}) == Member(id="row", name="Ann")


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"timeout_seconds": "30"}, "timeout_seconds: '30' is no number: write one, without quotes"),
        ({"sidecar_context_window": 2.5}, "sidecar_context_window: 2.5 is no whole number"),
        ({"result_bytes": True}, "result_bytes: True is no number"),
        ({"parallel": "no"}, "parallel: 'no' is neither true nor false"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_the_constructor_too(said: Any, sentence: str) -> None:
    with pytest.raises(SetupError, match=re.escape(sentence)):
        CouncilSettings(**said)
