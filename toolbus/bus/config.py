"""What a bus is told when it starts: one frozen record, read once.

`Config` is what `toolbus.bus.Bus` takes. `settle` builds one for ``toolbus serve``: flag over environment over file
over default. Everything checks itself here, before anything listens, and every refusal names the value, the rule and
the cure. Nothing here opens a socket or makes a directory.
"""

from __future__ import annotations

import math
import socket
import tomllib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from toolbus.bus.callback_url import parse_callback_url
from toolbus.bus.calls.tripwire import Tripwire
from toolbus.bus.catalog.policy import AccessRules
from toolbus.bus.loopback import is_loopback_host, mask
from toolbus.errors import InvalidRequest, SetupError
from toolbus.tool import Limits, is_source

DEFAULT_GRPC = "127.0.0.1:48930"
DEFAULT_HTTP_PORT = 48911
HTTP_PORT_VARIABLES = ("NEKO_MAIN_SERVER_PORT", "MAIN_SERVER_PORT")  # first one that is set wins
DEFAULT_UPSTREAM_PORT = 48916  # of a bus that offers its tools to a main server, which has the other one
UPSTREAM_PORT_VARIABLES = ("NEKO_USER_PLUGIN_SERVER_PORT",)
MAX_UNIX_PATH = 107  # bytes: sun_path of Linux holds 108 with its end
MAX_SECONDS = 3600.0
OFFERED = ("tasks", "search")  # groups of the bus's own tools that are made for models
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Config:
    """What to listen on and what to accept.

    Attributes:
        grpc: ``HOST:PORT`` or ``unix:PATH``; port 0 picks a free one.
        http: ``HOST:PORT``, or ``off``.
        roles: the personas that tools can be for, in order; empty: none yet.
        data_dir: where what survives a restart is kept; None: nowhere.
        upstream: ``http://HOST:PORT`` of a main server that our tools are offered to; None: to nobody.
        limits: what is accepted, see `Limits`.
        grace_seconds: how long the tools of a broken session wait for it to come back.
        drain_seconds: how long calls in flight may take when the bus is asked to stop.
        silenced: sources that may attach and call, but not offer tools.
        guarded: sources whose results are withheld where they hold something named like a secret; one that ends with
            ``*`` stands for all that begin so.
        tripwire: how secrets are told by their names: ``default``, or ``synchronet`` for that system's own rules.
        tripwire_allow: names that a tool's results may hold all the same, by tool.
        permissions: which users may call which tools, and those of which roles and sources.
        background_after_seconds: how long a call of this process (`toolbus.tools.ToolRegistry`) waits before it becomes
            a task.
        tools_dir: a folder of drop-in tools to offer; ``toolbus serve`` runs them, in processes of their own.
        require_manifest: whether such a folder offers nothing without a ``_manifest.json``.
        council: a file of members that run tools before a model is asked (`toolbus.council`), and of their settings;
            None: whoever asks for a run brings members.
        offered: the bus's own tools that models are offered: ``tasks``, ``search``, or both.
        record_contents: whether the record of calls holds arguments and outputs, cut and without secrets.
        grpc_reflection: whether clients can ask the server for its services.

    Raises:
        SetupError: from the constructor, naming the first rule that is broken.
    """

    grpc: tuple[str, ...] = (DEFAULT_GRPC,)
    http: str = f"127.0.0.1:{DEFAULT_HTTP_PORT}"
    roles: tuple[str, ...] = ("default",)
    data_dir: Path | None = None
    upstream: str | None = None
    limits: Limits = field(default_factory=Limits)
    grace_seconds: float = 5.0
    drain_seconds: float = 30.0
    silenced: tuple[str, ...] = ()
    guarded: tuple[str, ...] = ("dropin", "dropin:*")
    tripwire: str = "default"
    tripwire_allow: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    permissions: AccessRules = field(default_factory=AccessRules)
    background_after_seconds: float = 10.0
    tools_dir: Path | None = None
    require_manifest: bool = False
    council: Path | None = None
    offered: tuple[str, ...] = ()
    record_contents: bool = False
    grpc_reflection: bool = True

    def __post_init__(self) -> None:
        if not self.grpc:
            raise SetupError(f"grpc names no address: name at least one, for example {DEFAULT_GRPC}")
        for name in ("grpc", "roles", "silenced", "guarded", "offered"):
            _check_list(name, getattr(self, name))
        for address in self.grpc:
            check_address("grpc", address, unix=True)
        if self.http != "off":
            check_address("http", self.http)
        if self.upstream is not None:
            check_upstream(self.upstream)
            if self.http == "off":
                raise SetupError("upstream needs http, since the main server calls tools back over it: drop http off")
        if self.tools_dir is not None and not self.tools_dir.is_dir():
            raise SetupError(f"tools_dir {str(self.tools_dir)!r} is no folder: make it, or name another")
        if self.council is not None and not self.council.is_file():
            raise SetupError(f"council {str(self.council)!r} is no file: write it, or name another")
        for name, sources in (("silenced", self.silenced), ("guarded", [each.rstrip("*") for each in self.guarded])):
            for source in sources:
                if source and not is_source(source):
                    raise SetupError(f"{name} names {source!r}: a source is 1 to 128 of [A-Za-z0-9_.:-]")
        try:
            Tripwire(self.tripwire, self.tripwire_allow)  # type: ignore[arg-type]  # which presets there are, it says
        except InvalidRequest as problem:
            raise SetupError(str(problem)) from None
        for group in self.offered:
            if group not in OFFERED:
                raise SetupError(f"offered names {group!r}: the bus can offer models {' and '.join(OFFERED)}")
        for name in ("grace_seconds", "drain_seconds", "background_after_seconds"):
            seconds = getattr(self, name)
            if not 0 <= seconds <= MAX_SECONDS:  # NaN fails this too
                raise SetupError(f"{name} is {seconds:g}, it must be from 0 to {MAX_SECONDS:g} seconds")
        for limit in fields(Limits):
            value = getattr(self.limits, limit.name)
            if value < 1:
                raise SetupError(f"limits.{limit.name} is {value}, it must be at least 1")

    @property
    def bus_id(self) -> str:
        """Names the bus so that it is the same after a restart on the same machine and addresses."""
        return uuid.uuid5(uuid.NAMESPACE_DNS, f"{socket.gethostname()} {' '.join(self.grpc)}").hex


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What ``toolbus serve`` was told: the bus's part and its own."""

    config: Config
    log_level: str = "info"
    log_json: bool = False

    def __post_init__(self) -> None:
        if self.log_level not in LOG_LEVELS:
            raise SetupError(f"log_level is {self.log_level!r}, it must be one of {', '.join(LOG_LEVELS)}")


