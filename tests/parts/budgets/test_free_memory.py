"""Memory that was freed goes back to the system, in a process of its own, whose memory nothing else changes."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from toolbus.parts.budgets.free_memory import KEPT_BYTES, FreeMemory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

memory = FreeMemory()
if "looked" in sys.argv:
    assert not memory.release()
for burst in range(2):  # the second uses again what the first has left
    large = [bytes(100_000) for _ in range(1_000)]
    left = large[::50]
    del large
    before = resident()
    print(memory.release(), before - resident() > KEPT_BYTES, memory.release())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc gives memory back on demand")
@pytest.mark.parametrize("before", ["looked", "just started"])
def test_much_free_memory_goes_back_to_the_system_and_little_stays(before: str) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, before], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True", "True", "False"] * 2
