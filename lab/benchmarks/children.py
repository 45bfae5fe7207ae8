"""The processes of a run: started, waited for, watched and ended by their own process id.

Children get a session of their own, so that Ctrl-C reaches this process only, which then ends them in order.
Their standard error goes to a file that is quoted when one of them fails.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

GRPC_SWITCH = "-event_engine_client,-event_engine_listener"
READY_SECONDS = 30.0


class ChildFailed(Exception):
    """A child ended, or said nothing in time. The text carries what it wrote to standard error."""


class Child:
    """One process of a run, read line by line."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], cwd: str | None = None
    ) -> None:
        self.name = name
        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed in end()
        self._waiting = b""  # bytes read that are no whole line yet
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=dict(environment),
            cwd=cwd,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process is there no more."""
        return self._process.poll() is not None

    def line(self, seconds: float = READY_SECONDS) -> str:
        """Returns the next line of standard output, waiting for it.

        Raises:
            ChildFailed: where none comes in time or the process has ended.
        """
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        ends_at = time.monotonic() + seconds
        while b"\n" not in self._waiting:
            left = ends_at - time.monotonic()
            if left <= 0 or not select.select([source], [], [], left)[0]:
                raise ChildFailed(f"{self.name} (pid {self.pid}) said nothing for {seconds:g} s. {self.complaints()}")
            read = os.read(source, 65536)
            if not read:
                code = self._process.wait()
                raise ChildFailed(f"{self.name} (pid {self.pid}) ended: code {code}. {self.complaints()}")
            self._waiting += read
        first, _, self._waiting = self._waiting.partition(b"\n")
        return first.decode()

    def complaints(self) -> str:
        """Returns the end of what the process wrote to standard error."""
        size = self._complaints.seek(0, os.SEEK_END)
        self._complaints.seek(max(0, size - 4000))
        text = self._complaints.read().decode(errors="replace").strip()
        return f"Its standard error:\n{text}" if text else "It wrote nothing to standard error."

    def ask_to_end(self) -> None:
        """Sends SIGTERM; what it still prints can be read."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends the process with SIGKILL and waits for it."""
        self._process.kill()
        self._process.wait()

    def end(self, seconds: float = 5.0) -> None:
        """Asks the process to end, ends it where it does not, and closes what is left."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._complaints.close()


class Nursery:
    """The children alive at the moment. Leaving the ``with`` block ends them, newest first."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self._children: list[Child] = []
        self._folders: list[tempfile.TemporaryDirectory[str]] = []  # what the children work in

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *failure: object) -> None:
        for child in reversed(self._children):
            child.end()
        self._children.clear()
        for folder in self._folders:
            folder.cleanup()
        self._folders.clear()

    def folder(self) -> str:
        """Returns an empty folder, which goes once all children have ended."""
        self._folders.append(tempfile.TemporaryDirectory(prefix="toolbus-bench-", ignore_cleanup_errors=True))
        return self._folders[-1].name

    def start(self, name: str, command: Sequence[str], cwd: str | None = None, **more: str) -> Child:
        """Starts a process; ``more`` is added to its environment."""
        child = Child(name, command, {**self.environment, **more}, cwd)
        self._children.append(child)
        return child

    def module(self, module: str, *arguments: str, python: str = sys.executable) -> Child:
        """Starts ``python -m lab.benchmarks.<module>``."""
        return self.start(module, [python, "-m", f"lab.benchmarks.{module}", *arguments])


def environment(experiments: bool) -> dict[str, str]:
    """Returns the environment of every child: the same gRPC switch for all, or for none."""
    changed = dict(os.environ)
    changed.pop("GRPC_EXPERIMENTS", None)
    if experiments:
        changed["GRPC_EXPERIMENTS"] = GRPC_SWITCH
    root = str(Path(__file__).resolve().parents[2])
    changed["PYTHONPATH"] = os.pathsep.join(filter(None, (root, changed.get("PYTHONPATH"))))
    return changed


def grpc_address(ready: str) -> str:
    """Returns the first gRPC address of a ready line (``… ready grpc=ADDR[,ADDR] …``).

    Raises:
        ChildFailed: where the line is none.
    """
    return address(ready, "grpc").split(",")[0]


def address(ready: str, kind: str) -> str:
    """Returns what a line of words says about one kind of address (``… grpc=ADDR http=ADDR …``).

    Raises:
        ChildFailed: where it says nothing.
    """
    for word in ready.split():
        if word.startswith(f"{kind}="):
            return word.removeprefix(f"{kind}=")
    raise ChildFailed(f"expected a line `… {kind}=ADDRESS …`, got {ready!r}")


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Turns SIGTERM into KeyboardInterrupt, so that both ways of stopping a run end its children."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
