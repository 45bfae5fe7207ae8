"""Reads JSON from models, plugins and callbacks, and compares it with what Python's own reader makes of it.

`expected` is the contract in a few lines over the standard library: one well-formed value, no NaN, no half of a
surrogate pair, no number that a float cannot hold, bounds on depth and on wide integers. A result's text need not be
JSON; arguments and schemas have to be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from lab.fuzz.target import Target, hold
from toolbus.bus.catalog.schema import ARGUMENT_DEPTH, WIDE_INTEGERS, load_arguments
from toolbus.bus.gateway.callback_messages import callback_body, read_response
from toolbus.common.text import join_surrogates_in_json, without_blanks
from toolbus.errors import InvalidTool
from toolbus.protocol.tool import Result, Tool

REFUSED = object()  # the verdict on a text that is not taken


def text_of(data: bytes) -> str:
    """Reads an input as a text; half of a surrogate pair may be in it, as a program can write one."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace")


def plain(text: str) -> Any:
    """Returns what Python's reader makes of JSON; `REFUSED` where it is not JSON."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return REFUSED


def _no_constant(constant: str) -> Any:
    raise ValueError(constant)


def expected(text: str) -> Any:
    """Returns the arguments that a text has to be read as, by the contract; `REFUSED` where it has to be refused."""
    if text == "":
        return {}
    value = plain(text)
    if value is REFUSED or has_half(text):
        return REFUSED
    scalars, depth = _survey(value)
    if depth > ARGUMENT_DEPTH:
        return REFUSED
    wide = [each for each in scalars if type(each) is int and not -(2**63) <= each < 2**64]
    # Half of a pair counts wherever it was written, also in a key that a later one replaced: so it is looked for in
    # the pairs, which `json.loads` would have joined.
    pairs = json.dumps(json.loads(text, object_pairs_hook=list), ensure_ascii=False)
    large = any(not _is_finite(digits) for digits in _numbers(text))
    return REFUSED if has_half(pairs) or large or len(wide) > WIDE_INTEGERS else value


def has_half(text: str) -> bool:
    """Returns whether half of a surrogate pair is in a text."""
    return any("\ud800" <= char <= "\udfff" for char in text)


def _survey(value: Any) -> tuple[list[Any], int]:
    """Returns what is in a value that is not a container, and how deep its containers are."""
    scalars, depth, level = [], 0, [value]
    while level:
        scalars += [each for each in level if not isinstance(each, dict | list)]
        containers = [each for each in level if isinstance(each, dict | list)]
        depth += bool(containers)
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]
    return scalars, depth


def _numbers(text: str, *, whole: bool = True) -> list[str]:
    """Returns the digits of every number; with ``whole`` those of integers too."""
    found: list[str] = []
    json.loads(text, parse_int=found.append if whole else None, parse_float=found.append)
    return found


def _is_finite(digits: str) -> bool:
    return math.isfinite(float(digits))


def same(one: Any, other: Any) -> bool:
    """Returns whether two values are the same, 5 and 5.0 being two."""
    return repr(one) == repr(other)


def _as_arguments(text: str) -> None:
    wanted = expected(text)
    try:
        found = load_arguments(text)
    except ValueError:
        found = REFUSED
    hold(
        (found is REFUSED) == (wanted is REFUSED),
        f"arguments {text!r:.300}: read as {found!r:.200}, not {wanted!r:.200}",
    )
    hold(found is REFUSED or same(found, wanted), f"arguments {text!r:.300} are {found!r:.200}, not {wanted!r:.200}")


def _as_schema(text: str) -> None:
    """A declaration is named by its content: neither white space nor the order of keys matters."""
    try:
        tool = Tool("t", parameters_json=text)
    except InvalidTool:
        return
    value = plain(text)
    hold(isinstance(value, dict), f"a schema that is not an object was taken: {text!r:.300}")
    turned = {key: value[key] for key in reversed(value)}
    if all(map(_is_finite, _numbers(text))):
        other = Tool("t", parameters_json=json.dumps(turned, indent=1))
        hold(other.schema_hash == tool.schema_hash, f"the schema {text!r:.300} has two hashes")


def _as_callback(text: str, data: bytes) -> None:
    """What is posted is JSON with the arguments unchanged, and every answer becomes a result that is JSON."""
    body = json.loads(callback_body("t", text, "c"))
    hold(body["raw_arguments"] == text, "the raw arguments were changed")
    read = without_blanks(text) or text
    value = plain(read) if text else {}
    finite = value is not REFUSED and all(map(_is_finite, _numbers(read or "0", whole=False)))
    if finite:
        wanted = value if isinstance(value, dict) else {"value": value}
        unread = {"_raw": text}  # too deep to be written
        hold(
            same(body["arguments"], wanted) or (_deep(value) and body["arguments"] == unread), f"{text!r:.300} changed"
        )
    else:
        hold(body["arguments"] == {"_raw": text}, f"{text!r:.300} became {body['arguments']!r:.200}")
    for status in (200, 302, 500):
        result = read_response(status, data, "", "t")
        output = json.loads(result.output_json)
        hold(status == 200 or result.is_error, f"status {status} is not a failure")
        if (
            status == 200
            and finite
            and read == text.strip(" \t\r\n")
            and text.isascii()
            and not isinstance(value, dict)
            and not _deep(value)
        ):
            hold(same(output, value), f"the answer {data!r:.300} became {output!r:.200}")


def _deep(value: Any) -> bool:
    return _survey(value)[1] > 200


def _as_output(text: str) -> None:
    """A result's output is read or refused as documented, and its text shows the same value."""
    result = Result("c", output_json=text)
    try:
        found = result.output
    except ValueError:
        found = REFUSED
    wanted = plain(text or "null")
    hold(wanted is REFUSED or same(found, wanted), f"the output {text!r:.300} is {found!r:.200}")
    shown = result.text
    if wanted is not REFUSED:
        wanted = join_surrogates_in_json(wanted)
        is_shown = shown == wanted if isinstance(wanted, str) else same(plain(shown), wanted)
        hold(is_shown, f"the output {text!r:.300} is shown as {shown!r:.200}")


