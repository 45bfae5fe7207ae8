"""Reads files of mounts in the common JSON of MCP clients, follows them, and changes that of a data directory.

A file has `mcpServers`, or `servers` as in VS Code; comments and trailing commas are allowed. One bad entry does not
stop the others. A file starts programs, so one that another user could write is refused, and only the command line of
the bus's user writes it: no RPC and no HTTP path does.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolbus.bus.keys.private_files import Stamp, stamp_of
from toolbus.common.path_ownership import check_path, make_directory
from toolbus.common.reader import Reader
from toolbus.common.text import list_names, quote, refuse_constant
from toolbus.common.whole_file import replace_file
from toolbus.errors import SetupError
from toolbus.parts.mcp.client.entries import MountEntry as MountEntry
from toolbus.parts.mcp.client.entries import mount_name, read_entry, switched_off
from toolbus.processes.child_environment import read_variables

FILE = "mcp.json"  # in the data directory; `toolbus mounts add` writes it
TABLES = ("mcpServers", "servers")
MAX_MOUNTS = 64
MAX_FILE_BYTES = 4 * 1024 * 1024
_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\r\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING = re.compile(r'"(?:\\.|[^"\\])*"|,(?=\s*[}\]])', re.DOTALL)
_KNOWN_KEYS = frozenset({*TABLES, "inputs", "$schema"})  # keys of a file that need no notice


@dataclass(frozen=True, slots=True)
class MountsReading:
    """The content of a file.

    Attributes:
        entries: by name, in the order of the file, disabled ones included.
        refused: by name, why an entry cannot be mounted and how to fix it.
        notices: what is ignored, or read differently than written.
    """

    entries: Mapping[str, MountEntry] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


def read_mounts(path: Path, environment: Mapping[str, str]) -> MountsReading:
    """Reads a file of mounts.

    Args:
        environment: where `${VAR}` is looked up.

    Raises:
        SetupError: the whole file cannot be used; single entries are in `refused`.
    """
    return read_document(load_document(path), str(path), environment)


def load_document(path: Path) -> Any:
    """Returns the JSON of a file that only this user and root can change.

    Raises:
        SetupError: it cannot be read or parsed, is too large, or another user could have written it.
    """
    try:
        check_path(path, f"the file of mounts {path}")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror or error}: name a file that can be read") from None
    if len(content) > MAX_FILE_BYTES:
        raise SetupError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB: a file of mounts has a few KiB")
    try:
        return parse_commented(content.decode("utf-8-sig"))
    except RecursionError:
        raise SetupError(f"{path}: it is nested too deep: flatten it") from None
    except UnicodeDecodeError:
        raise SetupError(f"{path} is not UTF-8: save it in that encoding") from None
    except ValueError as error:
        raise SetupError(f"{path} is not JSON: {error}: correct the file") from None


def parse_commented(text: str) -> Any:
    """Parses JSON with comments and trailing commas; positions in errors are those of the text.

    Raises:
        ValueError: it is invalid, or has NaN or Infinity.
        RecursionError: it is nested too deep.
    """
    bare = _COMMENT.sub(lambda match: match[0] if match[0][0] == '"' else re.sub(r"[^\r\n]", " ", match[0]), text)
    bare = _TRAILING.sub(lambda match: match[0] if match[0][0] == '"' else " ", bare)
    return json.loads(bare, parse_constant=refuse_constant)


def read_document(document: Any, place: str, environment: Mapping[str, str]) -> MountsReading:
    """Reads the JSON of a file.

    Args:
        place: names the file in errors.

    Raises:
        SetupError: it has no object of mounts.
    """
    whole = Reader(document, place).entries()
    tables = [name for name in TABLES if name in whole]
    if not tables:
        raise SetupError(f'{place} has neither "mcpServers" nor "servers": write {{"mcpServers": {{…}}}}')
    entries: dict[str, MountEntry] = {}
    refused: dict[str, str] = {}
    notices: list[str] = []
    reading = {name: each.value for name, each in whole.items()}
    others = [name for name in whole if name not in _KNOWN_KEYS]
    if others:
        notices.append(f"{place}: unknown keys {list_names(map(_shown, others))}: they are ignored")
    for table in tables:
        for written, reader in whole[table].entries().items():
            name = mount_name(written)
            label = Reader(reader.value, f"{place}: mount {_shown(written)}", loc=reader.loc)
            try:
                if not name:
                    raise SetupError(f"{label.subject}: its name has no letter or digit: rename it")
                if name in entries or name in refused:
                    raise SetupError(f"{label.subject}: another mount has the name {name} already: rename one")
                if len(entries) >= MAX_MOUNTS:
                    raise SetupError(f"{label.subject}: a file may have {MAX_MOUNTS} mounts (mounts): remove some")
                entry = read_entry(label, name, environment, notices, place)
                if not entry.disabled and (key := switched_off(reading, written)):
                    notices.append(f"{label.subject} is not started: {key} of the file switches it off")
                    entry = replace(entry, disabled=True)
                entries[name] = entry
            except SetupError as error:
                # By the mount's name, unless another mount has it: then by the name as written. Two tables may have the
                # same name, and two written names may become the same mount name.
                refused[_free(name or written, written, {*entries, *refused})] = str(error)
            else:
                if name != written:
                    notices.append(f"{label.subject} is named {name}, since a source consists of [A-Za-z0-9_.-]")
    return MountsReading(entries, refused, tuple(notices))


def _free(name: str, written: str, used: set[str]) -> str:
    """Returns a key for a refused mount that no other mount has, so that no reason is lost."""
    candidates = itertools.chain((name, written), (f"{written} ({number})" for number in itertools.count(2)))
    return next(key for key in candidates if key not in used)


def _shown(name: str) -> str:
    return quote(name)[1:-1]


# -- following the files of a bus --------------------------------------------------------------------------------------

FOLLOW_SECONDS = 0.5
_NOTHING = MountsReading()


@dataclass(frozen=True, slots=True)
class ConfiguredMounts(MountsReading):
    """The content of all files together; the first file that has a name wins.

    Attributes:
        errors: by path, why a file could not be read; `entries` still has its last content.
    """

    errors: Mapping[str, str] = field(default_factory=dict)


def variables_for(secrets: Path | None, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the variables for `${VAR}`: those of a file of secrets, then those of an environment.

    Raises:
        SetupError: the file cannot be used.
    """
    return environment if secrets is None else {**environment, **read_variables(secrets)}


