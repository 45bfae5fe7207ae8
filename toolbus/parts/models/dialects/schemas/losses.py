"""Reports the losses of a schema in the conversion for a provider, with their places in the schema."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from toolbus.common.text import shorten
from toolbus.protocol.json_schema import pointed_at

_STRICT_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)  # json.dumps would make one each time
MAX_LEVELS = 128  # of JSON: twice the bus's limit, since a converted schema may be deeper than the original


@dataclass(frozen=True, slots=True)
class Loss:
    """A keyword that a schema lost in the conversion for a dialect.

    Attributes:
        tool: the tool's name on the bus.
        path: the place in its schema, as a JSON pointer; "" is the root.
        keyword: which keyword was dropped or replaced.
        why: a sentence: the value, the rule, the replacement.
    """

    tool: str
    path: str
    keyword: str
    why: str


class Inexpressible(Exception):
    """A schema cannot be expressed at all; the text says why and how its author can fix it."""


class LossReport:
    """A schema in conversion: the places of its parts, the targets of its references, and its losses.

    Raises:
        Inexpressible: from the constructor, if a request cannot hold the schema as JSON.
    """

    def __init__(self, schema: dict[str, Any], tool: str) -> None:
        self.tool = tool
        self._root = schema
        self._places: dict[int, str] = {}  # JSON pointers by identity; the schema lives as long as this
        self._generated: list[object] = []  # schemas of the conversion, referenced here so that their ids stay unique
        self._anchors: dict[str, dict[str, Any]] = {}
        self._losses: dict[Loss, None] = {}  # a part may be visited several times, and then loses the same again
        self.visits = 0  # how often something was lost in this pass, the same several times included
        self._walk()

    def _walk(self) -> None:
        pending: list[tuple[Any, str, int]] = [(self._root, "", 1)]
        while pending:
            value, place, level = pending.pop()
            if level > MAX_LEVELS:
                raise Inexpressible(f"the schema is nested deeper than {MAX_LEVELS} levels: flatten it")
            if isinstance(value, dict):
                self._places[id(value)] = place
                if isinstance(anchor := value.get("$anchor"), str):
                    self._anchors[anchor] = value
                entries: Iterable[tuple[Any, Any]] = value.items()
            else:
                entries = enumerate(value)
            for key, item in entries:
                if isinstance(item, dict | list):
                    pending.append((item, f"{place}/{escaped(key) if isinstance(key, str) else key}", level + 1))
        try:
            _STRICT_JSON.encode(self._root).encode()
        except UnicodeEncodeError:
            raise Inexpressible(
                "the schema holds half of a surrogate pair, which UTF-8 cannot carry: write the whole character"
            ) from None
        except (TypeError, ValueError) as error:
            raise Inexpressible(f"the schema is not JSON: {error}; use numbers that JSON can hold") from None

    def over(self, schema: dict[str, Any]) -> LossReport:
        """Returns a report on a schema that this conversion has made, for a second pass; they share their losses."""
        report = LossReport(schema, self.tool)
        report._losses = self._losses
        return report

    @property
    def losses(self) -> list[Loss]:
        """The losses so far, in the order in which they were found: one for each place, keyword and reason."""
        return list(self._losses)

    def lose(self, schema: Mapping[str, Any], keyword: str, why: str) -> None:
        """Reports that a schema lost a keyword, or a part of its value, which the reason then names."""
        self.visits += 1
        self._losses[Loss(self.tool, self.path(schema), keyword, why)] = None

    def drop(self, schema: Mapping[str, Any], keyword: str, value: Any, rule: str) -> None:
        """Reports that a value, of a keyword or in it, was dropped since it is not what the rule names."""
        self.lose(schema, keyword, f"{excerpt(value)} is not {rule} and was dropped")

    def drop_reference(self, schema: Mapping[str, Any], reference: Any) -> None:
        """Reports that a reference was dropped, which has no target."""
        why = f"{excerpt(reference)} does not point to a schema of this tool and was dropped"
        self.lose(schema, "$ref", why)

    def keep_first(self, count: int) -> None:
        """Drops all losses but the first: those of a failed attempt."""
        for loss in list(self._losses)[count:]:
            del self._losses[loss]

    def path(self, schema: Mapping[str, Any]) -> str:
        """Returns the place of a schema, as a JSON pointer."""
        return self._places.get(id(schema), "")

    def generated(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """Registers and returns a schema that the conversion generated for a place."""
        self._generated.append(schema)
        self._places[id(schema)] = path
        return schema

    def free_definition(self, wish: str, taken: Mapping[str, str]) -> str:
        """Returns a name that no definition of the root has, near to a wish."""
        definitions = self._root.get("$defs")
        used = {*taken.values(), *(definitions if isinstance(definitions, dict) else ())}
        return next(name for number in itertools.count(1) if (name := f"{wish}{number}") not in used)

    def target(self, reference: str) -> dict[str, Any] | bool | None:
        """Returns the schema that a reference points to; None if it points to none."""
        if not reference.startswith("#"):
            return None
        pointer = reference[1:]
        if pointer and not pointer.startswith("/"):
            return self._anchors.get(unquote(pointer))
        value, _ = pointed_at(self._root, pointer)
        return value if isinstance(value, dict | bool) else None


def escaped(key: str) -> str:
    """Returns a key as a step of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def excerpt(value: Any) -> str:
    """Returns a value for a sentence, shortened so that a large value cannot flood a log."""
    return shorten(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
