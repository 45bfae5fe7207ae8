"""Reads what the manifest grants to one file: paths, hosts, secrets and limits, each checked.

A grant is never a pattern, reaches only what it names, and never the tools themselves. Of the file system it
reads only symbolic links.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from toolbus.reader import Keys, Reader
from toolbus.tool import is_source

FILE = "_manifest.json"
EXTENSION = "spindle.json"  # makes a folder in the folder an extension
EXAMPLE = '{"allow": ["clock.py"], "files": {"clock.py": {"read": ["/etc/localtime"]}}}'
SOURCE = "dropin"  # of the tools of files without grants; a file with grants has one of its own: `own_source`
SCRIPTS = "dropin:js"  # of the tools of JavaScript files without grants
MIN_MEMORY_MB = 128  # the connection alone takes 100
_MAX_MEMORY_MB = 1 << 20
_MAX_CPU_SECONDS = 86_400  # a day: no call takes longer
_TARGET = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*)):(?P<port>[0-9]{1,5})", re.ASCII
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class Target(NamedTuple):
    """Where a file may connect to: a host name, or an address without brackets, and one port."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class FileGrants:
    """What one file may reach beyond what every file may.

    Attributes:
        write: absolute files and folders that it may change.
        read: absolute files and folders that it may read, besides its own code.
        connect: where it may connect to.
        secrets: environment variables that it may read.
        memory_mb: the memory limit of its process, in MiB; None means the default.
        cpu_seconds: the processor time limit of one call, in seconds; None means the default.
    """

    write: tuple[Path, ...] = ()
    read: tuple[Path, ...] = ()
    connect: tuple[Target, ...] = ()
    secrets: tuple[str, ...] = ()
    memory_mb: int | None = None
    cpu_seconds: int | None = None

    def covers(self, other: FileGrants) -> bool:
        """Tells whether these include all of the other grants, with the same limits."""
        lists = ("write", "read", "connect", "secrets")
        return (self.memory_mb, self.cpu_seconds) == (other.memory_mb, other.cpu_seconds) and all(
            set(getattr(self, name)) >= set(getattr(other, name)) for name in lists
        )


NO_GRANTS = FileGrants()


def own_source(file: str) -> str:
    """Returns the source of a file that has a process of its own.

    It is `dropin:clock` for clock.py and for the folder `clock` of an extension, and `dropin:clock.js` for clock.js.
    """
    folder, _, entry = file.rpartition("/")
    if folder:
        return f"{SOURCE}:{folder.partition('/')[0]}"
    stem = entry.removesuffix(".py")
    return f"{SOURCE}:{file}" if stem == "js" or stem.endswith(".js") else f"{SOURCE}:{stem}"


def read_grants(file: str, reader: Reader, folder: Path) -> FileGrants:
    """Returns what the manifest's entry for a file grants.

    Raises:
        SetupError: naming the value, the rule that it breaks and how to fix it.
    """
    name = Reader(file, FILE, "a key of files")
    read_file_name(name)
    keys: Keys = {
        "write": ("write", lambda each: tuple(_read_writable(item, folder) for item in each.items())),
        "read": ("read", lambda each: tuple(_read_path(item, folder) for item in each.items())),
        "connect": ("connect", lambda each: tuple(_read_target(item) for item in each.items())),
        "secrets": ("secrets", lambda each: tuple(_read_variable(item) for item in each.items())),
        "memory_mb": ("memory_mb", lambda each: _read_whole(each, MIN_MEMORY_MB, _MAX_MEMORY_MB)),
        "cpu_seconds": ("cpu_seconds", lambda each: _read_whole(each, 1, _MAX_CPU_SECONDS)),
    }
    refuse_null(reader, ("write", "read", "connect", "secrets"))
    if reader.entries() and file.startswith("_"):
        raise name.error("it is shared by several files and has their grants", "grant it to those files")
    if reader.entries() and not is_source(own_source(file)):
        raise name.error("it cannot be the name of a source", "rename the file: use letters, digits, '_', '-' and '.'")
    return FileGrants(**reader.record(keys))


