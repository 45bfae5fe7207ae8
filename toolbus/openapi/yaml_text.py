"""Reads YAML as JSON would have it: a value is a text unless JSON, or YAML 1.2, has it as something else.

So `yes`, `12:30`, `0123`, dates and `=` are texts. Values are built from the parser's events, without recursion: PyYAML
itself crashes the process where a document is nested too deep, and computes without end on a few lines of merges.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from toolbus.text import shorten

MAX_DEPTH = 200  # of collections, one in another
MAX_MERGED = 200_000  # members that merges (`<<`) copy into mappings

_TAG = "tag:yaml.org,2002:"
_WHOLE = r"[-+]?(?:0|[1-9][0-9]*)"
_is_whole = re.compile(_WHOLE).fullmatch
_is_number = re.compile(rf"(?:{_WHOLE}(?:\.[0-9]*)?|[-+]?\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}})?").fullmatch
_NUMBERS = frozenset("-+.0123456789")  # what begins one
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_KINDS = frozenset(_TAG + kind for kind in ("null", "bool", "int", "float", "seq", "map"))  # as a value is read anyway
_MERGE = object()  # stands for the key `<<`


def read_yaml(text: str) -> Any:
    """Reads the first document of YAML.

    Raises:
        ImportError: PyYAML is not installed.
        ValueError: it is not YAML, or is nested too deep.
    """
    import yaml

    try:
        return _Builder(yaml).value(yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except yaml.YAMLError as error:
        raise ValueError(shorten(" ".join(str(error).split()), 300)) from None


class _Builder:
    """Builds one value from events."""

    def __init__(self, yaml: Any) -> None:
        self._yaml = yaml
        self._anchors: dict[str, Any] = {}  # what aliases stand for
        self._merged = 0  # members so far

    def value(self, events: Iterator[Any]) -> Any:
        scalar, alias = self._yaml.ScalarEvent, self._yaml.AliasEvent
        start, end = self._yaml.CollectionStartEvent, self._yaml.CollectionEndEvent
        root: list[Any] = []
        open_: list[Any] = [root]  # a list for each collection: its items, or its keys and values in turn
        made: list[Any] = [None]  # what each of them becomes
        for event in events:
            if isinstance(event, scalar):
                value = self._scalar(event)
            elif isinstance(event, start):
                if event.tag not in (None, "!") and event.tag not in _KINDS:
                    raise ValueError(f"it has the tag {event.tag}, which JSON cannot hold")
                value = {} if isinstance(event, self._yaml.MappingStartEvent) else []
                made.append(value)
            elif isinstance(event, end):
                items = open_.pop()
                self._fill(made.pop(), items)
                continue
            elif isinstance(event, alias):
                if event.anchor not in self._anchors:
                    raise ValueError(f"the alias *{event.anchor} names nothing before it")
                open_[-1].append(self._anchors[event.anchor])
                continue
            elif isinstance(event, self._yaml.DocumentEndEvent):
                break
            else:
                continue
            open_[-1].append(value)
            if event.anchor is not None:
                self._anchors[event.anchor] = value
            if isinstance(event, start):
                open_.append([])
                if len(open_) > MAX_DEPTH:
                    raise ValueError("it is nested too deep to be read: flatten it")
        return root[0] if root else None

    def _scalar(self, event: Any) -> Any:
        text: str = event.value
        if event.tag is None:
            if not event.implicit[0]:
                return text
        elif event.tag not in _KINDS:
            if event.tag in ("!", f"{_TAG}str"):
                return text
            raise ValueError(f"it has the tag {event.tag}, which JSON cannot hold")
        if text in _WORDS:
            return _WORDS[text]
        if text[0] in _NUMBERS:
            if _is_whole(text):
                return int(text)
            if _is_number(text) and not math.isinf(number := float(text)):
                return number
        return _MERGE if text == "<<" else text

    def _fill(self, made: Any, items: list[Any]) -> None:
        if isinstance(made, list):
            made += ["<<" if each is _MERGE else each for each in items]
            return
        merged: dict[Any, Any] = {}
        for key, value in zip(items[::2], items[1::2], strict=True):
            if key is not _MERGE:
                if isinstance(key, dict | list):
                    raise ValueError("a mapping has a key that is not text: write it as text")
                made[key] = "<<" if value is _MERGE else value
                continue
            for each in value if isinstance(value, list) else [value]:
                if not isinstance(each, dict):
                    raise ValueError("a merge (<<) names a value that is not a mapping: name an anchor of one")
                self._merged += len(each)
                if self._merged > MAX_MERGED:
                    raise ValueError(f"its merges (<<) copy more than {MAX_MERGED} members")
                merged |= {name: own for name, own in each.items() if name not in merged}
        if merged:
            own = dict(made)
            made |= {**merged, **own}
