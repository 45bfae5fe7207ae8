"""Reports on the machine that it runs on: a plugin for a bus on another machine.

The credential says where the bus is and proves who this plugin is: `--credential FILE` of `toolbus run`, or
TOOLBUS_CREDENTIAL.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from typing import Any

from toolbus import Plugin

NAME = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname().partition(".")[0]) or "unnamed"
GIB = 1024**3

plugin = Plugin(f"machine:{NAME}", qualified=True)  # one tool for each machine: machine:NAME:report


@plugin.tool(read_only=True)
def report(path: str = "/") -> dict[str, Any]:
    """Report the load of a machine, and how full one of its disks is.

    Args:
        path: a folder on the disk.
    """
    disk = shutil.disk_usage(path)
    return {
        "machine": NAME,
        "load": round(os.getloadavg()[0], 2),
        "processors": os.cpu_count(),
        "disk_free_gib": round(disk.free / GIB, 1),
        "disk_used_percent": round(100 * disk.used / disk.total),
    }


if __name__ == "__main__":
    plugin.run()
