"""Reads the tools of `tools.jsonl`, of shapes that generators of schemas and their authors write.

They come as from pydantic, from zod in TypeScript, from OpenAPI documents, and written by hand in several drafts. Each
has calls that its schema allows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolbus.protocol.json_schema import normal_form
from toolbus.protocol.tool import Tool

FOLDER = Path(__file__).parent


def read_tools() -> tuple[Tool, ...]:
    """Returns the tools as a bus lists them: their schemas in normal form."""
    return tuple(_tool(line) for line in _lines("tools.jsonl"))


def read_calls() -> Mapping[str, Sequence[Any]]:
    """Returns valid arguments by the name of the tool."""
    return {line["name"]: line["calls"] for line in _lines("tools.jsonl")}


def read_questions() -> list[dict[str, Any]]:
    """Returns the questions, each with its tool, the facts that answer it, and the expected arguments."""
    return _lines("questions.jsonl")


def _tool(line: Mapping[str, Any]) -> Tool:
    schema = normal_form(line["parameters"]).schema
    return Tool(line["name"], line["description"], json.dumps(schema, ensure_ascii=False))


def _lines(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / file).read_text("utf-8").splitlines()]