def run(data: bytes) -> None:
    """Reads an input in every way in which JSON comes in."""
    text = text_of(data)
    _as_arguments(text)
    _as_schema(text)
    _as_output(text)
    if not has_half(text):  # what UTF-8 cannot hold cannot be posted
        _as_callback(text, data)


def seeds() -> Iterator[bytes]:
    """Texts at the edges of the contract."""
    wide = "123456789012345678901234567890"
    yield from (b"", b"{}", b"null", b'{"a": [1, 2.5, -0, 1e3, true, "\\u00e9"]}', b'{"a":1,"a":2}', b"[NaN]", b"1e999")
    yield from (wide.encode(), f'{{"a":{wide},"b":-{wide}}}'.encode(), b"9" * 309, b"1" + b"0" * 308)
    yield b"18446744073709551616"
    yield from (b'"\\ud83d\\ude00"', b'"\\ud83d"', '"é😀"'.encode(), b'{"\\ud800":1,"a":"\\udc00"}', b'"\xed\xa0\x80"')
    yield from (b"[" * 127 + b"]" * 127, b"[" * 129 + b"]" * 129, b"[" * 1500 + b"]" * 1500, b"[" + b"1" * 20 + b"]")
    yield from (b" \n[1 ,\t2]\r", b"\xef\xbb\xbf{}", b"[1,]", b"01", b"-", b"[1]x", b'"\x01"', b'"a\\/b"', b"\x0b1")
    yield from (b'{"output":{"a":1},"is_error":false}', b'{"output":null,"is_error":true,"error":"no"}', b'{"error":3}')


TARGET = Target(
    "json_texts", "arguments, schemas, outputs and callbacks are read as the standard library does", run, seeds
)
