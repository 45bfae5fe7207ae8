"""Makes texts fit to be sent or shown: repaired for UTF-8, cleaned for a terminal or log, shortened, as JSON.

Every floor uses this module, and it uses none of ours.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, NoReturn

MAX_SHOWN = 80  # characters of a foreign value that an error message repeats
MAX_NAMES_SHOWN = 8  # names that an error message lists
# A misspelt name is compared with so many others, and only where it is so short: each pair takes about 10 µs.
MAX_COMPARED = 500
MAX_COMPARED_LENGTH = 100
# What changes a terminal, or how the text around it is read: control characters of ASCII and Latin-1, line separators,
# marks and overrides of the writing direction, characters without a width, halves of surrogate pairs, tag characters.
# U+200C and U+200D stay, which languages and emoji need.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_UNSAFE_RUN = re.compile(f"{_UNSAFE.pattern}+")
COLOUR_END = "\x1b[0m"
# ECMA-48, 7-bit and 8-bit: colours (SGR), which stay; other control sequences; strings with their end (titles, links,
# clipboard); the other escapes. An incomplete one matches nothing and loses its control characters in `drop_unsafe`. A
# string holds no beginning of another one: a line of nothing else would otherwise take the square of its length.
_COLOUR = r"\x1b\[[0-9;:]{0,64}m"
_COLOURS = re.compile(_COLOUR)
_ESCAPE = re.compile(
    rf"(?P<colour>{_COLOUR})"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x90\x98\x9c-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]+[0-~]"
    r"|\x1b[0-OQ-WYZ\\`-~]"
)
_BREAK = re.compile(r"[\r\v\f\x85\u2028\u2029]+")  # within a line: progress bars return to its beginning


def shorten(text: str, limit: int = MAX_SHOWN) -> str:
    """Returns a text of at most ``limit`` characters; a cut is marked with ``…``, which counts."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def quote(text: str, limit: int = MAX_SHOWN) -> str:
    """Returns a text as an error message shows it: shortened, in quotes, control characters escaped."""
    return repr(shorten(text, limit))


def clean_line(text: str) -> str:
    """Returns a foreign text as one line that a terminal or log can show: ``�`` for each control character.

    Line breaks and other runs of blanks become one space, so it cannot look like two lines.
    """
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", " ".join(text.split()))


def clean_lines(text: str) -> str:
    """Returns a foreign text as `clean_line` does, with its lines and blanks; lines after the first are indented.

    So a line of it cannot look like a line of the log or program that shows it.
    """
    return clean_chunk("\n  ".join(text.splitlines()))


def clean_chunk(text: str) -> str:
    """Returns a part of a foreign text with its line breaks and tabs, and ``�`` for each other control character."""
    return _UNSAFE.sub(lambda match: match[0] if match[0] in "\n\t" else "\N{REPLACEMENT CHARACTER}", text)


def drop_unsafe(text: str) -> str:
    """Returns a foreign text without control characters."""
    return _UNSAFE.sub("", text)


def keep_colours(line: str) -> str:
    """Returns a line of output with its colours, and without other escape sequences and control characters."""
    if line.isprintable():  # most lines are, and this takes a fiftieth of the time
        return line
    line = _BREAK.sub(" ", line.rstrip("\r").expandtabs())
    if "\x1b" not in line:
        return drop_unsafe(_ESCAPE.sub("", line))
    parts: list[str] = []
    begin, coloured = 0, False
    for match in _ESCAPE.finditer(line):
        parts.append(drop_unsafe(line[begin : match.start()]))
        begin = match.end()
        if match["colour"]:
            parts.append(match["colour"])
            coloured = True
    parts.append(drop_unsafe(line[begin:]))
    return "".join(parts) + (COLOUR_END if coloured else "")  # the next line is another plugin's


def drop_colours(line: str) -> str:
    """Returns what `keep_colours` returned without its colours."""
    return _COLOURS.sub("", line)


def mark_unsafe(text: str) -> str:
    """Returns a foreign text for models and people: invisible characters are written out, `[U+202E]` or `[U+E0041 ×9]`.

    Line breaks and tabs stay.
    """
    return _UNSAFE_RUN.sub(_mark, text)


def _mark(match: re.Match[str]) -> str:
    run = match[0].replace("\r\n", "\n")
    hidden = run.strip("\n\t")
    if not hidden:
        return run
    if "\n" in hidden or "\t" in hidden:
        return _UNSAFE.sub(lambda each: each[0] if each[0] in "\n\t" else f"[U+{ord(each[0]):04X}]", run)
    more = f" ×{len(hidden)}" if len(hidden) > 1 else ""
    return run.replace(hidden, f"[U+{ord(hidden[0]):04X}{more}]")


