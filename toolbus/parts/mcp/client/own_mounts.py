"""Changes the file of mounts in a data directory, for `toolbus mount` and `toolbus unmount`.

The file is replaced as a whole (0600), so that a bus reads either the old or the new content. Only the command line of
the bus's user writes it: no RPC and no HTTP path does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolbus.bus.path_ownership import make_directory
from toolbus.bus.storage.database import write_state
from toolbus.common.reader import Reader
from toolbus.errors import SetupError
from toolbus.parts.mcp.client.mounts_file import FILE, MAX_MOUNTS, TABLES, load_document

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
        return {name: reader.value for table in TABLES for name, reader in _entries(document, table, self.path).items()}

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
                    f"--replace, or remove it with `toolbus unmount {duplicates[0]}`"
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
            write_state(self.path, document)
        except OSError as error:
            raise SetupError(f"{self.path} cannot be written: {error.strerror}: let this user write it") from None

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


def _entries(document: dict[str, Any], table: str, path: Path) -> dict[str, Reader]:
    return Reader(document[table], f"{path}: {table}").entries() if table in document else {}


def _remove(document: dict[str, Any], name: str) -> bool:
    removed = [document[table].pop(name) for table in TABLES if name in document.get(table, {})]
    return bool(removed)
