"""Reads settings of councils, as hosts write them: read or refused in a sentence, and read again to the same.

The list of unknown keys is checked too, since a host shows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lab.fuzz.choices import Choices
from lab.fuzz.json_texts import REFUSED, plain, text_of
from lab.fuzz.target import Target, hold, no_faults
from toolbus.errors import SetupError
from toolbus.parts.council.settings import CouncilSettings

_SETTINGS = "members enabled timeoutSeconds timeout_seconds toolsSettings tools_settings rounds concurrency"
KEYS = (
    *_SETTINGS.split(),
    *("name", "id", "itemName", "tools", "probability", "prompt", "model", "userId", "\ud800", "no such key", ""),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 1e300, float("inf"), 10**400, "", "a", "x" * 200, "\udc00", "30", [], {}, ["a"]),
    *([1], {"a": 1}, [{"name": "a"}], [{"name": "a"}] * 2, [[]], [{"itemName": "b", "id": "1", "probability": 50}]),
)


def _content(choose: Choices, depth: int = 0) -> Any:
    if depth == 3 or choose.byte() % 3 == 0:
        return choose.pick(VALUES)
    if choose.flag():
        return [_content(choose, depth + 1) for _ in range(choose.byte() % 3)]
    return {choose.pick(KEYS): _content(choose, depth + 1) for _ in range(choose.byte() % 4 + 1)}


def run(data: bytes) -> None:
    """Reads settings."""
    choose = Choices(data)
    if choose.flag():
        content = {choose.pick(KEYS): _content(choose) for _ in range(choose.byte() % 4 + 1)}
    else:
        content = plain(text_of(data[1:]))
        if content is REFUSED:
            return
    with no_faults():
        _read(content)


def _read(content: Any) -> None:
    try:
        settings = CouncilSettings.read(content)
    except SetupError as refusal:
        hold(str(refusal), "a refusal without a sentence")
        return
    hold(isinstance(content, dict), f"settings that are not an object were taken: {content!r:.300}")
    hold(CouncilSettings.read(content) == settings, "the same settings were read otherwise the second time")
    hold(settings.changed({}) == settings, "no change changed the settings")
    hold(len({member.id for member in settings.members}) == len(settings.members), "two members have one id")
    unknown: list[str] = []
    settings.changed(content, unknown)
    known = {key: value for key, value in content.items() if str(key) not in unknown}
    hold(CouncilSettings.read(known) == settings, f"a key that is content to be unknown counts: {unknown!r:.300}")


def seeds() -> Iterator[bytes]:
    """Settings as a host writes them, and every key with every value."""
    member = {"name": "Keeper", "id": "k", "tools": ["dice"], "probability": 50}
    for content in (
        {"members": [member]},
        {"members": [member, member]},
        {"timeoutSeconds": 5, "timeout_seconds": 6},
        {"x": 1},
    ):
        yield b"\0" + json.dumps(content).encode()
    for key in range(len(KEYS)):
        for value in range(0, len(VALUES), 3):
            yield bytes([1, 0, key, 0, value])


TARGET = Target("settings", "council settings are refused in a sentence or read, and always alike", run, seeds, 1024)
