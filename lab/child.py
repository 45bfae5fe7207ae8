"""Runs one process of a run, or one program over all its lives, and ends it by its process id."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from toolbus.processes.lifeline import Lifeline

READY_SECONDS = 60.0  # on any machine
FAULT_SIGNS = ("Traceback (most recent", "a fault of the bus")  # in a log, which no disturbance explains
_QUOTED_BYTES = 4000  # of a child's standard error


class ChildFailed(Exception):
    """A child ended, or printed nothing in time. The text quotes what it wrote to standard error."""


class Child(subprocess.Popen[bytes]):
    """One process of a run.

    Args:
        log: the file that its output is appended to. Without one, standard output is read with `line`, and standard
            error is quoted when the process fails.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        lifeline: Lifeline,
        cwd: str | None = None,
        log: Path | None = None,
    ) -> None:
        self.name = name
        self._lifeline = lifeline
        self._errors: IO[bytes] = open(log, "ab") if log else tempfile.TemporaryFile()  # noqa: SIM115  # see end()
        self._unread = b""  # bytes of an incomplete line
        super().__init__(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=self._errors if log else subprocess.PIPE,
            stderr=self._errors,
            env=dict(environment),
            cwd=cwd,
            start_new_session=True,
        )
        lifeline.add(self.pid)

    @property
    def has_ended(self) -> bool:
        return self.poll() is not None

    @property
    def resident_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    def settled_bytes(self, seconds: float) -> int:
        """Lets it rest for so long and returns its resident memory."""
        time.sleep(seconds)
        return self.resident_bytes

    def line(self, seconds: float = READY_SECONDS) -> str:
        """Waits for the next line of standard output and returns it.

        Raises:
            ChildFailed: no line came in time, or the process has ended.
        """
        assert self.stdout is not None  # it has no log
        source = self.stdout.fileno()
        ends_at = time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = ends_at - time.monotonic()
            if left <= 0 or not select.select([source], [], [], left)[0]:
                raise ChildFailed(
                    f"{self.name} (pid {self.pid}) printed nothing for {seconds:g} s. {self.error_text()}"
                )
            read = os.read(source, 65536)
            if not read:
                raise ChildFailed(f"{self.name} (pid {self.pid}) ended with code {self.wait()}. {self.error_text()}")
            self._unread += read
        first, _, self._unread = self._unread.partition(b"\n")
        return first.decode()

    def error_text(self) -> str:
        """Returns the end of what the process wrote to standard error."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _QUOTED_BYTES))
        text = self._errors.read().decode(errors="replace").strip()
        return f"Its standard error:\n{text}" if text else "It wrote nothing to standard error."

    def wait(self, timeout: float | None = None) -> int:
        code = super().wait(timeout)
        self._lifeline.remove(self.pid)
        return code

    def kill(self) -> None:
        """Ends the process with SIGKILL and waits for it."""
        super().kill()
        self.wait()

    def end(self, seconds: float = 5.0) -> None:
        """Terminates the process, kills it where it does not end in time, and closes what is left."""
        self.terminate()
        try:
            self.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
        if self.stdout is not None:
            self.stdout.close()
        self._errors.close()


class Actor:
    """One program of a run over all its lives. What it prints is appended to a log.

    Attributes:
        starts: how often it was started.
        surprises: a sentence for each unexpected end.
    """

    def __init__(self, name: str, log: Path, environment: Mapping[str, str], lifeline: Lifeline) -> None:
        self.name = name
        self.log = log
        self.starts = 0
        self.surprises: list[str] = []
        self._environment = environment
        self._lifeline = lifeline
        self._child: Child | None = None  # None before the first start
        self._ending = False  # whether the run has caused its end
        self._children: dict[int, psutil.Process] = {}  # that it has had

    @property
    def pid(self) -> int:
        assert self._child is not None  # started
        return self._child.pid

    @property
    def is_running(self) -> bool:
        """Whether it runs now. An end that the run did not cause is noted."""
        if self._child is None:
            return False
        if (code := self._child.poll()) is None:
            return True
        if not self._ending:
            self._ending = True
            self.surprises.append(f"{self.name} (pid {self.pid}) ended by itself with code {code}: see {self.log}")
        return False

    def start(self, command: Sequence[str]) -> None:
        if not self.is_running:
            self._child = Child(self.name, command, self._environment, self._lifeline, log=self.log)
            self._ending = False
            self.starts += 1

    def kill(self) -> int:
        """Ends it with SIGKILL and waits for that; returns the id of the process."""
        self.send(signal.SIGKILL)
        return self._reap()

    def terminate(self) -> None:
        self.send(signal.SIGTERM)

    def has_ended(self) -> bool:
        if not self.is_running and self._child is not None:
            self._reap()
        return not self.is_running

    def send(self, number: signal.Signals) -> None:
        if self.is_running and self._child is not None:
            self._ending = self._ending or number in (signal.SIGKILL, signal.SIGTERM)
            self._child.send_signal(number)

    def children(self, module: str) -> set[int]:
        """Returns the processes that it has started with a module."""
        found = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in psutil.Process(self.pid).children() if self.is_running else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if module in each.cmdline():
                        self._children[each.pid] = each
                        found.add(each.pid)
        return found

    def left_behind(self) -> list[int]:
        """Returns the processes that it had started and that still run."""
        return [pid for pid, child in self._children.items() if child.is_running()]

    def faults(self) -> list[str]:
        """Returns what it did that the run did not cause: unexpected ends, and faults in its log."""
        text = self.text()
        counts = {sign: text.count(sign) for sign in FAULT_SIGNS}
        return [*self.surprises, *(f"{self.log.name} says {sign!r} {n} times" for sign, n in counts.items() if n)]

    def text(self) -> str:
        return self.log.read_text("utf-8", "replace") if self.log.exists() else ""

    def _reap(self) -> int:
        assert self._child is not None  # started
        self._child.end()
        return self.pid
