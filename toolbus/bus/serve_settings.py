"""Collects the settings of ``toolbus serve``: flags win over the environment, the file and defaults.

Each source is read by the setting's own declaration, so a bad value gets the same error wherever it stands: its place,
the value, the rule and how to fix it. `Config` knows what a bus accepts, and checks itself.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolbus.bus.config import Config, check_port
from toolbus.common.part import is_installed, parts
from toolbus.common.path_ownership import check_path
from toolbus.common.reader import Keys, Reader, path_of
from toolbus.common.setting import (
    FLAG,
    TEXT,
    CheckedRecord,
    Option,
    Setting,
    ValueKind,
    missing_parts,
    one_of,
    part_records,
    setting,
    settings_of,
    variable_of,
)
from toolbus.errors import SetupError

HTTP_PORT_VARIABLES = ("NEKO_MAIN_SERVER_PORT", "MAIN_SERVER_PORT")  # first one that is set wins
IGNORED = "ignored"  # the key of these warnings in what a part derives
LOG_LEVELS = ("debug", "info", "warning", "error")

# What a part's record may have as `derive`: gets the settings of all sources, the names of those that do not come from
# the file, and the environment; returns settings that follow, such as those that variables of other systems name, and
# as `ignored` warnings about such variables that the bus cannot use.
Derive = Callable[[Mapping[str, Any], Collection[str], Mapping[str, str]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ServeSettings(CheckedRecord):
    """The settings of ``toolbus serve``: those of the bus, and its own.

    Raises:
        SetupError: from the constructor; the log level is unknown.
    """

    config: Config
    log_level: str = setting(
        "info",
        TEXT,
        "`debug`, `info`, `warning` or `error`",
        check=one_of(*LOG_LEVELS),
        option=Option("debug, info, warning or error (default: info).", "LEVEL"),
    )
    log_json: bool = setting(
        False, FLAG, "log lines as JSON, on standard error", option=Option("Write the log as JSON lines.")
    )

    ignored: tuple[str, ...] = ()  # warnings about variables of other programs that the bus reads and cannot use


def serve_settings() -> Iterator[Setting]:
    """Yields all settings: of the bus, of its parts, and of the program."""
    for record in (Config, *part_records(), ServeSettings):
        yield from settings_of(record).values()


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
    ignored: list[str] = []
    for record in part_records():
        derive: Derive | None = getattr(record, "derive", None)
        if derive is not None:
            derived = derive(merged, over_file, environ)
            ignored += derived.pop(IGNORED, ())
            over_file |= derived
            merged |= over_file
    if "http" not in over_file:
        merged |= _http_port(environ, ignored)
    log = {name: merged.pop(name) for name in settings_of(ServeSettings) if name in merged}
    if "data_dir" not in merged:
        import platformdirs  # only a bus that persists something needs it

        merged["data_dir"] = platformdirs.user_data_path("toolbus")
    return ServeSettings(Config(**merged), **log, ignored=tuple(ignored))


# -- where settings come from ----------------------------------------------------------------------------------------


def _kinds() -> dict[str, ValueKind]:
    """Returns how each key is read, those of switches included."""
    kinds: dict[str, ValueKind] = {}
    for each in serve_settings():
        kinds[each.name] = each.kind
        if each.switch is not None:
            kinds[each.switch.name] = FLAG
    return kinds


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Reads ``TOOLBUS_<NAME>``; an empty variable counts as unset, a list has commas between its items."""
    for part in parts():  # a protection that is asked for is never left out silently
        for name in part.guards if not is_installed(part) else ():
            if environ.get(variable_of(name)):
                raise SetupError(f"{variable_of(name)} is set{missing_parts()}")
    settings: dict[str, Any] = {}
    for name, kind in _kinds().items():
        text = environ.get(variable_of(name))
        if text and kind.of_text is not None:
            settings[name] = kind.read(Reader(kind.of_text(text), variable_of(name)))
    return _apply_switches(settings, variable_of)


def _http_port(environ: Mapping[str, str], ignored: list[str]) -> dict[str, Any]:
    """Returns where HTTP listens by the variables of the systems that the contract comes from (REST-51)."""
    for variable in HTTP_PORT_VARIABLES:
        if environ.get(variable):
            try:
                return {"http": f"127.0.0.1:{check_port(variable, environ[variable])}"}
            except SetupError as problem:
                if variable.startswith("NEKO_"):
                    raise
                # Kubernetes sets MAIN_SERVER_PORT=tcp://… in every pod beside a service of that name.
                ignored.append(f"{problem}; it is ignored")
    return {}


def _from_file(file: Path) -> dict[str, Any]:
    try:
        check_path(file, f"the configuration {file}")
        document = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise SetupError(f"cannot read the configuration {file}: {error.strerror or error}") from error
    except ValueError as error:  # tomllib's own error, or bytes that are not UTF-8
        raise SetupError(f"the configuration {file} is not TOML: {error}: correct the file") from error
    keys: Keys = {name: (name, kind.read) for name, kind in _kinds().items()}
    unknown = [key for key in document if key not in keys]
    if unknown and missing_parts():
        raise SetupError(f"{file}: unknown key {path_of(unknown[:1])}{missing_parts()}", (unknown[0],))
    return _apply_switches(Reader(document, str(file)).record(keys), lambda name: f"{file}: {name}")


def _apply_switches(settings: dict[str, Any], shown: Callable[[str], str]) -> dict[str, Any]:
    """Turns the switches that empty another setting into that setting; `shown` names a setting in an error."""
    for each in serve_settings():
        if each.switch is not None and settings.pop(each.switch.name, False):
            if each.name in settings:
                raise SetupError(f"{shown(each.switch.name)} and {shown(each.name)} contradict each other: drop one")
            settings[each.name] = each.switch.empty
    return settings
