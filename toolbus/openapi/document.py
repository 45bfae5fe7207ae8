"""Reads an OpenAPI document, JSON or YAML, versions 3.0 to 3.2, and resolves its references.

No reference out of the document is followed. A fault of the whole document is a `SetupError`; a fault of a part is a
`DocumentFault`, which costs only the operations that need that part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from toolbus.errors import SetupError
from toolbus.limits import MIB
from toolbus.openapi.yaml_text import MAX_DEPTH, read_yaml
from toolbus.text import dump_json, parse_json, quote, shorten

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
