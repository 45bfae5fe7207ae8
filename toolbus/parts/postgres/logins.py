"""Keeps the logins of mounts equal in the data directories of several buses, through the database that they share.

The tokens stay in private files, which only helper processes of the bus write (`parts.mcp.client.oauth`). What changed
here goes into the database; what others changed there comes into the files. A token is renewed by one bus at a time,
since some refresh tokens are valid once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from toolbus.bus.keys.private_files import make_directory, read_private, write_private
from toolbus.bus.storage.store import Kind, WriteFailed
from toolbus.errors import SetupError
from toolbus.parts.postgres.shared_store import SharedStore

log = logging.getLogger("toolbus.storage")

FOLDERS = ("mcp-tokens", "mcp-users")  # in the data directory: of mounts, and of users of mounts

LOGINS = Kind(  # by the path of the file in the data directory: its content
    "logins", needed=False, without="have users log in at mounted servers again", synced=True, shared="settings"
)
MARKS = Kind(  # of this bus: by path, the digest of what file and database had in common last
    "login_marks", needed=False, without="take the files of this bus for the newer ones"
)


class SharedLogins:
    """The logins of one bus.

    Args:
        directory: its data directory.
    """

    def __init__(self, store: SharedStore, directory: Path) -> None:
        self._store = store
        self._directory = directory
        self._guard = threading.Lock()  # of a comparison

    @contextlib.asynccontextmanager
    async def exclusive(self, path: Path) -> AsyncIterator[None]:
        """Lets one bus at a time renew the token of a file, with what the one before it wrote."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._store.database.locked(f"login {self._name_of(path)}"))
                await asyncio.to_thread(self._store.database.look)
                await asyncio.to_thread(self.compare)
            except (WriteFailed, SetupError, OSError) as error:
                log.warning("a login is renewed without regard to other buses: %s", error)
            try:
                yield
            finally:
                await asyncio.to_thread(self.compare)

    def compare(self) -> None:
        """Takes over what changed on one side since the last comparison; where both changed, the file counts."""
        with self._guard:
            files, rows, marks = self._files(), self._store.load(LOGINS), self._store.load(MARKS)
            for name in {*files, *rows}:
                here, there = _digest(files.get(name)), _digest(rows.get(name))
                if here != there:
                    try:
                        if here == marks.get(name, ""):
                            self._put(name, rows.get(name))
                            here = there
                        else:
                            self._store.write(LOGINS, {name: files[name]} if here else {}, [] if here else [name])
                    except (WriteFailed, SetupError, OSError) as error:
                        log.warning("the login in %s is not shared yet: %s", name, error)
                        continue
                if here != marks.get(name, ""):
                    self._store.write(MARKS, {name: here} if here else {}, [] if here else [name])

    def _files(self) -> dict[str, str]:
        paths = [path for folder in FOLDERS for path in (self._directory / folder).glob("**/*.json")]
        found: dict[str, str] = {}
        for path in paths:
            with contextlib.suppress(OSError, SetupError, UnicodeDecodeError):  # it goes, or is no file of ours
                found[self._name_of(path)] = read_private(path)[0].decode()
        return found

    def _put(self, name: str, content: Any) -> None:
        path = self._directory / name
        if content is None:
            path.unlink(missing_ok=True)
            return
        if not isinstance(content, str) or Path(name).parts[0] not in FOLDERS or ".." in Path(name).parts:
            raise SetupError(f"the database names {name!r}, which is no login")
        for folder in reversed(path.relative_to(self._directory).parents[:-1]):
            make_directory(self._directory / folder)
        write_private(path, content.encode())

    def _name_of(self, path: Path) -> str:
        return path.relative_to(self._directory).as_posix()


def _digest(content: Any) -> str:
    return "" if content is None else hashlib.sha256(str(content).encode()).hexdigest()
