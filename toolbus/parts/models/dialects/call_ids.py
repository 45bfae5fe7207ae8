"""Gives calls ids that every provider accepts and that occur once in a conversation."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import replace

from toolbus.parts.models.dialects.conversation import ModelCall

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
