"""Reads a call's arguments where a server sends them more than once: in pieces, as a whole, behind a placeholder.

A stream may state the same arguments several times: deltas, an event with all of them, the item, the response. Servers
leave them empty in one place, repeat them in another, or send all so far in each piece. The source that has arguments
wins; different arguments are a contradiction, and such a call must not be made. Calls get ids here that every provider
accepts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from toolbus.common.text import is_json_object
from toolbus.parts.models.dialects.conversation import ModelCall

CONTRADICTION = "the model's server sent different arguments for it in different places. Call it again."
ANNOUNCED = "the model's server announced it, but never sent its arguments or its end. Call it again."
_MAX_STARTS = 32  # of pieces at which the whole may begin again, from either end: more would take quadratic time
_PLACEHOLDERS: tuple[object, ...] = ({}, None, "", [])
_DECODER = json.JSONDecoder()


def has_arguments(text: str) -> bool:
    """Tells whether arguments say something: not empty, `{}` or null."""
    plain = text.strip()
    return bool(plain) and _values(plain) not in [[each] for each in _PLACEHOLDERS]


def joined_pieces(pieces: Sequence[str]) -> str:
    """Returns the text of pieces of arguments.

    They are joined, unless that is no JSON object and leaving out placeholders and repetitions gives one: `{}` or null
    before the object, all so far in each piece, the whole again at the end. Different objects stay joined: a mistake.
    """
    joined = "".join(pieces)
    if not joined.strip() or is_json_object(joined):
        return joined
    starts = [place for place, piece in enumerate(pieces) if piece.lstrip()[:1] in ("{", "n", '"', "[")]
    for start in dict.fromkeys(itertools.chain(starts[:_MAX_STARTS], starts[-_MAX_STARTS:])):
        text = "".join(pieces[start:])
        whole = _only_object(text)
        if whole is not None and _lead_to(whole, pieces[:start]):
            return whole
    return joined


def resolved(sources: Iterable[str]) -> tuple[str, str]:
    """Returns the arguments that sources state, and why the call must not be made; "" if it may be.

    Args:
        sources: the arguments by each, in the order in which they came; "" where a source has none.
    """
    texts = [text for text in sources if text.strip()]
    objects = [text for text in texts if has_arguments(text) and is_json_object(text)]
    if objects:
        same = all(json.loads(text) == json.loads(objects[0]) for text in objects)
        return objects[-1], "" if same else CONTRADICTION
    empty = [text.strip() for text in texts if not has_arguments(text)]
    broken = [text for text in texts if has_arguments(text) and not any(each.startswith(text) for each in empty)]
    return (broken or texts or [""])[-1], ""


def refused(call: ModelCall, fault: str) -> ModelCall:
    """Returns a call that must not be made if there is a fault."""
    return replace(call, whole=False, fault=fault) if fault else call


def _values(text: str) -> list[object]:
    """Returns the JSON values that follow each other in a text; empty if it holds anything else."""
    values: list[object] = []
    place = 0
    while place < len(text):
        try:
            value, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            return []
        values.append(value)
        while text[place : place + 1].isspace():
            place += 1
    return values


def _only_object(text: str) -> str | None:
    """Returns the text of the one object that a text of several values states, placeholders aside; else None."""
    plain = text.strip()
    values = _values(plain)
    objects = [value for value in values if value not in _PLACEHOLDERS]
    if not values:
        return None
    if not objects:
        return "{}" if {} in values else None
    if any(not isinstance(value, dict) or value != objects[0] for value in objects):
        return None
    place = 0
    while True:  # the spelling of the first of them
        value, end = _DECODER.raw_decode(plain, place)
        if value not in _PLACEHOLDERS:
            return plain[place:end]
        place = end + len(plain[end:]) - len(plain[end:].lstrip())


def _lead_to(whole: str, pieces: Sequence[str]) -> bool:
    """Tells whether pieces before the whole arguments are the beginning of them, joined or each by itself."""
    beginnings = [piece for piece in pieces if piece.strip() not in ("", "{}", "null")]
    return whole.startswith("".join(beginnings)) or all(map(whole.startswith, beginnings))


_PORTABLE_ID = re.compile(r"[a-zA-Z0-9_-]{1,40}", re.ASCII)  # OpenAI's chat: 40 characters; Anthropic: this alphabet
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}", re.ASCII)  # "must be a-z, A-Z, 0-9, with a length of 9" (Mistral)
_MAX_STEM = 34  # characters of an id that is made unique: five digits and a mark fit behind it


def portable_id(call_id: str) -> str:
    """Returns an id that every provider accepts: the given one, or a digest of it, which is always the same."""
    if not call_id or _PORTABLE_ID.fullmatch(call_id):
        return call_id
    return "call_" + hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def unique_id(call_id: str, taken: set[str]) -> str:
    """Returns an id that is not taken: the given one, or one derived from it."""
    unique, count = call_id or "call_0", 1
    while unique in taken:
        unique = f"{(call_id or 'call')[:_MAX_STEM]}_{count}"
        count += 1
    return unique


def short_id(call_id: str, taken: set[str]) -> str:
    """Returns an id of nine letters and digits that is not taken: the given one, or always the same digest."""
    short, count = call_id, 0
    while short in taken or not _SHORT_ID.fullmatch(short):
        short = hashlib.sha256(f"{count} {call_id}".encode("utf-8", "surrogatepass")).hexdigest()[:9]
        count += 1
    return short


def unique_calls(calls: Iterable[ModelCall]) -> tuple[ModelCall, ...]:
    """Returns the calls of one turn with an id each; a server may have given the same id twice."""
    taken: set[str] = set()
    unique = []
    for call in calls:
        unique.append(replace(call, id=unique_id(call.id, taken)))
        taken.add(unique[-1].id)
    return tuple(unique)
