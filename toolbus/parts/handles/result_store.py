"""Stores large results: the newest in memory, the others in files, each until its time has passed.

A file is written whole and then renamed, and read only if its digest is right: after a kill a handle has the right
bytes or is gone. The names of files are the ids, which cannot be guessed.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from toolbus.parts.handles.settings import ResultRules

log = logging.getLogger("toolbus.handles")

URI = "toolbus://results/"
MAX_STORED = 10_000  # results
_IN_MEMORY, _IN_FILES = ("place", "memory"), ("place", "files")
MAX_HEADER = 16_384  # bytes of a file's first line
HANDLE = re.compile(re.escape(URI) + r"[A-Za-z0-9_-]{22}")


class Gone(Exception):
    """A handle that cannot be read: unknown, of another owner, too old, or lost."""

    def __init__(self, handle: str) -> None:
        super().__init__(
            f"there is no result {handle[:64]!r}: it is another user's, its time has passed, or it was dropped for "
            "newer ones or lost with the bus: call the tool again"
        )


@dataclass(slots=True)
class Stored:
    """One stored result.

    Attributes:
        id: names it; cannot be guessed.
        owner: who may read it.
        source, tool: whose result it is.
        mime_type: of the content.
        size: of the content, in bytes.
        digest: SHA-256 of the content; "" while that grows.
        expires: seconds since the epoch.
        content: None where it is in a file; a `bytearray` grows.
    """

    id: str
    owner: str
    source: str
    tool: str
    mime_type: str
    size: int
    digest: str
    expires: float
    content: bytes | bytearray | None = None

    @property
    def uri(self) -> str:
        """The handle, as callers write it."""
        return URI + self.id

    @property
    def is_text(self) -> bool:
        return self.mime_type.startswith("text/") or self.mime_type == "application/json"


class ResultStore:
    """The stored results of one bus.

    Args:
        folder: where files go; None: what does not fit into memory is dropped.
        clock: seconds since the epoch.
    """

    def __init__(self, rules: ResultRules, folder: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._rules = rules
        self._folder = folder
        self._clock = clock
        self._stored: dict[str, Stored] = {}  # by id, oldest first
        self._bytes: Counter[tuple[str, str]] = Counter()  # what is held, by place, owner and source
        self._writing: dict[str, asyncio.Task[None]] = {}  # by id, until the file is there

    def __repr__(self) -> str:
        return f"<ResultStore stored={len(self._stored)} memory={self._bytes[_IN_MEMORY]}>"

    def open(self) -> None:
        """Finds the files of earlier runs, which end no later than if they were new; one that is damaged is removed."""
        if self._folder is None or not self._folder.is_dir():
            return
        now, valid = self._clock(), list[Stored]()
        files = [path for path in self._folder.iterdir() if path.is_file()]  # a volume of its own has a lost+found
        for path in sorted(files, key=lambda each: each.stat().st_mtime):
            stored = _header_of(path)
            if stored is None or stored.expires <= now:
                path.unlink(missing_ok=True)
            else:
                stored.expires = min(stored.expires, now + self._rules.ttl_seconds)
                valid.append(stored)
        for stored in sorted(valid, key=lambda each: each.expires):
            self._stored[stored.id] = stored
            self._count(stored, stored.size)

    async def close(self) -> None:
        """Writes what is in memory to files."""
        for stored in list(self._stored.values()):
            if isinstance(stored.content, bytearray):
                self.finish(stored, bytes(stored.content))
            self._spill(stored)
        await asyncio.gather(*self._writing.values())

    def add(self, owner: str, source: str, tool: str, mime_type: str, content: bytes) -> Stored | None:
        """Stores a result; older ones of the owner and of the source make room for it.

        Returns:
            None where it is larger than a quota.
        """
        rules, size = self._rules, len(content)
        room = rules.memory_bytes if self._folder is None else max(rules.memory_bytes, rules.disk_bytes)
        if size > min(rules.user_bytes, rules.source_bytes, room):
            return None
        self.expire()
        self._make_room_beside(owner, source, size)
        digest, expires = hashlib.sha256(content).hexdigest(), self._clock() + rules.ttl_seconds
        stored = Stored(secrets.token_urlsafe(16), owner, source, tool, mime_type, size, digest, expires, content)
        self._stored[stored.id] = stored
        self._count(stored, size)
        self._keep_within()
        return stored if stored.id in self._stored else None

    def grow(self, stored: Stored, more: bytes) -> bool:
        """Appends to a result that is not complete; False if it is dropped, since it is larger than a quota."""
        rules, size = self._rules, stored.size + len(more)
        if stored.id in self._stored and size > min(rules.user_bytes, rules.source_bytes, rules.memory_bytes):
            self._drop(stored)
        if stored.id not in self._stored or stored.content is None:
            return False
        if not isinstance(stored.content, bytearray):
            stored.content, stored.digest = bytearray(stored.content), ""
        stored.content += more
        self._count(stored, len(more))
        stored.size = size
        self._make_room_beside(stored.owner, stored.source, 0)
        self._keep_within()
        return stored.id in self._stored

    def finish(self, stored: Stored, content: bytes) -> None:
        """Completes a result that grew."""
        if stored.id in self._stored and isinstance(stored.content, bytearray):
            self._count(stored, len(content) - stored.size)
            stored.content, stored.size, stored.digest = content, len(content), hashlib.sha256(content).hexdigest()
            self._keep_within()

    def _keep_within(self) -> None:
        """Moves the oldest results from memory into files, or drops them, until the bounds of all are kept."""
        rules = self._rules
        if self._folder is None:
            self._make_room(_IN_MEMORY, lambda each: True, rules.memory_bytes)
        else:
            self._make_room(_IN_FILES, lambda each: each.content is None, rules.disk_bytes)
            held = iter(list(self._stored.values()))
            while self._bytes[_IN_MEMORY] > rules.memory_bytes and (each := next(held, None)) is not None:
                self._spill(each)
        while len(self._stored) > MAX_STORED:
            self._drop(next(iter(self._stored.values())))

    def find(self, handle: str, owner: str) -> Stored:
        """Returns a result of an owner.

        Raises:
            Gone: there is none.
        """
        stored = self._stored.get(handle.removeprefix(URI))
        if stored is None or stored.owner != owner or stored.expires <= self._clock():
            raise Gone(handle)
        return stored

    def read(self, stored: Stored) -> bytes:
        """Returns the content of a result; may be called on any thread.

        Raises:
            Gone: its file is not there, or damaged.
        """
        content = stored.content
        if content is not None:
            return bytes(content)
        try:
            content = self._path(stored).read_bytes().partition(b"\n")[2]
        except OSError:
            content = b""
        if hashlib.sha256(content).hexdigest() != stored.digest:
            raise Gone(stored.uri)
        return content

    def expire(self) -> None:
        """Drops the results whose time has passed, which are the first: all that are added have the same."""
        now = self._clock()
        for stored in list(itertools.takewhile(lambda each: each.expires <= now, self._stored.values())):
            self._drop(stored)

    def _count(self, stored: Stored, size: int) -> None:
        """Adds to what is held; what is being written counts as written."""
        place = _IN_MEMORY if stored.content is not None and stored.id not in self._writing else _IN_FILES
        self._bytes.update(dict.fromkeys((place, ("owner", stored.owner), ("source", stored.source)), size))

    def _make_room_beside(self, owner: str, source: str, size: int) -> None:
        """Drops the oldest results of an owner and of a source until so many bytes more fit into their quotas."""
        rules = self._rules
        self._make_room(("owner", owner), lambda each: each.owner == owner, rules.user_bytes - size)
        self._make_room(("source", source), lambda each: each.source == source, rules.source_bytes - size)

    def _make_room(self, what: tuple[str, str], counts: Callable[[Stored], bool], most: int) -> None:
        """Drops the oldest of some results until the rest has no more than ``most`` bytes."""
        counted = iter(list(self._stored.values()) if self._bytes[what] > most else ())
        while self._bytes[what] > most and (each := next(counted, None)) is not None:
            if counts(each):
                self._drop(each)

    def _drop(self, stored: Stored) -> None:
        self._count(stored, -stored.size)
        del self._stored[stored.id]
        stored.expires = 0.0  # a write that goes on removes its file
        if self._folder is not None and stored.content is None:
            self._path(stored).unlink(missing_ok=True)

    def _path(self, stored: Stored) -> Path:
        assert self._folder is not None  # only results in files have a path
        return self._folder / stored.id

    def _spill(self, stored: Stored) -> None:
        """Moves a result into a file; until that is written, it is read from memory."""
        content = stored.content
        if self._folder is None or not isinstance(content, bytes) or stored.id in self._writing:
            return
        task = asyncio.get_running_loop().create_task(self._write(stored, content), name="toolbus handles")
        self._count(stored, -stored.size)
        self._writing[stored.id] = task
        self._count(stored, stored.size)
        task.add_done_callback(lambda _: self._writing.pop(stored.id, None))

    async def _write(self, stored: Stored, content: bytes) -> None:
        try:
            await asyncio.to_thread(_write_file, self._path(stored), stored, content)
        except OSError as error:
            log.warning("a large result was not stored, its handle is gone: %s", error.strerror or error)
            if stored.id in self._stored:
                self._drop(stored)
            return
        stored.content = None
        if stored.expires == 0.0:  # dropped meanwhile
            self._path(stored).unlink(missing_ok=True)


def _write_file(path: Path, stored: Stored, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    header = {name: value for name, value in asdict(stored).items() if name != "content"}
    unfinished = path.with_name(f"{path.name}.new")
    try:
        with open(unfinished, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(json.dumps(header).encode() + b"\n" + content)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _header_of(path: Path) -> Stored | None:
    """Returns what a file holds, without its content; None where it is not one of ours, or damaged."""
    try:
        with path.open("rb") as file:
            line = file.readline(MAX_HEADER)
        stored = Stored(**json.loads(line))
        whole = path.stat().st_size == len(line) + stored.size
    except (OSError, ValueError, TypeError):
        return None
    return stored if whole and stored.id == path.name and HANDLE.fullmatch(stored.uri) else None
