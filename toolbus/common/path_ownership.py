"""Refuses paths that another user could change or replace: the data directory, sockets, and files that give rights.

A path is as safe as each directory and each symbolic link that it leads through: a user who may write one of these
decides which file is at its end. Root is trusted, and so are directories like ``/tmp`` (sticky).
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from toolbus.common.local_users import show_user, unmapped_uid
from toolbus.errors import SetupError

ROOT = 0
MAX_LINKS = 40  # symbolic links that a path leads through, as in Linux
_GROUP, _OTHERS = 0o020, 0o002  # permission to write
_REACHED = 0o011  # permission of a directory to reach what is in it


def make_directory(directory: Path, what: str) -> None:
    """Makes a directory that is missing, and those above it, so that only we may enter them (0700); then checks it.

    Raises:
        SetupError: as `check_path`.
        OSError: it cannot be made.
    """
    for missing in [each for each in (*reversed(directory.parents), directory) if not each.exists()]:
        missing.mkdir(mode=0o700, exist_ok=True)
    if not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    check_path(directory, what)


def check_path(path: Path, what: str, *, lstat: Callable[[Path], os.stat_result] = os.lstat) -> None:
    """Checks that only this user and root can change what is at a path. Its end may be missing.

    Args:
        what: names the path in an error: ``the data directory /x``.
        lstat: returns owner and mode of a part of the path.

    Raises:
        SetupError: another user can; the text has the command that fixes it.
        OSError: a part of the path cannot be read.
    """
    end, unmapped = path.absolute(), unmapped_uid()
    resolved = Path(os.path.realpath(end))
    closed = False  # whether only we may enter the directory of the part
    for part in _parts(end):
        try:
            status = lstat(part)
        except FileNotFoundError:
            return
        is_end = not stat.S_ISLNK(status.st_mode) and part == resolved
        fault, fix = _fault(part, status, is_end=is_end)
        if status.st_uid == unmapped and not is_end:  # perhaps root of the machine, from within a user namespace
            fault = ""
        if stat.S_ISREG(status.st_mode) and closed and status.st_uid in (os.geteuid(), ROOT):
            fault = ""
        if fault:
            shown = "it" if part == end else f"it leads through {part}, which"
            raise SetupError(
                f"{what} cannot be used: {shown} {fault}, who could change what is read there. Check what is in "
                f"it, then: {fix}; or use another one"
            )
        closed = stat.S_ISDIR(status.st_mode) and not status.st_mode & _REACHED


def _fault(part: Path, status: os.stat_result, *, is_end: bool) -> tuple[str, str]:
    """Returns who else can change a part of a path, and the command that fixes it; "" where no other user can."""
    shown = shlex.quote(str(part))
    if status.st_uid not in (os.geteuid(), ROOT):
        return f"belongs to {show_user(status.st_uid)}", f"chown -h {os.geteuid()} {shown}"
    if stat.S_ISLNK(status.st_mode) or (status.st_mode & stat.S_ISVTX and not is_end):
        return "", ""
    if status.st_mode & _OTHERS or (status.st_mode & _GROUP and not _is_trusted_group(status)):
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        return f"may be written by other users (mode {mode})", f"chmod go-w {shown}"
    return "", ""


def _is_trusted_group(status: os.stat_result) -> bool:
    """Whether a group may write: that of the owner alone, or one that root chose for a directory of its own."""
    if status.st_uid == ROOT and os.geteuid() != ROOT:
        return True
    import grp
    import pwd

    try:
        group, owner = grp.getgrgid(status.st_gid), pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        return False
    return group.gr_name == owner and set(group.gr_mem) <= {owner}


def _parts(path: Path) -> Iterator[Path]:
    """Yields every directory and symbolic link that a path leads through, from the root on, its end last."""
    names = list(reversed(path.parts))
    at, links = Path(names.pop()), 0
    yield at
    while names:
        name = names.pop()
        if name in ("/", ".."):
            at = Path("/") if name == "/" else at.parent
            continue
        part = at / name
        yield part
        if part.is_symlink():
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            names.extend(reversed(Path(os.readlink(part)).parts))
        else:
            at = part
