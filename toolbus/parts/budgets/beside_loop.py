"""Lets threads do long work beside the loop of this process, which would else get the interpreter too seldom."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_SECONDS = 0.0001  # that a thread keeps the interpreter from the loop; by default it is 50 times as long
_LOCK = threading.Lock()
_working: list[float] = []  # for each thread that works so, the interval before the first of them


@contextmanager
def beside_loop() -> Iterator[None]:
    """Lets other threads have the interpreter often, while this one works."""
    with _LOCK:
        _working.append(_working[0] if _working else sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        with _LOCK:
            before = _working.pop()
            if not _working:
                sys.setswitchinterval(before)
