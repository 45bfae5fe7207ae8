"""Writes folders of tool files, loads them, and calls what they offer, for the tests of this package."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

from toolbus.dropin import Loaded, load_folder
from toolbus.protocol.tool import Result
from toolbus.sdk import ToolScope

REGISTERED = """
def greet(args, env):
    return {"hello": args.get("name", "you")}

register_tool(
    name="greet",
    execute=greet,
    definition={
        "type": "function",
        "function": {
            "name": "greet",
            "description": "Greets a person.",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string"}},
                "required": ["name"],
            },
        },
    },
)
"""


def write(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Writes files into a folder and returns it."""
    for name, text in files.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else dedent(text).encode())
    return folder


def load(folder: Path, files: Mapping[str, str | bytes], **options: Any) -> Loaded:
    """Writes files into a folder and loads it."""
    return load_folder(write(folder, files), **options)


def load_one(folder: Path, text: str) -> Loaded:
    """Loads a folder of one file, which must load."""
    loaded = load(folder, {"one.py": text})
    assert loaded.problems == ()
    return loaded


def names(loaded: Loaded) -> list[str]:
    """Returns what is offered, in order."""
    return [spec.tool.name for spec in loaded.specs]


def skipped(loaded: Loaded) -> dict[str, str]:
    """Returns why files were skipped, by their names."""
    return {problem.file: problem.reason for problem in loaded.problems if problem.skipped}


async def call(
    loaded: Loaded, name: str, arguments: Mapping[str, Any] | str = "{}", scope: ToolScope | None = None
) -> Result:
    """Calls a tool as its process would, sync ones on a thread of their own."""

    async def run_sync(job: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(job)

    return await loaded.call(name, arguments, scope or ToolScope("c1", name), run_sync)
