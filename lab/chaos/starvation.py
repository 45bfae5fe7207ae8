"""Notes when a process of the cast had no processor: what it did not do then has a cause, which is the machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from lab.chaos.cast import WATCHER
from lab.chaos.scene import Scene, Trouble
from lab.chaos.schedule import Act

LOOK_SECONDS = 1.0
MAX_WAIT_SECONDS = 0.5  # between two looks, at once (a bus takes itself to have stood still after as much) or in pieces


class Starvation:
    """Watches how long the threads of the cast waited for a processor, as the kernel counts it (on Linux).

    Args:
        scene: gets a trouble for each time between two looks in which a thread of a process, this one included, waited
            for too long.
        waits: see `waits_of`.
    """

    def __init__(self, scene: Scene, waits: Callable[[int], dict[str, float]] | None = None) -> None:
        self._scene = scene
        self._waits_of = waits or waits_of
        self._looked = time.monotonic()
        self._waits: dict[str, float] = {}  # seconds, by the file of the thread

    async def watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        now = time.monotonic()
        waits: dict[str, float] = {}
        pids = {name: actor.pid for name, actor in self._scene.actors.items() if actor.starts}
        for name, pid in {**pids, WATCHER: os.getpid()}.items():
            mine = self._waits_of(pid)
            if any(waited - self._waits.get(thread, waited) > MAX_WAIT_SECONDS for thread, waited in mine.items()):
                self._scene.troubles.append(Trouble(name, Act.STARVE, self._looked, now))
            waits |= mine
        self._looked, self._waits = now, waits


def waits_of(pid: int) -> dict[str, float]:
    """Returns how long each thread of a process has waited; nothing where the kernel does not say."""
    waits = {}
    with contextlib.suppress(OSError):  # the process has ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread has
                file = Path(f"/proc/{pid}/task/{task}/schedstat")
                waits[str(file)] = int(file.read_text().split()[1]) / 1e9
    return waits
