"""Refuses a repeated call that has already succeeded often enough: some models repeat the same call without end."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, TypeAlias

from toolbus.errors import Code, Stage
from toolbus.tool import CallError, Result, Tool

Key: TypeAlias = tuple[str, str]

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def canonical_json(arguments: Any) -> str:
    """Returns arguments as a text that is the same for the same call, whatever the order of keys and white space."""
    return _CANONICAL.encode(arguments)


class RepeatGuard:
    """Counts the successful calls of one turn. Calls that tools make themselves are not counted.

    Args:
        allowed: how often the same call may succeed; 0: any number of times.
    """

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._succeeded: Counter[Key] = Counter()  # by tool and canonical arguments

    def __repr__(self) -> str:
        return f"<RepeatGuard allowed={self._allowed} seen={len(self._succeeded)}>"

    def key(self, tool: Tool, arguments: Any) -> Key | None:
        """Returns the key that repeated calls share, whatever the order of keys and white space; None: not guarded."""
        if not self._allowed or tool.allow_repeat:
            return None
        return tool.name, canonical_json(arguments)

    def refusal(self, key: Key) -> Result | None:
        """Returns the error that replaces another run; None where the call may run."""
        times = self._succeeded[key]
        if times < self._allowed:
            return None
        error = CallError(
            Code.REPEATED,
            f"{key[0]} has already answered this same call {times} times and was not run again: "
            "its result stands above. Use it, or call with other arguments.",
            Stage.NOT_DISPATCHED,
            limit=("repeats", float(self._allowed)),
        )
        return Result(is_error=True, error=error)

    def ended(self, key: Key, result: Result) -> None:
        """Counts a call that succeeded; one that failed or asks may be tried as often as the rounds allow."""
        if not result.is_error and result.error is None and not result.asks:
            self._succeeded[key] += 1
