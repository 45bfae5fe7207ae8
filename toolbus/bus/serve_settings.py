"""Collects the settings of ``toolbus serve``: flags win over the environment, the file and defaults.

Each source is read by the same functions, so a bad value gets the same error wherever it stands: its place, the value,
the rule and how to fix it. `Config` knows what a bus accepts, and checks itself.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from toolbus.bus.catalog.policy import AccessRules
from toolbus.bus.config import TRACES_PATH, Config, check_port
from toolbus.bus.keys.issuer_settings import read_issuers
from toolbus.bus.pins.pins import PINS
from toolbus.common.reader import Keys, Read, Reader
from toolbus.errors import InvalidRequest, SetupError
from toolbus.parts.mcp.settings import read_mcp
from toolbus.protocol.limits import Limits

HTTP_PORT_VARIABLES = ("NEKO_MAIN_SERVER_PORT", "MAIN_SERVER_PORT")  # first one that is set wins
DEFAULT_UPSTREAM_PORT = 48916  # of a bus that offers its tools to a main server, which has the other one
COLLECTOR_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")  # first one wins
UPSTREAM_PORT_VARIABLES = ("NEKO_USER_PLUGIN_SERVER_PORT",)
LOG_LEVELS = ("debug", "info", "warning", "error")
_SWITCH_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The settings of ``toolbus serve``: those of the bus, and its own.

    Raises:
        SetupError: from the constructor; the log level is unknown.
    """

    config: Config
    log_level: str = "info"
    log_json: bool = False

    def __post_init__(self) -> None:
        if self.log_level not in LOG_LEVELS:
            raise SetupError(f"log_level is {self.log_level!r}, it must be one of {', '.join(LOG_LEVELS)}")


