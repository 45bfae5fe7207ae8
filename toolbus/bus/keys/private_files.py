"""Reads and writes files that only this user may see: ours and 0600 in a directory of ours and 0700, or refused.

A file is replaced as a whole (a temporary file, fsync, rename), so that a reader sees the old content or the new one,
also when the writer is killed in between. Writers lock the directory; the next one removes the files of a killed one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from toolbus.common import path_ownership, whole_file
from toolbus.errors import SetupError

MAX_FILE = 4 * 1024 * 1024  # bytes; 10,000 keys with their identities need about 3 MiB
LOCK = "lock"
LOCK_SECONDS = 10.0  # a writer holds the lock for milliseconds
POLL_SECONDS = 0.02
_PRIVATE = 0o077  # permissions that others must not have
_UNFINISHED = ".tmp"  # suffix of a file that is not complete yet

# Changes with a file: its content, its permissions, or the file itself. None: it cannot be found.
Stamp = tuple[int, int, int, int] | None


def check_directory(directory: Path) -> None:
    """Checks that a directory is ours alone.

    Raises:
        SetupError: it is missing, belongs to another user, others may enter it, or could put another in its place.
    """
    try:
        status = directory.stat()
    except OSError as error:
        raise _unreadable(directory, error) from None
    if not stat.S_ISDIR(status.st_mode):
        raise SetupError(f"{directory} is not a directory: move it away, or name another one")
    _check_owner(directory, status, "700")
    path_ownership.check_path(directory, str(directory))


def make_directory(directory: Path) -> None:
    """Makes a directory that is ours alone, if it is not there.

    Raises:
        SetupError: it cannot be made, or is there and others may enter it.
    """
    try:
        if not directory.is_dir():
            path_ownership.make_directory(directory, str(directory))  # and the data directory, where it is new
    except OSError as error:
        raise SetupError(f"{directory} cannot be made: {error.strerror}: choose a place that you may write") from None
    check_directory(directory)


def stamp_of(path: Path) -> Stamp:
    """Returns the stamp of a file as it is now."""
    try:
        return _stamp(path.stat())
    except OSError:
        return None


def read_private(path: Path) -> tuple[bytes, Stamp]:
    """Returns the content of a file that only we may read, and the stamp of exactly this content.

    Raises:
        SetupError: it cannot be read, is larger than `MAX_FILE`, belongs to another user, or others may read it.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not make us wait
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise SetupError(f"{path} is not a regular file: move it away")
            _check_owner(path, status, "600")
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise _unreadable(path, error) from None
    if len(content) > MAX_FILE:
        raise SetupError(f"{path} is larger than {MAX_FILE >> 20} MiB: remove keys that have ended from it")
    return content, _stamp(status)


@contextlib.contextmanager
def prepared(path: Path, content: bytes) -> Iterator[Path]:
    """Writes a complete file beside a path, for the caller to move or link there; removes it afterwards.

    Raises:
        SetupError: it cannot be written.
    """
    try:
        with whole_file.prepared(path, content, _UNFINISHED) as complete:
            yield complete
    except OSError as error:
        fix = f"let this user write {path.parent}, and see that its disk has room"
        raise SetupError(f"{path} cannot be written: {error.strerror}: {fix}") from None


def write_private(path: Path, content: bytes) -> None:
    """Replaces a file atomically; only we may read it.

    Raises:
        SetupError: it cannot be written.
    """
    with prepared(path, content) as complete:
        os.replace(complete, path)
        _sync(path.parent)


@contextlib.contextmanager
def locked(directory: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Locks a directory against other writers, and removes the files of a killed one.

    Raises:
        SetupError: the directory is not ours alone, or another writer does not end.
    """
    check_directory(directory)
    try:
        handle = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SetupError(f"{directory / LOCK} cannot be opened: {error.strerror}: let this user write it") from None
    try:
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() >= deadline:
                raise SetupError(
                    f"another program has changed {directory} for {seconds:g} seconds and has not ended: wait for it "
                    f"or end it (`fuser {directory / LOCK}` names it), then try again"
                )
            time.sleep(POLL_SECONDS)
        for unfinished in directory.glob(f".*{_UNFINISHED}"):
            with contextlib.suppress(OSError):
                unfinished.unlink()
        yield
    finally:
        os.close(handle)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _check_owner(path: Path, status: os.stat_result, mode: str) -> None:
    if status.st_uid != os.geteuid():
        raise SetupError(
            f"{path} belongs to user {status.st_uid}, it must belong to the user of this process ({os.geteuid()}): "
            "who owns it decides who may use the bus"
        )
    if status.st_mode & _PRIVATE:
        raise SetupError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, others must have no access to it: "
            f"run `chmod {mode} {path}`"
        )


def _unreadable(path: Path, error: OSError) -> SetupError:
    if isinstance(error, FileNotFoundError):
        return SetupError(f"{path} does not exist: make keys with `toolbus keys init --name HOST`, or correct the path")
    return SetupError(f"{path} cannot be read: {error.strerror}: let this user read it")
