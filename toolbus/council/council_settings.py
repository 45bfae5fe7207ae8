"""How a council goes about its runs, and how that is read: from a mapping, a JSON or a TOML file.

Keys may be spelled as hosts of role-play systems keep them (`toolsSettings`, `timeoutMs`, `itemName`) or as the fields
here. What is wrong is refused with value, rule and cure; a key that nobody knows is tolerated and named in a warning.
Nothing here knows tools or runs.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from toolbus.council.member import MAX_RETENTION, Member
from toolbus.dialects.result_text import utf8
from toolbus.errors import SetupError
from toolbus.tool import KIB, MAX_TIMEOUT_SECONDS

LEAST_TIMEOUT_SECONDS = 15.0  # below it, tools that ask a model themselves hardly ever finish
MODES = ("sidecar", "inline")
SUBJECT = "council settings"
MAX_NAMED = 8  # unknown keys that one warning names

log = logging.getLogger("toolbus.extension")
_Read = Callable[[Any, str], Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CouncilSettings:
    """What a council consists of and how its tools run.

    Attributes:
        members: in the order in which they run; ids are unique.
        mode: `sidecar` runs the tools before the main model is asked; `inline` leaves calling them to that model.
        timeout_seconds: for each tool, 0 to 300; raised to `least_timeout_seconds` where it is less.
        sidecar_context_window: messages, the newest, that tools are shown.
        exclude_latest_user_message: whether the user's newest message is left out of them.
        include_user_persona, include_character_info, include_world_info: whether tools are shown these texts.
        allow_user_control: whether prompt tools may plan what the user's own character does.
        max_words_per_tool: that a prompt tool is asked to stay below; 0 means any number.
        parallel: whether all tools run at the same time; outcomes keep their order.
        plan_arguments: whether a model writes the arguments of the bus's tools; else they are called with none.
        retain_results_for_regens: whether a run that is made again returns the earlier outcome, if nothing changed.
        least_timeout_seconds: the floor of `timeout_seconds`.
        result_bytes: the text of one result, in UTF-8, so that one tool cannot fill the main model's context.

    Raises:
        SetupError: from the constructor, where one breaks its rule.
    """

    members: tuple[Member, ...] = ()
    mode: Literal["sidecar", "inline"] = "sidecar"
    timeout_seconds: float = 30.0
    sidecar_context_window: int = 25
    exclude_latest_user_message: bool = False
    include_user_persona: bool = True
    include_character_info: bool = True
    include_world_info: bool = True
    allow_user_control: bool = False
    max_words_per_tool: int = 250
    parallel: bool = False
    plan_arguments: bool = False
    retain_results_for_regens: bool = False
    least_timeout_seconds: float = LEAST_TIMEOUT_SECONDS
    result_bytes: int = 64 * KIB

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise _refused("mode", self.mode, "is no mode", f"say {' or '.join(MODES)}", ("mode",))
        for each in fields(self):
            if (read := _KINDS.get(type(each.default))) is not None:
                _at(each.name, read, getattr(self, each.name), each.name)
        for name in ("timeout_seconds", "least_timeout_seconds"):
            if not 0 <= getattr(self, name) <= MAX_TIMEOUT_SECONDS:  # NaN fails this too
                rule = f"is not from 0 to {MAX_TIMEOUT_SECONDS:g} seconds"
                cure = f"give it 0 to {MAX_TIMEOUT_SECONDS:g}, or in ms 0 to {MAX_TIMEOUT_SECONDS * 1000:g}"
                raise _refused(name, getattr(self, name), rule, cure, (name,))
        for name, least in (("sidecar_context_window", 1), ("max_words_per_tool", 0), ("result_bytes", KIB)):
            if getattr(self, name) < least:
                raise _refused(name, getattr(self, name), f"is less than {least}", f"give it {least} or more", (name,))
        ids: set[str] = set()
        for index, member in enumerate(self.members):
            if member.id in ids:
                cure, loc = "give each an id of its own", ("members", index, "id")
                raise _refused("members", member.id, "is the id of two members", cure, loc)
            ids.add(member.id)
        object.__setattr__(self, "timeout_seconds", max(self.timeout_seconds, self.least_timeout_seconds))

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> CouncilSettings:
        """Returns what a mapping says, as a host's settings or a request's body hold it.

        Raises:
            SetupError: naming the value, the rule that it breaks and the cure.
        """
        found = _said(said)
        with _placed(said):
            return cls(**found)

    def changed(self, said: Mapping[str, Any]) -> CouncilSettings:
        """Returns these settings, but for what a mapping says otherwise; it is spelled as for `read`.

        Raises:
            SetupError: as `read`.
        """
        found = _said(said)
        with _placed(said):
            return replace(self, **found)

    @classmethod
    def load(cls, path: Path | str) -> CouncilSettings:
        """Returns what a file says: TOML where its name ends so, else JSON.

        Raises:
            SetupError: naming the file, and what is wrong in it.
        """
        return read_file(Path(path), cls.read)


def read_file(path: Path, read: Callable[[Any], T]) -> T:
    """Returns what a function makes of a file's content: TOML where the file's name ends so, else JSON.

    Raises:
        SetupError: naming the file, and what is wrong in it.
    """
    try:
        text = path.read_text("utf-8-sig")
        return read(tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text))
    except OSError as problem:
        raise SetupError(f"{path}: {problem.strerror or problem}: name a file that can be read") from None
    except RecursionError:
        raise SetupError(f"{path}: is nested too deep to be read: flatten it") from None
    except ValueError as problem:  # what JSON, TOML and UTF-8 refuse
        raise SetupError(f"{path}: cannot be read: {problem}: correct the file") from None
    except SetupError as problem:
        raise SetupError(f"{path}: {problem}") from None


def read_member(said: Any, where: str = "member") -> Member:
    """Returns the member that a mapping describes.

    Raises:
        SetupError: naming the member, the value, the rule and the cure.
    """
    named = said.get("itemName", said.get("name")) if isinstance(said, Mapping) else None
    place = f"{where} {named!r:.80}" if named else where
    found = _fields(said, place, _MEMBER)
    for needed in ("name", "id"):
        if not found.setdefault(needed, found.get("name", "")):
            raise SetupError(f"{SUBJECT}: {place}: has no {needed}: give it one", (needed,))
    return Member(**found)


def _said(said: Any) -> dict[str, Any]:
    """Returns the fields of `CouncilSettings` that a mapping sets."""
    found = _fields(said, SUBJECT, _TOP)
    nested = found.pop("tools_settings", {})
    for twice in found.keys() & nested.keys():
        rule = "is said twice, once within toolsSettings"
        raise _refused(twice, nested[twice], rule, "say it once", _spelled(said, twice))
    return {**found, **nested}


def unknown_keys(said: Mapping[str, Any]) -> list[str]:
    """Returns the keys that are left out of what a mapping says, each with its place (`members[0].colour`)."""
    found = []
    for key, value in said.items():
        name, _ = _TOP.get(_snake(str(key)), (None, None))
        if name is None:
            found.append(str(key))
        elif name == "tools_settings" and isinstance(value, Mapping):
            found += [f"{key}.{inner}" for inner in value if _snake(str(inner)) not in _TOOLS]
        elif name == "members" and isinstance(value, list | tuple):
            found += [
                f"{key}[{index}].{inner}"
                for index, member in enumerate(value)
                if isinstance(member, Mapping)
                for inner in member
                if _snake(str(inner)) not in _MEMBER
            ]
    return found


@contextmanager
def _placed(said: Mapping[str, Any]) -> Iterator[None]:
    """Has a fault of a field name the key that set it."""
    try:
        yield
    except SetupError as problem:
        if len(problem.loc) == 1:
            problem.loc = _spelled(said, str(problem.loc[0]))
        raise


def _spelled(said: Mapping[str, Any], name: str) -> tuple[str | int, ...]:
    """Returns where a mapping sets a field, by its own keys."""
    for key, value in said.items():
        field, _ = _TOP.get(_snake(str(key)), ("", None))
        if field == name:
            return (str(key),)
        if field == "tools_settings" and isinstance(value, Mapping):
            for inner in value:
                if _TOOLS.get(_snake(str(inner)), ("", None))[0] == name:
                    return str(key), str(inner)
    return (name,)


def _at(place: str | int, read: _Read, value: Any, where: str) -> Any:
    """Reads a value; its fault names the place too."""
    try:
        return read(value, where)
    except SetupError as problem:
        problem.loc = (place, *problem.loc)
        raise


def _fields(said: Any, where: str, known: Mapping[str, tuple[str, _Read]]) -> dict[str, Any]:
    """Reads the keys that are known, in either spelling; null is as if it were not there."""
    if not isinstance(said, Mapping):
        raise _refused(where, said, "is no object", "give names with values")
    found: dict[str, Any] = {}
    unknown = []
    for key, value in said.items():
        name, read = known.get(_snake(str(key)), ("", None))
        if read is None:
            unknown.append(repr(str(key)[:80])[1:-1])  # a line end in it would look like a line of the log's own
        elif name in found:
            raise _refused(f"{where}: {key}", value, f"says {name} a second time", "say it once", (str(key),))
        elif value is not None and name:
            found[name] = _at(str(key), read, value, f"{where}: {key}")
    if unknown:
        log.warning("%s: nothing is known of %s; they are left out", where, ", ".join(unknown[:MAX_NAMED]))
    return found


def _snake(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", key).lower()


def _refused(where: str, value: object, rule: str, cure: str, loc: tuple[str | int, ...] = ()) -> SetupError:
    place = where if where.startswith(SUBJECT) else f"{SUBJECT}: {where}"
    return SetupError(f"{place}: {value!r:.200} {rule}: {cure}", loc)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _refused(where, value, "is no text", "put it in quotes")
    if utf8(value) != value:
        raise _refused(where, value, "holds half of a surrogate pair, which UTF-8 cannot carry", "correct it")
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _refused(where, value, "is neither true nor false", "write one of them, without quotes")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_MAX_NUMBER <= value <= _MAX_NUMBER:
        raise _refused(where, value, "is no number", "write one, without quotes")
    return float(value)


def _milliseconds(value: Any, where: str) -> float:
    return _number(value, where) / 1000


def _whole(value: Any, where: str) -> int:
    if not (number := _number(value, where)).is_integer():
        raise _refused(where, value, "is no whole number", "leave out what stands behind the point")
    return int(number)


def _integer(value: Any, where: str) -> int:
    if not isinstance(value, int):  # what is read from a file has become one
        raise _refused(where, value, "is no whole number", "leave out what stands behind the point")
    return _whole(value, where)


def _within(least: int, most: int, read: Callable[[Any, str], float]) -> _Read:
    def checked(value: Any, where: str) -> float:
        if not least <= (number := read(value, where)) <= most:
            raise _refused(where, value, f"is not from {least} to {most}", f"give it {least} to {most}")
        return number

    return checked


def _names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise _refused(where, value, "is no list", "put [ and ] round it")
    for index, each in enumerate(value):
        if not _at(index, _text, each, where):
            raise _refused(where, each, "names no tool", "leave it out", (index,))
    return tuple(dict.fromkeys(value))  # a tool that is named twice runs once


def _retention(value: Any, where: str) -> Mapping[str, int]:
    if not isinstance(value, Mapping):
        raise _refused(where, value, "is no object", 'write it like {"tool": 3}')
    found = {str(tool): _at(str(tool), _FEW, count, f"{where}: {tool}") for tool, count in value.items()}
    return MappingProxyType(found)


def _members(value: Any, where: str) -> tuple[Member, ...]:
    if not isinstance(value, list | tuple):
        raise _refused(where, value, "is no list", "put [ and ] round it")
    return tuple(_at(index, read_member, each, f"members[{index}]") for index, each in enumerate(value))


def _tools_settings(value: Any, where: str) -> dict[str, Any]:
    return _fields(value, where, _TOOLS)


_MAX_NUMBER = sys.float_info.max
_FEW = _within(0, MAX_RETENTION, _whole)
_KINDS: Mapping[type, _Read] = {bool: _flag, int: _integer, float: _number}  # by the type of a default
_ELSEWHERE: tuple[str, _Read] = ("", _text)  # known to the hosts and of no meaning here: not read, no warning

# A key, in our spelling → the field that it sets, and how its value is read.
_TOOLS: dict[str, tuple[str, _Read]] = {
    "mode": ("mode", _text),
    "timeout_ms": ("timeout_seconds", _milliseconds),
    **{name: (name, _number) for name in ("timeout_seconds", "least_timeout_seconds")},
    **{name: (name, _whole) for name in ("sidecar_context_window", "max_words_per_tool", "result_bytes")},
    **{
        name: (name, _flag)
        for name in (
            *("exclude_latest_user_message", "include_user_persona", "include_character_info", "include_world_info"),
            *("allow_user_control", "parallel", "plan_arguments", "retain_results_for_regens"),
        )
    },
    **dict.fromkeys(("enabled", "sidecar"), _ELSEWHERE),
}
_TOP: dict[str, tuple[str, _Read]] = {
    **_TOOLS,
    "members": ("members", _members),
    "tools_settings": ("tools_settings", _tools_settings),
    **dict.fromkeys(("council_mode", "sidecar_settings"), _ELSEWHERE),
}
_MEMBER: dict[str, tuple[str, _Read]] = {
    **{
        name: (name, _text)
        for name in (
            *("id", "name", "role", "item_id", "pack_id", "pack_name", "avatar_url"),
            *("definition", "personality", "behavior"),
        )
    },
    "member_id": ("id", _text),
    "item_name": ("name", _text),
    "tools": ("tools", _names),
    "chance": ("chance", _within(0, 100, _number)),
    "gender_identity": ("gender_identity", _within(0, 3, _whole)),
    "history_retention": ("history_retention", _retention),
    "tool_history_retention": ("history_retention", _retention),
}
