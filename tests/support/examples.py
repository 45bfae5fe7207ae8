"""Says how many examples a property test draws: few in `make test`, more where ``TOOLBUS_EXAMPLES`` multiplies them.

With 0 property tests are left out, for CI, which runs `make thorough` too. What a few hundred examples once found has a
test of its own; `make thorough` and CI search further.
"""

from __future__ import annotations

import os

TIMES = int(os.environ.get("TOOLBUS_EXAMPLES", "1"))
MAX_EXAMPLES = 20  # in `make test`
DEFAULT = 25  # where a test names no number; hypothesis's own is 100


def examples(count: int = DEFAULT) -> int:
    """Returns how many examples a test draws: `MAX_EXAMPLES` at most in `make test`, ``count`` times more elsewhere."""
    return min(count, MAX_EXAMPLES) if TIMES < 2 else count * TIMES
