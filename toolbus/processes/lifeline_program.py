"""Kills the process groups that a killed supervisor leaves behind; `toolbus.processes.lifeline` starts this program.

Its standard input is a pipe from the supervisor, with a line ``+PGID`` for each group of processes that starts and
``-PGID`` for each that has ended; ``+NAME=VALUE`` and ``-NAME=VALUE`` for a variable that marks all processes that a
program started, also those that left its group. The pipe ends when the supervisor does, also by SIGKILL. All that is
left then is killed, grandchildren included. It uses the standard library only and is started by its path.
"""

from __future__ import annotations

import os
import signal
import sys

_ROUNDS = 5  # what forks while it is looked for is found the next time


def kill_marked(variable: str) -> int:
    """Kills every process whose environment holds a variable, ``NAME=VALUE``; returns how many (Linux).

    It finds what has left its group and its session. A process of another user cannot be read, and is not found.
    """
    mark, killed = os.fsencode(variable), set[int]()
    for _ in range(_ROUNDS):
        before = len(killed)
        try:
            processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        except OSError:  # another system
            return 0
        for process in processes:
            try:
                with open(f"/proc/{process}/environ", "rb") as opened:
                    if mark in opened.read().split(b"\0") and process != os.getpid():
                        os.kill(process, signal.SIGKILL)
                        killed.add(process)
            except OSError:  # it has ended, or belongs to somebody else
                pass
        if len(killed) == before:
            break
    return len(killed)


def main() -> None:
    """Reads until the supervisor has ended, then kills the groups and the marked processes that are left."""
    left: set[str] = set()
    for line in sys.stdin:
        (left.add if line[0] == "+" else left.discard)(line[1:].strip())
    for each in left:
        if "=" in each:
            kill_marked(each)
            continue
        try:
            os.killpg(int(each), signal.SIGKILL)
        except OSError:  # it has ended by itself
            pass


if __name__ == "__main__":
    main()
