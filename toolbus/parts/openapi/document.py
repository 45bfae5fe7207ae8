"""Reads an OpenAPI document, JSON or YAML, versions 3.0 to 3.2, and resolves its references.

No reference out of the document is followed. A fault of the whole document is a `SetupError`; a fault of a part is a
`DocumentFault`, which costs only the operations that need that part.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from toolbus.common.text import dump_json, parse_json, quote, shorten
from toolbus.errors import SetupError
from toolbus.protocol.limits import MIB

# Reads YAML as JSON would have it: a value is a text unless JSON, or YAML 1.2, has it as something else.
#
# So `yes`, `12:30`, `0123`, dates and `=` are texts. Values are built from the parser's events, without recursion:
# PyYAML itself crashes the process where a document is nested too deep, and computes without end on a few lines of
# merges.

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


MAX_BYTES = 32 * MIB  # of a document; that of GitHub, one of the largest, has 12
MAX_REPEATED = 200_000  # values that YAML's aliases repeat: a few lines can make them endless
STEPS_OF_A_PART = 10  # that reading one parameter costs, or one of other things that an operation lists
MAX_STEPS = 16  # from reference to reference

JsonObject = Mapping[str, Any]


class DocumentFault(ValueError):
    """A part of a document cannot be used; the text says why."""


class ReadBudget:
    """How much of a document may still be read: bounds the time of one whose parts are shared by many operations.

    Args:
        steps: of about 2 µs each.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def spend(self, steps: int) -> None:
        """Counts what is read now.

        Raises:
            DocumentFault: nothing is left.
        """
        self._steps -= steps
        if self._steps < 0:
            raise DocumentFault("the document is too large to be read for all of it: allow fewer operations")


@dataclass(frozen=True, slots=True)
class Document:
    """An OpenAPI document.

    Attributes:
        content: the parsed document.
        name: what messages call it: its URL, its file or `the document`.
        url: where it was fetched; "" for a file or a mapping.
    """

    content: JsonObject = field(repr=False)
    name: str = "the document"
    url: str = ""

    @property
    def is_3_0(self) -> bool:
        """Whether its schemas are those of OpenAPI 3.0, a dialect of its own; later ones are JSON Schema."""
        return str(self.content["openapi"]).startswith("3.0")

    def pointer(self, reference: str) -> str:
        """Returns the JSON pointer of a reference.

        Raises:
            DocumentFault: it leads out of the document.
        """
        address, fragment = urldefrag(reference)
        if address and (not self.url or urldefrag(_join(self.url, address))[0] != urldefrag(self.url)[0]):
            raise DocumentFault(
                f"the reference {quote(reference)} leads out of the document, and only references within it are "
                "followed: bundle the document into one file"
            )
        if not fragment.startswith("/"):
            raise DocumentFault(f"the reference {quote(reference)} is not a JSON pointer: write #/components/…")
        return unquote(fragment)

    def find(self, pointer: str) -> Any:
        """Returns what stands at a JSON pointer.

        Raises:
            DocumentFault: nothing does.
        """
        value: Any = self.content
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, Mapping) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isascii() and key.isdigit() and int(key[:9]) < len(value):
                value = value[int(key[:9])]
            else:
                value = None
            if value is None:
                raise DocumentFault(f"the reference {quote('#' + pointer)} names nothing in the document")
        return value

    def resolve(self, value: Any) -> Any:
        """Returns a value, or what it refers to where it is a reference."""
        reference = ""
        for _ in range(MAX_STEPS):
            following = value.get("$ref") if isinstance(value, Mapping) else None
            if not isinstance(following, str):
                return value
            reference = following
            value = self.find(self.pointer(reference))
        raise DocumentFault(f"references lead from one to another more than {MAX_STEPS} times: {quote(reference)}")

    def resolve_object(self, value: Any, what: str) -> JsonObject:
        """Returns an object, or the one that a reference names.

        Args:
            what: names the part in the message.
        """
        found = self.resolve(value)
        if not isinstance(found, Mapping):
            raise DocumentFault(f"{what} is {shown(found)}, it must be an object")
        return found