def escape_unsafe(text: str) -> str:
    r"""Returns JSON text that a terminal or log can show: what `clean_line` replaces is escaped (``\u009b``).

    Line breaks stay: between the values they are layout, and within a text JSON has escaped them.
    """
    return _UNSAFE.sub(lambda match: match[0] if match[0] == "\n" else json.dumps(match[0])[1:-1], text)


def without_blanks(text: str) -> str:
    """Returns a JSON text without the blanks of Unicode and byte order marks around it, which some models write."""
    return text.strip().strip("\ufeff").strip()


def list_names(names: Iterable[str], limit: int = MAX_NAMES_SHOWN) -> str:
    """Returns the first names for an error message, ``none`` where there are none."""
    first = list(itertools.islice(names, limit + 1))
    return (", ".join(first[:limit]) or "none") + (" and others" if len(first) > limit else "")


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns the known name that is nearest to a misspelt one, "" where none is near."""
    from difflib import get_close_matches  # only a message about a misspelt name needs it

    if len(name) > MAX_COMPARED_LENGTH:
        return ""
    return next(iter(get_close_matches(name, list(islice(names, MAX_COMPARED)), 1)), "")


def repair_utf8(text: str) -> str:
    """Returns a text that UTF-8 can carry: each half of a surrogate pair, which models do write, becomes ``?``."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def join_surrogates(text: str) -> str:
    """Returns a text with surrogate pairs joined to characters; a half alone becomes U+FFFD.

    For texts of a model: JSON and streams may spell a character as a pair, which `repair_utf8` would lose.
    """
    if is_utf8(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def join_surrogates_in_json(value: Any) -> Any:
    """Returns a JSON value with `join_surrogates` applied to every text in it, keys included."""
    try:
        return _join_in_json(value)
    except RecursionError:  # nested too deeply to be written as JSON either
        return value


def _join_in_json(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else join_surrogates(value)
    if isinstance(value, (dict, Mapping)):  # the check for dict takes a tenth of the time
        return {_join_in_json(key): _join_in_json(inner) for key, inner in value.items()}
    return [_join_in_json(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def escape_surrogates(text: str) -> str:
    r"""Returns JSON text that UTF-8 can carry: half of a surrogate pair becomes JSON's own escape (``\ud83d``)."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def is_utf8(text: str) -> bool:
    """Tells whether UTF-8 can carry a text: JSON can also spell half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_constant(constant: str) -> NoReturn:
    """Refuses what Python reads as JSON and others do not (NaN, Infinity): a ``parse_constant`` for `json`.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"JSON has no {constant}")


_DECODER = json.JSONDecoder(parse_constant=refuse_constant)  # making one takes longer than a small text


def parse_json(text: str) -> Any:
    """Reads JSON strictly.

    Raises:
        ValueError: it is not JSON, or holds NaN or Infinity.
        RecursionError: it is nested too deeply.
    """
    return _DECODER.decode(text)


def is_json_object(text: str) -> bool:
    """Tells whether a text is a whole JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def read_foreign_json(text: str) -> Any:
    """Parses foreign JSON that goes out again; returns None where it is not JSON, or UTF-8 cannot hold it."""
    try:
        value = parse_json(text)
        return value if is_utf8(dump_json(value)) else None
    except (ValueError, RecursionError):
        return None


def json_writer(plain: Callable[[Any], Any] | None = None) -> Callable[[Any], str]:
    """Returns a function that writes JSON.

    Args:
        plain: returns the JSON form of a value that `json` does not know; None: such a value is a TypeError.

    `json.dumps` with options makes an encoder for each call, and `JSONEncoder.encode` its C encoder for each call,
    which costs as much as writing a small output. So the C encoder is made once; if this Python has another one, the
    `JSONEncoder` is. A value that contains itself ends in a RecursionError.
    """
    encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=plain)
    try:
        machine: Any = json.encoder.c_make_encoder  # type: ignore[attr-defined]  # the published stubs lack it
        encode = machine(None, encoder.default, json.encoder.encode_basestring, None, ":", ",", False, False, False)
        if "".join(encode({"a": ["\u00e9", 1.5, None]}, 0)) != '{"a":["\u00e9",1.5,null]}':
            return encoder.encode
    except (AttributeError, TypeError):
        return encoder.encode
    join = "".join
    return lambda value: join(encode(value, 0))


_write_json = json_writer()


def dump_json(value: Any) -> str:
    """Returns a value as compact JSON.

    Raises:
        TypeError, ValueError: JSON cannot hold it (NaN included, or a value that contains itself).
    """
    try:
        return _write_json(value)
    except RecursionError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
