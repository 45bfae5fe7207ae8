"""Writes, reads and compares the HTTP headers in which a request of the modern era repeats parts of its body.

Proxies route by them. `Mcp-Method` and `Mcp-Name` go with every request that has them, `Mcp-Param-…` with those
arguments that a tool's schema marks with `x-mcp-header`.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

VERSION: Final = "MCP-Protocol-Version"
SESSION: Final = "Mcp-Session-Id"
METHOD: Final = "Mcp-Method"
NAME: Final = "Mcp-Name"
PARAM_PREFIX: Final = "Mcp-Param-"
MARK: Final = "x-mcp-header"  # the keyword of a property that goes into a header

# Which of its params a method's Mcp-Name repeats.
NAMED_BY: Final[Mapping[str, str]] = {
    "tools/call": "name",
    "prompts/get": "name",
    "resources/read": "uri",
    "tasks/get": "taskId",
    "tasks/update": "taskId",
    "tasks/cancel": "taskId",
}

_ENCODED = re.compile(r"=\?base64\?(.*)\?=", re.DOTALL)
_PLAIN = re.compile(r"[\x20-\x7e]*")
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # RFC 9110, section 5.6.2
_TYPES = ("string", "integer", "boolean")  # a number's text differs between languages
# Keywords that hold schemas. A mark below one of them has no path of properties alone, so it is invalid.
_ONE = ("items", "contains", "additionalProperties", "propertyNames", "not", "if", "then", "else", "contentSchema")
_ONE_MORE = ("unevaluatedItems", "unevaluatedProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_TABLES = ("patternProperties", "dependentSchemas", "$defs", "definitions")


def write_value(value: str) -> str:
    """Returns a text as a header value: unchanged, or as ``=?base64?…?=`` where a header cannot hold it."""
    if _PLAIN.fullmatch(value) and value == value.strip() and not _ENCODED.fullmatch(value):
        return value
    return f"=?base64?{base64.b64encode(value.encode()).decode('ascii')}?="


def read_value(header: str) -> str | None:
    """Returns the text of a header value; None if its encoding is broken."""
    header = header.strip(" \t")
    encoded = _ENCODED.fullmatch(header)
    if encoded is None:
        return header
    try:
        data = base64.b64decode(encoded[1], validate=True)
        text = data.decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    return text if base64.b64encode(data).decode("ascii") == encoded[1] else None


def scalar_text(value: Any) -> str | None:
    """Returns an argument as header text; None for null, a list, an object or a fraction, which have no header."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value) if isinstance(value, str | int) else None


def marked(schema: Any) -> dict[str, tuple[str, ...]]:
    """Returns which arguments of a tool go into headers: the header's name after `Mcp-Param-` → path of properties.

    Raises:
        ValueError: a mark is at a wrong place, is not a header name, is given twice, or is on a type without one text.
    """
    names: dict[str, tuple[str, ...]] = {}
    for path, each in _schemas(schema):
        if MARK not in each:
            continue
        name, where = each[MARK], ".".join(path or ())
        if not path:
            raise ValueError(f"{MARK} is allowed on properties only, not inside items, anyOf, $defs and the like")
        if not isinstance(name, str) or not _TOKEN.fullmatch(name):
            raise ValueError(
                f"property {where}: {MARK} {str(name)[:40]!r} is not a name of a header: use letters, digits and -"
            )
        if each.get("type") not in _TYPES:
            raise ValueError(f"property {where}: {MARK} needs the type string, integer or boolean")
        if name.lower() in (other.lower() for other in names):
            raise ValueError(f"property {where}: {MARK} {name!r} is used twice: give each property a header of its own")
        names[name] = path
    return names


def param_headers(names: Mapping[str, tuple[str, ...]], arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns the headers of a call, from its arguments and the names that `marked` returned."""
    headers = {}
    for name, path in names.items():
        text = scalar_text(value_at(arguments, path))
        if text is not None:
            headers[PARAM_PREFIX + name] = write_value(text)
    return headers


def value_at(arguments: Any, path: tuple[str, ...]) -> Any:
    """Returns the argument at a path of properties; None if it is missing."""
    for key in path:
        if not isinstance(arguments, Mapping):
            return None
        arguments = arguments.get(key)
    return arguments


def _schemas(root: Any) -> Iterator[tuple[tuple[str, ...] | None, Mapping[str, Any]]]:
    """Yields every schema inside a schema, with its path of properties; None where other keywords lead to it."""
    todo: list[tuple[tuple[str, ...] | None, Any]] = [((), root)]
    while todo:
        path, schema = todo.pop()
        if not isinstance(schema, Mapping):
            continue
        yield path, schema
        for keyword, value in schema.items():
            if keyword == "properties" and isinstance(value, Mapping):
                todo += [(None if path is None else (*path, name), each) for name, each in value.items()]
            elif keyword in _ONE or keyword in _ONE_MORE:
                todo.append((None, value))
            elif keyword in _LISTS and isinstance(value, list):
                todo += [(None, each) for each in value]
            elif keyword in _TABLES and isinstance(value, Mapping):
                todo += [(None, each) for each in value.values()]
