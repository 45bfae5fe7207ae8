"""Defines the settings of a council, and reads them from a mapping, a JSON or a TOML file.

Keys may be spelled as hosts of role-play systems write them (`toolsSettings`, `timeoutMs`, `itemName`) or as the fields
here. A bad value is refused; an unknown key is ignored and named in a warning. Nothing here knows tools or runs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from toolbus.council.council_limits import LEAST_TOOL_SECONDS, TOOL_SECONDS
from toolbus.council.member import MAX_RETENTION, Member
from toolbus.errors import SetupError
from toolbus.reader import Keys, Read, Reader, UnknownKey, list_unknown, path_of, read_file, snake_case
from toolbus.text import quote
from toolbus.tool import KIB, MAX_TIMEOUT_SECONDS

MODES = ("sidecar", "inline")
SUBJECT = "council settings"

log = logging.getLogger("toolbus.extension")


@dataclass(frozen=True, slots=True)
class CouncilSettings:
    """What a council consists of and how its tools run.

    Attributes:
        members: in the order in which they run; ids are unique.
        mode: `sidecar` runs the tools before the main model is asked; `inline` leaves calling them to that model.
        timeout_seconds: for each tool, 0 to 300; raised to `least_timeout_seconds` if it is less.
        sidecar_context_window: messages, the newest, that tools are shown.
        exclude_latest_user_message: whether the user's newest message is left out of them.
        include_user_persona, include_character_info, include_world_info: whether tools are shown these texts.
        allow_user_control: whether prompt tools may write actions of the user's own character.
        max_words_per_tool: that a prompt tool is asked to stay below; 0 means any number.
        parallel: whether all tools run at the same time; outcomes keep their order.
        plan_arguments: whether a model writes the arguments of the bus's tools; else they are called without arguments.
        retain_results_for_regens: whether a run that is made again returns the earlier outcome, if nothing changed.
        least_timeout_seconds: the floor of `timeout_seconds`.
        result_bytes: the text of one result, in UTF-8, so that one tool cannot fill the main model's context.

    Raises:
        SetupError: from the constructor, if one breaks its rule.
    """

    members: tuple[Member, ...] = ()
    mode: Literal["sidecar", "inline"] = "sidecar"
    timeout_seconds: float = TOOL_SECONDS
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
    least_timeout_seconds: float = LEAST_TOOL_SECONDS
    result_bytes: int = 64 * KIB

    def __post_init__(self) -> None:
        for each in fields(self):
            if (read := _RULES.get(each.name)) is not None:
                value = read(Reader(getattr(self, each.name), SUBJECT, each.name, (each.name,)))
                object.__setattr__(self, each.name, value)
        ids: set[str] = set()
        for index, member in enumerate(self.members):
            if member.id in ids:
                loc = ("members", index, "id")
                id_ = Reader(member.id, SUBJECT, path_of(loc), loc)
                raise id_.error("it is the id of two members", "give each an id of its own")
            ids.add(member.id)
        object.__setattr__(self, "timeout_seconds", max(self.timeout_seconds, self.least_timeout_seconds))

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> CouncilSettings:
        """Returns the settings of a mapping, as a host's file or a request's body holds them.

        Raises:
            SetupError: naming the value, the rule that it breaks and how to fix it.
        """
        return cls(**_read_fields(settings))

    def changed(self, settings: Mapping[str, Any], unknown: list[str] | None = None) -> CouncilSettings:
        """Returns these settings with the changes of a mapping; it is spelled as for `read`.

        Args:
            unknown: gets the place of each key that is ignored (`members[0].colour`); None logs them.

        Raises:
            SetupError: as `read`.
        """
        return replace(self, **_read_fields(settings, unknown))

    @classmethod
    def load(cls, path: Path | str) -> CouncilSettings:
        """Returns the settings of a file: TOML if its name ends with `.toml`, else JSON.

        Raises:
            SetupError: names the file and its error.
        """
        return read_file(Path(path), cls.read)


def read_member(member: Any, where: str = "member") -> Member:
    """Returns the member that a mapping describes.

    Args:
        where: its place, for messages.

    Raises:
        SetupError: naming the member, the value, the rule and how to fix it.
    """
    unknown: list[UnknownKey] = []
    found = _member(Reader(member, f"{SUBJECT}: {where}", unknown=unknown))
    _log_unknown(unknown)
    return found


def _read_fields(settings: Any, unknown: list[str] | None = None) -> dict[str, Any]:
    """Returns the fields of `CouncilSettings` that a mapping sets."""
    ignored: list[UnknownKey] = []
    matches = Reader(settings, SUBJECT, unknown=ignored).matched(_TOP, snake_case)
    tools_settings = matches.pop("tools_settings", None)
    nested = tools_settings[0].matched(_TOOLS, snake_case) if tools_settings is not None else {}
    for field in matches.keys() & nested.keys():
        raise matches[field][0].error("it is set a second time within toolsSettings", "keep one of the two")
    values = {field: read(reader) for field, (reader, read) in (matches | nested).items()}
    if unknown is not None:
        unknown += [path_of(each.loc) for each in ignored]
    else:
        _log_unknown(ignored)
    return values


def _log_unknown(unknown: list[UnknownKey]) -> None:
    if unknown:
        log.warning("%s: unknown keys are ignored: %s", SUBJECT, list_unknown(unknown))


def _member(reader: Reader) -> Member:
    if isinstance(reader.value, Mapping) and (name := reader.value.get("itemName", reader.value.get("name"))):
        reader = reader.labelled(quote(str(name)))
    values = reader.record(_MEMBER, snake_case)
    for needed in ("name", "id"):
        if not values.setdefault(needed, values.get("name", "")):
            raise SetupError(f"{reader.place}: it has no {needed}: give it one", (*reader.loc, needed))
    return Member(**values)


def _members(reader: Reader) -> tuple[Member, ...]:
    return tuple(_member(each) for each in reader.items())


def _retention(reader: Reader) -> Mapping[str, int]:
    return MappingProxyType({tool: each.whole(0, MAX_RETENTION) for tool, each in reader.entries().items()})


def _milliseconds(reader: Reader) -> float:
    return reader.number(0, MAX_TIMEOUT_SECONDS * 1000) / 1000


_seconds = partial(Reader.number, least=0, most=MAX_TIMEOUT_SECONDS)
_FLAGS = (
    *("exclude_latest_user_message", "include_user_persona", "include_character_info", "include_world_info"),
    *("allow_user_control", "parallel", "plan_arguments", "retain_results_for_regens"),
)
_RULES: Mapping[str, Read] = {
    "mode": partial(Reader.choice, options=MODES),
    "timeout_seconds": _seconds,
    "least_timeout_seconds": _seconds,
    "sidecar_context_window": partial(Reader.whole, least=1),
    "max_words_per_tool": partial(Reader.whole, least=0),
    "result_bytes": partial(Reader.whole, least=KIB),
    **dict.fromkeys(_FLAGS, Reader.flag),
}
_IGNORED = ("", Reader.text)  # known to the hosts and of no meaning here: not read, no warning

_TOOLS: Keys = {
    **{name: (name, read) for name, read in _RULES.items()},
    "timeout_ms": ("timeout_seconds", _milliseconds),
    **dict.fromkeys(("enabled", "sidecar"), _IGNORED),
}
_TOP: Keys = {
    **_TOOLS,
    "members": ("members", _members),
    "tools_settings": ("tools_settings", Reader.entries),
    **dict.fromkeys(("council_mode", "sidecar_settings"), _IGNORED),
}
_MEMBER: Keys = {
    **{
        name: (name, Reader.text)
        for name in (
            *("id", "name", "role", "item_id", "pack_id", "pack_name", "avatar_url"),
            *("definition", "personality", "behavior"),
        )
    },
    "member_id": ("id", Reader.text),
    "item_name": ("name", Reader.text),
    "tools": ("tools", Reader.names),
    "chance": ("chance", partial(Reader.number, least=0, most=100)),
    "gender_identity": ("gender_identity", partial(Reader.whole, least=0, most=3)),
    "history_retention": ("history_retention", _retention),
    "tool_history_retention": ("history_retention", _retention),
}
