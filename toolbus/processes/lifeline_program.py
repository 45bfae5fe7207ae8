"""Kills the process groups that a killed supervisor leaves behind; `toolbus.processes.lifeline` starts this program.

Its standard input is a pipe from the supervisor, with a line ``+PGID`` for each group of processes that starts and
``-PGID`` for each that has ended; ``+NAME=VALUE`` and ``-NAME=VALUE`` for a variable that marks all processes of a
program, also those that left its group. The pipe ends with the supervisor, also after SIGKILL. The remaining processes
are killed then, grandchildren included. It uses the standard library only and is started by its path.
"""

from __future__ import annotations

import os
import signal
import sys

_ROUNDS = 5  # a process that forks during one search is found by the next


def kill_marked(variable: str) -> int:
    """Kills every process whose environment holds a variable, ``NAME=VALUE``; returns how many (Linux).

    It also finds processes that have left their group and their session, but none of another user.
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
            except OSError:  # it has ended, or belongs to another user
                pass
        if len(killed) == before:
            break
    return len(killed)


def main() -> None:
    """Reads until the supervisor has ended, then kills the remaining groups and marked processes."""
    remaining: set[str] = set()
    for line in sys.stdin:
        (remaining.add if line[0] == "+" else remaining.discard)(line[1:].strip())
    for each in remaining:
        if "=" in each:
            kill_marked(each)
            continue
        try:
            os.killpg(int(each), signal.SIGKILL)
        except OSError:  # it has ended by itself
            pass


if __name__ == "__main__":
    main()
