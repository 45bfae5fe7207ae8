r"""Blocks results that have a field named like a secret.

It protects against mistakes of untrusted tools, such as returning a whole user record instead of a name. Fields are
judged by their names, never by their values. The text is read as it is, without a JSON parser, because all of it is
passed on: a parser keeps one of two fields with the same name, and refuses text that is truncated, too deep or has NaN.

Most results are harmless, and one search tells: `_FINDS_NONE` accepts texts in which no field can be named so. It takes
less than 1 µs for a small result and a few ms for 4 MB; the rest is read field by field, up to a bound: a result that
takes longer to judge is blocked. What is long in messages of sessions is judged on a thread, beside the loop.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import jsonschema_rs

from toolbus.bus.calls.call_records import is_secret_name, parted, redacted
from toolbus.common.text import quote
from toolbus.errors import Code, InvalidRequest, ToolBusError
from toolbus.v1 import tool_pb2 as pb

Preset = Literal["default", "synchronet"]

MAX_LEVELS = 4  # JSON in a text in JSON …: each level is read again, and one hardly happens
MAX_NAME = 1_000  # characters of a field's name that are looked at: half of them at either end
MAX_SHOWN = 300  # characters of a path in an error text
MAX_TOKENS = 200_000  # read for a path, 40 ms at worst: beyond them the path is left out
MAX_SEEN = 10_000  # fields of a text that are not judged again
# What one result may cost to judge, 0.3 s: 1 for a field or text that is read, 3 more where it is a new one, 30 more
# where it is looked into, 2 for each letter of a name. That is 400,000 fields, 100,000 different ones, or 7,000 names
# of 10 letters that look like a secret's and differ by more than their numbers.
MAX_EFFORT = 400_000
CACHED_NAME = 64  # characters: longer names seldom come again, and 4,096 of them would be much to hold

# -- the names -------------------------------------------------------------------------------------------------------

# Synchronet's list, which matches anywhere in a name: `secretary` and `max_tokens` are blocked too.
_SYNCHRONET = re.compile(
    r"password|passwd|secret|private_key|api_key|token|passphrase|\bauth\b", re.IGNORECASE | re.ASCII
)
# Words that name a secret even where they are written together with others: `dbpassword`, `authtokens`.
_RUN_TOGETHER = re.compile(
    r"passw(?:or)?ds?|passphrase|pwd|secrets?(?!ar[iy]|ion|ing|ive|ed|es|ory)|tokens?(?!i[sz])|credentials?|oauth"
    r"|(?:api|private|access|ssh|signing|encryption|master|account)_?keys?|passkeys?|session_?ids?(?![a-z])",
    re.IGNORECASE,
)
# Words that redaction hides, but that are too common to block a whole result for: a map's pins, a function's
# signature, the token of the next page, the tokens of a language model.
_COMMON = re.compile(
    r"(?:^|_)(?:pins?|signatures?|(?:next|prev|previous|bos|eos|pad|unk|sep|cls|mask|stop|special)_?tokens?)(?=_|$)"
    r"|(?:page|continuation)_?tokens?",
    re.IGNORECASE,
)
# The last words of names that say something about a secret: `token_type`, `password_policy`, `password_changed_at`.
_ABOUT = re.compile(
    r"_(?:types?|kind|polic(?:y|ies)|rules?|requirements?|pages?|format|status|strength|length|expir(?:y|es|ed|ation)"
    r"|(?:expires|changed|created|issued|updated)_(?:at|in|on))_?$",
    re.IGNORECASE,
)
_DIGITS = re.compile(r"[0-9]+")
_CODES = frozenset(Code.__members__)  # counted by name: `{"SECRET_BLOCKED": 1}`
_COUNTABLE = re.compile(r"(?:^|_)(?:tokens?|pass|passes)(?=_|$)", re.IGNORECASE)
_SEPARATORS = re.compile(r"[^\w]+|_+", re.ASCII)
_NO_VALUE = frozenset("tfn")  # as true, false and null begin: no secret is one of them

# -- the text --------------------------------------------------------------------------------------------------------

# Possessive, and every text is consumed whole, so that any text is read once.
_BODY = r'[^"\\]*+(?:\\.[^"\\]*+)*+'
_COUNT = r"(?:-?\d[\d.eE+-]*+|true|false|null)(?=\s*+(?:[,}\]]|\Z))"
_VALUE = rf"\s*+:\s*+(?:(?={_COUNT})(?P<count>.))?"  # its first letter, where it is a number, true, false or null
# The next field, or the next text that may hold JSON itself: it begins with a bracket, or has an escape, as a quote is.
_PIECE = re.compile(
    r'(?:[^"]*+"(?!\s*+[\[{])[^"\\]*+"(?!\s*+:))*+[^"]*+'
    rf'(?:"(?:(?P<name>{_BODY})"{_VALUE}|(?P<text>{_BODY})(?:"|\\?\Z))|\Z)',
    re.DOTALL,
)
# In a text that only holds JSON somewhere: where an object begins, and fields whatever the quotes around them.
_OBJECT = re.compile(r'\{\s*+"')
_FIELD = re.compile(rf'[{{,]\s*+"(?P<name>{_BODY})"{_VALUE}', re.DOTALL)
_TOKEN = re.compile(rf'"(?P<name>{_BODY})(?:"(?P<colon>\s*+:)?|\\?\Z)|[\[\]{{}},]', re.DOTALL)
_LIKE_JSON = re.compile(r'\s*+(?:\{|"|\[\s*+(?:[\[{"\]]|[-+.\w]++\s*+,))')

# What the name of a field has to hold at any level, where every quote is escaped once more, to be one of a secret: a
# word of the lists, or what could be a letter of one or nothing at all (letters of these scripts never are). And ASCII
# that is escaped without need, which may be a quote. By the engine behind JSON Schema: it takes time in proportion to
# the text, where `re` takes up to 1 s for 4 MB.
_GAP = r"(?:[^a-z0-9]|\\[a-z])*"
_SCRIPTS = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{Cyrillic}\p{Greek}\p{Thai}\p{Arabic}\p{Hebrew}"
_SUSPECT = (
    rf"(?is)(?:pass|pwd|secret|token|(?:api|private|access|ssh|signing|encryption|master|account){_GAP}key"
    rf"|cred(?:ential)?s?|auth|bearer|cookie|session{_GAP}id|otp|jwt|(?:mfa|recovery|backup){_GAP}code|\\u|(?-i:[^\t\n\r\x20-\x7e{_SCRIPTS}]|[\p{{M}}\p{{Cf}}]))"
    r'(?:[^"\\]|\\.)*\\*"(?:\s|\\+[nrt])*:'
    r"|\\u00[0-7]"
)
_FINDS_NONE = jsonschema_rs.validator_for(
    {"not": {"pattern": _SUSPECT}}, pattern_options=jsonschema_rs.RegexOptions()
).is_valid


class Tripwire:
    """The check of results of untrusted sources on one bus.

    Args:
        preset: "default", or "synchronet" for that board's list of names and its sentence.
        allow: names of fields that a tool may return all the same, exactly as they are written, by tool. What is
            allowed for a bare name also holds for the tool's qualified name.

    Raises:
        InvalidRequest: the preset is unknown, or the names are not a collection of texts.
    """

    def __init__(self, preset: Preset = "default", allow: Mapping[str, Collection[str]] | None = None) -> None:
        if preset not in get_args(Preset):
            raise InvalidRequest(f"tripwire preset {preset!r:.80} does not exist: use {' or '.join(get_args(Preset))}")
        self.preset = preset
        self.judged: dict[tuple[str, str | bytes], str | None] = {}  # see `SecretCheck`; empty but for long messages
        self._allow = {tool: _names(tool, names) for tool, names in (allow or {}).items()}
        self._is_secret = _is_secret_by_default if preset == "default" else _is_secret_for_synchronet

    def __repr__(self) -> str:
        return f"<Tripwire {self.preset} allow={len(self._allow)} tools>"

    def check(self, tool_name: str, output_json: str) -> str | None:
        """Returns an error text that names a field which is named like a secret; None without such a field.

        Accepts any text, JSON or not. The error text holds names of fields, never values.
        """
        if self.judged and (tool_name, output_json) in self.judged:  # the text of most results is never hashed
            return self.judged[tool_name, output_json]
        return None if _finds_none(output_json) else self._refusal(tool_name, output_json, _Effort())

    def check_result(self, tool_name: str, result: pb.ToolResult) -> str | None:
        """Does the same as `check` for all that is read of a result: output, parts of text, questions, the error."""
        if self.judged and (key := (tool_name, result.SerializeToString())) in self.judged:
            return self.judged[key]
        refusal = self.check(tool_name, result.output_json)
        if refusal is not None or not (result.content or result.HasField("error") or result.input_requests_json):
            return refusal
        effort = _Effort()
        parts = (
            text for part in result.content for text in (part.text.text, part.resource.text, part.annotations_json)
        )
        texts = (*parts, result.error.message, result.error.reason, result.input_requests_json, result.request_state)
        refusals = (self._refusal(tool_name, text, effort, 0) for text in texts if not _finds_none(text))
        return next((refusal for refusal in refusals if refusal is not None), None)

    def clear_progress(self, tool_name: str, progress: pb.ToolProgress) -> None:
        """Clears what may not pass: parts of an output, which cannot be judged, since the result carries all of it."""
        progress.output_chunk = ""
        del progress.content[:]
        if self.check(tool_name, progress.message) is not None:
            progress.message = ""

    def _refusal(self, tool_name: str, text: str, effort: _Effort, level: int = 1) -> str | None:
        """Returns what is wrong with a text, which is JSON, or at level 0 may hold JSON."""
        bare_name = tool_name.rpartition(":")[2]
        allowed = self._allow.get(tool_name, frozenset()) | self._allow.get(bare_name, frozenset()) | _CODES
        search = _Search(self._is_secret, allowed, effort)
        try:
            found = search.in_json(text, level) if level else search.in_text(text, level)
        except _TooMuch:
            return (
                f"the result of tool {quote(tool_name)} was blocked: it has too many different fields, or names "
                f"like those of secrets, to check in time (tripwire preset {self.preset}). Return less of it at once"
            )
        if found is None:
            return None
        path, name = found
        shown = _shown(f"{path or '<root>'}.{name}")
        if self.preset == "synchronet":
            return f'llm_tools: forbidden field "{shown}" -- review llm_tools security policy'
        return (
            f"the result of tool {quote(tool_name)} was blocked: its field {shown!r} is named like a secret "
            f"(tripwire preset default). Leave the field out of the tool's result, or put its name under "
            f"[tripwire_allow] in the bus's configuration file, for this tool, if it holds no secret"
        )


class _TooMuch(ToolBusError):
    """Judging a result would take too long."""


class _Effort:
    """Counts what judging one result costs."""

    def __init__(self) -> None:
        self.left = MAX_EFFORT

    def spend(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0:
            raise _TooMuch


@dataclass(frozen=True, slots=True)
class _Search:
    """Searches a text for the first field that is named like a secret.

    Attributes:
        is_secret: tells whether a name is a secret's, given the first letter of a value that is not a text.
        allowed: names that pass.
        effort: of the whole result.
        harmless: names judged harmless, with 0 for every number, each with the first letter of its value.
    """

    is_secret: Callable[[str, str], bool]
    allowed: frozenset[str]
    effort: _Effort
    harmless: set[tuple[str, str]] = field(default_factory=set)

    def in_json(self, text: str, level: int) -> tuple[str, str] | None:
        """Returns the path and the name of the first field that is named like a secret; None without one."""
        seen: set[tuple[str, ...]] = set()  # the same few fields in every record, usually
        for found in _PIECE.finditer(text):
            piece = found.groups("")
            self.effort.spend(1)
            if piece in seen:
                continue
            self.effort.spend(3)
            name, count, inner = piece
            culprit = self._in_body(inner, level) if inner else self._of_field(name, count)
            if culprit is not None:
                of_field = found["name"] is not None
                inner_path, name = culprit
                return _path(text, found.start("name" if of_field else "text"), of_field=of_field) + inner_path, name
            if len(seen) < MAX_SEEN:
                seen.add(piece)
        return None

    def in_text(self, text: str, level: int) -> tuple[str, str] | None:
        """Returns what `in_json` finds in a text that is JSON, or holds some behind other words."""
        if _LIKE_JSON.match(text):
            return self.in_json(text, level + 1)
        begun = _OBJECT.search(text)
        if begun is None:
            return None
        held = text[begun.start() :]
        return self.in_json(held, level + 1) or self._among_words(held)

    def _among_words(self, text: str) -> tuple[str, str] | None:
        """Looks for fields alone: in the words between two objects a single quote turns texts and names about."""
        seen: set[tuple[str, str]] = set()
        for found in _FIELD.finditer(text):
            self.effort.spend(2)
            piece = found["name"], found["count"] or ""
            if piece not in seen and (culprit := self._of_field(*piece)) is not None:
                return culprit
            if len(seen) < MAX_SEEN:
                seen.add(piece)
        return None

    def _in_body(self, body: str, level: int) -> tuple[str, str] | None:
        """Returns what `in_text` finds in a text within JSON."""
        self.effort.spend(30)
        text = _decoded(body)
        return None if level == MAX_LEVELS or _finds_none(text) else self.in_text(text, level)

    def _of_field(self, body: str, count: str) -> tuple[str, str] | None:
        """Returns no path and a field's name, where it is named like a secret."""
        if _finds_none(f'"{body}":'):
            return None
        alike = _DIGITS.sub("0", body), count
        if alike in self.harmless:
            return None
        self.effort.spend(30 + 2 * min(len(body), MAX_NAME))
        name = _decoded(body)
        if not self.is_secret(name, count):
            self.harmless.add(alike)
            return None
        return None if name in self.allowed else ("", name)


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


