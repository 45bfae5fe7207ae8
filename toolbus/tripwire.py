r"""Results that must not leave a tool: those with a field that is named like a secret.

A net under the tools of others, against slips: a tool that returns a whole user record instead of a name. Fields are
judged by their names, never by what they hold. The text is read as it stands, without a JSON parser, because all of it
is handed on: of a field that is there twice a parser keeps one, and text that is cut off, nested too deeply or holds
NaN it does not read at all.

Most results are clean, and one search tells: `_FINDS_NONE` knows texts in which no field can be named so. It costs
less than 1 µs for a small result and a few ms for 4 MB; the rest is read field by field.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Collection, Mapping
from typing import Literal, get_args

import jsonschema_rs

from toolbus.errors import InvalidRequest
from toolbus.redaction import is_secret_name, parted, redacted
from toolbus.v1 import tool_pb2 as pb

Preset = Literal["default", "synchronet"]

MAX_LEVELS = 4  # JSON in a text in JSON …: each level is read again, and one hardly happens
MAX_NAME = 1_000  # characters of a field's name that are looked at: half of them at either end
MAX_SHOWN = 300  # characters of a path in a sentence
MAX_TOKENS = 200_000  # read for a path, 40 ms at worst: beyond them it is not told
MAX_SEEN = 10_000  # fields of a text that are not judged again
CACHED_NAME = 64  # characters: longer names seldom come again, and 4,096 of them would be much to hold

# -- the names -------------------------------------------------------------------------------------------------------

# Synchronet's list, which is matched anywhere in a name: `secretary` and `max_tokens` are held back too.
_SYNCHRONET = re.compile(
    r"password|passwd|secret|private_key|api_key|token|passphrase|\bauth\b", re.IGNORECASE | re.ASCII
)
# Words that name a secret even where they are written together with others: `dbpassword`, `authtokens`.
_RUN_TOGETHER = re.compile(
    r"passw(?:or)?ds?|passphrase|pwd|secrets?(?!ar[iy]|ion|ing|ive|ed|es|ory)|tokens?(?!i[sz])|credentials?|oauth"
    r"|(?:api|private|access|ssh)_?keys?|session_?ids?(?![a-z])",
    re.IGNORECASE,
)
# Words that are hidden from onlookers, and too common to hold a whole result back for: a map's pins, a function's
# signature, where the next page begins.
_COMMON = re.compile(r"(?:^|_)(?:pins?|signatures?)(?=_|$)|(?:page|continuation)_?tokens?", re.IGNORECASE)
_COUNTABLE = re.compile(r"(?:^|_)(?:tokens?|pass|passes)(?=_|$)", re.IGNORECASE)
_SEPARATORS = re.compile(r"[^\w]+|_+", re.ASCII)

# -- the text --------------------------------------------------------------------------------------------------------

# Possessive, and every text is consumed whole, so that whatever is sent is gone through once.
_BODY = r'[^"\\]*+(?:\\.[^"\\]*+)*+'
_COUNT = r"(?:-?\d[\d.eE+-]*+|true|false)(?=\s*+(?:[,}\]]|\Z))"
# The next field, or the next text that may be JSON itself: it begins with a bracket, or with an escape that may be one.
_PIECE = re.compile(
    rf'(?:[^"]*+"(?!\s*+[\[{{\\]){_BODY}"(?!\s*+:))*+[^"]*+'
    rf'(?:"(?:(?P<name>{_BODY})"\s*+:\s*+(?:(?={_COUNT})(?P<count>.))?|(?P<text>{_BODY})(?:"|\\?\Z))|\Z)',
    re.DOTALL,
)
_TOKEN = re.compile(rf'"(?P<name>{_BODY})(?:"(?P<colon>\s*+:)?|\\?\Z)|[\[\]{{}},]', re.DOTALL)
_LIKE_JSON = re.compile(r'\s*+(?:\{|"|\[\s*+(?:[\[{"\]]|[-+.\w]++\s*+,))')

# What the name of a field has to hold at any level, where every quote is escaped once more, to be one of a secret: a
# word of the lists, or what could be a letter of one or nothing at all (letters of these scripts never are). And ASCII
# that is escaped without need, which may be a quote. By the engine behind JSON Schema: it takes time in proportion to
# the text, where `re` takes up to 1 s for 4 MB.
_GAP = r"(?:[^a-z0-9]|\\[a-z])*"
_SCRIPTS = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{Cyrillic}\p{Greek}\p{Thai}\p{Arabic}\p{Hebrew}"
_SUSPECT = (
    rf"(?is)(?:pass|pwd|secret|token|(?:api|private|access|ssh){_GAP}key|credential|auth|bearer|cookie"
    rf"|session{_GAP}id|otp|jwt|\\u|(?-i:[^\t\n\r\x20-\x7e{_SCRIPTS}]|[\p{{M}}\p{{Cf}}]))"
    r'(?:[^"\\]|\\.)*\\*"(?:\s|\\+[nrt])*:'
    r"|\\u00[0-7]"
)
_FINDS_NONE = jsonschema_rs.validator_for(
    {"not": {"pattern": _SUSPECT}}, pattern_options=jsonschema_rs.RegexOptions()
).is_valid


class Tripwire:
    """The rule for one bus.

    Args:
        preset: "default", or "synchronet" for that board's list of names and its sentence.
        allow: names of fields that a tool may return all the same, exactly as they are written, by tool. What is
            allowed for a bare name also holds for the tool's qualified name.

    Raises:
        InvalidRequest: there is no such preset, or the names are no collection of texts.
    """

    def __init__(self, preset: Preset = "default", allow: Mapping[str, Collection[str]] | None = None) -> None:
        if preset not in get_args(Preset):
            raise InvalidRequest(f"tripwire preset {preset!r:.80} does not exist: use {' or '.join(get_args(Preset))}")
        self.preset = preset
        self._allow = {tool: _names(tool, names) for tool, names in (allow or {}).items()}
        self._is_secret = _is_secret_by_default if preset == "default" else _is_secret_for_synchronet

    def __repr__(self) -> str:
        return f"<Tripwire {self.preset} allow={len(self._allow)} tools>"

    def check(self, tool_name: str, output_json: str) -> str | None:
        """Says which field of an output is named like a secret, as the sentence of an error; None where none is.

        Total: whatever the text is, JSON or not, it is looked at. The sentence holds names of fields, no values.
        """
        return None if _finds_none(output_json) else self._refusal(tool_name, output_json)

    def check_result(self, tool_name: str, result: pb.ToolResult) -> str | None:
        """Does what `check` does for all that a model reads of a result: output, parts that are text, the error."""
        refusal = self.check(tool_name, result.output_json)
        if refusal is not None or not (result.content or result.HasField("error")):
            return refusal
        texts = (*(part.text.text for part in result.content), result.error.message, result.error.reason)
        refusals = (self.check(tool_name, text) for text in texts if _LIKE_JSON.match(text))
        return next((refusal for refusal in refusals if refusal is not None), None)

    def _refusal(self, tool_name: str, text: str) -> str | None:
        bare_name = tool_name.rpartition(":")[2]
        allowed = self._allow.get(tool_name, frozenset()) | self._allow.get(bare_name, frozenset())
        found = self._first(text, allowed, 1)
        if found is None:
            return None
        path, name = found
        field = _shown(f"{path or '<root>'}.{name}")
        if self.preset == "synchronet":
            return f'llm_tools: forbidden field "{field}" -- review llm_tools security policy'
        return (
            f"the result of tool {tool_name[:80]!r} was held back: its field {field!r} is named like a secret "
            f"(tripwire preset default). Leave the field out of the tool's result, or put its name on the tripwire's "
            f"allow-list for this tool if it holds none"
        )

    def _first(self, text: str, allowed: frozenset[str], level: int) -> tuple[str, str] | None:
        """Returns the path and the name of the first field that is named like a secret; None where none is."""
        seen: set[tuple[str, ...]] = set()  # the same few fields in every record, usually
        for found in _PIECE.finditer(text):
            piece = found.groups("")
            if piece in seen:
                continue
            name, count, inner = piece
            culprit = self._of_text(inner, allowed, level) if inner else self._of_field(name, count, allowed)
            if culprit is not None:
                of_field = found["name"] is not None
                inner_path, name = culprit
                return _path(text, found.start("name" if of_field else "text"), of_field=of_field) + inner_path, name
            if len(seen) < MAX_SEEN:
                seen.add(piece)
        return None

    def _of_text(self, body: str, allowed: frozenset[str], level: int) -> tuple[str, str] | None:
        """Returns what `_first` finds in a text within a text."""
        text = _decoded(body)
        if level == MAX_LEVELS or not _LIKE_JSON.match(text) or _finds_none(text):
            return None
        return self._first(text, allowed, level + 1)

    def _of_field(self, body: str, count: str, allowed: frozenset[str]) -> tuple[str, str] | None:
        """Returns no path and a field's name, where it is named like a secret."""
        if _finds_none(f'"{body}":'):
            return None
        name = _decoded(body)
        return ("", name) if self._is_secret(name, bool(count)) and name not in allowed else None


