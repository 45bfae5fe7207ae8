"""Becomes the program of a plugin that is not a Python file; `toolbus run --exec` starts this program.

It reads the program's whole environment from standard input, ``NAME=VALUE`` with a NUL after each, and then executes
the program in its own process. The supervisor writes them after it has added the process to the `Lifeline`, so no
program is left behind, whenever the supervisor is killed. This file uses the standard library only and is started by
its path, without the operator's environment.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys

CANNOT_START = 78  # EX_CONFIG of sysexits.h: a restart would not help
MODULE_VARIABLE = "_TOOLBUS_MODULE"  # NAME=FILE of the module that a plugin's file is
SUPERVISOR_VARIABLE = "TOOLBUS_SUPERVISOR"  # the supervisor's process id; unset without one
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_REASONS = {
    errno.ENOENT: "it does not exist any more, or its first line (#!) names an interpreter that does not exist",
    errno.ENOEXEC: "it is neither a program for this machine nor a script with a first line such as #!/bin/sh",
}


def killed_with_parent() -> bool:
    """Lets the kernel kill this process when its parent ends, also after `exec`; returns whether it will (Linux)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0  # type: ignore[no-any-return]
    except (OSError, AttributeError):  # a libc without it
        return False


def main() -> int:
    """Executes the program that the arguments name: its file, then its arguments from the zeroth on."""
    _, file, *arguments = sys.argv
    killed_with_parent()
    variables = dict(each.split(b"=", 1) for each in sys.stdin.buffer.read().split(b"\0") if each)
    if os.getppid() != int(os.environ[SUPERVISOR_VARIABLE]):  # it has ended: the variables may be incomplete
        return 1
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the program would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(file, arguments, variables)
    except OSError as error:
        print(f"cannot run {file}: {_REASONS.get(error.errno or 0, error.strerror)}", file=sys.stderr)
    return CANNOT_START


if __name__ == "__main__":
    sys.exit(main())
