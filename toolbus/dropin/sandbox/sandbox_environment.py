"""What a sandboxed process finds in its environment, and how it gets its token without finding it there.

A variable stays readable in ``/proc/PID/environ`` for as long as the process lives, also after `os.environ` lost it. So
the token comes through a pipe, whose number is in ``TOOLBUS_TOKEN_FD``; once read it is nowhere but in the SDK.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping, Sequence

from toolbus.errors import SetupError

TOKEN_FD = "TOOLBUS_TOKEN_FD"
MAX_TOKEN = 4096  # bytes: what a pipe takes at once everywhere

_KEPT = {
    *("PATH", "LANG", "LANGUAGE", "TZ", "TZDIR", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "NO_COLOR"),
    *("PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONCOERCECLOCALE", "PYTHONTZPATH", "PYTHONDEVMODE"),
    *("TOOLBUS_ADDRESS", "TOOLBUS_SUPERVISOR", "TOOLBUS_GRPC_EXPERIMENTS"),
}
_KEPT_BEGINNINGS = ("LC_", "GRPC_")
_ALWAYS = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONSAFEPATH": "1",  # else the working directory, or the script's, is where modules are looked for first
    "MALLOC_ARENA_MAX": "2",  # glibc would reserve 64 MiB a thread, which all count as memory
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_CODE = re.compile(r"LD_.*|DYLD_.*|PYTHON.*|TOOLBUS_.*|MALLOC_.*|GLIBC_.*|GCONV_PATH|PATH", re.ASCII)


def clean_environment(secrets: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment of a process to be sandboxed: what Python and the SDK need, and the granted secrets.

    Args:
        secrets: names of variables that its tools may know; those that are not set stay unset.
        environment: what to choose from; None means this process's.

    Raises:
        SetupError: a name is no variable's, or one that decides which code the process runs.
    """
    environment = os.environ if environment is None else environment
    for name in secrets:
        if not _NAME.fullmatch(name):
            raise SetupError(f"secret {name[:140]!r} is no name of a variable: letters, digits and _ only")
        if _CODE.fullmatch(name):
            raise SetupError(f"secret {name!r} decides how the process runs and cannot be granted: use another name")
    kept = {
        name: value
        for name, value in environment.items()
        if name in _KEPT or name in secrets or name.startswith(_KEPT_BEGINNINGS)
    }
    return kept | _ALWAYS


def token_pipe(token: str) -> int:
    """Returns the reading end of a pipe that holds a token.

    Give its number to the process as ``TOOLBUS_TOKEN_FD`` and by ``pass_fds``, then close it.

    Raises:
        SetupError: the token is too long.
    """
    text = token.encode()
    if len(text) > MAX_TOKEN:
        raise SetupError(f"a token of {len(text)} bytes is longer than {MAX_TOKEN}: choose a shorter one")
    reading, writing = os.pipe()
    try:
        os.write(writing, text)
    finally:
        os.close(writing)
    return reading


def take_token(environment: MutableMapping[str, str] | None = None) -> str:
    """Reads the token that `token_pipe` left for this process; empty where there is none. Call it before `apply`.

    Raises:
        SetupError: ``TOOLBUS_TOKEN_FD`` names no open pipe.
    """
    environment = os.environ if environment is None else environment
    number = environment.pop(TOKEN_FD, "")
    if not number:
        return ""
    try:
        with open(int(number), "rb") as pipe:
            return pipe.read(MAX_TOKEN).decode()
    except (OSError, ValueError) as problem:
        raise SetupError(f"{TOKEN_FD} is {number!r}, it must be an open pipe with the token: {problem}") from None
