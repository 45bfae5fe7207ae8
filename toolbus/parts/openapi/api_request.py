"""Builds the request of an operation from arguments, as its parameters say: pure, nothing is sent.

What a model writes can change neither the path's steps nor the headers around it: values are percent-encoded, a value
of a path that would be more than one step is refused, and so is a line break in a header.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote as percent_encode

from toolbus.common.text import dump_json, quote
from toolbus.parts.openapi.operations import FORM, JSON, MULTIPART, TEXT, Body, Operation, Parameter

_SEPARATORS = {"form": ",", "spaceDelimited": "%20", "pipeDelimited": "%7C"}
FILE_KEYS = frozenset(("filename", "text", "base64"))
_MAX_WHOLE = 2**53  # a float beyond it is not written as a whole number

Pairs = list[tuple[str, str]]
Part = tuple[str, tuple[str | None, bytes] | tuple[str | None, bytes, str]]  # name; filename, content, media type


class ArgumentFault(ValueError):
    """An argument cannot be sent; the text names it, the rule and how to fix it."""


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One request.

    Attributes:
        path: below the base URL, with its query, percent-encoded.
        content: the body; None without one, and for a body of parts.
        parts: of a multipart body: name, file name, bytes.
    """

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    content: bytes | None = field(default=None, repr=False)
    parts: tuple[Part, ...] | None = field(default=None, repr=False)

    def with_query(self, pairs: Pairs) -> ApiRequest:
        """Returns the request with more query parameters."""
        if not pairs:
            return self
        added = "&".join(f"{_encode(name)}={_encode(text)}" for name, text in pairs)
        return replace(self, path=f"{self.path}{'&' if '?' in self.path else '?'}{added}")


def build_request(operation: Operation, arguments: Mapping[str, Any], *, slashes: bool = False) -> ApiRequest:
    """Returns the request for arguments.

    Args:
        slashes: whether values of the path may hold a slash, which is sent as %2F.

    Raises:
        ArgumentFault: an argument is missing, unknown or cannot be sent.
    """
    known = {parameter.argument for parameter in operation.parameters}
    known |= {operation.body.argument} if operation.body else set()
    if unknown := sorted(arguments.keys() - known):
        raise ArgumentFault(f"unknown argument {quote(unknown[0])}; there are {', '.join(sorted(known)) or 'none'}")
    path = operation.path
    query: list[str] = []
    headers: Pairs = []
    cookies: list[str] = []
    for parameter in operation.parameters:
        value = arguments.get(parameter.argument)
        if value is not None and parameter.as_json:
            value = dump_json(value)
        if value is None:
            if parameter.required:
                raise ArgumentFault(f"the argument {quote(parameter.argument)} is missing")
        elif parameter.location == "path":
            path = path.replace(f"{{{parameter.name}}}", _step(parameter, value, slashes))
        elif parameter.location == "query":
            query += [f"{_encode(name)}={text}" for name, text in _query(parameter, value)]
        elif parameter.location == "header":
            headers.append((parameter.name, _header(parameter, value)))
        else:
            named = isinstance(value, Mapping)  # then each name is a key, and a model's
            cookies += [f"{_encode(name) if named else name}={text}" for name, text in _query(parameter, value)]
    if cookies:
        headers.append(("Cookie", "; ".join(cookies)))
    content: bytes | None = None
    parts: tuple[Part, ...] | None = None
    if operation.body is not None:
        given = arguments.get(operation.body.argument)
        if operation.body.argument not in arguments or (given is None and operation.body.kind != JSON):
            if operation.body.required:
                raise ArgumentFault(f"the argument {quote(operation.body.argument)} is missing")
        elif operation.body.kind == MULTIPART:
            parts = tuple(_parts(operation.body, given))
        else:
            content = _content(operation.body, given)
            headers.append(("Content-Type", operation.body.media_type))
    path = percent_encode(path, safe="/%:@!$&'()*+,;=-._~")  # what the document itself writes in its path
    return ApiRequest(operation.method, f"{path}?{'&'.join(query)}" if query else path, tuple(headers), content, parts)


def _step(parameter: Parameter, value: Any, slashes: bool) -> str:
    """Returns a value as part of one step of the path."""
    items = _items(value)
    texts = [key for pair in items for key in pair] if isinstance(value, Mapping) else [text for _, text in items]
    for text in texts or [""]:
        # Servers decode %2F before they choose the operation: "7/owner" would reach another one than was allowed.
        steps = text.split("/") if slashes else [text]
        if any(step in ("", ".", "..") or re.search(r"[/\\]", step) for step in steps) or not text.isprintable():
            raise ArgumentFault(
                f"the argument {quote(parameter.argument)} is {quote(text)}: a value of the path must be visible text, "
                f"and may not be . or .. or hold a {'backslash' if slashes else 'slash'}"
            )
    named = isinstance(value, Mapping)
    joined = [f"{_encode(key)}{'=' if parameter.explode else ','}{_encode(text)}" for key, text in items]
    plain = joined if named else [_encode(text) for _, text in items]
    name = _encode(parameter.name)
    if parameter.style == "label":
        return "." + ("." if parameter.explode else ",").join(plain)
    if parameter.style == "matrix":
        if not parameter.explode:
            return f";{name}={','.join(plain)}"
        return "".join(f";{each}" if named else f";{name}={each}" for each in plain)
    return ",".join(plain)


