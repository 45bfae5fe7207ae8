"""Kills what a killed supervisor leaves behind. A program of its own: the standard library only, started by path.

Its standard input is a pipe from the supervisor, which says ``+PGID`` for each group of processes that it starts and
``-PGID`` for each that is over. The pipe's end is the supervisor's end, however it came about; SIGKILL to the
supervisor cannot prevent that. Whatever groups are left then are killed, grandchildren included.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Reads until the supervisor is gone, then kills the groups that are left."""
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
