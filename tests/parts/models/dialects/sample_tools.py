"""Declares tools whose names and schemas providers are known to refuse; the tests of all dialects share them."""

from __future__ import annotations

import json
from typing import Any

from toolbus.protocol.tool import Tool


def tool(name: str, description: str = "", **schema: Any) -> Tool:
    """Returns a tool whose parameters are the given keywords."""
    return Tool(name, description, json.dumps(schema or {"type": "object"}, ensure_ascii=False))


PLAIN = tool(
    "get_weather",
    "Tells the weather of a city.",
    type="object",
    properties={
        "city": {"type": "string", "description": "Name of the city."},
        "days": {"type": "integer", "minimum": 1, "maximum": 14, "default": 1},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    required=["city"],
    additionalProperties=False,
)
EMPTY = tool("now", "Tells the time.")
CHINESE = tool("查询天气", "查询某个城市的天气。", type="object", properties={"城市": {"type": "string"}})
DOTTED = tool("files.read", "Reads a file.", type="object", properties={"path": {"type": "string", "format": "uri"}})
UNDERSCORED = tool("files_read", "What the name before becomes.", type="object", properties={})
QUALIFIED = tool("notes:add note", "Adds a note.", type="object", properties={"text": {"const": "hello"}})
DIGIT_FIRST = tool("3d_print", "Prints.", type="object", properties={"file": {"type": ["string", "null"]}})
LONG = tool("a" * 60 + ".end", "A name of 64 characters.", type="object", properties={"n": {"type": "number"}})
DOUBLE = tool("db__query", "A name with the mark that others split at.", type="object", properties={})
TREE = tool(
    "save_tree",
    "Saves a tree; its schema refers to itself.",
    **{
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$ref": "#/$defs/Node",
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {
                    "label": {"type": "string"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
                },
                "required": ["label"],
            }
        },
    },
)
SHAPES = tool(
    "draw",
    "Draws a shape.",
    type="object",
    properties={
        "shape": {
            "oneOf": [
                {"type": "object", "properties": {"kind": {"const": "circle"}, "r": {"exclusiveMinimum": 0}}},
                {"type": "object", "properties": {"kind": {"const": "point"}}, "required": ["kind", "colour"]},
            ]
        },
        "layer": {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "null"}], "default": None},
        "scale": {"enum": [1, 2, 4]},
        "corners": {"type": "array", "prefixItems": [{"type": "number"}, {"type": "string"}]},
        "tags": {"type": "array"},
        "anything": True,
    },
    required=["shape"],
)
KEYWORD_NAMES = tool(
    "keywords",
    "Properties called like keywords.",
    type="object",
    properties={
        "type": {"type": "string"},
        "$ref": {"type": "string"},
        "additionalProperties": {"type": "boolean"},
        "properties": {"type": "object", "properties": {"enum": {"enum": ["$ref"]}}},
    },
    required=["type"],
)
EITHER = tool(
    "find_user",
    "Finds a user by one of two keys.",
    type="object",
    properties={"id": {"type": "integer"}, "mail": {"type": "string", "format": "email"}},
    anyOf=[{"required": ["id"]}, {"required": ["mail"]}],
)

SAMPLES: tuple[Tool, ...] = (
    *(PLAIN, EMPTY, CHINESE, DOTTED, UNDERSCORED, QUALIFIED, DIGIT_FIRST, LONG, DOUBLE),
    *(TREE, SHAPES, KEYWORD_NAMES, EITHER),
)