def _is_secret_by_default(name: str, count: str) -> bool:
    """Tells whether a name is a secret's, given the first letter of a value that is a number, true, false or null."""
    if count in _NO_VALUE:
        return False
    if len(name) <= CACHED_NAME:
        verdict = _judged_once(_DIGITS.sub("0", name) if name.isascii() else name)
    else:
        verdict = _judged(name)
    return verdict is True or (verdict is None and not count)


def _is_secret_for_synchronet(name: str, _count: str) -> bool:
    return _SYNCHRONET.search(name) is not None or (
        not _is_plain(name) and _SYNCHRONET.search(_undisguised(name)) is not None
    )


def _judged(name: str) -> bool | None:
    """Tells whether a name is a secret's; None if it may as well be the name of a count."""
    if len(name) > MAX_NAME:
        name = name[: MAX_NAME // 2] + name[-MAX_NAME // 2 :]
    name = _SEPARATORS.sub("_", parted(name if _is_plain(name) else _undisguised(name)))
    name = _RUN_TOGETHER.sub(r"_\g<0>_", _COMMON.sub("_", name))
    if not is_secret_name(name) or _ABOUT.search(name):
        return False
    return None if not is_secret_name(_COUNTABLE.sub("_", _SEPARATORS.sub("_", name))) else True


@functools.lru_cache(maxsize=4096)
def _judged_once(name: str) -> bool | None:
    return _judged(name)


def _is_plain(name: str) -> bool:
    return name.isascii() and name.isprintable()


def _undisguised(name: str) -> str:
    """Returns a name as it looks: full-width letters as ASCII, without accents and invisible characters."""
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
    """Returns a path for an error text: only its end if it is long, and nothing that looks like a value."""
    if len(field) > MAX_SHOWN:
        field = "…" + field[-MAX_SHOWN:]
    shown = redacted(field, MAX_SHOWN + 1)
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in shown)
