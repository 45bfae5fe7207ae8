"""Checks the audit events about files: one check for each event that opens, changes or lists them.

A check takes an event's arguments and returns why it is denied, or an empty text. Checks are closures over everything
that they use, builtins included: a tool can replace what is in a module, and cannot reach a closure. They compare exact
types only and call no method of an argument, which may be of a tool's own class.
"""

from __future__ import annotations

import os
import posix
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Check = Callable[[tuple[Any, ...]], str]

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MAX_LINKS = 40  # as the kernel

# Event → how many of its first arguments are paths, and which arguments are the directories they are relative to.
_IN_FOLDER: dict[str, tuple[int, tuple[int, ...]]] = {
    "os.remove": (1, (1,)),
    "os.rmdir": (1, (1,)),
    "os.mkdir": (1, (2,)),
    "os.rename": (2, (2, 3)),
}
_ON_FILE: dict[str, tuple[int, tuple[int, ...]]] = {
    "os.truncate": (1, ()),
    "os.chmod": (1, (2,)),
    "os.utime": (1, (3,)),
}
_READING = ("os.listdir", "os.scandir", "os.chdir", "os.getxattr", "os.listxattr")

WRITE_FIX = """only granted files may be written; grant it in _manifest.json, under "write" of this tool file's entry"""
READ_FIX = """it may not be read; grant it in _manifest.json, under "write" or "read" of this tool file's entry"""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the hook allows.

    Attributes:
        read: resolved paths, with everything below them.
        write: likewise; a file, or a directory with everything below it.
        connect: hosts and ports.
        unix: the path of the bus's unix socket, empty if it has none.
        kernel: whether Landlock checks paths too. If not, what an event leaves open is denied.
        limits: its one item is the limit on processor time that is being set now, see `CpuGuard`.
    """

    read: tuple[str, ...]
    write: tuple[str, ...]
    connect: tuple[tuple[str, int], ...]
    unix: str
    kernel: bool
    limits: list[object]


def file_checks(allowed: Allowed) -> dict[str, Check]:
    """Returns the checks of all events about files, by event."""
    change = _change_checks(allowed)
    return {
        "open": _open_check(allowed),
        "sqlite3.connect": _database_check(allowed),
        **{event: change(*shape, beneath=True) for event, shape in _IN_FOLDER.items()},
        **{event: change(*shape, beneath=False) for event, shape in _ON_FILE.items()},
        **dict.fromkeys(_READING, _list_check(allowed)),
    }


def within(roots: tuple[str, ...]) -> Callable[[str], bool]:
    """Returns a function that tells whether a resolved path is one of these or below one."""
    exact = frozenset(roots)
    prefixes = tuple(root.rstrip("/") + "/" for root in roots)
    return lambda path: path in exact or path.startswith(prefixes)


def resolver() -> Callable[..., str]:
    """Returns a function that resolves a str or bytes to the path that the kernel will use; empty for a loop of links.

    `os.path.realpath` consists of functions that a tool can replace.
    """
    kind, text, error, readlink, getcwd = type, str, OSError, posix.readlink, posix.getcwd
    max_links = _MAX_LINKS

    def resolve(path: Any, follow_last: bool = True) -> str:
        path = path if kind(path) is text else path.decode("utf-8", "surrogateescape")
        absolute = path.startswith("/")
        done = [] if absolute else getcwd().split("/")[1:]
        todo = [part for part in path.split("/")[::-1] if part and part != "."]
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                done = done[:-1]
                continue
            done.append(part)
            if not todo and not follow_last:
                break
            try:
                target = readlink("/" + "/".join(done))
            except error:  # not a link, or it does not exist
                continue
            links += 1
            if links > max_links:
                return ""
            done = [] if target.startswith("/") else done[:-1]
            todo += [step for step in target.split("/")[::-1] if step and step != "."]
        return "/" + "/".join(done)

    return resolve


def _open_check(allowed: Allowed) -> Check:
    kind, text, data, number, show = type, str, bytes, int, ascii
    resolve, may_write, kernel = resolver(), within((*allowed.write, "/dev/null")), allowed.kernel
    may_read = within((*allowed.read, *allowed.write))
    writing, is_folder = _WRITING, _folder_test()
    write_fix, read_fix = WRITE_FIX, READ_FIX

    def check(args: tuple[Any, ...]) -> str:
        path, mode, flags = args
        if kind(path) is number:
            return ""  # an open descriptor: it was checked when it was opened
        if kind(path) is not text and kind(path) is not data:
            return "the sandbox denies a path that is not str or bytes: use os.fspath(path)"
        by_mode = kind(mode) is text and ("w" in mode or "a" in mode or "x" in mode or "+" in mode)
        writes = by_mode or kind(flags) is not number or flags & writing
        real = resolve(path)
        if writes:
            return "" if may_write(real) else f"the sandbox denies writing {show(real)}: {write_fix}"
        if mode is None and kernel and (path[:1] not in ("/", b"/")):
            return ""  # it may be relative to a directory other than the working directory: the kernel checks it
        if not may_read(real):
            return f"the sandbox denies reading {show(real)}: {read_fix}"
        if mode is None and not kernel and is_folder(real):
            return f"the sandbox denies a descriptor of the directory {show(real)}: it could reach any path; use paths"
        return ""

    return check


def _folder_test() -> Callable[[str], bool]:
    error, status, mask, folder = OSError, posix.stat, stat.S_IFMT(0o177777), stat.S_IFDIR

    def is_folder(path: str) -> bool:
        try:
            return status(path).st_mode & mask == folder
        except error:
            return False

    return is_folder


def _change_checks(allowed: Allowed) -> Callable[..., Check]:
    kind, text, data, number, show = type, str, bytes, int, ascii
    resolve, kernel, fix = resolver(), allowed.kernel, WRITE_FIX
    may_write = within(allowed.write)
    granted = frozenset(allowed.write)

    def changes(paths: int, folders: tuple[int, ...], *, beneath: bool) -> Check:
        """Returns a check.

        Args:
            beneath: the granted path itself may not be changed, and a link at the end of a path is not followed.
        """

        def check(args: tuple[Any, ...]) -> str:
            for at in folders:
                if kind(args[at]) is not number or args[at] != -1:
                    # Landlock does not cover modes and times.
                    return "" if kernel and beneath else "the sandbox denies dir_fd: use a whole path"
            for path in args[:paths]:
                if kind(path) is number:
                    if folders:
                        return "the sandbox denies changing modes and times by a descriptor: use the file's path"
                    continue  # a file that was opened for writing is truncated
                if kind(path) is not text and kind(path) is not data:
                    return "the sandbox denies a path that is not str or bytes: use os.fspath(path)"
                real = resolve(path, not beneath)
                if not may_write(real) or (beneath and real in granted):
                    return f"the sandbox denies changing {show(real)}: {fix}"
            return ""

        return check

    return changes


def _list_check(allowed: Allowed) -> Check:
    kind, text, data, number, show = type, str, bytes, int, ascii
    resolve, may_read, fix = resolver(), within((*allowed.read, *allowed.write)), READ_FIX

    def check(args: tuple[Any, ...]) -> str:
        path = "." if args[0] is None else args[0]
        if kind(path) is number:
            return ""
        if kind(path) is not text and kind(path) is not data:
            return "the sandbox denies a path that is not str or bytes: use os.fspath(path)"
        real = resolve(path)
        return "" if may_read(real) else f"the sandbox denies listing {show(real)}: {fix}"

    return check


def _database_check(allowed: Allowed) -> Check:
    """Checks connections of SQLite, which opens files in C: without Landlock only granted ones are allowed."""
    kind, text, data, show = type, str, bytes, ascii
    resolve, may_write, kernel, fix = resolver(), within(allowed.write), allowed.kernel, WRITE_FIX

    def check(args: tuple[Any, ...]) -> str:
        path = args[0]
        if kernel:
            return ""
        if kind(path) is not text and kind(path) is not data:
            return "the sandbox denies a path that is not str or bytes: use os.fspath(path)"
        if path[:5] not in ("file:", b"file:") and path not in ("", ":memory:", b"", b":memory:"):
            real = resolve(path)
            if may_write(real):
                return ""
        return f"the sandbox denies SQLite {show(path)}: {fix}"

    return check
