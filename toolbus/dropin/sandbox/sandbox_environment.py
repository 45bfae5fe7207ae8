"""Chooses the environment of a sandboxed process, and which secrets its tools may read.

A variable that a process starts with stays readable in ``/proc/PID/environ`` for as long as it lives, also after it was
removed from `os.environ`. So neither secrets nor the token are part of that environment: they come with the
`ProcessPlan`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from toolbus.errors import SetupError
from toolbus.processes.child_environment import EVERY_PROCESS, VARIABLE_NAME

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
