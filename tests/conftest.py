"""What holds for all tests."""

from __future__ import annotations

import gc
import os

# Before anything imports grpc: its C core would log every connection that a test breaks.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def pytest_collection_finish() -> None:
    """Has the garbage collector look at what tests make, and not at thousands of tests each time."""
    gc.collect()
    gc.freeze()
