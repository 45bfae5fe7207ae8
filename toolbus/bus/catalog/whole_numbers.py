"""Writes 3.0 as 3 where a schema asks for an integer: models write it so, and JSON Schema counts it as one.

A handler that gets it does not: `range(3.0)` raises, and a Go or Rust program cannot read 3.0 into an int. The
validator tells which numbers are meant: one that stays valid as a fraction is not an integer of the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema_rs

from toolbus.bus.catalog.argument_repair import MAX_REPAIRS, Fix, apply, original_of, repairs_of, written
from toolbus.bus.catalog.schema_defaults import Path
from toolbus.bus.catalog.schema import CHOICES, MAYBE_WHOLE, ArgumentChecker, load_arguments

MAX_WHOLE = 2**53  # up to here each whole number is a float of its own


def with_whole_numbers(checker: ArgumentChecker, text: str, limit: int) -> str:
    """Returns the text of arguments with its whole numbers written as such where the schema asks for integers.

    Args:
        text: of arguments that fit; it may have been repaired.
        limit: how many bytes arguments may have.
    """
    if not checker.has_integers or MAYBE_WHOLE not in text:
        return text
    plain = str(text)
    value = load_arguments(plain)
    places = list(_whole(value, ()))
    if not places or len(places) > MAX_REPAIRS:
        return text
    fractions = load_arguments(plain)
    for path, number in places:
        apply(Fix(path, number + 0.5 if abs(number) < MAX_WHOLE / 4 else 0.5), fractions)
    integers = {path for error in checker.errors(fractions, 2 * MAX_REPAIRS) or () for path in _integer_places(error)}
    repairs = [apply(Fix(path, int(number)), value) for path, number in places if path in integers]
    if not repairs:
        return text
    before = original_of(text)
    room = limit - len(before.encode())
    return written(checker, value, before, [*repairs_of(text), *repairs], room) or text


def _whole(value: Any, path: Path) -> Iterator[tuple[Path, float]]:
    if type(value) is float:
        if value.is_integer() and abs(value) <= MAX_WHOLE:
            yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _whole(each, (*path, key))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _whole(each, (*path, index))


def _integer_places(error: jsonschema_rs.ValidationError) -> Iterator[Path]:
    """Yields the places where a schema expects an integer and got a fraction."""
    kind = error.kind
    if isinstance(kind, jsonschema_rs.ValidationErrorKind.Type) and "integer" in kind.types:
        yield tuple(error.instance_path)
    elif isinstance(kind, CHOICES):
        for branch in kind.context:
            for each in branch:
                yield from _integer_places(each)