def check_address(name: str, address: str, *, unix: bool = False) -> None:
    """Checks an address to listen on.

    Args:
        name: what the address is for, in the error's text.
        unix: whether ``unix:PATH`` will do as well.

    Raises:
        SetupError: no such form, a port out of range, a host that is not loopback.
    """
    if unix and address.startswith("unix:"):
        _check_unix(name, address)
        return
    host, colon, port = address.rpartition(":")
    forms = "HOST:PORT or unix:PATH" if unix else "HOST:PORT or off"
    if not colon or host in ("", "unix") or (":" in host and not host.startswith("[")):
        raise SetupError(
            f"{name} address {address!r} is not {forms}: write for example 127.0.0.1:0 (an IPv6 host in brackets)"
        )
    check_port(f"{name} address {address!r}", port)
    if not is_loopback_host(host.removeprefix("[").removesuffix("]")):
        raise SetupError(
            f"{name} address {address!r} is not on loopback: other machines could call every tool without a "
            "credential, so until this bus has TLS and credentials it listens on 127.0.0.0/8, [::1] or localhost only"
        )


def check_upstream(url: str) -> None:
    """Checks the address of a main server.

    Raises:
        SetupError: it is no http URL of a host and port on loopback.
    """
    try:
        target = parse_callback_url(url)
    except ValueError:
        raise SetupError(
            f"upstream {mask(url)!r} is not http://HOST:PORT of this machine: write for example http://127.0.0.1:48911"
        ) from None
    if target.scheme != "http" or target.user or target.url.partition("://")[2].partition("/")[2]:
        raise SetupError(f"upstream {target.shown!r} is not http://HOST:PORT: write for example http://127.0.0.1:48911")


