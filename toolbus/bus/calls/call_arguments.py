"""Validates the arguments of calls: strips keys that only hosts may set, repairs what breaks the schema, or refuses it.

Arguments that simply pass are checked in `Dispatcher.calls` and do not come here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

from toolbus.bus.calls.call import Call, Caller
from toolbus.bus.calls.call_log import call_fields
from toolbus.bus.calls.refusals import Refused, invalid
from toolbus.bus.catalog.argument_repair import (
    ABSENT,
    WHOLE_TEXT,
    Repair,
    RepairedArguments,
    original_of,
    read_object,
    repair,
    repairs_of,
)
from toolbus.bus.catalog.entry import Declaration
from toolbus.bus.catalog.schema import ArgumentChecker, load_arguments
from toolbus.bus.catalog.whole_numbers import with_whole_numbers
from toolbus.errors import Code
from toolbus.newest import NewestCache
from toolbus.text import clean_line, list_names
from toolbus.tool import Limits
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.calls")

MAX_LOGGED = 1_000  # repairs that are logged once


class CallArguments:
    """The arguments of calls on one bus.

    Args:
        repairs: whether arguments that break their schema are repaired before they are refused.
    """

    def __init__(self, limits: Limits, *, repairs: bool = True) -> None:
        self._limits = limits
        self._repairs = repairs
        self._logged: NewestCache[tuple[str, ...], None] = NewestCache(MAX_LOGGED)  # tools and repairs of them

    def validate(self, caller: Caller, call: pb.ToolCall, parent: Call | None, declaration: Declaration) -> str:
        """Validates arguments that do not simply pass: repairs them, strips keys, fills in defaults.

        Returns:
            The arguments as the plugin gets them: without the keys that only a host may set.

        Raises:
            Refused: they break the schema or a limit.
        """
        text, limit = call.arguments_json, self._limits.arguments_bytes
        if len(text) * 4 > limit and len(text.encode()) > limit:
            raise Refused(
                Code.INVALID_ARGUMENTS,
                f"the arguments have more than {limit} bytes: send less, or a reference to the data",
                limit=("arguments_bytes", limit),
            )
        if text.isspace():  # some models write blanks where there are no arguments
            text = RepairedArguments.of("", text, ())
        checker, strips = declaration.checker, declaration.strips
        # A key may be spelled with escapes; arguments that cannot be parsed cannot be searched for keys either.
        if checker is None and not (strips and ("ser" in text or "\\" in text)):
            return text
        try:
            arguments = load_arguments(text)
        except ValueError as problem:
            raise Refused(Code.INVALID_ARGUMENTS, str(problem)) from None
        if type(arguments) is dict and not strips.isdisjoint(arguments):
            arguments, text = _stripped(arguments, strips)
        if checker is None:
            return text
        repairs, passes = self._repairs and not declaration.tool.no_repair, False
        if type(arguments) is dict:
            passes = checker.passes(arguments)
            if not passes and is_unplanned(caller, call, parent, declaration):
                return text
            if not repairs and (passes or checker.is_valid(arguments)):  # it may lack defaults
                return text
        repaired = text if passes else self._repair(checker, text, arguments, strips) if repairs else None
        if repaired is None:
            raise invalid(text, arguments, checker)
        repaired = with_whole_numbers(checker, repaired, limit)
        self._log_repairs(caller, call, repairs_of(repaired))
        return repaired

    def _repair(self, checker: ArgumentChecker, text: str, arguments: Any, strips: frozenset[str]) -> str | None:
        """Returns the text of arguments that fit, None if repairs do not help."""
        original = original_of(text)
        first: tuple[Repair, ...] = ()
        if type(arguments) is str:  # a model has written the object as text
            inner = read_object(arguments)
            if inner is None:
                return None
            text, arguments, first = arguments, inner, (WHOLE_TEXT,)
            if not strips.isdisjoint(arguments):
                arguments, text = _stripped(arguments, strips)
                original = text
        elif type(arguments) is not dict:
            return None
        room = self._limits.arguments_bytes - (len(text) if text.isascii() else len(text.encode()))
        if not first:
            return repair(checker, text, arguments, room)
        repaired = text if checker.passes(arguments) else repair(checker, text, arguments, room)
        return None if repaired is None else RepairedArguments.of(repaired, original, (*first, *repairs_of(repaired)))

    def _log_repairs(self, caller: Caller, call: pb.ToolCall, repairs: Iterable[Repair]) -> None:
        """Logs what was repaired, once for each tool and kind of repair; defaults are nothing to correct."""
        texts = [str(each) for each in repairs if each.before != ABSENT]
        if texts and (key := (call.name, *texts)) not in self._logged:
            self._logged[key] = None
            why = clean_line(list_names(texts))
            fields = call_fields(call.call_id, call.name, "", caller.principal)
            log.info("repaired arguments: %s", why, extra=fields)


def is_unplanned(caller: Caller, call: pb.ToolCall, parent: Call | None, declaration: Declaration) -> bool:
    """Tells whether a council makes a call without arguments, because it plans none, so that none could be given."""
    return (
        declaration.tool.council_eligible
        and parent is None
        and caller.may_set_context
        and call.context.unplanned
        and call.arguments_json in ("", "{}")
    )


def _stripped(arguments: dict[str, Any], keys: frozenset[str]) -> tuple[dict[str, Any], str]:
    remaining = {key: value for key, value in arguments.items() if key not in keys}
    # ASCII: a lone surrogate is legal JSON, but not UTF-8.
    return remaining, json.dumps(remaining, separators=(",", ":"))
