"""Generates a catalog like those of real hosts, the same at every run: tools of many shapes, some with awkward names.

About a third of the schemas are flat; the others have nested objects, lists of them, enums, alternatives or shared
definitions, recursive ones included.
"""

from __future__ import annotations

import json
import random
from typing import Any

from toolbus.protocol.tool import Tool

SEED = 7

_VERBS = (
    "get set list create delete update send search find move copy read write open close start stop play pause convert "
    "translate summarize schedule cancel book order track count compare merge split upload download"
)
_NOUNS = (
    "weather email calendar event file folder image video song playlist user account invoice payment ticket branch "
    "commit message channel contact note task reminder alarm light door camera sensor page table row column query "
    "report chart map route flight hotel"
)
_FILLERS = (
    "the of a for in with and to from returns given selected current all matching items that are stored in your "
    "workspace by name or id use this when a person asks about it optionally filtered sorted limited page size cursor"
)
_FORMATS = ("date-time", "date", "uri", "email", "uuid")
_AWKWARD = ("文件.{0}", "notes:{0} now", "3d_{0}", "{0}.{1}", "{0}__{1}", "{0}_" + "x" * 52)
AWKWARD_EVERY = 10  # of so many tools one has a name that some provider refuses
EITHER_EVERY = 25  # one has a schema whose root accepts either of two arguments
FOREIGN_EVERY = 40  # one has an argument whose name some provider refuses


class Generator:
    """Makes tools, one after the other, from one seed."""

    def __init__(self, seed: int = SEED) -> None:
        self._random = random.Random(seed)
        self._verbs, self._nouns, self._fillers = _VERBS.split(), _NOUNS.split(), _FILLERS.split()

    def tool(self, number: int) -> Tool:
        """Returns the tool of a number; the order of calls counts."""
        name, description, parameters = self._name(number), self._sentence(25), self._parameters()
        properties = parameters["properties"]
        if number % EITHER_EVERY == 1:
            parameters["anyOf"] = [{"required": [argument]} for argument in [*properties][:2]]
        if number % FOREIGN_EVERY == 2:
            properties["路径"] = {"type": "string"}
            parameters["required"] += ["路径"] if number % (2 * FOREIGN_EVERY) == 2 else []
        return Tool(name, description, json.dumps(parameters, ensure_ascii=False))

    def _name(self, number: int) -> str:
        verb, noun = self._random.choice(self._verbs), self._random.choice(self._nouns)
        plain = f"{verb}_{noun}_{number}"
        if number % AWKWARD_EVERY:
            return plain
        return _AWKWARD[number // AWKWARD_EVERY % len(_AWKWARD)].format(f"{verb}_{number}", noun)[:64]

    def _sentence(self, words: int) -> str:
        some = self._random
        text = " ".join(
            some.choice(self._fillers if some.random() < 0.7 else self._nouns + self._verbs) for _ in range(words)
        )
        return f"{text.capitalize()}."

    def _parameters(self) -> dict[str, Any]:
        properties = {
            f"{self._random.choice(self._nouns)}_{each}": self._property(depth=0)
            for each in range(self._random.randint(1, 6))
        }
        schema: dict[str, Any] = {"type": "object", "properties": properties, "required": [*properties][:2]}
        chance = self._random.random()
        if chance < 0.15:
            properties["node"] = {"$ref": "#/$defs/Node"}
            schema["$defs"] = {"Node": self._recursive() if chance < 0.05 else self._object(depth=2)}
        if chance > 0.5:
            schema["additionalProperties"] = False
        return schema

    def _property(self, depth: int) -> dict[str, Any]:
        kinds = (
            *(self._string, self._string, self._number, self._number, self._choice, self._flag),
            *((self._object, self._list, self._either) if depth < 3 else ()),
        )
        return {**self._random.choice(kinds)(depth), "description": self._sentence(8)}

    def _string(self, depth: int) -> dict[str, Any]:
        chance = self._random.random()
        if chance < 0.2:
            return {"type": "string", "format": self._random.choice(_FORMATS)}
        return {"type": "string", "maxLength": 200} if chance < 0.5 else {"type": "string"}

    def _number(self, depth: int) -> dict[str, Any]:
        limit = self._random.choice(("minimum", "exclusiveMinimum", "multipleOf"))
        return {"type": self._random.choice(("integer", "number")), limit: 1}

    def _choice(self, depth: int) -> dict[str, Any]:
        words: list[Any] = self._random.sample(self._nouns, 4)
        return {"enum": [*words, None]} if self._random.random() < 0.2 else {"type": "string", "enum": words}

    def _flag(self, depth: int) -> dict[str, Any]:
        return {"type": "boolean", "default": False}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(self._nouns, 3)
        return {
            "type": "object",
            "properties": {name: self._property(depth + 1) for name in names},
            "required": names[:1],
        }

    def _list(self, depth: int) -> dict[str, Any]:
        return {"type": "array", "items": self._property(depth + 1), "maxItems": 20}

    def _either(self, depth: int) -> dict[str, Any]:
        word = self._random.choice(("anyOf", "oneOf"))
        return {word: [self._property(depth + 1), {"type": "null"}]}

    def _recursive(self) -> dict[str, Any]:
        children = {"type": "array", "items": {"$ref": "#/$defs/Node"}}
        return {"type": "object", "properties": {"label": {"type": "string"}, "children": children}}


def tools(count: int) -> list[Tool]:
    """Returns the first so many tools."""
    generator = Generator()
    return [generator.tool(number) for number in range(count)]