def settle(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> ServeSettings:
    """Merges the settings of all sources.

    Args:
        flags: settings by name, as in the file; only those that were given. ``data_dir`` None means ephemeral.
        environ: the process's environment.
        file: a TOML file; None: the one that ``TOOLBUS_CONFIG`` names, if any.

    Raises:
        SetupError: a setting of any source breaks a rule.
    """
    if file is None and environ.get("TOOLBUS_CONFIG"):
        file = Path(environ["TOOLBUS_CONFIG"])
    from_file = _from_file(file) if file is not None else {}
    over_file = {**_from_environment(environ), **flags}
    merged = {**from_file, **over_file}
    if "http" not in over_file:
        merged.update(_http_port(environ, beside_upstream=bool(merged.get("upstream")), from_file=from_file))
    if "traces" not in merged:
        merged.update(_collector(environ))
    elif merged["traces"] == "off":
        merged["traces"] = None
    log = {name: merged.pop(name) for name in ("log_level", "log_json") if name in merged}
    if "data_dir" not in merged:
        import platformdirs  # only a bus that persists something needs it

        merged["data_dir"] = platformdirs.user_data_path("toolbus")
    return ServeSettings(Config(**merged), **log)


# -- how values are read ---------------------------------------------------------------------------------------------


def _texts(reader: Reader) -> tuple[str, ...]:
    return (reader.value,) if isinstance(reader.value, str) else tuple(item.text() for item in reader.items())


def _users(reader: Reader) -> tuple[str, ...]:
    """Reads a list of users, or one; a uid may be a number."""
    if isinstance(reader.value, str):
        return (reader.value,)
    return tuple(str(item.whole()) if isinstance(item.value, int) else item.text() for item in reader.items())


def _path(reader: Reader) -> Path:
    return Path(reader.text()).expanduser()


def _limits(reader: Reader) -> Limits:
    keys: Keys = {each.name: (each.name, Reader.whole) for each in fields(Limits)}
    return Limits(**reader.record(keys))


def _rules(reader: Reader) -> AccessRules:
    try:
        return AccessRules.read({key: value.value for key, value in reader.entries().items()})
    except InvalidRequest as error:
        raise SetupError(f"{reader.subject}: {error}") from None


def _allowed(reader: Reader) -> dict[str, tuple[str, ...]]:
    return {tool: _texts(names) for tool, names in reader.entries().items()}


def _pins(reader: Reader) -> dict[str, str]:
    return {source: pin.choice(PINS) for source, pin in reader.entries().items()}


# Each setting by its name in the file; tables have no variables.
_READ: dict[str, Read] = {
    "grpc": _texts,
    "http": Reader.text,
    "neighbours": _users,
    "https": Reader.text,
    "keys": _path,
    "roles": _texts,
    "no_roles": Reader.flag,
    "adopt_roles": Reader.text,
    "data_dir": _path,
    "ephemeral": Reader.flag,
    "grace_seconds": Reader.number,
    "drain_seconds": Reader.number,
    "heartbeat_seconds": Reader.number,
    "idle_heartbeat_seconds": Reader.number,
    "missed_heartbeats": Reader.whole,
    "missed_heartbeats_gone": Reader.whole,
    "upstream": Reader.text,
    "silenced": _texts,
    "background_after_seconds": Reader.number,
    "generation": _texts,
    "guarded": _texts,
    "tripwire": Reader.text,
    "tools_dir": _path,
    "require_manifest": Reader.flag,
    "council": _path,
    "mcp_secrets": _path,
    "mcp_servers": _path,
    "offered": _texts,
    "repair_arguments": Reader.flag,
    "record_contents": Reader.flag,
    "audit": Reader.flag,
    "audit_required": Reader.flag,
    "audit_calls": Reader.flag,
    "traces": Reader.text,
    "trace_ratio": Reader.number,
    "trace_most": Reader.whole,
    "slow_seconds": Reader.number,
    "metrics": Reader.flag,
    "metrics_tools": Reader.whole,
    "grpc_reflection": Reader.flag,
    "console": Reader.flag,
    "log_level": Reader.text,
    "log_json": Reader.flag,
}
_TABLES: dict[str, Read] = {
    "limits": _limits,
    "permissions": _rules,
    "tripwire_allow": _allowed,
    "pins": _pins,
    "issuers": read_issuers,
    "mcp": read_mcp,
}
SETTINGS: tuple[str, ...] = tuple(_READ)


def _items_of(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _number_of(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


# How a variable's text becomes what a file would hold; text that cannot be converted goes on as it is, to be refused.
_FROM_TEXT: dict[Read, Callable[[str], Any]] = {
    _texts: _items_of,
    _users: _items_of,
    Reader.flag: lambda text: _SWITCH_WORDS.get(text.lower(), text),
    Reader.number: _number_of,
    Reader.whole: lambda text: int(text) if text.isdecimal() else text,
}


# -- where settings come from ----------------------------------------------------------------------------------------


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Reads ``TOOLBUS_<NAME>``; an empty variable counts as unset, a list has commas between its items."""
    settings: dict[str, Any] = {}
    for name, read in _READ.items():
        variable = _variable(name)
        if environ.get(variable):
            value = _FROM_TEXT.get(read, str)(environ[variable])
            settings[name] = read(Reader(value, variable))
    return _apply_switches(settings, _variable)


def _http_port(environ: Mapping[str, str], *, beside_upstream: bool, from_file: Mapping[str, Any]) -> dict[str, Any]:
    """Returns where HTTP listens by the variables of the systems that the contract comes from (REST-51).

    The port beside a main server is that of its own plugin server, which may run as well: then the next one is taken.
    """
    for variable in UPSTREAM_PORT_VARIABLES if beside_upstream else HTTP_PORT_VARIABLES:
        if environ.get(variable):
            http = f"127.0.0.1:{check_port(variable, environ[variable])}"
            return {"http": http, "http_fallback": beside_upstream}
    if beside_upstream and "http" not in from_file:
        return {"http": f"127.0.0.1:{DEFAULT_UPSTREAM_PORT}", "http_fallback": True}
    return {}


def _collector(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the collector that OpenTelemetry's variables name; that of traces has its path, the other needs one."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return {}
    of_traces, of_all = (environ.get(variable, "") for variable in COLLECTOR_VARIABLES)
    if of_traces:
        return {"traces": of_traces}
    return {"traces": f"{of_all.rstrip('/')}{TRACES_PATH}"} if of_all else {}


def _variable(name: str) -> str:
    return f"TOOLBUS_{name.upper()}"


def _from_file(file: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise SetupError(f"cannot read the configuration {file}: {error.strerror or error}") from error
    except ValueError as error:  # tomllib's own error, or bytes that are not UTF-8
        raise SetupError(f"the configuration {file} is not TOML: {error}: correct the file") from error
    keys: Keys = {name: (name, read) for name, read in (_READ | _TABLES).items()}
    return _apply_switches(Reader(document, str(file)).record(keys), lambda name: f"{file}: {name}")


def _apply_switches(settings: dict[str, Any], shown: Callable[[str], str]) -> dict[str, Any]:
    """Turns the two switches that empty another setting into that setting; `shown` names a setting in an error."""
    for switch, name, empty in (("no_roles", "roles", ()), ("ephemeral", "data_dir", None)):
        if settings.pop(switch, False):
            if name in settings:
                raise SetupError(f"{shown(switch)} and {shown(name)} contradict each other: drop one")
            settings[name] = empty
    return settings
