"""Routes a user's message to a tool by rules, before the first request: small models often miss an obvious call."""

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
    """Calls a tool for a user's message.

    Attributes:
        match: takes the text and returns the arguments of the call, or None if the rule does not match. A pattern is
            searched in the text; its named groups are the arguments.
        tool: the tool's name on the bus.
        priority: rules are tried in ascending order; of equal ones the first.

    Raises:
        SetupError: from the constructor, if the pattern is invalid.
    """

    match: Match | re.Pattern[str] | str
    tool: str
    priority: int = 50

    def __post_init__(self) -> None:
        if isinstance(self.match, str):
            try:
                object.__setattr__(self, "match", re.compile(self.match))
            except re.error as error:
                raise SetupError(
                    f"the rule for {self.tool!r} has an invalid pattern: {error}; correct the regular expression"
                ) from None

    def arguments(self, text: str) -> str | None:
        """Returns the arguments of the call as JSON; None if the rule does not match, or fails."""
        try:
            arguments = self._match_arguments(text)
            return None if arguments is None else dump_arguments(dict(arguments))
        except Exception:  # a rule is the program's own code, and the model can still answer
            log.exception("the rule for %r failed: it is skipped", self.tool)
            return None

    def _match_arguments(self, text: str) -> Mapping[str, Any] | None:
        if callable(self.match):
            return self.match(text)
        match = re.search(self.match, text)
        if match is None:
            return None
        return {name: value for name, value in match.groupdict().items() if value is not None}


def in_order(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Returns rules in the order in which they are tried."""
    return tuple(sorted(rules, key=lambda rule: rule.priority))


def route(
    rules: Sequence[Rule], text: str, offered: Mapping[str, Tool], may_route: Callable[[Tool], bool]
) -> tuple[str, str] | None:
    """Returns the tool and the arguments of the first rule that matches; None if no rule matches.

    Args:
        offered: the offered tools; a rule cannot call other tools.
        may_route: which of these a rule may call.
    """
    for rule in rules:
        tool = offered.get(rule.tool)
        if tool is not None and may_route(tool) and (arguments := rule.arguments(text)) is not None:
            return rule.tool, arguments
    return None


def comes_from_no_file(tool: Tool) -> bool:
    """Tells whether a tool does not come from a file of a drop-in folder, whose metadata has `{"origin": "dropin"}`."""
    if not tool.metadata_json:
        return True
    try:
        metadata = json.loads(tool.metadata_json)
    except (ValueError, RecursionError):
        return True
    return not (isinstance(metadata, dict) and metadata.get("origin") == "dropin")
