"""Two network namespaces with a line between them, and programs that run in one of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import Running, environment

INSTRUCTION = (
    "this test makes network namespaces, so it needs Linux, root, CAP_NET_ADMIN, CAP_NET_RAW and the program `ip`: run "
    "`sudo make network`, in a container `docker run --privileged`, after apt-get install iproute2"
)


@dataclass(frozen=True, slots=True)
class Namespace:
    """One network namespace.

    Attributes:
        device: its end of the line.
        address: that it has there.
    """

    name: str
    device: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Returns a command that runs another one in here, under the same process id."""
        return ["ip", "netns", "exec", self.name, *words]

    def run(self, program: Path, *arguments: str, **env: str) -> str:
        """Runs a Python program to its end, and returns what it printed."""
        command = self.command(sys.executable, str(program), *arguments)
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(env), check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def toolbus(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of toolbus to its end."""
        command = self.command(sys.executable, "-m", "toolbus.cli", *words)
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(env), check=False)


class RunningThere(Running):
    """A Python program, or ``toolbus`` command, that keeps running in a namespace."""

    def __init__(self, namespace: Namespace, folder: Path, *words: str, **env: str) -> None:
        self._namespace = namespace
        super().__init__(folder, *words, **env)

    def _command(self, words: tuple[str | Path, ...]) -> list[str | Path]:
        if str(words[0]) == "python":
            return [*self._namespace.command(sys.executable), *words[1:]]
        return [*self._namespace.command(sys.executable), "-m", "toolbus.cli", *words]


@contextmanager
def two_namespaces() -> Iterator[tuple[Namespace, Namespace]]:
    """Makes the namespaces; fails the test, with what it needs, where they cannot be made."""
    if shutil.which("ip") is None:
        pytest.fail(f"there is no program `ip`: {INSTRUCTION}", pytrace=False)
    stem = f"tb{os.getpid()}"
    here = Namespace(f"{stem}-a", f"{stem}a", "10.213.77.1")
    there = Namespace(f"{stem}-b", f"{stem}b", "10.213.77.2")
    try:
        for namespace in (here, there):
            _ip("netns", "add", namespace.name)
        _ip(
            *("link", "add", here.device, "netns", here.name),
            *("type", "veth", "peer", "name", there.device, "netns", there.name),
        )
        for namespace in (here, there):
            of = ("-n", namespace.name)
            _ip(*of, "address", "add", f"{namespace.address}/24", "dev", namespace.device)
            _ip(*of, "link", "set", namespace.device, "up")
            _ip(*of, "link", "set", "lo", "up")
        yield here, there
    finally:
        for namespace in (here, there):
            subprocess.run(["ip", "netns", "delete", namespace.name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    ended = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if ended.returncode:
        pytest.fail(f"`ip {' '.join(words)}` failed ({ended.stderr.strip()}): {INSTRUCTION}", pytrace=False)
