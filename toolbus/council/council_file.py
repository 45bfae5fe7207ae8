"""The file that gives a bus its council: members and settings, the model beside the conversation, prompt tools.

TOML or JSON. What it says of members and settings `settings.py` reads, of the model `sidecar.py`. The model's API key
comes from the environment and never from a file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolbus.council.council_settings import CouncilSettings, read_file
from toolbus.council.language_model import LanguageModel
from toolbus.council.prompt_tool import PromptTool, bundled_prompt_tools, read_prompt_tools
from toolbus.council.sidecar import API_KEY_VARIABLE, SidecarSettings, sidecar_model
from toolbus.errors import SetupError

_SIDECARS = ("sidecar", "sidecarSettings", "sidecar_settings")
_TOOLS_SETTINGS = ("toolsSettings", "tools_settings")


@dataclass(frozen=True, slots=True)
class CouncilFile:
    """What a council is made of.

    Attributes:
        sidecar: the settings of the model.
        model: it; None where the settings name none.
        prompt_tools: those of files, then the bundled ones, so that these count where a name comes twice.
    """

    settings: CouncilSettings = field(default_factory=CouncilSettings)
    sidecar: SidecarSettings = field(default_factory=SidecarSettings)
    model: LanguageModel | None = field(default=None, repr=False)
    prompt_tools: tuple[PromptTool, ...] = field(default_factory=bundled_prompt_tools, repr=False)

    @classmethod
    def load(cls, path: Path, environ: Mapping[str, str] = os.environ) -> CouncilFile:
        """Reads a file, and the files that it names.

        Args:
            environ: has the API key of the model, under `API_KEY_VARIABLE`.

        Raises:
            SetupError: naming the file, the value, the rule and the cure.
        """
        return read_file(path, lambda said: _read(said, path.parent, environ))


def _read(said: Any, folder: Path, environ: Mapping[str, str]) -> CouncilFile:
    if not isinstance(said, Mapping):
        raise SetupError("it holds no object: give names with values, such as members")
    left = dict(said)
    sidecar = _sidecar(left)
    connections = _connections(left.pop("connections", None))
    prompt_tools = _prompt_tools(left.pop("prompt_tools", None), folder)
    bundled = left.pop("bundled", True)
    if not isinstance(bundled, bool):
        raise SetupError(f"bundled is {bundled!r:.80}, it must be true or false: write one of them, without quotes")
    return CouncilFile(
        settings=CouncilSettings.read(left),
        sidecar=sidecar,
        model=sidecar_model(sidecar, api_key=environ.get(API_KEY_VARIABLE), connections=connections),
        prompt_tools=(*prompt_tools, *(bundled_prompt_tools() if bundled else ())),
    )


def _sidecar(left: dict[str, Any]) -> SidecarSettings:
    """Takes the settings of the model out of a file's content, wherever the hosts of that system keep them."""
    found = {name: left.pop(name) for name in _SIDECARS if left.get(name) is not None}
    for name in _TOOLS_SETTINGS:
        tools_settings = left.get(name)
        if isinstance(tools_settings, Mapping) and tools_settings.get("sidecar") is not None:
            found[f"{name}.sidecar"] = tools_settings["sidecar"]
    if len(found) > 1:
        raise SetupError(f"the model is described under {' and '.join(found)}, which mean the same: keep one")
    said: Any = next(iter(found.values()), {})
    return SidecarSettings.read(said)


def _connections(said: Any) -> dict[str, str]:
    if said is None:
        return {}
    if not isinstance(said, Mapping) or not all(isinstance(url, str) for url in said.values()):
        raise SetupError('connections must be a table of URLs by name: write home = "http://127.0.0.1:8080/v1"')
    return {str(name): url for name, url in said.items()}


def _prompt_tools(said: Any, folder: Path) -> tuple[PromptTool, ...]:
    """Reads the files that are named; one tool that is broken is logged, a file with no other is refused."""
    if said is None:
        return ()
    if not isinstance(said, list) or not all(isinstance(each, str) and each for each in said):
        raise SetupError(f'prompt_tools are {said!r:.80}, they must be a list of files and folders: write ["prompts"]')
    found: list[PromptTool] = []
    for each in said:
        if not (folder / each).exists():
            raise SetupError(f"prompt_tools: {folder / each} is not there: write it, or name a file or folder that is")
        read = read_prompt_tools(folder / each)
        if not read.tools:
            why = "; ".join(read.problems) or f"{folder / each} holds none: name the file or folder that has them"
            raise SetupError(f"prompt_tools: {why}")
        found += read.tools
    return tuple(found)
