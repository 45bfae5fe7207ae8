"""Loads the folder's files in order, with a `register_tool` that only records its arguments."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "examples" / "dropin"
FILES = ("_common.py", *sorted(path.name for path in FOLDER.glob("*.py") if not path.name.startswith("_")))


@functools.cache
def _code_of(path: Path) -> CodeType:
    return compile(path.read_bytes(), str(path), "exec")


def load(path: Path, **names: Any) -> ModuleType:
    """Runs a file as a module that finds these names without importing them."""
    module = ModuleType(path.stem)
    vars(module).update(names, __file__=str(path))
    exec(_code_of(path), vars(module))
    return module


class Folder:
    """The modules of the files, and the tools that they registered."""

    def __init__(self) -> None:
        self.modules: dict[str, Any] = {}
        self.registered: dict[str, dict[str, Any]] = {}

    def register_tool(self, *, name: str, execute: Any, definition: Any, **options: Any) -> None:
        """Records a tool."""
        assert name not in self.registered
        self.registered[name] = {"execute": execute, "definition": definition, **options}

    def call(self, name: str, args: Mapping[str, Any] | None = None, **env: Any) -> Any:
        """Runs a tool; its answer has to be one that JSON can hold."""
        answer = self.registered[name]["execute"](args or {}, env)
        json.dumps(answer, allow_nan=False)
        return answer


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Folder:
    result = Folder()
    for file in FILES:
        module = load(FOLDER / file, register_tool=result.register_tool)
        result.modules[module.__name__] = module
        if file.startswith("_"):
            monkeypatch.setitem(sys.modules, module.__name__, module)
    result.modules["relay_message"].QUEUE = tmp_path / "queue.db"
    return result
