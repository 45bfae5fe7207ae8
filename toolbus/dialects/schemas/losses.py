"""What a schema loses on its way to a provider, and where in it: the report that every conversion writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

MAX_LEVELS = 128  # of JSON: twice what the bus takes, since a converted schema may be deeper than what it came from


@dataclass(frozen=True, slots=True)
class Loss:
    """What a schema lost on its way into a dialect.

    Attributes:
        tool: the tool's name on the bus.
        path: where in its schema, as a JSON pointer; "" is the root.
        keyword: which keyword was dropped or replaced.
        why: a sentence: the value, the rule, what became of it.
    """

    tool: str
    path: str
    keyword: str
    why: str


class Inexpressible(Exception):
    """A schema cannot be expressed at all; the text says why and what its author could do."""


class LossReport:
    """A schema that is being converted: where its parts stand, what references in it point to, what it lost.

    Raises:
        Inexpressible: from the constructor, if the schema is no JSON that a request could hold.
    """

    def __init__(self, schema: dict[str, Any], tool: str) -> None:
        self._root = schema
        self._tool = tool
        self._places: dict[int, str] = {}  # JSON pointers by identity; the schema lives as long as this
        self._made: list[object] = []  # schemas that stand nowhere in it, kept so that their identity stays theirs
        self._anchors: dict[str, dict[str, Any]] = {}
        self._losses: dict[tuple[str, str], Loss] = {}  # one of a keyword of a place, however often it is visited
        self._walk()

    def _walk(self) -> None:
        waiting: list[tuple[Any, str, int]] = [(self._root, "", 1)]
        while waiting:
            value, place, level = waiting.pop()
            if level > MAX_LEVELS:
                raise Inexpressible(f"the schema is nested deeper than {MAX_LEVELS} levels: flatten it")
            if isinstance(value, dict):
                self._places[id(value)] = place
                if isinstance(anchor := value.get("$anchor"), str):
                    self._anchors[anchor] = value
                inner = [(item, f"{place}/{escaped(key)}", level + 1) for key, item in value.items()]
            else:
                inner = [(item, f"{place}/{index}", level + 1) for index, item in enumerate(value)]
            waiting.extend(item for item in inner if isinstance(item[0], dict | list))
        try:
            json.dumps(self._root, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            raise Inexpressible(
                "the schema holds half of a surrogate pair, which UTF-8 cannot carry: write the whole character"
            ) from None
        except (TypeError, ValueError) as problem:
            raise Inexpressible(f"the schema is no JSON: {problem}; take numbers that JSON can hold") from None

    @property
    def losses(self) -> list[Loss]:
        """What was lost so far, in the order in which it was met."""
        return list(self._losses.values())

    def lose(self, schema: Mapping[str, Any], keyword: str, why: str) -> None:
        """Notes that a schema lost a keyword."""
        path = self.path(schema)
        self._losses.setdefault((path, keyword), Loss(self._tool, path, keyword, why))

    def keep_first(self, count: int) -> None:
        """Forgets all losses but the first: those of an attempt that led nowhere."""
        self._losses = dict(list(self._losses.items())[:count])

    def path(self, schema: Mapping[str, Any]) -> str:
        """Returns where a schema stands, as a JSON pointer."""
        return self._places.get(id(schema), "")

    def made(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """Returns a schema that conversion made out of what stands at a place."""
        self._made.append(schema)
        self._places[id(schema)] = path
        return schema

    def target(self, reference: str) -> dict[str, Any] | bool | None:
        """Returns the schema that a reference points to, None where there is none."""
        if not reference.startswith("#"):
            return None
        pointer = unquote(reference[1:])
        if pointer and not pointer.startswith("/"):
            return self._anchors.get(pointer)
        found: Any = self._root
        for step in pointer.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and step in found:
                found = found[step]
            elif isinstance(found, list) and step.isdecimal() and len(step) < 7 and int(step) < len(found):
                found = found[int(step)]
            else:
                return None
        return found if isinstance(found, dict | bool) else None


def escaped(key: str) -> str:
    """Returns a key as a step of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def shown(value: Any) -> str:
    """Returns a value for a sentence, cut so that a large one cannot flood a log."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
