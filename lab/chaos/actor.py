"""The processes of a run: started, killed, frozen and ended by their own process id."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from toolbus.processes.lifeline import Lifeline


class Actor:
    """One process of the cast, over all its lives. What it prints is appended to a file.

    Attributes:
        generation: how often it was started.
        surprises: how it ended without having been told to, a sentence each.
    """

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str], lifeline: Lifeline) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.generation = 0
        self.surprises: list[str] = []
        self._environment = environment
        self._lifeline = lifeline
        self._process: subprocess.Popen[bytes] | None = None  # None before the first start
        self._told = False  # to end
        self._children: dict[int, psutil.Process] = {}  # that it has had

    @property
    def pid(self) -> int:
        """The id of the newest process."""
        assert self._process is not None  # started
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it runs now. An end that nobody asked for is noted."""
        if self._process is None:
            return False
        code = self._process.poll()
        if code is None:
            return True
        if not self._told:
            self._told = True
            self.surprises.append(f"{self.name} (pid {self.pid}) ended by itself with code {code}: see {self.log}")
        return False

    def start(self, command: Sequence[str]) -> None:
        """Starts it, unless it runs."""
        if self.runs:
            return
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self._environment),
                start_new_session=True,
            )
        self._told = False
        self.generation += 1
        self._lifeline.add(self.pid)

    def kill(self) -> int:
        """Ends it with SIGKILL and waits for that; returns the id of the process."""
        self.send(signal.SIGKILL)
        self._over()
        return self.pid

    def ask_to_end(self) -> None:
        """Sends SIGTERM."""
        self.send(signal.SIGTERM)

    def over(self) -> bool:
        """Whether a process that was asked to end has ended."""
        if self.runs:
            return False
        self._over()
        return True

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, where it runs."""
        if self.runs:
            self._told = self._told or number in (signal.SIGKILL, signal.SIGTERM)
            os.kill(self.pid, number)

    def children(self, module: str) -> set[int]:
        """Returns the processes that it has started with a module."""
        found = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in psutil.Process(self.pid).children() if self.runs else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if module in each.cmdline():
                        self._children[each.pid] = each
                        found.add(each.pid)
        return found

    def left_behind(self) -> list[int]:
        """Returns the processes that it had started and that still run."""
        return [pid for pid, child in self._children.items() if child.is_running()]

    def _over(self) -> None:
        if self._process is not None:
            self._process.wait()
            self._lifeline.remove(self.pid)
