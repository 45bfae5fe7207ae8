"""Gives memory back to the system that the C library has freed and keeps: bursts of large messages leave much."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

KEPT_BYTES = 8 * 1024 * 1024  # that the C library may keep


class _Statistics(ctypes.Structure):
    """What glibc says of its memory, see mallinfo(3)."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())
    fordblks: int  # free bytes, also those that were given back


class FreeMemory:
    """The memory of this process that is free and still its own. Only glibc can give it back on demand."""

    def __init__(self) -> None:
        self._least = 0  # the least that this process had since memory was last given back; 0 before the first time

    def release(self) -> bool:
        """Gives it back if it is much, in about 10 ms for 50 MB; tells whether it did.

        What was given back still counts as free. So it has to be much, and this process has to have grown as much.
        """
        with contextlib.suppress(AttributeError, OSError):
            library = ctypes.CDLL(None)
            library.mallinfo2.restype = _Statistics
            resident = _resident_bytes()
            self._least = min(self._least, resident)
            if library.mallinfo2().fordblks > KEPT_BYTES and resident > self._least + KEPT_BYTES:
                given = library.malloc_trim(0)
                self._least = _resident_bytes()
                return bool(given)
        return False


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
