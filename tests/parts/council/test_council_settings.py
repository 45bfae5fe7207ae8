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
    settings = CouncilSettings()
    assert (settings.mode, settings.timeout_seconds, settings.sidecar_context_window) == ("sidecar", 30.0, 25)
    assert (settings.include_user_persona, settings.include_character_info, settings.include_world_info) == (
        True,
        True,
        True,
    )
    off = (
        "exclude_latest_user_message",
        "allow_user_control",
        "retain_results_for_regens",
        "parallel",
        "plan_arguments",
    )
    assert [name for name in off if getattr(settings, name)] == []
    assert (settings.max_words_per_tool, settings.result_bytes) == (250, 65536)


def test_settings_of_the_original_are_read_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    settings = CouncilSettings.read(ORIGINAL)
    assert settings == CouncilSettings(
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


def test_our_own_spelling_means_the_same_in_toml_and_json(tmp_path: Path) -> None:
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
    settings = CouncilSettings.load(tmp_path / "council.toml")
    assert settings == CouncilSettings.load(str(tmp_path / "council.json"))
    assert settings.members[0] == Member(id="Ann", name="Ann", tools=("look",), gender_identity=0, avatar_url="/a.png")


def test_a_timeout_below_the_minimum_is_raised_to_it_and_the_minimum_can_be_lowered() -> None:
    assert CouncilSettings(timeout_seconds=1).timeout_seconds == 15.0
    assert CouncilSettings.read({"timeoutMs": 0}).timeout_seconds == 15.0
    assert CouncilSettings(timeout_seconds=1, least_timeout_seconds=0.5).timeout_seconds == 1.0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"mode": "loud"}, "council settings: mode is 'loud', it must be one of sidecar, inline"),
        ({"timeoutMs": 300_001}, "timeoutMs is 300001, it must be a number from 0 to 300000"),
        ({"timeoutMs": "30"}, "timeoutMs is '30', it must be a number from 0 to 300000: write it without"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds is nan, it must be a number"),
        ({"timeoutMs": 1, "timeout_seconds": 1}, "keep one of timeoutMs and timeout_seconds"),
        (
            {"timeoutMs": 1, "toolsSettings": {"timeoutMs": 1}},
            "timeoutMs is 1, it is set a second time within toolsSettings",
        ),
        ({"sidecarContextWindow": 0}, "sidecarContextWindow is 0, it must be a whole number of at least 1"),
        ({"maxWordsPerTool": 2.5}, "maxWordsPerTool is 2.5, it must be a whole number"),
        ({"result_bytes": 10}, "result_bytes is 10, it must be a whole number of at least 1024"),
        ({"parallel": 1}, "parallel is 1, it must be true or false"),
        ({"members": {"name": "Ann"}}, "members is {'name': 'Ann'}, it must be a list"),
        ({"toolsSettings": []}, "toolsSettings is [], it must be an object"),
        ([], "council settings is [], it must be an object"),
        ({"members": [{"name": "Ann"}, {"name": "Ann"}]}, "members[1].id is 'Ann', it is the id of two members"),
        ({"members": [{"id": "x"}]}, "members[0]: it has no name: give it one"),
        ({"members": [{"name": "A"}, 7]}, "members[1] is 7, it must be an object"),
        (
            {"members": [{"itemName": "Ann", "chance": 101}]},
            "members[0] 'Ann': chance is 101, it must be a number from 0 to 100",
        ),
        ({"members": [{"name": "Ann", "chance": True}]}, "members[0] 'Ann': chance is True, it must be a number"),
        ({"members": [{"name": "Ann", "role": 5}]}, "members[0] 'Ann': role is 5, it must be text: put it in quotes"),
        (
            {"members": [{"name": "Ann", "tools": "look"}]},
            "members[0] 'Ann': tools is 'look', it must be a list: put [ and ] around it",
        ),
        ({"members": [{"name": "Ann", "tools": [""]}]}, "members[0] 'Ann': tools[0] is '', it must be a name"),
        (
            {"members": [{"name": "Ann", "genderIdentity": 4}]},
            "genderIdentity is 4, it must be a whole number from 0 to 3",
        ),
        (
            {"members": [{"name": "Ann", "toolHistoryRetention": {"look": 11}}]},
            "members[0] 'Ann': toolHistoryRetention.look is 11, it must be a whole number from 0 to 10",
        ),
        ({"members": [{"name": "Ann", "history_retention": 3}]}, "history_retention is 3, it must be an"),
    ],
)
def test_a_bad_value_is_refused_with_its_place_its_rule_and_how_to_fix_it(settings: Any, sentence: str) -> None:
    with pytest.raises(SetupError) as caught:
        CouncilSettings.read(settings)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("council settings")


@pytest.mark.parametrize(
    ("settings", "loc"),
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
def test_an_error_has_the_keys_that_lead_to_its_value(settings: Any, loc: tuple[str | int, ...]) -> None:
    with pytest.raises(SetupError) as caught:
        CouncilSettings.read(settings)
    assert caught.value.loc == loc


def test_unknown_keys_are_ignored_and_named_in_one_warning_with_the_nearest_known_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        settings = CouncilSettings.read({"members": [{"name": "Ann", "mood": "grim"}], "colour": 1, "paralel": 2})
    assert settings == CouncilSettings(members=(Member(id="Ann", name="Ann"),))
    assert [each.getMessage() for each in caplog.records] == [
        "council settings: unknown keys are ignored: colour, paralel (did you mean parallel?), members[0].mood",
    ]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("none.json", None, "No such file"),
        ("bad.json", b"{", "cannot be parsed"),
        ("bad.toml", b"mode", "cannot be parsed"),
        ("bytes.json", b"\xff\xfe", "cannot be parsed"),
        ("deep.json", b"[" * 200_000, "nested too deep"),
        ("mode.json", b'{"mode": "loud"}', "council settings: mode is 'loud'"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(
    tmp_path: Path, name: str, content: bytes | None, sentence: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SetupError) as caught:
        CouncilSettings.load(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert sentence in str(caught.value)


def test_a_member_can_be_read_by_itself() -> None:
    assert read_member({"memberId": "row", "name": "Ann", "role": None}) == Member(id="row", name="Ann")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"timeout_seconds": "30"},
            "timeout_seconds is '30', it must be a number from 0 to 300: write it without quotes",
        ),
        ({"sidecar_context_window": 2.5}, "sidecar_context_window is 2.5, it must be a whole number"),
        ({"result_bytes": True}, "result_bytes is True, it must be a whole number"),
        ({"parallel": "no"}, "parallel is 'no', it must be true or false"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_the_constructor_too(settings: Any, sentence: str) -> None:
    with pytest.raises(SetupError, match=re.escape(sentence)):
        CouncilSettings(**settings)
