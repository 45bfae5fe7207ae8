"""Chooses which variables of an operator's environment a new process gets, and makes its token.

There is an allow-list, because an environment has the keys of all services of the operator, and a plugin needs few of
them. The operator names further variables. Drop-in tools get `EVERY_PROCESS` only, see `toolbus.parts.dropin.sandbox`.
"""

from __future__ import annotations

import ast
import hmac
import itertools
import os
import re
import shlex
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from toolbus.common.path_ownership import check_path
from toolbus.common.text import list_names, nearest, quote
from toolbus.errors import SetupError

VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# The proof of this process's identity, and the key of its model. A plugin has a token of its own.
NEVER_PASSED_ON = frozenset({"TOOLBUS_TOKEN", "TOOLBUS_CREDENTIAL", "TOOLBUS_SIDECAR_API_KEY"})
MAX_SCANNED_BYTES = 1024 * 1024  # of a plugin file that is searched for names of variables
MAX_SCANNED_FILES = 200  # of a plugin's folder
_LIKE_A_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class AllowedVariables:
    """A list of variables that a process gets.

    Attributes:
        names: whole names.
        prefixes: beginnings of names; a name that looks like that of a secret is left out (`NVIDIA_API_KEY`).
    """

    names: frozenset[str]
    prefixes: tuple[str, ...]

    def choose(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables of an environment that are on this list; URLs of proxies without user and password."""
        chosen = {name: value for name, value in environment.items() if self._has(name)}
        return chosen | {name: _without_user(chosen[name]) for name in chosen.keys() & ALL_PROXIES}

    def _has(self, name: str) -> bool:
        return name in self.names or (name.startswith(self.prefixes) and not _LIKE_A_SECRET.search(name))


def _without_user(proxy: str) -> str:
    """Returns the URL of a proxy without user and password: they are this process's, as its keys are."""
    scheme, separator, rest = proxy.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


# Programs and their libraries, languages, time zones, certificates, the bus; no path of the user's files.
EVERY_PROCESS = AllowedVariables(
    frozenset(
        {
            *(
                "PATH",
                "LANG",
                "LANGUAGE",
                "TZ",
                "TZDIR",
                "LD_LIBRARY_PATH",
                "SSL_CERT_FILE",
                "SSL_CERT_DIR",
                "NO_COLOR",
            ),
            *("PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONCOERCECLOCALE", "PYTHONTZPATH"),
            *("PYTHONDEVMODE", "TOOLBUS_ADDRESS", "TOOLBUS_LANE", "TOOLBUS_GRPC_EXPERIMENTS"),
        }
    ),
    ("LC_", "GRPC_"),
)
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY")
ALL_PROXIES = frozenset((*_PROXIES, *map(str.lower, _PROXIES)))
PLUGIN = AllowedVariables(
    EVERY_PROCESS.names
    | {
        *("HOME", "USER", "LOGNAME", "SHELL", "PWD", "HOSTNAME", "TMPDIR", "TMP", "TEMP"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"),
        *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
        *ALL_PROXIES,
        *("TERM", "COLORTERM", "COLUMNS", "LINES", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE"),
        *("DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "DBUS_SESSION_BUS_ADDRESS"),  # notifications, screenshots
        *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
    },
    (*EVERY_PROCESS.prefixes, "PYTHON", "XDG_", "CUDA_", "OMP_", "MKL_", "OPENBLAS_"),
)
# For MCP servers: the variables that the protocol's clients pass on, and none of the bus.
MCP_SERVER = AllowedVariables(
    frozenset(
        {
            *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TMP", "TEMP"),
            *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
            *ALL_PROXIES,
        }
    ),
    ("LC_", "XDG_"),
)


def requested_variables(requests: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that an operator names: ``NAME``, ``NAME=VALUE``, or a pattern such as ``AWS_*``.

    Raises:
        SetupError: a name is not valid or not set, or belongs to this process alone.
    """
    chosen: dict[str, str] = {}
    for request in requests:
        name, equals, value = request.partition("=")
        if name in NEVER_PASSED_ON:
            raise SetupError(
                f"{name} is not passed on to plugins, since each has to prove its own identity: set it in the table of "
                "one plugin in a file, and name the file with --secrets"
            )
        if equals:
            if not VARIABLE_NAME.fullmatch(name):
                raise SetupError(f"{quote(name)} is not a valid variable name: use letters, digits and _")
            chosen[name] = value
            continue
        matched = {key: text for key, text in environment.items() if fnmatchcase(key, name)}
        if not matched:
            raise SetupError(f"no variable {quote(name)} is set: export it, or give its value as {name}=VALUE")
        chosen |= {key: text for key, text in matched.items() if key not in NEVER_PASSED_ON}
    return chosen


def mentioned_variables(file: Path) -> set[str]:
    """Returns the variables that a Python file reads by name (`os.environ["X"]`, `os.getenv("X")`).

    It reads the file, not its imports; of a folder, all files in it. A file that cannot be parsed has none: its own
    process reports why.
    """
    if file.is_dir():
        inner = itertools.islice(file.rglob("*.py"), MAX_SCANNED_FILES)
        return {name for each in inner if each.is_file() for name in mentioned_variables(each)}
    try:
        with file.open("rb") as opened:
            tree = ast.parse(opened.read(MAX_SCANNED_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    return {name for node in ast.walk(tree) for name in variables_read_by(node)}


def variables_read_by(node: ast.AST) -> list[str]:
    """Returns the name of the variable that an expression reads (`os.environ["X"]`), if it reads one."""
    match node:
        case ast.Subscript(value=owner, slice=ast.Constant(value=str(name))):
            known = _is_called(owner, "environ")
        case ast.Call(func=ast.Attribute(value=owner, attr=method), args=[ast.Constant(value=str(name)), *_]):
            known = method == "getenv" or (method in ("get", "pop", "setdefault") and _is_called(owner, "environ"))
        case ast.Call(func=ast.Name(id="getenv"), args=[ast.Constant(value=str(name)), *_]):
            known = True
        case ast.Compare(left=ast.Constant(value=str(name)), comparators=[owner]):
            known = _is_called(owner, "environ")
        case _:
            return []
    return [name] if known else []


def _is_called(node: ast.expr, name: str) -> bool:
    """Tells whether an expression is a name, or an attribute of that name."""
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)


def token_of(secret: str, owner: str) -> str:
    """Returns the token of one owner; neither the secret nor another token can be derived from it."""
    return hmac.new(secret.encode(), owner.encode(), "sha256").hexdigest()


# No error text shows a value.
def read_secrets(file: Path, plugins: Sequence[str]) -> dict[str, dict[str, str]]:
    """Returns the variables of each plugin that has a table.

    Args:
        plugins: the names that a table may have.

    Raises:
        SetupError: others may read the file, it belongs to another user, it is not TOML of this form, or a table is of
            an unknown plugin.
    """
    document = _read_document(file)
    known = f"the plugins are {list_names(plugins)}"
    for name, table in document.items():
        if not isinstance(table, dict):
            raise SetupError(f"{file}: {quote(name)} is in no table: put it below [PLUGIN]; {known}")
        if name not in plugins:
            near = nearest(name, plugins)
            guess = f" (did you mean [{near}]?)" if near else ""
            raise SetupError(f"{file}: [{_shown(name)}] is not a plugin of this run{guess}: {known}")
        _check(table, lambda variable, name=name: f"{file}: {quote(variable)} of [{_shown(name)}]")  # type: ignore[misc]
    return document


def read_variables(file: Path) -> dict[str, str]:
    """Returns the variables of a file that has no tables.

    Raises:
        SetupError: others may read the file, it belongs to another user, or it is not TOML of this form.
    """
    document = _read_document(file)
    _check(document, lambda variable: f"{file}: {quote(variable)}")
    return document


def _read_document(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read_private(file))
    except ValueError as error:  # tomllib's own error, or bytes that are not UTF-8
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
        raise SetupError(f"{file} is not TOML: {reason}") from None


def _read_private(file: Path) -> str:
    """Returns the text of a file that only this user can read."""
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            if status.st_uid != os.geteuid():
                raise SetupError(
                    f"{file} belongs to user id {status.st_uid}, and this process is of user id {os.geteuid()}: "
                    f"sudo chown {os.geteuid()} {shlex.quote(str(file))}"
                )
            if stat.S_IMODE(status.st_mode) & 0o077:
                raise SetupError(
                    f"{file} has secrets, and others may read or change it (mode {stat.S_IMODE(status.st_mode):04o}): "
                    f"chmod 600 {shlex.quote(str(file))}"
                )
            check_path(file, str(file))
            return opened.read().decode()
    except OSError as error:
        raise SetupError(f"cannot read {file}: {error.strerror or error}") from None


def _check(table: dict[str, Any], place_of: Callable[[str], str]) -> None:
    for name, value in table.items():
        place = place_of(name)
        if not VARIABLE_NAME.fullmatch(name):
            raise SetupError(f"{place} is not a valid variable name: use letters, digits and _")
        if not isinstance(value, str):
            raise SetupError(f"{place} is not text: put its value in quotes")
        if "\0" in value:
            raise SetupError(f"{place} holds a NUL, which no variable can: remove it")


def _shown(plugin: str) -> str:
    return quote(plugin)[1:-1]