def _names(tool: str, names: object) -> frozenset[str]:
    if isinstance(names, str | bytes) or not isinstance(names, Collection):
        raise InvalidRequest(f"the tripwire's allow-list for tool {tool!r:.80} is {names!r:.80}: give a list of names")
    for name in names:
        if not isinstance(name, str):
            raise InvalidRequest(
                f"the tripwire's allow-list for tool {tool!r:.80} has {name!r:.80}: a field's name is a text"
            )
    return frozenset(names)


def _finds_none(text: str) -> bool:
    try:
        return _FINDS_NONE(text)
    except ValueError:  # half of a surrogate pair, which the engine cannot read
        return False


# -- names -----------------------------------------------------------------------------------------------------------


def _is_secret_by_default(name: str, is_count: bool) -> bool:
    verdict = _judged_once(name) if len(name) <= CACHED_NAME else _judged(name)
    return verdict is True or (verdict is None and not is_count)


def _is_secret_for_synchronet(name: str, _is_count: bool) -> bool:
    return _SYNCHRONET.search(name) is not None or (
        not _is_plain(name) and _SYNCHRONET.search(_undisguised(name)) is not None
    )


def _judged(name: str) -> bool | None:
    """Whether a name is one of a secret; None where it may as well be one of a count."""
    if len(name) > MAX_NAME:
        name = name[: MAX_NAME // 2] + name[-MAX_NAME // 2 :]
    name = _SEPARATORS.sub("_", parted(name if _is_plain(name) else _undisguised(name)))
    name = _RUN_TOGETHER.sub(r"_\g<0>_", _COMMON.sub("_", name))
    if not is_secret_name(name):
        return False
    return None if not is_secret_name(_COUNTABLE.sub("_", _SEPARATORS.sub("_", name))) else True


@functools.lru_cache(maxsize=4096)
def _judged_once(name: str) -> bool | None:
    return _judged(name)


def _is_plain(name: str) -> bool:
    return name.isascii() and name.isprintable()


def _undisguised(name: str) -> str:
    """Returns a name as it looks: full-width letters as ASCII, without accents and what nobody sees."""
    return "".join(
        letter
        for letter in unicodedata.normalize("NFKD", name)
        if unicodedata.category(letter)[0] not in "MC" or letter in "\b\f\n\r\t"
    )


# -- places ----------------------------------------------------------------------------------------------------------


def _decoded(body: str) -> str:
    """Returns what stands between two quotes without its escapes; as it is where they are wrong."""
    if "\\" not in body:
        return body
    try:
        decoded: str = json.loads(f'"{body}"', strict=False)
    except ValueError:
        return body
    return decoded


def _path(text: str, end: int, *, of_field: bool) -> str:
    """Returns the names and numbers that lead to a place in a text, each behind a dot.

    Args:
        end: where the place is: behind the quote that begins a field's name or a value.
        of_field: whether it is a field, whose own name is not part of its path.
    """
    steps: list[str | int] = []  # where each object or array that is open stands: its newest field or number
    for read, token in enumerate(_TOKEN.finditer(text, 0, end - 1)):
        if read == MAX_TOKENS:
            return ".…"
        sign = token[0]
        if sign == "{":
            steps.append("")
        elif sign == "[":
            steps.append(0)
        elif sign in ("}", "]"):
            del steps[-1:]
        elif not steps:
            continue
        elif sign == ",":
            step = steps[-1]
            steps[-1] = step + 1 if isinstance(step, int) else step
        elif token["colon"]:
            steps[-1] = _decoded(token["name"])
    if of_field:
        del steps[-1:]
    cut = ".…" if len(steps) > MAX_SHOWN else ""
    return cut + "".join(f".{str(step)[:MAX_SHOWN]}" for step in steps[-MAX_SHOWN:])


def _shown(field: str) -> str:
    """Returns a path for a sentence: its end, where it is long, and nothing in it that looks like a value."""
    if len(field) > MAX_SHOWN:
        field = "…" + field[-MAX_SHOWN:]
    shown = redacted(field, MAX_SHOWN + 1)
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in shown)
