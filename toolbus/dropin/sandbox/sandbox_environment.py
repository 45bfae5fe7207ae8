"""Makes the environment of a sandboxed process, and hands it its token without leaving the token there.

A variable that a process starts with stays readable in ``/proc/PID/environ`` for as long as it lives, also after it was
removed from `os.environ`. So the token comes through a pipe, whose number is in ``TOOLBUS_TOKEN_FD``; once read it is
only in the SDK's memory. Granted secrets are sent in the same way, and not part of the environment made here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping, Sequence

from toolbus.errors import SetupError
from toolbus.processes.child_environment import EVERY_PROCESS, VARIABLE_NAME

TOKEN_FD = "TOOLBUS_TOKEN_FD"
MAX_TOKEN = 4096  # bytes: what a pipe takes at once everywhere

_ADDED = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONSAFEPATH": "1",  # else Python looks for modules in the working directory first
    "MALLOC_ARENA_MAX": "2",  # else glibc reserves 64 MiB for each thread, which counts as memory
}
_DECIDES_CODE = re.compile(r"LD_.*|DYLD_.*|PYTHON.*|TOOLBUS_.*|MALLOC_.*|GLIBC_.*|GCONV_PATH|PATH", re.ASCII)


def clean_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment of a process to be sandboxed: what Python and the SDK need.

    Args:
        environment: to choose from; None means this process's.
    """
    return EVERY_PROCESS.choose(os.environ if environment is None else environment) | _ADDED


def granted_secrets(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that the tools of a process may read besides; those that are not set stay unset.

    Raises:
        SetupError: a name is not a valid variable name, or the variable decides which code the process runs.
    """
    for name in names:
        if not VARIABLE_NAME.fullmatch(name):
            raise SetupError(f"the secret {name[:140]!r} is not a valid variable name: use letters, digits and _")
        if _DECIDES_CODE.fullmatch(name):
            raise SetupError(
                f"the secret {name!r} decides which code the process runs and cannot be granted: use another variable"
            )
    return {name: environment[name] for name in names if name in environment}


def token_pipe(token: str) -> int:
    """Returns the read end of a pipe that holds a token.

    Pass its number to the process in ``TOOLBUS_TOKEN_FD`` and in ``pass_fds``, then close it.

    Raises:
        SetupError: the token is too long.
    """
    text = token.encode()
    if len(text) > MAX_TOKEN:
        raise SetupError(f"the token has {len(text)} bytes, the limit is {MAX_TOKEN}: choose a shorter one")
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, text)
    finally:
        os.close(write_end)
    return read_end


def take_token(environment: MutableMapping[str, str] | None = None) -> str:
    """Reads the token that `token_pipe` left for this process; empty if there is none. Call it before `apply`.

    Raises:
        SetupError: ``TOOLBUS_TOKEN_FD`` is not the number of an open pipe.
    """
    environment = os.environ if environment is None else environment
    number = environment.pop(TOKEN_FD, "")
    if not number:
        return ""
    try:
        with open(int(number), "rb") as pipe:
            return pipe.read(MAX_TOKEN).decode()
    except (OSError, ValueError) as error:
        raise SetupError(f"{TOKEN_FD} is {number!r}, it must be the number of an open pipe: {error}") from None