class MountsFollower:
    """The files of mounts of one bus.

    Args:
        own: the file that `toolbus mounts add` writes, which may be missing; None without a data directory.
        named: the file of `--mcp-servers`; None without that option.
        environment: where `${VAR}` is looked up.
    """

    def __init__(self, own: Path | None, named: Path | None, environment: Mapping[str, str]) -> None:
        self._own = own
        self._files = [path for path in (own, named) if path is not None]
        self._environment = environment
        self._readings: dict[Path, MountsReading] = {}  # the last valid content of each file
        self._errors: dict[str, str] = {}
        self._stamps: dict[Path, Stamp] = {}  # of the last poll

    def __repr__(self) -> str:
        return f"<MountsFollower {' '.join(map(str, self._files))}>"

    def read_first(self) -> ConfiguredMounts:
        """Returns the content of the files at the start of a bus.

        Raises:
            SetupError: the named file cannot be read: a bus must not start without the mounts of its options.
        """
        configured = self._read()
        for path, why in configured.errors.items():
            if self._own is None or path != str(self._own):
                raise SetupError(why)
        return configured

    async def follow(self, seconds: float = FOLLOW_SECONDS) -> AsyncGenerator[ConfiguredMounts]:
        """Yields the content of the files whenever one of them has changed."""
        while True:
            await asyncio.sleep(seconds)
            if any(self._stamps.get(path) != stamp_of(path) for path in self._files):  # some microseconds
                yield await asyncio.to_thread(self._read)

    def _read(self) -> ConfiguredMounts:
        for path in self._files:
            stamp = stamp_of(path)  # before it is read: the next poll finds a change during the reading
            if path in self._stamps and self._stamps[path] == stamp:
                continue
            self._stamps[path] = stamp
            self._errors.pop(str(path), None)
            if stamp is None and path == self._own:
                self._readings.pop(path, None)
                continue
            try:
                self._readings[path] = read_mounts(path, self._environment)
            except SetupError as error:
                self._errors[str(path)] = str(error)
        return self._merged()

    def _merged(self) -> ConfiguredMounts:
        entries: dict[str, MountEntry] = {}
        refused: dict[str, str] = {}
        notices: list[str] = []
        for path in self._files:
            reading = self._readings.get(path, _NOTHING)
            for name, entry in reading.entries.items():
                if name in entries:
                    notices.append(f"{path}: mount {name} is ignored: {entries[name].origin} has that name too")
                else:
                    entries[name] = entry
            refused.update(reading.refused)
            notices.extend(reading.notices)
        refused = {name: why for name, why in refused.items() if name not in entries}
        return ConfiguredMounts(entries, refused, tuple(notices), dict(self._errors))


