"""Says how a mount is: its state with a reason and how to fix it, its server, its process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from toolbus.bus.mcp_client.declarations import Left


class MountState(Enum):
    """How a mount is."""

    STARTING = "starting"  # its server is being started, installed or asked
    LIVE = "live"
    DEGRADED = "degraded"  # live, but not all that it declares is offered
    RESTARTING = "restarting"  # its server died, and is started again
    NEEDS_LOGIN = "needs login"
    STOPPED = "stopped"  # its server does not run; a call starts it
    FAILED = "failed"  # its server is not started any more


@dataclass(frozen=True, slots=True)
class MountStatus:
    """What an operator sees of a mount.

    Attributes:
        reason: why it is in its state; "" where that says enough.
        fix: what a person should do; "" where nothing is to be done.
        era: ``modern`` or ``legacy``; "" as long as that is not known.
        server: its name and version, as it says them.
        left: what it declares and the bus does not offer.
        hidden: how many tools `allow` and `deny` leave out.
        changed: subjects whose declaration differs from what is trusted, see `fingerprints`.
        pid: of its process; 0 where none runs.
        memory_bytes: of its process and what that started; 0 where that is not known.
        restarts: how often it was started again after it died.
        last_error: why it died or failed the last time.
        notices: what a person should know of its tools, by name.
    """

    name: str
    state: MountState
    reason: str = ""
    fix: str = ""
    era: str = ""
    version: str = ""
    server: str = ""
    tools: int = 0
    prompts: int = 0
    resources: int = 0
    left: tuple[Left, ...] = ()
    hidden: int = 0
    changed: tuple[str, ...] = ()
    pid: int = 0
    memory_bytes: int = 0
    restarts: int = 0
    last_error: str = ""
    in_flight: int = 0
    notices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def memory_of_group(group: int) -> int:
    """Returns the resident memory of a process group in bytes; 0 where the system does not say (Linux)."""
    if not group:
        return 0
    pages = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[2]) == group:
                pages += int(fields[21])
    return pages * os.sysconf("SC_PAGE_SIZE")
