"""Kills the process groups that a killed supervisor leaves behind; `toolbus.processes.lifeline` starts this program.

Its standard input is a pipe from the supervisor, with a line ``+PGID`` for each group of processes that starts and
``-PGID`` for each that has ended. The pipe ends when the supervisor does, also by SIGKILL. All groups that are left
then are killed, grandchildren included. It uses the standard library only and is started by its path.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Reads until the supervisor has ended, then kills the groups that are left."""
    groups: set[int] = set()
    for line in sys.stdin:
        sign, group = line[0], int(line[1:])
        (groups.add if sign == "+" else groups.discard)(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:  # it has ended by itself
            pass


if __name__ == "__main__":
    main()