# -- the file in a data directory --------------------------------------------------------------------------------------

LOCK = f"{FILE}.lock"


class OwnMounts:
    """The file of mounts of one data directory, created by the first `add`.

    Raises:
        SetupError: by each method: the file or directory cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE

    def entries(self) -> dict[str, Any]:
        """Returns the entries as written, by name."""
        document = self._load()
        tables = [Reader(document[table], f"{self.path}: {table}") for table in TABLES if table in document]
        return {name: reader.value for table in tables for name, reader in table.entries().items()}

    def add(self, entries: Mapping[str, Any], *, replace: bool = False) -> None:
        """Adds all entries, or none if one of the names exists.

        Args:
            replace: whether an entry of the same name is replaced.
        """
        with self._locked():
            document = self._load()
            existing = self.entries()
            duplicates = [name for name in entries if name in existing]
            if duplicates and not replace:
                raise SetupError(
                    f"{self.path} has a mount {duplicates[0]} already: choose another name, replace it with "
                    f"--replace, or remove it with `toolbus mounts remove {duplicates[0]}`"
                )
            if len(existing | dict(entries)) > MAX_MOUNTS:
                raise SetupError(f"{self.path} would have more than {MAX_MOUNTS} mounts: unmount some first")
            for name in duplicates:
                _remove(document, name)
            table = next((name for name in TABLES if name in document), TABLES[0])
            document[table] = {**document.get(table, {}), **entries}
            self._write(document)

    def remove(self, name: str) -> bool:
        """Removes an entry. Returns whether it existed."""
        if not self.path.exists():
            return False
        with self._locked():
            document = self._load()
            if not _remove(document, name):
                return False
            self._write(document)
        return True

    def _load(self) -> dict[str, Any]:
        if not self.path.exists():
            return {}
        document = load_document(self.path)
        if not isinstance(document, dict):
            raise SetupError(f"{self.path} is not a JSON object: correct it, or move it away")
        return document

    def _write(self, document: dict[str, Any]) -> None:
        try:
            replace_file(self.path, json.dumps(document, ensure_ascii=False, indent=1).encode())
        except OSError as error:
            fix = "let this user write it, and see that its disk has room"
            raise SetupError(f"{self.path} cannot be written: {error.strerror}: {fix}") from None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks the file against another command that changes it."""
        directory = self.path.parent
        try:
            make_directory(directory, f"the data directory {directory}")
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(directory / LOCK, flags, 0o600), "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise SetupError(f"{directory} cannot be used: {error.strerror or error}: let this user write it") from None


def _remove(document: dict[str, Any], name: str) -> bool:
    return bool([document[table].pop(name) for table in TABLES if name in document.get(table, {})])