def _query(parameter: Parameter, value: Any) -> Pairs:
    """Returns name and encoded value of what a query or cookie parameter becomes."""
    if parameter.style == "deepObject" and isinstance(value, Mapping):
        return [(name, _encode(text)) for name, text in _deep(parameter.name, value)]
    items = _items(value)
    if parameter.explode or not isinstance(value, Mapping | list):
        return [(key if isinstance(value, Mapping) else parameter.name, _encode(text)) for key, text in items]
    texts = [part for pair in items for part in pair] if isinstance(value, Mapping) else [text for _, text in items]
    return [(parameter.name, _SEPARATORS[parameter.style].join(map(_encode, texts)))] if texts else []


def _deep(name: str, value: Any) -> Pairs:
    if isinstance(value, Mapping):
        return [pair for key, inner in value.items() for pair in _deep(f"{name}[{key}]", inner)]
    if isinstance(value, list):
        return [(name, _text(each)) for each in value]
    return [] if value is None else [(name, _text(value))]


def _header(parameter: Parameter, value: Any) -> str:
    items = _items(value)
    named = isinstance(value, Mapping)
    text = ",".join(f"{key}{'=' if parameter.explode else ','}{each}" if named else each for key, each in items)
    text = text.strip(" ")
    if not text.isprintable() or not text.isascii():
        raise ArgumentFault(
            f"the argument {quote(parameter.argument)} is {quote(text)}: a header holds printable ASCII characters only"
        )
    return text


def _items(value: Any) -> Pairs:
    """Returns the texts of a value: those of a list's items, or of an object's members with their keys."""
    if isinstance(value, Mapping):
        return [(str(key), _text(each)) for key, each in value.items() if each is not None]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [("", _text(each)) for each in value]
    return [("", _text(value))]


def _text(value: Any) -> str:
    """Returns one value as requests have it."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_WHOLE:
        return str(int(value))
    return dump_json(value)


def _encode(text: str) -> str:
    return percent_encode(text, safe="-._~", errors="replace")


def _content(body: Body, value: Any) -> bytes:
    if body.kind == JSON:
        return dump_json(value).encode("utf-8", "replace")
    if body.kind == FORM:
        pairs = [pair for key, each in _fields(body, value) for pair in _form_field(body, key, each)]
        return "&".join(f"{_encode(key)}={text}" for key, text in pairs).encode()
    if body.kind == TEXT:
        return _text(value).encode("utf-8", "replace")
    return _file(body.argument, value)[1]


def _fields(body: Body, value: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        raise ArgumentFault(f"the argument {quote(body.argument)} must be an object: it is sent as a form")
    return [(str(key), each) for key, each in value.items() if each is not None]


def _form_field(body: Body, name: str, value: Any) -> Pairs:
    """Returns name and encoded value of what a field of a form becomes: a list each by itself, an object as JSON."""
    if name in body.styles:
        style, explode = body.styles[name]
        return _query(Parameter(name, name, "query", style, explode), value)
    return [(name, _encode(_text(each))) for each in (value if isinstance(value, list) else [value])]


def _parts(body: Body, value: Any) -> Iterable[Part]:
    for name, given in _fields(body, value):
        named = body.types.get(name, ())
        media = named[0] if len(named) == 1 and "*" not in named[0] else ""
        for each in given if isinstance(given, list) else [given]:
            if isinstance(each, Mapping) and each.keys() & {"text", "base64"} and each.keys() <= FILE_KEYS:
                filename, content = _file(name, each)
                yield name, ((filename, content, media) if media else (filename, content))
                continue
            content = _text(each).encode("utf-8", "replace")
            media_here = media or ("application/json" if isinstance(each, Mapping | list) else "")  # OpenAPI's default
            yield name, ((None, content, media_here) if media_here else (None, content))


def _file(argument: str, value: Any) -> tuple[str, bytes]:
    """Returns name and bytes of a file: an object with its text, or its bytes as base64."""
    if not isinstance(value, Mapping) or ("text" in value) == ("base64" in value) or not value.keys() <= FILE_KEYS:
        raise ArgumentFault(f"the argument {quote(argument)} is a file: give an object with text or base64")
    filename = str(value.get("filename") or argument)
    if "text" in value:
        return filename, str(value["text"]).encode("utf-8", "replace")
    try:
        return filename, base64.b64decode(str(value["base64"]), validate=True)
    except binascii.Error as error:
        raise ArgumentFault(f"base64 of the argument {quote(argument)} cannot be decoded: {error}") from None
