"""Settings of councils, as hosts write them: read or refused in a sentence, and read again to the same.

The list of unknown keys is checked too, since a host shows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lab.fuzz.choices import Choices
from lab.fuzz.json_texts import REFUSED, plain, text_of
from lab.fuzz.target import Target, hold, no_faults
from toolbus.council.council_settings import CouncilSettings
from toolbus.errors import SetupError

KEYS = (
    *(
        "members",
        "enabled",
        "timeoutSeconds",
        "timeout_seconds",
        "toolsSettings",
        "tools_settings",
        "rounds",
        "concurrency",
    ),
    *("name", "id", "itemName", "tools", "probability", "prompt", "model", "userId", "\ud800", "no such key", ""),
)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        3,
        1e300,
        float("inf"),
        10**400,
        "",
        "a",
        "x" * 200,
        "\udc00",
        "30",
        [],
        {},
        ["a"],
        [1],
    ),
    *(
        {"a": 1},
        [{"name": "a"}],
        [{"name": "a"}, {"name": "a"}],
        [[]],
        [{"itemName": "b", "id": "1", "probability": 50}],
    ),
)


def _said(choose: Choices, depth: int = 0) -> Any:
    if depth == 3 or choose.byte() % 3 == 0:
        return choose.pick(VALUES)
    if choose.flag():
        return [_said(choose, depth + 1) for _ in range(choose.byte() % 3)]
    return {choose.pick(KEYS): _said(choose, depth + 1) for _ in range(choose.byte() % 4 + 1)}


def run(data: bytes) -> None:
    """Reads settings."""
    choose = Choices(data)
    if choose.flag():
        said = {choose.pick(KEYS): _said(choose) for _ in range(choose.byte() % 4 + 1)}
    else:
        said = plain(text_of(data[1:]))
        if said is REFUSED:
            return
    with no_faults():
        _read(said)


def _read(said: Any) -> None:
    try:
        settings = CouncilSettings.read(said)
    except SetupError as refusal:
        hold(str(refusal), "a refusal without a sentence")
        return
    hold(isinstance(said, dict), f"settings that are no object were taken: {said!r:.300}")
    hold(CouncilSettings.read(said) == settings, "the same settings were read otherwise the second time")
    hold(settings.changed({}) == settings, "no change changed the settings")
    hold(len({member.id for member in settings.members}) == len(settings.members), "two members have one id")
    unknown: list[str] = []
    settings.changed(said, unknown)
    known = {key: value for key, value in said.items() if str(key) not in unknown}
    hold(CouncilSettings.read(known) == settings, f"a key that is said to be unknown counts: {unknown!r:.300}")


def seeds() -> Iterator[bytes]:
    """Settings as a host writes them, and every key with every value."""
    member = {"name": "Keeper", "id": "k", "tools": ["dice"], "probability": 50}
    for said in (
        {"members": [member]},
        {"members": [member, member]},
        {"timeoutSeconds": 5, "timeout_seconds": 6},
        {"x": 1},
    ):
        yield b"\0" + json.dumps(said).encode()
    for key in range(len(KEYS)):
        for value in range(0, len(VALUES), 3):
            yield bytes([1, 0, key, 0, value])


TARGET = Target("settings", "council settings are refused in a sentence or read, and always alike", run, seeds, 1024)
