from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.parts.dropin.loaded_files import write
from toolbus.dropin import Loaded
from toolbus.parts.dropin.javascript import EngineLimits
from toolbus.parts.dropin.script_group import ScriptGroup

SEEDS = Path(__file__).with_name("seed_scripts")  # the examples of both systems' documents, as they are there


MEMBER = {"memberId": "m-1", "name": "Mara", "role": "Skeptic", "chance": 50}


def seed(*files: str) -> str:
    return "\n".join((SEEDS / file).read_text("utf-8") for file in files)


Load = Callable[..., Loaded]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    groups: list[ScriptGroup] = []

    def load(files: Mapping[str, str | bytes], **options: Any) -> Loaded:
        write(tmp_path, files)
        options.setdefault("limits", EngineLimits(turn_seconds=0.1, load_seconds=0.25))
        group = ScriptGroup(tmp_path, list(files), **options)
        groups.append(group)
        return group.load()

    yield load
    for group in groups:
        group.close()
