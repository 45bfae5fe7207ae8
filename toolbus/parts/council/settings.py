"""Defines the settings of a council, and reads them from a mapping, a JSON or a TOML file.

Keys may be spelled as hosts of role-play systems write them (`toolsSettings`, `timeoutMs`, `itemName`) or as the fields
here. A bad value is refused; an unknown key is ignored and named in a warning. Nothing here knows tools or runs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from toolbus.common.reader import Keys, Read, Reader, UnknownKey, list_unknown, path_of, read_file, snake_case
from toolbus.common.setting import PATH, CheckedRecord, Option, is_file, setting
from toolbus.common.text import quote
from toolbus.errors import SetupError
from toolbus.protocol.tool import KIB, MAX_TIMEOUT_SECONDS

# Defines all lengths of time and numbers of tokens of councils, with their reasons.
#
# They include the defaults of `CouncilSettings` and `SidecarSettings`.

# -- settings: their defaults ----------------------------------------------------------------------------------------

TOOL_SECONDS = 30.0  # for each tool, instead of the tool's own timeout
LEAST_TOOL_SECONDS = 15.0  # in less time, tools that ask a model themselves rarely finish
TEMPERATURE = 0.7
TOP_P = 0.9
ANSWER_TOKENS = 1024  # of one answer of the model

# -- plans: the arguments that a model writes ------------------------------------------------------------------------

PLAN_TEMPERATURE = 0.2  # at most: arguments should be right, not original
PLAN_TOKENS_PER_SECOND = 10  # of the tool's timeout: the speed of a slow model; a plan must leave time for the call
LEAST_PLAN_TOKENS = 128
REPAIR_TOKENS = 192  # for the second question, about missing arguments

# -- attempts --------------------------------------------------------------------------------------------------------

ATTEMPTS = 3  # of a prompt tool


@dataclass(frozen=True, slots=True)
class CouncilTimings:
    """Timeouts and pauses of a council that are not settings, in seconds. Tests use tiny values.

    Attributes:
        event_seconds: timeout of an async ``on_event`` for one event, so that a stuck host blocks no run.
        extra_seconds: above the timeout of a tool, for a source that does not enforce it; a bus does.
        backoff_seconds: before the second attempt of a prompt tool; increases by this before each further one.
        answer_seconds: timeout of one question to a sidecar's server, from connecting to the end of its answer; the
            timeout of the tool is shorter.
        connect_seconds: the part of it for connecting.
    """

    event_seconds: float = 5.0
    extra_seconds: float = 1.0
    backoff_seconds: float = 0.5
    answer_seconds: float = 120.0
    connect_seconds: float = 10.0


COUNCIL_TIMINGS = CouncilTimings()


def plan_tokens(timeout_seconds: float, max_tokens: int) -> int:
    """Returns how many tokens a plan of arguments may have.

    Args:
        timeout_seconds: of the tool.
        max_tokens: of one answer.
    """
    return min(max_tokens, max(LEAST_PLAN_TOKENS, int(timeout_seconds * PLAN_TOKENS_PER_SECOND)))


# Settings never have an API key, since every client can read them.

log = logging.getLogger("toolbus.extension")

API_KEY_VARIABLE = "TOOLBUS_SIDECAR_API_KEY"
WHERE_KEYS_GO = f"set {API_KEY_VARIABLE} in the environment (or, in Python, give sidecar_model an api_key)"
NOT_BARE = (
    "sidecar.connection is a URL with a user, a query or a fragment, which may hold a key: leave them out, and "
    + WHERE_KEYS_GO
)

SAMPLING: Mapping[str, float] = {"temperature": TEMPERATURE, "top_p": TOP_P, "max_tokens": ANSWER_TOKENS}
_SUBJECT = "sidecar"
_KEYS = {"api_key", "apiKey", "api-key", "key"}


@dataclass(frozen=True, slots=True)
class SidecarSettings:
    """The model beside the conversation, and its sampling options.

    Attributes:
        connection: the base URL of an OpenAI-compatible server (`http://127.0.0.1:8080/v1`), or a connection's name.
        model: by the server's name for it.
        temperature: 0 to 2.
        top_p: 0 to 1.
        max_tokens: of one answer, at least 1.

    Raises:
        SetupError: from the constructor, if one breaks its rule.
    """

    connection: str = ""
    model: str = ""
    temperature: float = TEMPERATURE
    top_p: float = TOP_P
    max_tokens: int = ANSWER_TOKENS

    def __post_init__(self) -> None:
        for name, read in _SIDECAR_RULES.items():
            object.__setattr__(self, name, read(Reader(getattr(self, name), path=f"{_SUBJECT}.{name}")))

    @classmethod
    def read(cls, settings: object) -> SidecarSettings:
        """Reads a mapping, with names as here or in camelCase; missing or null values get their defaults.

        Raises:
            SetupError: naming the value, the rule that it breaks and how to fix it.
        """
        unknown: list[UnknownKey] = []
        reader = Reader(settings, path=_SUBJECT, unknown=unknown)
        for key in reader.entries().keys() & _KEYS:
            raise SetupError(f"sidecar has {key}, but settings hold no key: take it out, and {WHERE_KEYS_GO}")
        values = reader.record(_SETTINGS, snake_case)
        if unknown:
            log.warning("%s: unknown keys are ignored: %s", _SUBJECT, list_unknown(unknown))
        return cls(**values)

    @property
    def defaults(self) -> frozenset[str]:
        """The sampling options that are at their default: those that the program gave to an endpoint go before them."""
        return frozenset(name for name, value in SAMPLING.items() if getattr(self, name) == value)

    @property
    def unavailable(self) -> str:
        """Why these settings have no model, a sentence; "" if they have one."""
        if not self.connection:
            return (
                "no sidecar model: the settings name no connection; set it to the base URL of an OpenAI-compatible "
                "server, for example http://127.0.0.1:8080/v1"
            )
        if not self.model:
            return (
                "no sidecar model: the settings name no model; set it to one that the server of the connection has, "
                "for example qwen3"
            )
        return ""


def _connection(reader: Reader) -> str:
    """Refuses a URL that may hold a password or a key, without showing it: every client that asks is shown settings."""
    connection = reader.text()
    _, scheme, rest = connection.partition("://")
    if scheme and any(sign in rest for sign in "@?#"):
        raise SetupError(NOT_BARE)
    return connection


_SIDECAR_RULES: Mapping[str, Read] = {
    "connection": _connection,
    "model": Reader.text,
    "temperature": partial(Reader.number, least=0, most=2),
    "top_p": partial(Reader.number, least=0, most=1),
    "max_tokens": partial(Reader.whole, least=1),
}
_SETTINGS: Keys = {
    **{name: (name, read) for name, read in _SIDECAR_RULES.items()},
    "connection_profile_id": ("connection", _connection),
}


def in_camel_case(record: object, *names: str) -> dict[str, Any]:
    """Returns fields of a record under the names that extensions know: `displayName` for display_name."""
    return {re.sub("_([a-z])", lambda after: after[1].upper(), name): getattr(record, name) for name in names}


DEFAULT_GENDER_IDENTITY = 3  # 0 feminine, 1 masculine, 2 neutral, 3 any
MAX_RETENTION = 10  # earlier results of a tool that the main model gets


@dataclass(frozen=True, slots=True)
class Member:
    """One member, as the host configured it.

    Attributes:
        id: of the row in the host's settings; unique in a council.
        name: as texts and results show it.
        tools: names of the tools that it runs, in order: as listed (`source:name`), bare, or of a prompt tool.
        role: its part in the council, in words; may be "".
        chance: of taking part in a run, in percent, 0 to 100.
        item_id, pack_id, pack_name: where its description comes from.
        avatar_url: a picture, or None.
        definition, personality, behavior: its description.
        gender_identity: 0 feminine, 1 masculine, 2 neutral, 3 any.
        history_retention: by tool, how many of its earlier results the main model gets, 0 to 10.
    """

    id: str
    name: str
    tools: tuple[str, ...] = ()
    role: str = ""
    chance: float = 100.0
    item_id: str = ""
    pack_id: str = ""
    pack_name: str = ""
    avatar_url: str | None = None
    definition: str = ""
    personality: str = ""
    behavior: str = ""
    gender_identity: int = DEFAULT_GENDER_IDENTITY
    history_retention: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def described(self) -> dict[str, Any]:
        """Returns the twelve fields that a tool gets, under the names that extensions know (`councilMember`)."""
        names = ("item_id", "pack_id", "pack_name", "name", "role", "chance", "avatar_url")
        about = ("definition", "personality", "behavior", "gender_identity")
        return {"memberId": self.id, **in_camel_case(self, *names, *about)}


class Randomness(Protocol):
    """A source of random numbers: `random.Random`, or a fixed sequence in a test."""

    def random(self) -> float:
        """Returns a number from 0 up to, but not including, 1."""


def participants(members: Iterable[Member], randomness: Randomness) -> tuple[Member, ...]:
    """Rolls the dice for each member with tools; returns those that take part in a run, in their order."""
    return tuple(member for member in members if takes_part(member, randomness))


def takes_part(member: Member, randomness: Randomness) -> bool:
    """Rolls the dice for one member; a chance of 0 or 100 draws no number."""
    if not member.tools or member.chance <= 0:
        return False
    return member.chance >= 100 or randomness.random() * 100 < member.chance


MODES = ("sidecar", "inline")
SUBJECT = "council settings"


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
    for name in matches.keys() & nested.keys():
        raise matches[name][0].error("it is set a second time within toolsSettings", "keep one of the two")
    values = {name: read(reader) for name, (reader, read) in (matches | nested).items()}
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


def _retention(reader: Reader) -> Mapping[str, int]:
    return MappingProxyType({tool: each.whole(0, MAX_RETENTION) for tool, each in reader.entries().items()})


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
    "timeout_ms": ("timeout_seconds", lambda reader: reader.number(0, MAX_TIMEOUT_SECONDS * 1000) / 1000),
    **dict.fromkeys(("enabled", "sidecar"), _IGNORED),
}
_TOP: Keys = {
    **_TOOLS,
    "members": ("members", lambda reader: tuple(_member(each) for each in reader.items())),
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


@dataclass(frozen=True, slots=True)
class BusCouncil(CheckedRecord):
    """Which council a bus runs for hosts; without a file each request for a run brings its members."""

    council: Path | None = setting(
        None,
        PATH,
        "the file of a [council](../start/council-settings.md#a-council-over-http) for hosts over HTTP; its [times and "
        "tokens](../start/council-settings.md#times-and-tokens)",
        check=is_file,
        option=Option("Run the council of this file for hosts that call over HTTP.", "FILE"),
    )
