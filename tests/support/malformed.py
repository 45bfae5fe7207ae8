"""Changes JSON at random, as a peer may send it: values of other types, and missing ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 7, 1.5, float("nan"), 10**400, "", "x", "\ud800", "[", '{"city": "Bern"}', "x" * 20_000),
    *([], [None], [{}], ["x"], {}, {"city": "Bern"}, {"text": 5}, {"name": ["x"]}, {"error": 5}),
)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the keys that lead to each value in a value."""
    yield place
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from places(inner, (*place, key))


@st.composite
def changed_json(draw: st.DrawFn, value: Any) -> Any:
    """Returns a value that is another one in one place, or lacks that place."""
    place: tuple[Any, ...] = ("", *draw(st.sampled_from([*places(value)])))
    way, last = place[:-1], place[-1]
    root = {"": copy.deepcopy(value)}
    inside: Any = root
    for key in way:
        inside = inside[key]
    how = draw(st.integers(0, 5))
    if how == 0 and way:
        del inside[last]
    elif how == 1:
        inside[last] = draw(st.sampled_from([[inside[last]], {"a": inside[last]}, json.dumps(inside[last])]))
    else:
        inside[last] = copy.deepcopy(draw(st.sampled_from(ODD)))
    return root[""]
