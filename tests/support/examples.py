"""Says how many examples a property test draws: few in `make test`, more where ``TOOLBUS_EXAMPLES`` multiplies them.

What a few hundred examples once found has a test of its own; `make thorough` and CI search further.
"""

from __future__ import annotations

import os

TIMES = int(os.environ.get("TOOLBUS_EXAMPLES", "1"))
DEFAULT = 25  # where a test names no number; hypothesis's own is 100


def examples(count: int = DEFAULT) -> int:
    """Returns the number of examples for a test that draws so many in `make test`."""
    return count * TIMES
