"""Gives memory back to the system that the C library has freed and keeps: a burst of large messages leaves much."""

from __future__ import annotations

import contextlib
import ctypes

KEPT_BYTES = 16 * 1024 * 1024  # that the C library may keep


class _Statistics(ctypes.Structure):
    """What glibc says of its memory, see mallinfo(3)."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())
    fordblks: int  # free bytes, also those that were given back


class FreeMemory:
    """The memory of this process that is free and still its own. Only glibc can give it back on demand."""

    def __init__(self) -> None:
        self._given_back = 0

    def release(self) -> bool:
        """Gives it back if it is much, in about 10 ms for 50 MB; tells whether it did."""
        with contextlib.suppress(AttributeError, OSError):
            library = ctypes.CDLL(None)
            library.mallinfo2.restype = _Statistics
            free = library.mallinfo2().fordblks
            self._given_back = min(self._given_back, free)
            if free > self._given_back + KEPT_BYTES and library.malloc_trim(0):
                self._given_back = free
                return True
        return False
