"""Which items of its data a tool may show to whom: by access level and by user, as the host said them.

What is not shown should not be told of either: filter first, count and suggest afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

Row = TypeVar("Row", bound=Mapping[str, Any])

_LISTS = (list, tuple, set, frozenset)


def may_see(env: Mapping[str, Any], min_level: Any = 0, users: Any = None) -> bool:
    """Tells whether the user whom a tool is run for may see something.

    Args:
        env: the second parameter of `execute`. Nobody, or nobody known, has the level 0.
        min_level: the level that it takes; None as 0. What is no whole number from 0 on hides it from everybody.
        users: the user ids that may see it, besides having the level; None means everybody. What is no list of texts
            hides it from everybody.
    """
    if min_level is not None and (type(min_level) is not int or not 0 <= min_level <= _level(env)):
        return False
    if users is None:
        return True
    user_id = env.get("user_id")
    named = isinstance(users, _LISTS) and all(isinstance(each, str) for each in users)
    return named and isinstance(user_id, str) and user_id != "" and user_id in users


def visible(rows: Iterable[Row], env: Mapping[str, Any]) -> list[Row]:
    """Returns the rows that the user whom a tool is run for may see, in their order.

    A row may have `min_level`, `users` and `allowed_users`, read as `may_see` reads them; all that it has count.
    """
    return [
        row
        for row in rows
        if isinstance(row, Mapping)
        and may_see(env, row.get("min_level"), row.get("users"))
        and may_see(env, users=row.get("allowed_users"))
    ]


def _level(env: Mapping[str, Any]) -> int:
    level = env.get("level")
    return level if type(level) is int else 0
