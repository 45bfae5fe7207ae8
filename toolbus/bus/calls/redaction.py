"""Redacts secrets in texts that are recorded or shown.

A value is judged by the name of its key; in texts that are not JSON, by the word before it. It is a best effort for
texts that people read, and decides nothing: tripwire.py blocks results.
"""

from __future__ import annotations

import json
import re
from typing import Any

from toolbus.bus.loopback import mask
from toolbus.text import repair_utf8, shorten

HIDDEN = "[hidden]"
MAX_PARSED = 16_384  # characters, 6 ms at worst: a longer text is not searched, so none of it is shown
MAX_DEPTH = 32

_WORD = (
    r"pass(?:word|wd|phrase|code|key)?s?|pwd|secrets?|tokens?|credentials?|creds?|auth|authori[sz]ation|oauth|bearer"
    r"|(?:api|private|access|ssh|signing|encryption|master|account)[-_ ]?keys?|cookies?|session[-_ ]?ids?|signature|pin"
    r"|t?otp|jwt|(?:mfa|recovery|backup)[-_ ]?codes?"
)
# A whole word of the key: `clientSecret` and `x-api-key` match, `author` and `spin` do not.
_KEY = re.compile(rf"(?:^|[-_ .]){'(?:' + _WORD + ')'}[0-9]*(?:$|[-_ .])", re.IGNORECASE)
_HINT = re.compile(_WORD)  # quick test on the lower-case key: most keys do not match
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_COUNTS = re.compile(
    r"(?:^|[-_ .])(?:max|min|num|count|total|limit|used|usage|per|n|prompt|completion|input|output|cached|reasoning)"
    r"(?:$|[-_ .])",
    re.IGNORECASE,
)
_TOKENS = re.compile(r"tokens?", re.IGNORECASE)
# Possessive, and starting at a word only: any text is read once, in linear time.
_KEYED = re.compile(r"""(?<![\w.-])(?P<key>[\w.-]++(?: [\w.-]++)?)\\*["']?\s*+[:=]+>?\s*+""")
_VALUE = re.compile(  # in quotes; an object or array to the end of the text; one word
    r"""(?P<quote>\\*["']).*?(?:(?<!\\)(?P=quote)|$)|[\[{].*|(?:(?:bearer|basic|digest|token)\s+)?\S+""",
    re.IGNORECASE | re.DOTALL,
)
# Formats of well-known secrets.
_BARE = re.compile(
    r"\b(?:(?:sk|pk|rk)[-_]|gh[opsur]_|github_pat_|tbk_|xox[abprs]-|AKIA|eyJ)[-_A-Za-z0-9.]{12,}"
    r"|(?<=\bbearer )\S+|(?<=\bbasic )[A-Za-z0-9+/]{16,}=*",
    re.IGNORECASE,
)
# Quick test: without a match, neither `mask` nor the expressions above find anything.
_SUSPECT = re.compile(r"[:=]|[-_A-Za-z0-9.]{15}|bearer |basic ", re.IGNORECASE)
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # creating one takes as long as encoding


def is_secret_name(key: str) -> bool:
    """Tells whether a key names a secret: `password`, `clientSecret`, `x-api-key`; not `author`, `max_tokens`."""
    if key.isascii() and _HINT.search(key.lower()) is None:
        return False
    name = parted(key)
    if _COUNTS.search(name):
        name = _TOKENS.sub("", name)
    return _KEY.search(name) is not None


def parted(key: str) -> str:
    """Separates the parts of a key: `clientSecret` becomes `client_Secret`."""
    return _HUMP.sub("_", key)


def redacted(text: str, limit: int) -> str:
    """Returns JSON or any other text without its secrets, shortened to ``limit`` characters."""
    if len(text) > MAX_PARSED:
        return f"[{len(text)} characters]"
    try:
        shown = _ENCODER.encode(_redacted(json.loads(text), 0))
    except (ValueError, RecursionError):
        shown = _plain(text)
    return shorten(repair_utf8(shown), limit)


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
    parts, end = [], 0  # what may be shown so far, and where in the text it ends
    for match in _KEYED.finditer(text):
        # `api key` is a name of two words; in `n token` the first word does not belong to the name.
        names = (match["key"], match["key"].rpartition(" ")[2])
        if match.start() < end or not any(map(is_secret_name, names)):
            continue
        value = _VALUE.match(text, match.end())
        if value is not None:
            parts += [text[end : match.end()], HIDDEN]
            end = value.end()
    return _BARE.sub(HIDDEN, "".join(parts) + text[end:])
