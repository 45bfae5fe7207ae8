"""Reads and changes `_manifest.json`: which files of a folder are loaded, and what each of them may reach.

    {"allow": ["clock.py", "relay.py"],
     "files": {"relay.py": {"write": ["queue.db"], "connect": ["127.0.0.1:8000"], "secrets": ["API_KEY"]}}}

Without `allow` every file is loaded; without an entry under `files` a file may reach nothing. It fails closed: if the
manifest cannot be read or holds an unknown key, nothing is loaded. Nothing is enforced here; the sandbox does that, and
gets the grants as plain values.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from toolbus.common.path_ownership import check_path
from toolbus.common.reader import Keys, Reader
from toolbus.common.text import quote
from toolbus.common.whole_file import replace_file
from toolbus.errors import SetupError
from toolbus.protocol.tool import is_source

# A grant is never a pattern, reaches only what it names, and never the tools themselves. Of the file system it
# reads only symbolic links.

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


_FILE_MODE = 0o644  # of a new file


@dataclass(frozen=True, slots=True)
class Manifest:
    """A folder's manifest; the empty one allows every file and grants nothing.

    Attributes:
        allow: the files that are loaded; None means all.
        files: what each file may reach.
    """

    allow: tuple[str, ...] | None = None
    files: Mapping[str, FileGrants] = field(default_factory=lambda: MappingProxyType({}))

    def allows(self, file: str) -> bool:
        """Tells whether a file may be loaded."""
        return self.allow is None or file in self.allow

    def of(self, files: Sequence[str]) -> Manifest:
        """Returns what it says about these files only."""
        allow = None if self.allow is None else tuple(file for file in self.allow if file in files)
        return Manifest(allow, {file: grants for file, grants in self.files.items() if file in files})

    def grants(self, file: str) -> FileGrants:
        """Returns what a file may reach; `NO_GRANTS` if it has no entry."""
        return self.files.get(file, NO_GRANTS)


def load_manifest(folder: Path, *, require: bool = False) -> Manifest:
    """Reads the manifest of a folder; without one, everything is allowed and nothing granted.

    Args:
        require: a folder without a manifest is refused as well.

    Raises:
        SetupError: it is missing, cannot be read, breaks a rule, or another user can change it, or a file that it
            grants something. Nothing of the folder may be loaded then.
    """
    try:
        if not stat.S_ISREG((folder / FILE).stat().st_mode):  # reading a pipe would block
            raise SetupError(f"{folder / FILE} is not a regular file: replace it by a file like {EXAMPLE}")
        check_path(folder / FILE, str(folder / FILE))
        text = (folder / FILE).read_text("utf-8-sig")
    except FileNotFoundError:
        if require:
            raise _missing(folder) from None
        return Manifest()
    except OSError as error:
        raise SetupError(f"{folder / FILE} cannot be read: {error.strerror}: let this user read it") from None
    except UnicodeDecodeError:
        raise SetupError(f"{folder / FILE} is not UTF-8 text: save it as UTF-8") from None
    manifest = read_manifest(text, folder)
    for file in manifest.files:  # what has a grant: whoever changes it has the grant
        check_path(folder / file, str(folder / file))
    return manifest


def read_manifest(text: str, folder: Path) -> Manifest:
    """Reads the text of a manifest. Paths become absolute, with symbolic links followed.

    Raises:
        SetupError: naming the value, the rule that it breaks and how to fix it.
    """
    reader = Reader(_parse(text), FILE)
    refuse_null(reader, ("allow", "files"))
    keys: Keys = {
        "allow": ("allow", lambda each: tuple(read_file_name(item) for item in each.items())),
        "files": ("files", lambda each: _read_files(each, folder)),
    }
    return Manifest(**reader.record(keys))


def _read_files(reader: Reader, folder: Path) -> Mapping[str, FileGrants]:
    return MappingProxyType({file: read_grants(file, entry, folder) for file, entry in reader.entries().items()})


def append(folder: Path, file: str) -> bool:
    """Adds a file to the allow list, atomically; returns whether it was missing there.

    A manifest without an allow list allows every file already, and stays as it is.

    Raises:
        SetupError: the manifest is missing or broken, the name is not a file name, or the folder cannot be written.
    """
    read_file_name(Reader(file, FILE, "allow"))
    try:
        with _locked(folder):
            manifest = load_manifest(folder, require=True)
            if manifest.allows(file):
                return False
            content = _parse((folder / FILE).read_text("utf-8-sig"))
            content["allow"].append(file)
            write_file(folder / FILE, _as_text(content))
    except FileNotFoundError:
        raise _missing(folder) from None
    except OSError as error:
        raise _not_writable(folder, error) from None
    return True


def grant(folder: Path, file: str, entry: Mapping[str, Any], helpers: Sequence[str] = ()) -> bool:
    """Adds a file to the allow list, if there is one, and an entry to its grants; atomically.

    What was granted before stays: lists grow, numbers stay as they are. Without a manifest one is created, if there is
    something to grant.

    Args:
        helpers: further files to be allowed, which it imports.

    Returns:
        Whether that changed anything.

    Raises:
        SetupError: the manifest is broken or would be, or the folder cannot be written.
    """
    try:
        with _locked(folder):
            content = {}
            if (folder / FILE).exists():
                load_manifest(folder)
                content = _parse((folder / FILE).read_text("utf-8-sig"))
            after = _with_grants(content, file, entry, helpers)
            if after == content:
                return False
            read_manifest(_as_text(after).decode(), folder)
            write_file(folder / FILE, _as_text(after))
    except OSError as error:
        raise _not_writable(folder, error) from None
    return True


def _with_grants(
    content: dict[str, Any], file: str, entry: Mapping[str, Any], helpers: Sequence[str]
) -> dict[str, Any]:
    """Returns a manifest's content with a file allowed and an entry added to its grants."""
    after = dict(content)
    if (allow := content.get("allow")) is not None:
        after["allow"] = [*allow, *(each for each in (*helpers, file) if each not in allow)]
    if entry:
        own = dict(content.get("files", {}).get(file, {}))
        for key, value in entry.items():
            if isinstance(value, list):
                before = own.get(key, [])
                own[key] = [*before, *(each for each in value if each not in before)]
            else:
                own.setdefault(key, value)
        after["files"] = {**content.get("files", {}), file: own}
    return after


def _as_text(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks the manifest against other writers; the folder itself is the lock, so that no lock file is left."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_file(path: Path, content: bytes) -> None:
    """Replaces a file of a folder atomically; it keeps its mode."""
    replace_file(path, content, stat.S_IMODE(path.stat().st_mode) if path.exists() else _FILE_MODE)


def _not_writable(folder: Path, error: OSError) -> SetupError:
    return SetupError(f"{folder / FILE} cannot be written: {error.strerror}: let this user write it")


def _missing(folder: Path) -> SetupError:
    return SetupError(f"{folder} has no {FILE}, so no file of it may be loaded: create one like {EXAMPLE}")


def _parse(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicates)
    except RecursionError:
        raise SetupError(f"{FILE} is nested too deeply: write it like {EXAMPLE}") from None
    except ValueError as error:
        raise SetupError(f"{FILE} is not JSON: {error}: write it like {EXAMPLE}") from None


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise SetupError(f"{FILE} has the key {quote(duplicate)} twice, and only one would count: merge the two")
    return content