def check_port(where: str, port: str) -> int:
    """Returns a port that was given as text.

    Raises:
        SetupError: it is no number from 0 to 65535.
    """
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise SetupError(f"{where}: port {port!r} is no number from 0 to 65535; 0 picks a free one")
    return int(port)


def settle(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> ServeSettings:
    """Puts together what was said in several places: flag over environment over file over default.

    Args:
        flags: settings by name, as in the file; only those that were given. ``data_dir`` None means ephemeral.
        environ: the process's environment.
        file: a TOML file; None: the one that ``TOOLBUS_CONFIG`` names, if any.

    Raises:
        SetupError: anything that breaks a rule, whoever said it.
    """
    if file is None and environ.get("TOOLBUS_CONFIG"):
        file = Path(environ["TOOLBUS_CONFIG"])
    from_file = _from_file(file) if file is not None else {}
    said = {**_from_environment(environ), **flags}
    merged = {**from_file, **said}
    if "http" not in said:
        merged.update(_http_port(environ, beside_upstream=bool(merged.get("upstream")), otherwise=from_file))
    limits = merged.pop("limits", {})
    log = {name: merged.pop(name) for name in ("log_level", "log_json") if name in merged}
    if "data_dir" not in merged:
        import platformdirs  # only a bus that keeps something needs it

        merged["data_dir"] = platformdirs.user_data_path("toolbus")
    return ServeSettings(Config(**merged, limits=Limits(**limits)), **log)


# -- where settings come from ------------------------------------------------------------------------------------


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Reads ``TOOLBUS_<NAME>``; an empty variable counts as unset, a list has commas between its items."""
    said: dict[str, Any] = {}
    for name, (read, _) in _SETTINGS.items():
        variable = _variable(name)
        if environ.get(variable):
            said[name] = read(variable, environ[variable])
    return _either(said, _variable)


def _http_port(environ: Mapping[str, str], *, beside_upstream: bool, otherwise: Mapping[str, Any]) -> dict[str, str]:
    """Says where HTTP listens by the variables of the systems that the contract comes from (REST-51)."""
    for variable in UPSTREAM_PORT_VARIABLES if beside_upstream else HTTP_PORT_VARIABLES:
        if environ.get(variable):
            return {"http": f"127.0.0.1:{check_port(variable, environ[variable])}"}
    return {"http": f"127.0.0.1:{DEFAULT_UPSTREAM_PORT}"} if beside_upstream and "http" not in otherwise else {}


def _variable(name: str) -> str:
    return f"TOOLBUS_{name.upper()}"


def _from_file(file: Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as opened:
            found = tomllib.load(opened)
    except OSError as problem:
        raise SetupError(f"cannot read the configuration {file}: {problem.strerror or problem}") from problem
    except ValueError as problem:  # tomllib's own error, or bytes that are no UTF-8
        raise SetupError(f"the configuration {file} is no TOML: {problem}") from problem
    said: dict[str, Any] = {}
    limits = found.pop("limits", {})
    if not isinstance(limits, dict):
        raise SetupError(f"{file}: limits is {limits!r}, it must be a table: [limits]")
    permissions, allowed = found.pop("permissions", {}), found.pop("tripwire_allow", {})
    _refuse_unknown(file, found, _SETTINGS, "limits", "permissions", "tripwire_allow")
    for name, value in found.items():
        _, check = _SETTINGS[name]
        said[name] = check(f"{file}: {name}", value)
    if not isinstance(allowed, dict):
        raise SetupError(f"{file}: tripwire_allow is {allowed!r}, it must be a table: [tripwire_allow]")
    if allowed:
        said["tripwire_allow"] = {
            tool: _texts(f"{file}: tripwire_allow.{tool}", names) for tool, names in allowed.items()
        }
    if permissions:
        try:
            said["permissions"] = AccessRules.read(permissions)
        except InvalidRequest as problem:
            raise SetupError(f"{file}: {problem}") from None
    if limits:
        known = {each.name for each in fields(Limits)}
        _refuse_unknown(file, limits, known, of="[limits]: ")
        said["limits"] = {name: _whole(f"{file}: limits.{name}", value) for name, value in limits.items()}
    return _either(said, lambda name: f"{file}: {name}")


def _refuse_unknown(file: Path, found: Mapping[str, Any], known: Any, *more: str, of: str = "") -> None:
    for name in found:
        if name not in known:
            raise SetupError(f"{file}: {of}unknown key {name!r}; known are {', '.join(sorted([*known, *more]))}")


def _either(said: dict[str, Any], shown: Callable[[str], str]) -> dict[str, Any]:
    """Turns the two switches that empty another setting into that setting; `shown` names a setting in an error."""
    for switch, name, empty in (("no_roles", "roles", ()), ("ephemeral", "data_dir", None)):
        if said.pop(switch, False):
            if name in said:
                raise SetupError(f"{shown(switch)} and {shown(name)} contradict each other: drop one")
            said[name] = empty
    return said


def _items(where: str, text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise SetupError(f"{where} is {value!r}, it must be a string")
    return value


def _texts(where: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise SetupError(f"{where} is {value!r}, it must be a list of strings")
    return tuple(value)


def _path(where: str, value: object) -> Path:
    return Path(_text(where, value)).expanduser()


def _switch(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SetupError(f"{where} is {value!r}, it must be true or false")
    return value


def _switch_text(where: str, text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in known:
        raise SetupError(f"{where} is {text!r}, it must be one of {', '.join(known)}")
    return known[text.lower()]


def _seconds(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SetupError(f"{where} is {value!r}, it must be a number of seconds")
    return float(value)


def _seconds_text(where: str, text: str) -> float:
    try:
        return _seconds(where, float(text))
    except ValueError:
        raise SetupError(f"{where} is {text!r}, it must be a number of seconds") from None


def _whole(where: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SetupError(f"{where} is {value!r}, it must be a whole number")
    return value


# name → (how the environment's text is read, how the file's value is checked)
_SETTINGS: dict[str, tuple[Callable[[str, str], Any], Callable[[str, object], Any]]] = {
    "grpc": (_items, _texts),
    "http": (_text, _text),
    "roles": (_items, _texts),
    "no_roles": (_switch_text, _switch),
    "data_dir": (_path, _path),
    "ephemeral": (_switch_text, _switch),
    "grace_seconds": (_seconds_text, _seconds),
    "drain_seconds": (_seconds_text, _seconds),
    "upstream": (_text, _text),
    "silenced": (_items, _texts),
    "background_after_seconds": (_seconds_text, _seconds),
    "guarded": (_items, _texts),
    "tripwire": (_text, _text),
    "tools_dir": (_path, _path),
    "require_manifest": (_switch_text, _switch),
    "council": (_path, _path),
    "offered": (_items, _texts),
    "record_contents": (_switch_text, _switch),
    "grpc_reflection": (_switch_text, _switch),
    "log_level": (_text, _text),
    "log_json": (_switch_text, _switch),
}


# -- rules ---------------------------------------------------------------------------------------------------------


def _check_list(name: str, values: Sequence[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if not value:
            raise SetupError(f"{name} has an empty item: name it or leave it out")
        if value in seen and not value.endswith(":0"):  # two free ports are two addresses
            raise SetupError(f"{name} names {value!r} twice: name it once")
        seen.add(value)


def _check_unix(name: str, address: str) -> None:
    path = address.removeprefix("unix:")
    if not path or path.startswith("//"):
        raise SetupError(f"{name} address {address!r} names no path: write for example unix:/run/toolbus/bus.sock")
    size = len(path.encode())
    if size > MAX_UNIX_PATH:
        raise SetupError(
            f"{name} address {address!r} has a path of {size} bytes, more than the {MAX_UNIX_PATH} that the system "
            "takes: choose a shorter one"
        )
    if "\0" in path:
        raise SetupError(f"{name} address {address!r} has a NUL byte in its path: leave it out")
