"""Runs a program as another user, and says where tests cannot: there they give the kernel's answer themselves."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

NOBODY = 65534
CAN_BE_NOBODY = sys.platform == "linux" and os.geteuid() == 0
ROOT = Path(__file__).parents[2]


async def run_program(program: Path, *arguments: str) -> str:
    """Runs a Python program of the tests; returns what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program), *arguments, env=environment, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0
    return printed.decode()


def become_nobody() -> None:
    """Makes this process one of another user. What it has to read must be imported: other users may not read it."""
    os.setgroups(())
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def refuse_entry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the kernel's answer that this user may not enter a folder."""
    stat = os.stat

    def refusing(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str | os.PathLike) and folder in Path(path).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", refusing)
