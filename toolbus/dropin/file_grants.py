"""What the manifest grants to one file: paths, hosts, secrets and limits, each checked and refused in a sentence.

No grant is a pattern or leads anywhere but where it says, and none reaches the tools themselves. Only where symbolic
links lead is asked of the system.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from toolbus.errors import SetupError
from toolbus.tool import is_source

FILE = "_manifest.json"
EXAMPLE = '{"allow": ["clock.py"], "files": {"clock.py": {"read": ["/etc/localtime"]}}}'
SOURCE = "dropin"  # of the tools that have no grants; those of a file with grants are in `dropin:<stem>`
LEAST_MEMORY_MB = 128  # the sandbox's least: the connection alone takes 100
_MAX_MEMORY_MB = 1 << 20
_MAX_CPU_SECONDS = 86_400  # the longest that a call may go on
_TARGET = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*)):(?P<port>[0-9]{1,5})", re.ASCII
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class Target(NamedTuple):
    """Where a file may connect to; a name or an address without brackets, and one port."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class FileGrants:
    """What one file may reach beyond what every file may.

    Attributes:
        write: absolute files and folders that it may change.
        read: absolute files and folders that it may read, beside its own code.
        connect: where it may connect to.
        secrets: environment variables that it gets to see.
        memory_mb: most memory of its process, in MiB; None means the default.
        cpu_seconds: most processor time of one call, in seconds; None means the default.
    """

    write: tuple[Path, ...] = ()
    read: tuple[Path, ...] = ()
    connect: tuple[Target, ...] = ()
    secrets: tuple[str, ...] = ()
    memory_mb: int | None = None
    cpu_seconds: int | None = None

    def covers(self, other: FileGrants) -> bool:
        """Tells whether nothing of the other grants is missing in these, and the limits are the same."""
        lists = ("write", "read", "connect", "secrets")
        return (self.memory_mb, self.cpu_seconds) == (other.memory_mb, other.cpu_seconds) and all(
            set(getattr(self, name)) >= set(getattr(other, name)) for name in lists
        )


NO_GRANTS = FileGrants()


def refused(where: str, value: object, rule: str, cure: str) -> SetupError:
    """Returns the refusal of a value of the manifest, to be raised."""
    return SetupError(f"{FILE}: {where}: {value!r:.200} {rule}: {cure}")


