"""Reads prompt tools from JSON and TOML files, in the spelling of this package or of other hosts; ten are bundled.

A broken tool or file is ignored and reported; the others are read.
"""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolbus.council.prompt_tool import NO_PARAMETERS, PromptTool
from toolbus.errors import InvalidTool
from toolbus.tool import MIB

log = logging.getLogger("toolbus.extension")

_MAX_FILE = 1 * MIB
_SUFFIXES = (".json", ".toml")


# Field → its spellings in files and of other hosts.
_SPELLINGS = {
    "name": ("name", "tool_name", "toolName"),
    "display_name": ("display_name", "displayName"),
    "description": ("description",),
    "prompt": ("prompt",),
    "parameters": ("parameters", "input_schema", "inputSchema"),
    "variable": ("variable", "result_variable", "resultVariable"),
    "deliberates": ("deliberates", "store_in_deliberation", "storeInDeliberation"),
    "category": ("category",),
}


@dataclass(frozen=True, slots=True)
class PromptTools:
    """The prompt tools of files.

    Attributes:
        tools: each name once, in the order of their first appearance.
        problems: tools and files that were ignored, and why, a sentence each.
        warnings: parts that were changed, a sentence each.
    """

    tools: tuple[PromptTool, ...]
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def read_prompt_tools(path: Path | str) -> PromptTools:
    """Reads a JSON or TOML file, or those of a folder in the order of their names.

    A file holds one tool, a list of them, or an object with such a list under `tools`. Of two tools with one name the
    later is used, in the place of the first. A broken tool or file is ignored and reported as a problem.
    """
    problems: list[str] = []
    warnings: list[str] = []
    tools: dict[str, PromptTool] = {}
    for place, entry in _entries(Path(path), problems):
        try:
            tool = _tool(entry, place, warnings)
        except InvalidTool as error:
            problems.append(f"{place}: {error}")
            continue
        if tool.name in tools:
            warnings.append(f"{place}: prompt tool {tool.name!r} appears twice, the later one is used: remove one")
        tools[tool.name] = tool
    for sentence in (*problems, *warnings):
        log.warning("%s", sentence)
    return PromptTools(tuple(tools.values()), tuple(problems), tuple(warnings))


def bundled_prompt_tools() -> tuple[PromptTool, ...]:
    """Returns the ten prompt tools of this package."""
    return read_prompt_tools(Path(__file__).parent / "bundled").tools


def _tool(entry: object, place: str, warnings: list[str]) -> PromptTool:
    """Reads one tool; unknown fields belong to other hosts and are ignored.

    Raises:
        InvalidTool: it breaks a rule.
    """
    if not isinstance(entry, Mapping):
        raise InvalidTool([f"{entry!r:.80} is not a prompt tool: write an object with name and prompt"])
    values: dict[str, Any] = {}
    for name, spellings in _SPELLINGS.items():
        set_values = [entry[spelling] for spelling in spellings if entry.get(spelling) is not None]
        if set_values:
            values[name] = set_values[0]
    if "name" not in values:
        raise InvalidTool(["a prompt tool without a name: give it one"])
    if values.get("deliberates") in (0, 1):  # as a database stores it
        values["deliberates"] = bool(values["deliberates"])
    if "parameters" in values:
        values["parameters"] = _schema(values["parameters"], place, warnings)
    return PromptTool(**values)


def _schema(value: object, place: str, warnings: list[str]) -> Mapping[str, Any]:
    """Returns a schema, which may be JSON text; a broken one becomes that of a tool without parameters."""
    schema = value
    if isinstance(value, str):
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError):
            pass
    if (
        isinstance(schema, Mapping)
        and schema.get("type", "object") == "object"
        and isinstance(schema.get("properties", {}), Mapping)
    ):
        return {"type": "object", **schema}
    warnings.append(f"{place}: {value!r:.80} is not a JSON Schema of an object: the tool is used without parameters")
    return NO_PARAMETERS


def _entries(path: Path, problems: list[str]) -> Iterator[tuple[str, object]]:
    """Yields the entries of a file, or of all files of a folder by name, each with its place."""
    for file in _files(path, problems):
        yield from _file_entries(file, problems)


def _files(path: Path, problems: list[str]) -> list[Path]:
    if not path.exists():
        problems.append(f"{path} does not exist: write it, or name a file or folder that does")
        return []
    if not path.is_dir():
        return [path]
    try:
        return sorted(each for each in path.iterdir() if each.suffix in _SUFFIXES and not each.name.startswith("."))
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}: let this user read it")
        return []


def _file_entries(file: Path, problems: list[str]) -> Iterator[tuple[str, object]]:
    """Yields the entries of a file, each with its place."""
    try:
        content = _parse(file)
    except OSError as error:
        problems.append(f"{file} cannot be read: {error.strerror}: name a file or folder that this user may read")
        return
    except ValueError as error:
        problems.append(f"{file} is ignored: {error}: correct it")
        return
    except RecursionError:
        problems.append(f"{file} is ignored: it is nested too deep: flatten it")
        return
    if isinstance(content, Mapping) and "tools" in content:
        content = content["tools"]
        if not isinstance(content, list):
            problems.append(f"{file}: tools are {content!r:.80}, they must be a list: write [{{…}}, {{…}}]")
            return
    if not isinstance(content, list):
        yield str(file), content
        return
    yield from ((f"{file}, tool {number}", entry) for number, entry in enumerate(content, 1))


def _parse(file: Path) -> Any:
    """Parses a file.

    Raises:
        ValueError: it is neither JSON nor TOML, or too large; the message is a sentence.
    """
    if file.suffix not in _SUFFIXES:
        raise ValueError(f"it is not a {' or '.join(_SUFFIXES)} file")
    with file.open("rb") as opened:
        content = opened.read(_MAX_FILE + 1)
    if len(content) > _MAX_FILE:
        raise ValueError(f"it has more than {_MAX_FILE} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    try:
        return tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not {file.suffix[1:].upper()} ({error})") from None
