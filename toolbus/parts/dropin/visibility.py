"""Filters the items of a tool's data by who may see them: by access level and by user, as the host gave them.

Filter first, count and suggest afterwards, so that nothing reveals what is hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

Row = TypeVar("Row", bound=Mapping[str, Any])

_LISTS = (list, tuple, set, frozenset)


def may_see(env: Mapping[str, Any], min_level: Any = 0, users: Any = None) -> bool:
    """Tells whether the user whom a call is made for may see an item.

    Args:
        env: the second parameter of `execute`. Without a user or a valid level, the level is 0.
        min_level: the level that is needed; None means 0. Anything but a whole number from 0 on hides the item.
        users: ids of the users who may see it, if they have the level; None means all. Anything but a list of texts
            hides the item.
    """
    if min_level is not None and (type(min_level) is not int or not 0 <= min_level <= _level(env)):
        return False
    if users is None:
        return True
    user_id = env.get("user_id")
    is_list = isinstance(users, _LISTS) and all(isinstance(each, str) for each in users)
    return is_list and isinstance(user_id, str) and user_id != "" and user_id in users


def visible(rows: Iterable[Row], env: Mapping[str, Any]) -> list[Row]:
    """Returns the rows that the user whom a call is made for may see, in their order.

    A row may have `min_level`, `users` and `allowed_users`, as in `may_see`; every one that it has must allow the user.
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