def object_of(value: Any, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    """Returns a value that has to be an object of known words."""
    if not isinstance(value, dict):
        raise refused(where, value, "must be an object", f"write it like {EXAMPLE}")
    for key in value:
        if key not in known:
            raise refused(where, key, "is no word of a manifest", f"it may hold {', '.join(known)}")
    return value


def list_of(value: Any, where: str) -> list[Any]:
    """Returns a value that has to be a list."""
    if not isinstance(value, list):
        raise refused(where, value, "must be a list", "put [ and ] round it")
    return value


def file_name(value: Any, where: str) -> str:
    """Returns the name of a tool file; never a path, so that nothing outside the folder can be meant."""
    plain = isinstance(value, str) and value.isprintable() and "/" not in value and "\\" not in value
    if not plain or not value.endswith(".py") or value.startswith("."):
        raise refused(where, value, "is no name of a Python file in the folder", 'give its bare name, like "clock.py"')
    return str(value)


def read_grants(file: str, said: Any, folder: Path) -> FileGrants:
    """Returns what the manifest's entry for a file grants.

    Raises:
        SetupError: naming the value, the rule that it breaks and the cure.
    """
    file_name(file, "files")
    entry = object_of(said, f"files: {file}", FileGrants.__slots__)
    stem = file.removesuffix(".py")
    if entry and file.startswith("_"):
        raise refused("files", file, "is shared by several files and has their grants", "grant it to those files")
    if entry and not is_source(f"{SOURCE}:{stem}"):
        raise refused("files", file, "cannot name a source", "rename the file: letters, digits, '_', '-' and '.'")
    texts = {
        key: _texts(entry.get(key, []), f"files: {file}: {key}") for key in ("write", "read", "connect", "secrets")
    }
    return FileGrants(
        write=tuple(_writable(each, f"files: {file}: write", folder) for each in texts["write"]),
        read=tuple(_path(each, f"files: {file}: read", folder) for each in texts["read"]),
        connect=tuple(_target(each, f"files: {file}: connect") for each in texts["connect"]),
        secrets=tuple(_variable(each, f"files: {file}: secrets") for each in texts["secrets"]),
        memory_mb=_number(entry, "memory_mb", f"files: {file}", LEAST_MEMORY_MB, _MAX_MEMORY_MB),
        cpu_seconds=_number(entry, "cpu_seconds", f"files: {file}", 1, _MAX_CPU_SECONDS),
    )


def _texts(value: Any, where: str) -> list[str]:
    for each in list_of(value, where):
        if not isinstance(each, str):
            raise refused(where, each, "must be a text", "put it in quotes")
    return list(value)


def _path(text: str, where: str, folder: Path) -> Path:
    """Returns the file or folder that is meant, behind all symbolic links."""
    named = Path(text)
    if not text.strip() or "\0" in text or ".." in named.parts:
        raise refused(where, text, "is no path that stays where it begins", "write it out without '..'")
    if text.startswith("~") or any(each in text for each in "*?["):
        raise refused(where, text, "would be a pattern, and those are not followed", "name one file or folder")
    home = folder.resolve()
    try:
        meant = (home / named).resolve()
        if meant.is_symlink():
            raise RuntimeError("a loop of links")
    except (OSError, ValueError, RuntimeError) as problem:  # a loop, or a name that no file can have
        raise refused(where, text, f"leads nowhere ({problem})", "correct it") from None
    if not named.is_absolute() and not (meant.is_relative_to(home) and meant != home):
        raise refused(where, text, f"leads out of {home}, to {meant}", "write the absolute path if it is wanted")
    if meant == Path(meant.anchor):
        raise refused(where, text, "is everything there is", "name one file or folder")
    return meant


def _writable(text: str, where: str, folder: Path) -> Path:
    """Returns where a file may write: never the tools themselves, since it could then give itself what it likes."""
    meant = _path(text, where, folder)
    home = folder.resolve()
    code = meant.parent == home and (meant.suffix == ".py" or meant.name == FILE)
    if code or home.is_relative_to(meant):
        raise refused(where, text, "holds tools or their grants", "write to a folder or file of its own")
    return meant


def _target(text: str, where: str) -> Target:
    """Returns a host and a port. Hosts of other machines may be named; all of them, or all ports, may not."""
    cure = 'name one host and one port, like "127.0.0.1:8000", "api.example.org:443" or "[::1]:8000"'
    match = _TARGET.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= 65_535:
        raise refused(where, text, "is no host:port", cure)
    host = (match["six"] or match["host"]).lower()
    last = host.rpartition(".")[2]
    if match["six"] or last.isdigit() or last.startswith("0x"):  # resolvers read "0" and "0x7f.1" as addresses too
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            raise refused(where, text, "is no address in its usual form", cure) from None
        address = getattr(address, "ipv4_mapped", None) or address
        if address.is_unspecified or address.is_multicast:
            raise refused(where, text, "stands for more than one host", cure)
        host = str(address)
    return Target(host, int(match["port"]))


def _variable(text: str, where: str) -> str:
    if not _VARIABLE.fullmatch(text):
        raise refused(where, text, "is no name of an environment variable", 'give its name, like "API_KEY"')
    return text


def _number(entry: dict[str, Any], key: str, where: str, least: int, most: int) -> int | None:
    value = entry.get(key)
    if value is None or (type(value) is int and least <= value <= most):
        return value
    rule = f"must be a whole number from {least} to {most}"
    raise refused(f"{where}: {key}", value, rule, "correct it or leave it out")