def read_document(source: str | bytes | Mapping[str, Any], name: str = "the document", url: str = "") -> Document:
    """Reads a document from its text, JSON or YAML, or from the mapping that it was parsed to.

    Args:
        name: what messages call it.
        url: where it was fetched; its relative addresses are read against it.

    Raises:
        SetupError: it is not an OpenAPI 3 document, is too large, or PyYAML is not installed and it is YAML.
    """
    if isinstance(source, Mapping):
        content = _plain(source, name)
    else:
        if len(source) > MAX_BYTES:
            raise SetupError(f"{name} has {len(source)} bytes, an OpenAPI document may have {MAX_BYTES}: shorten it")
        try:
            text = source.decode("utf-8-sig") if isinstance(source, bytes) else source.removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise SetupError(f"{name} is not UTF-8 ({error.reason}): convert the file") from None
        content = _parse(text, name)
    if not isinstance(content, dict):
        raise SetupError(f"{name} holds {shown(content)}, not an object: name the OpenAPI document itself")
    if "swagger" in content and "openapi" not in content:
        raise SetupError(
            f"{name} is Swagger {shorten(str(content['swagger']))}, and only OpenAPI 3 is read: convert it once, with "
            "`npx swagger2openapi FILE` or at https://converter.swagger.io"
        )
    version = content.get("openapi")
    if not re.match(r"3\.[0-9]", str(version)):
        raise SetupError(
            f"{name}: openapi is {shorten(repr(version))}, it must be 3.0, 3.1 or 3.2: name an OpenAPI document"
        )
    if not isinstance(content.get("paths", {}), dict):
        raise SetupError(f"{name}: paths is {shorten(repr(content['paths']))}, it must be an object")
    return Document(content, name, url)


def _parse(text: str, name: str) -> Any:
    first, kind = text.lstrip()[:1], "YAML"
    if first == "<":
        raise SetupError(f"{name} is a page of HTML: name the document that it shows, often …/openapi.json")
    try:
        if first in ("{", "["):
            kind = "JSON"
            return parse_json(text)
        return _plain(read_yaml(text), name)
    except ImportError:
        raise SetupError(
            f"{name} is YAML, and reading that needs PyYAML: run `pip install 'toolbus[openapi]'`"
        ) from None
    except RecursionError:
        raise SetupError(f"{name} is nested too deep to be read: flatten it") from None
    except ValueError as error:
        raise SetupError(f"{name} is not {kind}: {error}") from None


def _plain(value: Any, name: str) -> Any:
    """Returns a value as JSON holds it, its own copy. It is measured first: aliases repeat what they name."""
    stack, seen, repeated = [(value, 0)], set[int](), 0
    while stack:
        each, depth = stack.pop()
        if not isinstance(each, Mapping | list | tuple):
            continue
        repeated += len(each) + 1 if id(each) in seen else 0
        seen.add(id(each))
        if repeated > MAX_REPEATED or depth > MAX_DEPTH:
            raise SetupError(f"{name} is nested too deep, or repeats itself too often (YAML's aliases): flatten it")
        stack += [(inner, depth + 1) for inner in (each.values() if isinstance(each, Mapping) else each)]
    try:
        return json.loads(dump_json(value))
    except (TypeError, ValueError) as error:
        raise SetupError(f"{name} holds what JSON cannot hold: {shorten(str(error), 200)}") from None


def shown(value: object) -> str:
    """Returns a value for an error text: a text as it is, or what kind of value it is, since it may be a large one."""
    if isinstance(value, str):
        return quote(value)
    kinds = {list: "a list", type(None): "nothing", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "an object")


def text_of(content: JsonObject, key: str) -> str:
    """Returns a text of an object, without blanks around it; "" without one."""
    value = content.get(key)
    return value.strip() if isinstance(value, str) else ""


def _join(base: str, address: str) -> str:
    try:
        return urljoin(base, address)
    except ValueError:  # brackets that are not an IPv6 address
        return address
