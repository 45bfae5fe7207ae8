"""Rules that call a tool before the model is asked: small models often do not see what a pattern sees at once."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from toolbus.errors import SetupError
from toolbus.tool import Tool, dump_arguments

log = logging.getLogger("toolbus.loop")

Match: TypeAlias = Callable[[str], Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """Calls a tool for what a user said.

    Attributes:
        match: given the text, the arguments of the call, or None where the rule does not fit. A pattern is searched for
            in the text; its named groups are the arguments.
        tool: the tool's name on the bus.
        priority: rules are tried in ascending order; of equals the one that stands first.

    Raises:
        SetupError: from the constructor, where the pattern is none.
    """

    match: Match | re.Pattern[str] | str
    tool: str
    priority: int = 50

    def __post_init__(self) -> None:
        if isinstance(self.match, str):
            try:
                object.__setattr__(self, "match", re.compile(self.match))
            except re.error as problem:
                raise SetupError(f"the rule for {self.tool!r} has no valid pattern: {problem}") from None

    def arguments(self, text: str) -> str | None:
        """Returns the arguments of the call as JSON; None where the rule does not fit, or fails."""
        try:
            given = self._given(text)
            return None if given is None else dump_arguments(dict(given))
        except Exception:  # a rule is somebody's code, and the model can still be asked
            log.exception("the rule for %r failed: it is passed over", self.tool)
            return None

    def _given(self, text: str) -> Mapping[str, Any] | None:
        if callable(self.match):
            return self.match(text)
        found = re.search(self.match, text)
        return (
            None if found is None else {name: value for name, value in found.groupdict().items() if value is not None}
        )


def in_order(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Returns rules in the order in which they are tried."""
    return tuple(sorted(rules, key=lambda rule: rule.priority))


def route(
    rules: Sequence[Rule], text: str, offered: Mapping[str, Tool], may_route: Callable[[Tool], bool]
) -> tuple[str, str] | None:
    """Returns the tool and the arguments of the first rule that fits; None where none does.

    Args:
        offered: what the model is offered: a rule cannot reach anything else.
        may_route: which of these it may call.
    """
    for rule in rules:
        tool = offered.get(rule.tool)
        if tool is not None and may_route(tool) and (arguments := rule.arguments(text)) is not None:
            return rule.tool, arguments
    return None


def comes_from_no_file(tool: Tool) -> bool:
    """Tells whether a tool is none of a file in a drop-in folder, as its metadata says: `{"origin": "dropin"}`."""
    if not tool.metadata_json:
        return True
    try:
        metadata = json.loads(tool.metadata_json)
    except (ValueError, RecursionError):
        return True
    return not (isinstance(metadata, dict) and metadata.get("origin") == "dropin")
