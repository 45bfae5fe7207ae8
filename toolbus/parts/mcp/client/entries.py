"""Defines one configured mount, an MCP server or a bus whose tools the bus offers, and reads it from the common JSON.

The form is that of the MCP clients' own files: `command`, `args`, `env`, `cwd`, or `url` and `headers`. A bus has
`bus`, `credential` and `token`. Keys that only this bus has are under `"toolbus"`. Restrictions in the words of other
clients fail closed: a key that looks like one is read, or its entry is refused with the key's name. A server would
otherwise start, or offer a tool, that its owner has forbidden. Nothing here opens a file or starts a process.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from toolbus.common.reader import Keys, Reader, UnknownKey, snake_case
from toolbus.common.text import dump_json, quote
from toolbus.errors import SetupError
from toolbus.processes.child_environment import VARIABLE_NAME
from toolbus.protocol.tool import MAX_LEVEL, MAX_ROLE, MAX_TIMEOUT_SECONDS
from toolbus.sdk.bus_address import written_address

MOUNT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)  # a source; listed names are `MOUNT:TOOL`
RESERVED = ("toolbus", "dropin")  # sources of the bus itself
PINS = ("warn", "block")
ERAS = ("auto", "legacy", "modern")
DEFAULT_IN_FLIGHT = 8  # calls that a server on pipes gets at once: most run one after the other
BUS_IN_FLIGHT = 256  # calls that a bus gets at once, as from any host
MAX_IN_FLIGHT = 10_000
MAX_RATE = 100_000.0  # calls a second
MAX_IDLE_SECONDS = 86_400.0
MAX_GLOBS = 1_000  # of one list
PER_USER = "user"  # the login of a mount where each user has their own
DEFAULT_USERS, MAX_USERS = 32, 1_000  # users of one mount that are connected at the same time
USER_REFERENCES = frozenset(("user:id", "user:dir", "user:token"))  # filled in when a user's server starts
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}", re.ASCII)
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_DEFAULTED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*):-(.*)", re.ASCII | re.DOTALL)
_STDIO, _HTTP = ("stdio",), ("http", "streamable-http", "streamableHttp", "streamable_http")


@dataclass(frozen=True, slots=True)
class OAuthClient:
    """How the bus gets tokens of users for one mount, where the server does not say it all.

    Attributes:
        client_id: of the bus at the authorization server; "": the bus registers itself.
        client_secret: "" for a public client.
        exchange_at: the token endpoint that exchanges the callers' own tokens (RFC 8693); "": users log in.
        audience, resource, scope: of the exchanged token; "": what the endpoint gives.
    """

    client_id: str = ""
    client_secret: str = field(default="", repr=False)
    exchange_at: str = ""
    audience: str = ""
    resource: str = ""
    scope: str = ""


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One configured mount. One of `command`, `url` and `bus` is set.

    A file's texts may hold secrets, so a `repr` shows the name only.

    Attributes:
        name: the source that its tools belong to.
        command: the program, as a path or a name in PATH.
        env: variables in addition to those that every mount gets.
        cwd: where the program starts; None: the directory of the user.
        url: of a server over HTTP.
        headers: of each request to it.
        bus: the address of a bus, or of several, as hosts have it.
        credential: the file of the credential for it; "" for none.
        token: for it, of a bound source; "" for none.
        transit: whether tools that came to it from other buses are offered too.
        allow: globs of tools that are offered; empty: all of them.
        deny: globs of tools that are not offered, allowed or not.
        role: the role that the tools are for; None: all.
        min_level: the access level that a user needs.
        max_in_flight: the most calls that it runs at once.
        rate: the most calls a second; 0: no limit.
        timeout_seconds: of each call; 0: the default of tools.
        eager: whether it starts with the bus even if its tools are known.
        idle_seconds: without a call, after which its process ends; 0: never.
        era: of the protocol: ``auto`` finds out which one the server speaks, ``legacy`` and ``modern`` demand one.
        pin: what happens to a tool whose declaration changed: ``warn`` offers it, ``block`` waits for an approval.
        check_arguments: whether the bus checks arguments by the schemas of its tools; else only the server judges them.
        trust_hints: whether the hints of its tools are trusted: read-only and idempotent calls may run twice.
        instructions: whether MCP clients get its instructions.
        login: whether it needs OAuth (`toolbus mounts add --login`); ``user``: each user has a login and a server
            process or session of their own.
        max_users: the most users that are connected at the same time, where each has a login.
        oauth: how the bus gets the tokens of users; None: as the server says.
        disabled: whether it is configured but never started.
        command_digest: of the command line or URL as written; identifies the program in the manifest.
        origin: the path of its file; "" if it has none.
    """

    name: str
    command: str = field(default="", repr=False)
    args: tuple[str, ...] = field(default=(), repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: Path | None = field(default=None, repr=False)
    url: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    bus: str = field(default="", repr=False)
    credential: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    transit: bool = field(default=False, repr=False)
    allow: tuple[str, ...] = field(default=(), repr=False)
    deny: tuple[str, ...] = field(default=(), repr=False)
    role: str | None = field(default=None, repr=False)
    min_level: int = field(default=0, repr=False)
    max_in_flight: int = field(default=DEFAULT_IN_FLIGHT, repr=False)
    rate: float = field(default=0.0, repr=False)
    timeout_seconds: float = field(default=0.0, repr=False)
    eager: bool = field(default=False, repr=False)
    idle_seconds: float = field(default=0.0, repr=False)
    era: str = field(default="auto", repr=False)
    pin: str = field(default="warn", repr=False)
    check_arguments: bool = field(default=True, repr=False)
    trust_hints: bool = field(default=False, repr=False)
    instructions: bool = field(default=False, repr=False)
    login: bool | str = field(default=False, repr=False)
    max_users: int = field(default=DEFAULT_USERS, repr=False)
    oauth: OAuthClient | None = field(default=None, repr=False)
    disabled: bool = field(default=False, repr=False)
    command_digest: str = field(default="", repr=False, compare=False)
    origin: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        if not MOUNT_NAME.fullmatch(self.name) or self.name in RESERVED:
            raise SetupError(
                f"mount name {quote(self.name)} cannot be used: take 1 to 64 of [A-Za-z0-9_.-], other than "
                f"{' and '.join(RESERVED)}"
            )
        ways = [way for way in ("command", "url", "bus") if getattr(self, way)]
        if len(ways) != 1:
            given = f"both {' and '.join(ways)}" if ways else "neither command nor url nor bus"
            raise SetupError(
                f"mount {self.name} has {given}: give a command for a server on this machine, the url of one "
                "elsewhere, or the address of a bus"
            )
        self._check_bus()
        if not self.is_per_user and self.oauth is not None:
            raise SetupError(f'mount {self.name} has oauth, which only the tokens of users need: add "login": "user"')
        if self.is_per_user and any(name.lower() == "authorization" for name in self.headers):
            raise SetupError(
                f'mount {self.name} has both "login": "user" and a header Authorization, which all users would share: '
                "remove one of them"
            )
        if not self.command_digest:
            where = self.url or self.bus
            object.__setattr__(self, "command_digest", digest_of_command(self.command, self.args, where))

    def _check_bus(self) -> None:
        """Checks that only a bus has what only a bus reads, and a bus nothing else."""
        of_bus = [key for key in ("credential", "token", "transit") if getattr(self, key)]
        if not self.bus and of_bus:
            raise SetupError(f'mount {self.name} has {" and ".join(of_bus)}, which go with "bus": remove them')
        keys = ("args", "env", "cwd", "headers", "login", "oauth", "instructions", "idle_seconds")
        others = [key for key in keys if getattr(self, key)] + ["era"] * (self.era != "auto")
        if self.bus and others:
            raise SetupError(f'mount {self.name} has {" and ".join(others)}, which do not go with "bus": remove them')
        if self.bus:
            written_address(self.bus)

    @property
    def is_remote(self) -> bool:
        """Whether it runs elsewhere, and is not started by this bus."""
        return not self.command

    @property
    def is_per_user(self) -> bool:
        """Whether each user has a login of their own, and a process or session of the server."""
        return self.login == PER_USER

    @property
    def exchange_at(self) -> str:
        """The token endpoint that exchanges the callers' own tokens; "" where users log in."""
        return self.oauth.exchange_at if self.oauth is not None else ""


def digest_of_command(command: str, args: tuple[str, ...], url: str) -> str:
    """Returns the digest that identifies a program or address in files: its arguments may hold secrets."""
    return hashlib.sha256(dump_json([command, *args, url]).encode("utf-8", "replace")).hexdigest()


def mount_name(written: str) -> str:
    """Returns the source for a mount's name in a file; characters that a source cannot have become ``-``."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", written).strip("-")[:64]
    return f"{name}-mcp" if name in RESERVED else name


def read_entry(
    reader: Reader, name: str, environment: Mapping[str, str], notices: list[str], origin: str = ""
) -> MountEntry:
    """Reads one entry of a file.

    Args:
        reader: of the entry; its subject names the mount in errors.
        environment: where `${VAR}` is looked up.
        notices: gets a sentence for each key that is ignored.

    Raises:
        SetupError: it breaks a rule; the text never has the values of variables.
    """
    unknown: list[UnknownKey] = []
    at = Reader(reader.value, reader.subject, reader.path, reader.loc, unknown)
    fields = at.record(ENTRY_KEYS)
    _check_type(fields, at.place)
    ours = fields.pop("toolbus", {})
    if "bus" in fields:
        ours.setdefault("max_in_flight", BUS_IN_FLIGHT)
    fields.pop("type", None)
    rules = read_restrictions(reader, name, ENTRY_KEYS)
    if rules.only is not None and ours.get("allow"):
        raise SetupError(f'{at.place}: both the client\'s keys and "toolbus" choose tools (allow): write one of them')
    if rules.only is not None:
        ours["allow"] = rules.only
    if rules.denied or rules.only == ():  # a client that names no tools allows none
        ours["deny"] = (*ours.get("deny", ()), *rules.denied, *(("*",) if rules.only == () else ()))
    fields["disabled"] = fields.get("disabled", False) or rules.is_off
    for key in unknown:
        if key.loc[-1] in rules.keys:
            continue
        if key.loc[-2:-1] == ("toolbus",) and looks_restrictive(str(key.loc[-1])):
            raise SetupError(f"{at.place}: unknown key {key}, which looks like a restriction: correct or remove it")
        notices.append(f"{at.place}: {_IGNORED.get(str(key.loc[-1]), f'unknown key {key}')}: it is ignored")
    where = fields.get("url", "") or fields.get("bus", "")
    written = digest_of_command(fields.get("command", ""), fields.get("args", ()), where)
    resolved = {key: _resolve(value, f"{at.place}: {key}", environment) for key, value in fields.items()}
    if "cwd" in resolved:
        resolved["cwd"] = _directory(resolved["cwd"], at.place)
    if "url" in resolved:
        _check_url(resolved["url"], at.place)
    _check_values(resolved, at.place)
    _check_user_references(resolved, ours, at.place)
    if "oauth" in ours:
        values = {key: _resolve(value, f"{at.place}: oauth.{key}", environment) for key, value in ours["oauth"].items()}
        if values.get("exchange_at"):
            _check_url(values["exchange_at"], f"{at.place}: oauth.exchange_at")
        ours["oauth"] = OAuthClient(**values)
    try:
        return MountEntry(name, **resolved, **ours, command_digest=written, origin=origin)
    except SetupError as error:
        raise SetupError(f"{at.place}: {error}") from None


# -- checks --------------------------------------------------------------------------------------------------------


def _check_type(fields: Mapping[str, Any], place: str) -> None:
    kind = fields.get("type")
    if kind == "sse":
        raise SetupError(
            f'{place}: type "sse" is the HTTP transport of 2024, which the bus does not support: most servers moved, '
            'so try type "http" with the URL that ends with /mcp; else mount `npx -y mcp-remote URL` as a command'
        )
    if kind is not None and kind not in (*_STDIO, *_HTTP):
        raise SetupError(f'{place}: type is {quote(str(kind))}, it must be "stdio" (a command) or "http" (a url)')
    if (kind in _STDIO and "url" in fields) or (kind in _HTTP and "command" in fields):
        raise SetupError(f'{place}: type "{kind}" does not go with {"url" if "url" in fields else "command"}: drop one')


def _resolve(value: Any, place: str, environment: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return _REFERENCE.sub(lambda match: _lookup(match[1], place, environment), value)
    if isinstance(value, tuple):
        return tuple(_resolve(each, place, environment) for each in value)
    if isinstance(value, Mapping):
        return {key: _resolve(each, f"{place}.{quote(key)[1:-1]}", environment) for key, each in value.items()}
    return value


def _lookup(reference: str, place: str, environment: Mapping[str, str]) -> str:
    """Returns the value of one `${…}`."""
    kind, colon, rest = reference.partition(":")
    if kind == "input":
        raise SetupError(
            f"{place} has ${{{reference}}}, which asks a person in VS Code: write ${{NAME}} instead, and set NAME in "
            "the environment of the bus"
        )
    if kind in ("workspaceFolder", "workspaceFolderBasename", "command", "config"):
        raise SetupError(f"{place} has ${{{quote(reference)[1:-1]}}}, which only an editor knows: write its value")
    if reference in USER_REFERENCES:
        return f"${{{reference}}}"
    if reference == "userHome":
        return os.path.expanduser("~")
    if reference in ("pathSeparator", "/"):
        return os.sep
    name, default = (rest, None) if kind == "env" and colon else (reference, None)
    if match := _DEFAULTED.fullmatch(name):
        name, default = match[1], match[2]
    if not VARIABLE_NAME.fullmatch(name):
        raise SetupError(f"{place} has ${{{quote(reference)[1:-1]}}}, which is not a variable: write ${{NAME}}")
    value = environment.get(name) or default
    if value is None:
        raise SetupError(
            f"{place} needs the variable {name}, which is not set: set it in the environment of the bus, or in the "
            "file that mcp_secrets names, then start the bus again"
        )
    return value


def _directory(text: str, place: str) -> Path:
    directory = Path(text).expanduser()
    if not directory.is_absolute():
        raise SetupError(f"{place}: cwd is {quote(text)}, it must be an absolute path")
    return directory


def _check_url(url: str, place: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
        parts = urlsplit("")
    if not good or not url.isprintable() or " " in url or "\\" in url:
        raise SetupError(
            f"{place}: url is not http://HOST… or https://HOST…: write for example https://example.com/mcp"
        )
    if parts.username is not None or parts.password is not None:
        raise SetupError(f"{place}: url holds a user or password: put it into headers, as Authorization")
    if parts.fragment:
        raise SetupError(f"{place}: url holds a fragment (#…), which is never sent to a server: remove it")


def _check_user_references(fields: Mapping[str, Any], ours: Mapping[str, Any], place: str) -> None:
    """Checks that what differs between users is used only where each has a process."""
    for key, value in fields.items():
        for name in USER_REFERENCES:
            if f"${{{name}}}" not in repr(value):
                continue
            if ours.get("login") != PER_USER or key not in ("args", "env"):
                raise SetupError(
                    f'{place}: {key} has ${{{name}}}, which stands in args and env of a mount with "login": "user" only'
                )
            if name == "user:token" and not ours.get("oauth", {}).get("exchange_at"):
                raise SetupError(f"{place}: {key} has ${{{name}}}, which needs oauth.exchange_at: add it")


def _check_values(fields: Mapping[str, Any], place: str) -> None:
    texts = [("command", fields.get("command", ""))]
    texts += [(f"args[{index}]", text) for index, text in enumerate(fields.get("args", ()))]
    texts += [(f"env.{name}", text) for name, text in fields.get("env", {}).items()]
    for label, text in texts:
        if "\0" in text:
            raise SetupError(f"{place}: {label} holds a NUL, which programs cannot receive: remove it")
    for name, text in fields.get("headers", {}).items():
        if not text.isprintable() or not text.isascii():
            raise SetupError(f"{place}: headers.{name} is not a valid header value: use printable ASCII on one line")


# -- how values are read ---------------------------------------------------------------------------------------------


def _scalar(reader: Reader) -> str:
    """Reads text; a number or switch becomes text."""
    if isinstance(reader.value, bool):
        return "true" if reader.value else "false"
    if isinstance(reader.value, int | float):
        return str(reader.value)
    return _secret(reader)


def _secret(reader: Reader) -> str:
    """Reads text that errors must not show."""
    if not isinstance(reader.value, str):
        raise SetupError(f"{reader.place} is not text: put it in quotes", reader.loc)
    try:
        return reader.text()
    except SetupError:
        raise SetupError(f"{reader.place} holds half of a surrogate pair: replace that character", reader.loc) from None


def _container(reader: Reader) -> Reader:
    """Checks that a value is a list or an object; the error does not show the value."""
    if not isinstance(reader.value, list | Mapping):
        raise SetupError(f"{reader.place} is text or a number, it must be a list or an object", reader.loc)
    return reader


def _env(reader: Reader) -> dict[str, str]:
    variables = {}
    for name, value in _container(reader).entries().items():
        if not VARIABLE_NAME.fullmatch(name):
            raise SetupError(f"{value.place}: {quote(name)} is not a variable name: use letters, digits and _")
        if value.value is not None:  # VS Code: null unsets a variable; mounts do not inherit it anyway
            variables[name] = _scalar(value)
    return variables


def _headers(reader: Reader) -> dict[str, str]:
    headers = {}
    for name, value in _container(reader).entries().items():
        if not _HEADER_NAME.fullmatch(name):
            raise SetupError(f"{reader.place}: {quote(name)} is not the name of a header")
        headers[name] = _secret(value)
    return headers


def _globs(reader: Reader) -> tuple[str, ...]:
    globs = reader.names()
    if len(globs) > MAX_GLOBS:
        raise SetupError(f"{reader.place} has {len(globs)} patterns, the limit is {MAX_GLOBS}: use * in them")
    return globs


def _role(reader: Reader) -> str:
    role = reader.text()
    if not 1 <= len(role) <= MAX_ROLE:
        raise reader.error(f"it must have 1 to {MAX_ROLE} characters")
    return role


def _login(reader: Reader) -> bool | str:
    if reader.value == PER_USER or isinstance(reader.value, bool):
        return PER_USER if reader.value == PER_USER else reader.flag()
    raise reader.error(f'it must be true, false or "{PER_USER}"')


_OAUTH_KEYS: Keys = {
    key: (key, _secret) for key in ("client_id", "client_secret", "exchange_at", "audience", "resource", "scope")
}
OWN_KEYS: Keys = {
    "allow": ("allow", _globs),
    "deny": ("deny", _globs),
    "role": ("role", _role),
    "min_level": ("min_level", lambda reader: reader.whole(0, MAX_LEVEL)),
    "max_in_flight": ("max_in_flight", lambda reader: reader.whole(1, MAX_IN_FLIGHT)),
    "rate": ("rate", lambda reader: reader.number(0, MAX_RATE)),
    "timeout_seconds": ("timeout_seconds", lambda reader: reader.number(0, MAX_TIMEOUT_SECONDS)),
    "eager": ("eager", Reader.flag),
    "transit": ("transit", Reader.flag),
    "idle_seconds": ("idle_seconds", lambda reader: reader.number(0, MAX_IDLE_SECONDS)),
    "era": ("era", lambda reader: reader.choice(ERAS)),
    "pin": ("pin", lambda reader: reader.choice(PINS)),
    "check_arguments": ("check_arguments", Reader.flag),
    "trust_hints": ("trust_hints", Reader.flag),
    "instructions": ("instructions", Reader.flag),
    "login": ("login", _login),
    "max_users": ("max_users", lambda reader: reader.whole(1, MAX_USERS)),
    "oauth": ("oauth", lambda reader: reader.record(_OAUTH_KEYS, snake_case)),
}
ENTRY_KEYS: Keys = {
    "type": ("type", Reader.text),
    "command": ("command", _secret),
    "args": ("args", lambda reader: tuple(_scalar(item) for item in _container(reader).items())),
    "env": ("env", _env),
    "cwd": ("cwd", Reader.text),
    "url": ("url", _secret),
    "headers": ("headers", _headers),
    "bus": ("bus", _secret),
    "credential": ("credential", Reader.text),
    "token": ("token", _secret),
    "disabled": ("disabled", Reader.flag),
    "toolbus": ("toolbus", lambda reader: reader.record(OWN_KEYS, snake_case)),
}
# Keys of other clients' files, with a text that is more helpful than "unknown key".
_IGNORED = {
    "envFile": "envFile is not read, so its variables are missing (put them into env, or into the bus's environment)",
    "httpUrl": "httpUrl is Gemini's word for url (rename it)",
    "serverUrl": "serverUrl is Windsurf's word for url (rename it)",
    "autoApprove": "autoApprove concerns the dialog of another client",
    "alwaysAllow": "alwaysAllow concerns the dialog of another client",
    "trust": 'trust concerns the dialog of another client ("toolbus": {"trust_hints": true} believes hints)',
}


# -- restrictions of other clients -------------------------------------------------------------------------------------

# Keys of entries, as Python spells them, with the clients that have them.
_ON = frozenset(("enabled", "is_enabled", "enable", "active", "is_active"))  # Zed, Codex, opencode, Cherry Studio
_OFF = frozenset(("is_disabled", "disable", "inactive"))
_ONLY = frozenset(  # Gemini CLI, Codex, Copilot CLI, Claude, goose
    ("include_tools", "enabled_tools", "tools", "allowed_tools", "allow_tools", "available_tools", "included_tools")
)
_NOT = frozenset(  # Gemini CLI, Codex, Cline, Windsurf
    ("exclude_tools", "disabled_tools", "excluded_tools", "denied_tools", "deny_tools", "blocked_tools", "block_tools")
)
_LOOKS_RESTRICTIVE = re.compile(
    r"tool|allow|den(y|ied)|disabl|enabl|exclu|inclu|block|restrict|permi|read_?only|sandbox|filter|(^|_)only|"
    r"white_?list|black_?list|forbid|limit|approv|confirm|polic|(^|_)(off|skip(ped)?)($|_)|paus|suspend|hid(e|den)|ignor"
)
_LOOSENS = re.compile(r"auto_?(approv|allow)|always_?allow|^trust|tool_timeout|timeout")  # dialogs of other clients
# Keys of a whole file that name servers.
_SERVERS = r"_?(mcp_?)?(json_?)?servers"  # after what a key says of them
_SERVERS_ONLY = re.compile(rf"(is_)?(allow|enable|include|activ)(d|e|ed)?{_SERVERS}")
_SERVERS_NOT = re.compile(rf"(is_)?(exclude|disable|deny|denie|block|inactive|ignore|reject)(d|ed)?{_SERVERS}")


@dataclass(frozen=True, slots=True)
class Restrictions:
    """What an entry restricts.

    Attributes:
        is_off: whether the server is switched off.
        only: globs of the tools that it may offer; None: the entry names none.
        denied: globs of the tools that it may not offer.
        keys: the keys that were read.
    """

    is_off: bool = False
    only: tuple[str, ...] | None = None
    denied: tuple[str, ...] = ()
    keys: frozenset[str] = frozenset()


def read_restrictions(reader: Reader, name: str, known: Iterable[str]) -> Restrictions:
    """Reads the restrictions of an entry in the words of other clients.

    Args:
        name: of the server: some clients write it before the names of tools.
        known: the keys that have a meaning of their own.

    Raises:
        SetupError: a key restricts in a way that the bus does not know.
    """
    is_off, only, denied, keys = False, dict[str, tuple[str, ...]](), list[str](), set[str]()
    for key, at in reader.entries().items():
        word = snake_case(key.replace("-", "_"))
        if key in known or _LOOSENS.search(word):
            continue
        if word in _ON or word in _OFF:
            is_off = is_off or at.flag() is (word in _OFF)
        elif word in _ONLY and isinstance(at.value, Mapping):
            allowed, refused = _switches(at)
            denied += _patterns(refused, name)
            if allowed:
                only[key] = _patterns(allowed, name)
        elif word in _ONLY:
            only[key] = _patterns(_names(at), name)
        elif word in _NOT:
            denied += _patterns((each.partition("(")[0] for each in _names(at)), name)
        elif not looks_restrictive(word) or _is_empty(word, at.value):
            continue
        else:
            raise SetupError(
                f"{reader.place}: {quote(key)[1:-1]} looks like a restriction that the bus does not know: remove it, "
                'and restrict the mount with "disabled", or with "allow" and "deny" below "toolbus"',
                at.loc,
            )
        keys.add(key)
    if len(only) > 1:
        raise SetupError(f"{reader.place}: {' and '.join(only)} both choose tools: write one of them")
    chosen = next(iter(only.values()), None)
    return Restrictions(is_off, chosen, tuple(denied), frozenset(keys))


def is_restriction(key: str) -> bool:
    """Tells whether `read_restrictions` reads a key of an entry."""
    return snake_case(key.replace("-", "_")) in _ON | _OFF | _ONLY | _NOT


def looks_restrictive(key: str) -> bool:
    """Tells whether an unknown key may restrict a server."""
    return _LOOKS_RESTRICTIVE.search(snake_case(key)) is not None


def switched_off(file: Mapping[str, Any], name: str) -> str:
    """Returns the key by which a file switches a server off; "" if none does.

    Args:
        file: the object that holds the table of servers: of the whole file, or of a project in it.
    """
    settings = [(key, value) for key, value in file.items()]
    inner = file.get("mcp")  # Gemini CLI
    if isinstance(inner, Mapping):
        settings += [(f"mcp.{key}", value) for key, value in inner.items()]
    for key, value in settings:
        word = snake_case(key)
        if _SERVERS_ONLY.fullmatch(word) or key == "mcp.allowed":
            if not _names_server(value, name, otherwise=False):
                return key
        elif (_SERVERS_NOT.fullmatch(word) or key == "mcp.excluded") and _names_server(value, name, otherwise=True):
            return key
    return ""


def _names_server(value: Any, name: str, *, otherwise: bool) -> bool:
    """Tells whether a list names a server; `otherwise` if it is no list."""
    if isinstance(value, Mapping) and all(isinstance(each, bool) for each in value.values()):
        return value.get(name) is True
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list):
        return otherwise
    # Claude's managed settings have objects; one that gives a command or URL may mean any server.
    names = [each.get("serverName") if isinstance(each, Mapping) else each for each in names]
    return name in names or (otherwise and None in names)


def _names(reader: Reader) -> tuple[str, ...]:
    return (reader.text(),) if isinstance(reader.value, str) else reader.names()


def _switches(reader: Reader) -> tuple[list[str], list[str]]:
    """Reads an object that switches tools on and off; returns the names of both kinds."""
    kinds: tuple[list[str], list[str]] = ([], [])
    for name, at in reader.entries().items():
        if isinstance(at.value, Mapping):
            rules = read_restrictions(at, "", ())
            if rules.only is not None or rules.denied:
                raise at.error('it must be true, false, or {"enabled": …}')
            kinds[rules.is_off].append(name)
        else:
            kinds[not at.flag()].append(name)
    return kinds


def _patterns(names: Iterable[str], server: str) -> tuple[str, ...]:
    """Returns patterns for names of tools, as they are and without the server before them."""
    globs: list[str] = []
    for each in names:
        pattern = each.replace("[", "[[]")
        globs.append(pattern)
        for prefix in (f"mcp__{server}__", f"{server}__", f"{server}:", f"{server}/", f"{server}."):
            if server and pattern.startswith(prefix) and len(pattern) > len(prefix):
                globs.append(pattern.removeprefix(prefix))
    return tuple(globs)


def _is_empty(word: str, value: Any) -> bool:
    """Tells whether a key restricts nothing: it has no value, or is switched off."""
    if value is False:
        return "enabl" not in word and "allow" not in word and "permi" not in word
    return value is None or value == "" or value == [] or value == {}
