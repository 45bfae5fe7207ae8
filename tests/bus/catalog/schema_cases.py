from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from toolbus.bus.catalog.schema import (
    ArgumentChecker,
    compile_schema,
)
from toolbus.protocol.tool import Limits

LIMITS = Limits()


WIDE = 2**64 + 1


def compiled(schema: Any, limits: Limits = LIMITS) -> ArgumentChecker:
    return compile_schema(schema if isinstance(schema, str) else json.dumps(schema), limits)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=20,
)


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Bounds the CPU time, since machines are shared; what it is there to catch takes many times as long."""
    started = time.process_time()
    yield
    assert time.process_time() - started < seconds
