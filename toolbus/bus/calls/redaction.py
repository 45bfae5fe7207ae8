"""Texts that may be kept or shown: with what looks like a secret taken out.

A value is judged by the name of its key; in texts that are no JSON, by what stands before it. It is a net with holes,
for what people look at. It decides nothing.
"""

from __future__ import annotations

import json
import re
from typing import Any

from toolbus.bus.loopback import mask

HIDDEN = "[hidden]"
MAX_PARSED = 16_384  # characters, 6 ms at worst: a longer text is not looked through, so none of it is shown
MAX_DEPTH = 32

_WORD = (
    r"pass(?:word|wd|phrase|code|key)?s?|pwd|secrets?|tokens?|credentials?|creds?|auth|authori[sz]ation|oauth|bearer"
    r"|(?:api|private|access|ssh|signing|encryption|master|account)[-_ ]?keys?|cookies?|session[-_ ]?ids?|signature|pin"
    r"|t?otp|jwt|(?:mfa|recovery|backup)[-_ ]?codes?"
)
# A whole word of the key, with its parts set apart: `clientSecret` and `x-api-key` are, `author` and `spin` are not.
_KEY = re.compile(rf"(?:^|[-_ .]){'(?:' + _WORD + ')'}[0-9]*(?:$|[-_ .])", re.IGNORECASE)
_HINT = re.compile(_WORD)  # without it anywhere, small letters for capitals, a key is none: most are seen off here
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_COUNTS = re.compile(
    r"(?:^|[-_ .])(?:max|min|num|count|total|limit|used|usage|per|n|prompt|completion|input|output|cached|reasoning)"
    r"(?:$|[-_ .])",
    re.IGNORECASE,
)
_TOKENS = re.compile(r"tokens?", re.IGNORECASE)
# Possessive and begun at a word's start only: whatever is sent, a text is gone through once.
_KEYED = re.compile(r"""(?<![\w.-])(?P<key>[\w.-]++(?: [\w.-]++)?)\\*["']?\s*+[:=]+>?\s*+""")
_VALUE = re.compile(  # in quotes; nested, where what follows cannot be told apart any more; one word
    r"""(?P<quote>\\*["']).*?(?:(?<!\\)(?P=quote)|$)|[\[{].*|(?:(?:bearer|basic|digest|token)\s+)?\S+""",
    re.IGNORECASE | re.DOTALL,
)
# Shapes that well-known secrets have.
_BARE = re.compile(
    r"\b(?:(?:sk|pk|rk)[-_]|gh[opsur]_|github_pat_|xox[abprs]-|AKIA|eyJ)[-_A-Za-z0-9.]{12,}"
    r"|(?<=\bbearer )\S+|(?<=\bbasic )[A-Za-z0-9+/]{16,}=*",
    re.IGNORECASE,
)
# What none of the above, nor `mask`, finds anything without: a sign behind a name, or a bare secret's length or word.
_SUSPECT = re.compile(r"[:=]|[-_A-Za-z0-9.]{15}|bearer |basic ", re.IGNORECASE)
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # making one takes as long as what it writes


def is_secret_name(key: str) -> bool:
    """Whether a key names a secret: `password`, `clientSecret`, `x-api-key`; not `author`, `max_tokens`."""
    if key.isascii() and _HINT.search(key.lower()) is None:
        return False
    name = parted(key)
    if _COUNTS.search(name):
        name = _TOKENS.sub("", name)
    return _KEY.search(name) is not None


def parted(key: str) -> str:
    """Sets the parts of a key apart: `clientSecret` becomes `client_Secret`."""
    return _HUMP.sub("_", key)


def redacted(text: str, most: int) -> str:
    """Returns JSON or any other text without its secrets, cut to ``most`` characters."""
    if len(text) > MAX_PARSED:
        return f"[{len(text)} characters]"
    try:
        shown = _ENCODER.encode(_redacted(json.loads(text), 0))
    except (ValueError, RecursionError):
        shown = _plain(text)
    if not shown.isascii():  # half of a surrogate pair would break whoever prints it
        shown = shown.encode("utf-8", "replace").decode()
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def _redacted(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        return "…"
    if isinstance(value, dict):
        return {
            _plain(key): HIDDEN
            if is_secret_name(key) and each not in (None, "", False, True)
            else _redacted(each, depth + 1)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_redacted(each, depth + 1) for each in value]
    return _plain(value) if isinstance(value, str) else value


def _plain(text: str) -> str:
    if _SUSPECT.search(text) is None:
        return text
    text = mask(text)
    shown, at = [], 0  # what may be shown so far, and where in the text it ends
    for found in _KEYED.finditer(text):
        # `api key` is a name of two words; in `n token` the first belongs to the sentence.
        names = (found["key"], found["key"].rpartition(" ")[2])
        if found.start() < at or not any(map(is_secret_name, names)):
            continue
        value = _VALUE.match(text, found.end())
        if value is not None:
            shown += [text[at : found.end()], HIDDEN]
            at = value.end()
    return _BARE.sub(HIDDEN, "".join(shown) + text[at:])
