"""Holds what the tools of this folder share: how they read arguments, and the form of their outputs.

It has no tool. Files whose names begin with `_` are loaded first, so the others can import it. The rules are for small
models, which skip instructions and fill gaps: a limit is clamped instead of refused, a count is the number of all items
and not of those shown, an empty output says that it is empty, and numbers are texts that can be read out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

OPERATOR_LEVEL = 90  # of callers who may see everything; the host sets it as the attribute `level`
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def definition(
    name: str, description: str, properties: Mapping[str, Any], required: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns what a model reads about a tool, in the format of chat completions.

    Limits are described, not declared: a schema's `maximum` would refuse a call that a clamp can answer.
    """
    parameters = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def refuse(error: str, **fields: Any) -> dict[str, Any]:
    """Returns an error from which the model can recover: what is wrong and what to do instead."""
    return {"error": error, **fields}


def text_of(args: Mapping[str, Any], key: str) -> str:
    """Returns an argument as text without white space around it; "" if it is missing.

    Models write null, false or 0 for an argument of the schema that they leave out.
    """
    value = args.get(key)
    return str(value).strip() if value else ""


def whole_number(value: Any) -> int | None:
    """Returns a whole number, also one that a model wrote as text or as 5.0; None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if number.is_integer() else None  # infinity and NaN are not integers


def limit_of(args: Mapping[str, Any], default: int, maximum: int) -> int:
    """Returns how many rows to show: the argument `limit`, clamped to 1 to `maximum`."""
    limit = whole_number(args.get("limit"))
    return default if limit is None else min(max(limit, 1), maximum)


def wrong_mode(
    args: Mapping[str, Any], tool: str, mode: tuple[str, str], belongs_to: Mapping[str, Collection[str]]
) -> dict[str, Any] | None:
    """Returns the error for the first argument that belongs to another mode; None if all fit.

    Args:
        mode: the name of the argument that chooses the mode, and its value.
        belongs_to: argument → the modes that take it. Every mode takes an argument that is not listed here.
    """
    chooser, chosen = mode
    for key, modes in belongs_to.items():
        if chosen not in modes and text_of(args, key):
            others = " or ".join(f"{chooser}={each!r}" for each in modes)
            return refuse(
                f"`{key}` does not go with {chooser}={chosen!r}. Call {tool} again with {others} and the same `{key}`, "
                f"or leave `{key}` out."
            )
    return None


def matching(rows: Iterable[T], name: str, words_of: Callable[[T], Sequence[str]]) -> list[T]:
    """Returns the rows that match a name: the exact ones, else those that contain it, else those that it contains.

    Case does not matter. A word of fewer than three letters is too short to be searched inside the name.
    """
    name = name.casefold()
    candidates = [(row, [word.casefold() for word in words_of(row)]) for row in rows]
    steps: tuple[Callable[[str], bool], ...] = (
        lambda word: word == name,
        lambda word: name in word,
        lambda word: len(word) >= 3 and word in name,
    )
    for fits in steps:
        if matches := [row for row, words in candidates if any(map(fits, words))]:
            return matches
    return []


def cut(rows: Sequence[T], limit: int, name: str, *, counted_as: str = "count") -> dict[str, Any]:
    """Returns the first rows, under `name`, with the number of all rows and of those shown."""
    return {counted_as: len(rows), "shown": min(len(rows), limit), name: list(rows[:limit])}


def size_text(size: float) -> str:
    """Returns a number of bytes as a short text: models misquote long numbers."""
    for unit in UNITS:
        if size < 1024 or unit == UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"


def span_text(seconds: float) -> str:
    """Returns a length of time as a short text."""
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for unit, maximum in (("s", 60), ("min", 60), ("h", 48)):
        if seconds < maximum:
            return f"{seconds:.0f} {unit}"
        seconds /= maximum if unit != "h" else 24
    return f"{seconds:.0f} days"


def is_operator(env: Mapping[str, Any]) -> bool:
    """Tells whether the host gave the caller the level of an operator."""
    return (whole_number(env.get("level")) or 0) >= OPERATOR_LEVEL


def names_in(env: Mapping[str, Any], key: str) -> list[str]:
    """Returns names from the host: a list, or a text with commas, since attributes of a call are texts."""
    value = env.get(key) or ()
    parts = value.split(",") if isinstance(value, str) else value
    return [name for part in parts if (name := str(part).strip())]