def read_file_name(reader: Reader) -> str:
    """Returns the name of a tool file; only that of an extension's is a path, and none leads out of the folder."""
    name = reader.value
    plain = (
        isinstance(name, str) and name.isprintable() and "\\" not in name and (name.endswith(".js") or "/" not in name)
    )
    if not plain or not name.endswith((".py", ".js")) or any(not part or part[0] == "." for part in name.split("/")):
        raise reader.error(
            "it must be the name of a tool file in the folder, *.py or *.js",
            'write it without a path, like "clock.py"',
        )
    return str(name)


def refuse_null(reader: Reader, keys: Collection[str]) -> None:
    """Refuses null for these keys: a reader takes it for a missing key, which may allow more."""
    for key, value in reader.entries().items():
        if key in keys and value.value is None:
            raise value.error("it must not be null", "leave it out")


def _read_path(reader: Reader, folder: Path) -> Path:
    """Returns the file or folder that is meant, with all symbolic links followed."""
    text = _read_text(reader)
    path = Path(text)
    if not text.strip() or "\0" in text or ".." in path.parts:
        raise reader.error("it must be a path without '..'", "write the whole path")
    if text.startswith("~") or any(each in text for each in "*?["):
        raise reader.error("it must be a path and not a pattern", "name one file or folder")
    home = folder.resolve()
    try:
        target = (home / path).resolve()
        if target.is_symlink():
            raise RuntimeError("a loop of links")
    except (OSError, ValueError, RuntimeError) as error:  # a loop, or a name that no file can have
        raise reader.error(f"it leads nowhere ({error})", "name a file or folder that can exist") from None
    if not path.is_absolute() and not (target.is_relative_to(home) and target != home):
        raise reader.error(f"it leads out of {home}, to {target}", "write the absolute path if you mean that")
    if target == Path(target.anchor):
        raise reader.error("it is the whole file system", "name one file or folder")
    return target


def _read_writable(reader: Reader, folder: Path) -> Path:
    """Returns where a file may write: never to the tools or the manifest, since it could then grant itself more."""
    path = _read_path(reader, folder)
    home = folder.resolve()
    is_code = path.parent == home and (path.suffix in (".py", ".js") or path.name == FILE)
    extension = any((part / EXTENSION).exists() for part in (path, *path.parents) if part.parent.is_relative_to(home))
    if is_code or extension or home.is_relative_to(path):
        raise reader.error("it holds tools or their grants", "grant a file or folder without tools")
    return path


def _read_target(reader: Reader) -> Target:
    """Returns a host and a port. A host of another machine may be named; all hosts, or all ports, may not."""
    text = _read_text(reader)
    fix = 'name one host and one port, like "127.0.0.1:8000", "api.example.org:443" or "[::1]:8000"'
    match = _TARGET.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= 65_535:
        raise reader.error("it must be HOST:PORT", fix)
    host = (match["six"] or match["host"]).lower()
    last = host.rpartition(".")[2]
    if match["six"] or last.isdigit() or last.startswith("0x"):  # resolvers read "0" and "0x7f.1" as addresses too
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            raise reader.error("it must be a host name, or an address in its usual form", fix) from None
        address = getattr(address, "ipv4_mapped", None) or address
        if address.is_unspecified or address.is_multicast:
            raise reader.error("it stands for more than one host", fix)
        host = str(address)
    return Target(host, int(match["port"]))


def _read_variable(reader: Reader) -> str:
    name = _read_text(reader)
    if not _VARIABLE.fullmatch(name):
        raise reader.error("it must be the name of an environment variable", 'write it like "API_KEY"')
    return name


def _read_text(reader: Reader) -> str:
    """Returns a text; unlike `Reader.text` also one that UTF-8 cannot carry, as names of files may be."""
    if not isinstance(reader.value, str):
        raise reader.error("it must be text", "put it in quotes")
    return reader.value


def _read_whole(reader: Reader, least: int, most: int) -> int:
    """Returns a whole number; unlike `Reader.whole` not 2.0, which manifests never could hold."""
    if type(reader.value) is not int or not least <= reader.value <= most:
        raise reader.error(f"it must be a whole number from {least} to {most}", "correct it or leave it out")
    return reader.value
