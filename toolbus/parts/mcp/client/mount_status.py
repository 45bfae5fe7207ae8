"""Describes the status of a mount: its state with a reason and how to fix it, its server, its process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from toolbus.parts.mcp.client.declarations import Left


class MountState(Enum):
    """The state of a mount."""

    STARTING = "starting"  # its server is installed, started, or listing its tools
    LIVE = "live"
    DEGRADED = "degraded"  # live, but not all its tools are offered
    RESTARTING = "restarting"  # its server died and is started again
    NEEDS_LOGIN = "needs login"
    STOPPED = "stopped"  # its server does not run; a call starts it
    FAILED = "failed"  # its server is given up until an operator restarts it


@dataclass(frozen=True, slots=True)
class MountStatus:
    """The status of a mount, for operators.

    Attributes:
        reason: why it is in its state; "" if the state is enough.
        fix: what the operator should do; "" for nothing.
        era: ``modern`` or ``legacy``; "" before the first handshake.
        server: its own name and version.
        left: tools that it declares and the bus does not offer.
        hidden: how many tools `allow` and `deny` leave out.
        changed: subjects whose declaration differs from what is trusted, see `fingerprints`.
        pid: of its process; 0 while none runs.
        memory_bytes: of its process group; 0 if the system does not tell.
        restarts: how often it was started again after it died.
        last_error: why it last died or failed.
        notices: hints for people about its tools, by name.
        warnings: about the server: lists that it does not end, results that break its own schemas.
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
    warnings: tuple[str, ...] = ()


def memory_of_group(group: int) -> int:
    """Returns the resident memory of a process group in bytes; 0 on other systems than Linux."""
    if not group:
        return 0
    pages = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the process has just ended
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[2]) == group:
                pages += int(fields[21])
    return pages * os.sysconf("SC_PAGE_SIZE")
