"""Makes environments for rivals: their requirements conflict with each other and with those of the bus.

Each is made on first use below the environment of this Python and stays there, so only a first run waits for it.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from lab.child import ChildFailed

INSTALL_SECONDS = 900.0
# By name, what goes into it. The load generators need psutil.
ROOMS = {
    "fastmcp": ("fastmcp>=4.1,<5", "psutil>=6,<8", "uvloop>=0.21,<1"),
    "contextforge": ("mcp-contextforge-gateway>=1.0,<2",),
}


def python_of(room: str) -> str:
    """Returns the Python of an environment; makes it on first use."""
    folder = Path(sys.prefix, "rivals", room)
    python, installed = folder / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join(ROOMS[room])
    if not is_made(room):
        venv.create(folder, with_pip=True, clear=True)
        _install(str(python), ROOMS[room])
        installed.write_text(wanted)
    return str(python)


def is_made(room: str) -> bool:
    """Returns whether an environment exists with the packages that it should have."""
    installed = Path(sys.prefix, "rivals", room, "installed.txt")
    return installed.exists() and installed.read_text() == "\n".join(ROOMS[room])


def version_of(room: str, package: str) -> str:
    """Returns which version of a package an environment has; empty where it has none."""
    if not is_made(room):
        return ""
    found = Path(sys.prefix, "rivals", room).glob(f"lib/*/site-packages/{package.replace('-', '_')}-*.dist-info")
    return next((folder.name.removesuffix(".dist-info").rpartition("-")[2] for folder in found), "")


def _install(python: str, packages: tuple[str, ...]) -> None:
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", "install", *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"{packages[0]} was not installed in {INSTALL_SECONDS:g} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[
            -1:
        ]
        raise ChildFailed(f"{packages[0]} could not be installed: {' '.join(errors)[:1000]}")
