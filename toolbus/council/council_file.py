"""Reads the file that gives a bus its council: members and settings, the sidecar model, prompt tools.

TOML or JSON. `council_settings.py` reads members and settings, `sidecar.py` the model's settings. The model's API key
comes from the environment and never from a file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolbus.council.council_settings import CouncilSettings
from toolbus.council.language_model import LanguageModel
from toolbus.council.prompt_files import bundled_prompt_tools, read_prompt_tools
from toolbus.council.prompt_tool import PromptTool
from toolbus.council.sidecar import sidecar_model
from toolbus.council.sidecar_settings import API_KEY_VARIABLE, SidecarSettings
from toolbus.errors import SetupError
from toolbus.reader import Reader, read_file

_SIDECARS = ("sidecar", "sidecarSettings", "sidecar_settings")
_TOOLS_SETTINGS = ("toolsSettings", "tools_settings")


@dataclass(frozen=True, slots=True)
class CouncilFile:
    """The parts of a council.

    Attributes:
        sidecar: the settings of the model.
        model: None if the settings name no model.
        prompt_tools: those of files, then the bundled ones, which are used if a name occurs twice.
    """

    settings: CouncilSettings = field(default_factory=CouncilSettings)
    sidecar: SidecarSettings = field(default_factory=SidecarSettings)
    model: LanguageModel | None = field(default=None, repr=False)
    prompt_tools: tuple[PromptTool, ...] = field(default_factory=bundled_prompt_tools, repr=False)

    @classmethod
    def load(cls, path: Path, environ: Mapping[str, str] = os.environ) -> CouncilFile:
        """Reads a file, and the files that it names.

        Args:
            environ: the environment, with the API key of the model in `API_KEY_VARIABLE`.

        Raises:
            SetupError: naming the file, the value, the rule and how to fix it.
        """
        return read_file(path, lambda content: _read(content, path.parent, environ))


def _read(content: Any, folder: Path, environ: Mapping[str, str]) -> CouncilFile:
    entries = Reader(content, "the council file").entries()
    sidecar = _sidecar(content)
    connections = _text_by_name(entries.pop("connections", None))
    prompt_tools = _prompt_tools(entries.pop("prompt_tools", None), folder)
    bundled = entries.pop("bundled", None)
    return CouncilFile(
        settings=CouncilSettings.read({key: each.value for key, each in entries.items() if key not in _SIDECARS}),
        sidecar=sidecar,
        model=sidecar_model(sidecar, api_key=environ.get(API_KEY_VARIABLE), connections=connections),
        prompt_tools=(*prompt_tools, *(bundled_prompt_tools() if bundled is None or bundled.flag() else ())),
    )


def _sidecar(content: Mapping[str, Any]) -> SidecarSettings:
    """Returns the settings of the model from a file's content, under any of the keys that hosts use."""
    described = {name: content[name] for name in _SIDECARS if content.get(name) is not None}
    for name in _TOOLS_SETTINGS:
        tools_settings = content.get(name)
        if isinstance(tools_settings, Mapping) and tools_settings.get("sidecar") is not None:
            described[f"{name}.sidecar"] = tools_settings["sidecar"]
    if len(described) > 1:
        raise SetupError(f"the model is described under {' and '.join(described)}, which mean the same: remove one")
    return SidecarSettings.read(next(iter(described.values()), {}))


def _text_by_name(reader: Reader | None) -> dict[str, str]:
    return {} if reader is None else {name: each.text() for name, each in reader.entries().items()}


def _prompt_tools(reader: Reader | None, folder: Path) -> tuple[PromptTool, ...]:
    """Reads the named files; a broken tool is logged, a file without a valid tool is refused."""
    tools: list[PromptTool] = []
    for name in reader.names() if reader is not None else ():
        path = folder / name
        if not path.exists():
            raise SetupError(f"prompt_tools: {path} does not exist: write it, or name a file or folder that does")
        read = read_prompt_tools(path)
        if not read.tools:
            why = "; ".join(read.problems) or f"{path} has no prompt tools: name the file or folder that has them"
            raise SetupError(f"prompt_tools: {why}")
        tools += read.tools
    return tuple(tools)
