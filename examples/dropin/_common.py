"""What the tools of this folder share: how they read arguments and what their answers look like.

It holds no tool. Files whose names begin with `_` are loaded first, so the others can import it. The habits are for
small models, which skip instructions and fill gaps: a limit is clamped instead of refused, a count says how many there
are and not how many are shown, an empty answer says that it is empty, numbers come as they should be read out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

OPERATOR_LEVEL = 90  # of callers who may see everything; the host says it as the attribute `level`
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def definition(
    name: str, description: str, properties: Mapping[str, Any], required: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns what a model is told of a tool, in the form of chat completions.

    Limits are described, not declared: a schema's `maximum` would refuse the call that a clamp can answer.
    """
    parameters = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def refused(sentence: str, **more: Any) -> dict[str, Any]:
    """Returns a "no" that the model can recover from: what is wrong and what to do instead."""
    return {"error": sentence, **more}


def text_of(args: Mapping[str, Any], key: str) -> str:
    """Returns an argument as text without white space around it.

    "" where it was left out, and null, false and 0 are how models leave out what they see in the schema.
    """
    value = args.get(key)
    return str(value).strip() if value else ""


def whole_number(value: Any) -> int | None:
    """Returns a whole number, also one that a model wrote as text or as 5.0; None where it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if number.is_integer() else None  # infinity and NaN are none either


def limit_of(args: Mapping[str, Any], default: int, most: int) -> int:
    """Returns how many rows to show: from 1 to `most`, whatever was asked for."""
    asked = whole_number(args.get("limit"))
    return default if asked is None else min(max(asked, 1), most)


def wrong_mode(
    args: Mapping[str, Any], tool: str, mode: tuple[str, str], belongs_to: Mapping[str, Collection[str]]
) -> dict[str, Any] | None:
    """Returns the refusal of the first argument that another mode takes; None where all fit.

    Args:
        mode: the name of the argument that chooses the mode, and what it is.
        belongs_to: argument → the modes that take it. An argument that is not here fits every mode.
    """
    chooser, chosen = mode
    for key, modes in belongs_to.items():
        if chosen not in modes and text_of(args, key):
            meant = " or ".join(f"{chooser}={each!r}" for each in modes)
            return refused(
                f"`{key}` does not go with {chooser}={chosen!r}. Call {tool} again with {meant} and the same `{key}`, "
                f"or leave `{key}` out."
            )
    return None


def matching(rows: Iterable[T], wanted: str, words_of: Callable[[T], Sequence[str]]) -> list[T]:
    """Returns the rows that a name means: the exact ones, else those that contain it, else those that it contains.

    Case does not matter. A word of fewer than three letters is too short to be looked for inside the name.
    """
    wanted = wanted.casefold()
    named = [(row, [word.casefold() for word in words_of(row)]) for row in rows]
    steps: tuple[Callable[[str], bool], ...] = (
        lambda word: word == wanted,
        lambda word: wanted in word,
        lambda word: len(word) >= 3 and word in wanted,
    )
    for fits in steps:
        if found := [row for row, words in named if any(map(fits, words))]:
            return found
    return []


def cut(rows: Sequence[T], limit: int, name: str, *, counted_as: str = "count") -> dict[str, Any]:
    """Returns the first rows, under `name`, with how many there are and how many of them are shown."""
    return {counted_as: len(rows), "shown": min(len(rows), limit), name: list(rows[:limit])}


def size_text(size: float) -> str:
    """Returns a number of bytes to be read out: models misquote long ones."""
    for unit in UNITS:
        if size < 1024 or unit == UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"


def span_text(seconds: float) -> str:
    """Returns a length of time to be read out."""
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for unit, most in (("s", 60), ("min", 60), ("h", 48)):
        if seconds < most:
            return f"{seconds:.0f} {unit}"
        seconds /= most if unit != "h" else 24
    return f"{seconds:.0f} days"


def is_operator(env: Mapping[str, Any]) -> bool:
    """Whether the host vouches for somebody who may see everything."""
    return (whole_number(env.get("level")) or 0) >= OPERATOR_LEVEL


def names_in(env: Mapping[str, Any], key: str) -> list[str]:
    """Returns names that the host sent along: a list, or a text with commas, since attributes of a call are texts."""
    value = env.get(key) or ()
    parts = value.split(",") if isinstance(value, str) else value
    return [name for part in parts if (name := str(part).strip())]
