"""Admits calls: finds the tool, authorizes the caller, bounds the timeout; `CallArguments` validates the arguments.

These are the steps of a call's beginning that most calls do not need: `Dispatcher.calls` has the short way for plain
calls in itself, and uses these for the rest. Nothing here changes a call or the tables of the dispatcher.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from toolbus.bus.access.identity import Principal
from toolbus.bus.calls.call import Call, Caller, PolicySubject, Seams
from toolbus.bus.calls.call_log import call_fields
from toolbus.bus.calls.call_records import only_reads
from toolbus.bus.calls.refusals import AWAY_SECONDS, MAX_TOOLS_SHOWN, RETRY_SECONDS, Refused, invalid, must_fit
from toolbus.bus.catalog.argument_repair import (
    ABSENT,
    WHOLE_TEXT,
    Repair,
    RepairedArguments,
    filled,
    noted,
    notes_of,
    original_of,
    read_object,
    repair,
    repairs_of,
    with_whole_numbers,
)
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.entry import LENT_MODEL, Declaration, Entry, is_operators
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.catalog.schema import ArgumentChecker, load_arguments
from toolbus.common.newest import NewestCache
from toolbus.common.text import clean_line, list_names, quote, without_blanks
from toolbus.errors import Code, NotPermitted, UnknownRole
from toolbus.protocol.tool import MAX_TIMEOUT_SECONDS, TASK_SECONDS, Limits, level_of
from toolbus.v1 import tool_pb2 as pb


class CallAdmission:
    """The rules by which a call finds its tool and may call it.

    Attributes:
        settled_at: until when an unknown tool counts as one whose plugin may still reconnect to a restarted bus.
    """

    def __init__(self, registry: Registry, policy: Policy, view: CatalogView, limits: Limits, seams: Seams) -> None:
        self._registry = registry
        self._policy = policy
        self._view = view
        self._limits = limits
        self._seams = seams
        self.settled_at = 0.0

    def decide(self, principal: Principal, call: pb.ToolCall, now: float) -> Entry:
        """Returns the entry that a top-level call of a host would reach, without making the call.

        Raises:
            Refused: it would be refused.
        """
        host = _UnattachedHost(principal)
        return self.authorize(host, self.find(host, call, None, now), call, None, now)

    def find(self, caller: PolicySubject, call: pb.ToolCall, parent: Call | None, now: float) -> Entry:
        """Returns the entry that offers a name now.

        Raises:
            Refused: no entry does.
        """
        name, role, scopes = call.name, call.role, caller.principal.identity.scopes
        try:
            if role and scopes is not None and parent is None and not scopes.has_role(role):
                raise UnknownRole(role)
            entry = self._registry.find(name, role)
        except UnknownRole as unknown:
            roles = list_names(self._view.roles(caller.principal), MAX_TOOLS_SHOWN)
            raise Refused(Code.NOT_FOUND, f"{unknown} (configured: {roles})") from None
        if entry is None or entry.current is None:
            raise self._missing(caller, call, parent, entry, now)
        return entry

    def find_parent(self, caller: Caller, parent_id: str) -> Call:
        """Returns the call that a nested call belongs to.

        Raises:
            Refused: the caller does not run such a call, or the chain of nested calls is too long.
        """
        parent: Call | None = caller.pending.get(parent_id)
        if parent is None or not parent.active:
            raise Refused(
                Code.INVALID_ARGUMENTS,
                f"parent_call_id {quote(parent_id)} is not a call that this session runs now: "
                "use the id of the call being answered, while it is being answered",
            )
        if parent.depth >= self._limits.call_depth:
            depth = self._limits.call_depth
            raise Refused(
                Code.PERMISSION_DENIED,
                f"tools called tools {depth} deep, which is the limit: let a tool answer without calling another",
                limit=("call_depth", depth),
            )
        return parent

    def authorize(
        self, caller: PolicySubject, entry: Entry, call: pb.ToolCall, parent: Call | None, now: float
    ) -> Entry:
        """Returns the entry that a caller may call: the one found, or another role's if the call names no role.

        Raises:
            Refused: it may call none of them.
        """
        user_id, level = _user_of(caller, call, parent)
        principal = caller.principal
        if principal.identity.claims_matter and parent is None:
            _check_claims(principal, entry, user_id, level)
        denial = self._policy.denial(principal, entry, user_id, level)
        if entry.name == LENT_MODEL and parent is not None:
            _check_generation_depth(parent)
        if denial is None:
            if not (self._policy.depends_on_user(entry) or principal.identity.claims_matter):
                caller.allowed.add(entry)
            return entry
        borrowed = self._borrowed(principal, parent, entry)
        if borrowed is not principal:
            principal, denial = borrowed, self._policy.denial(borrowed, entry, user_id, level)
            if denial is None:
                return entry
        for other in () if call.role else self._registry.find_all(call.name):
            if self._policy.denial(self._borrowed(caller.principal, parent, other), other, user_id, level) is None:
                return other
        if self._policy.hides(principal, entry, level):
            raise self._missing(caller, call, parent, None, now)
        raise Refused(Code.PERMISSION_DENIED, denial)

    def _borrowed(self, principal: Principal, parent: Call | None, entry: Entry) -> Principal:
        """Returns the principal of a nested call by a remote peer: it may call what the outermost caller may.

        A plugin's key need not allow any call. But it administers the bus by its own scopes only, and tools that they
        exclude (`never`) stay excluded.
        """
        scopes = principal.identity.scopes
        if parent is None or scopes is None or is_operators(entry.source):
            return principal
        if scopes.never.match(entry.name, entry.bare_name, f"{entry.source}:{entry.bare_name}"):
            return principal
        try:  # the call may be a task, which goes on when the key of its caller has ended
            return replace(principal, identity=self._seams.current(parent.root.caller.principal.identity))
        except NotPermitted:
            return principal

    def _missing(
        self, caller: PolicySubject, call: pb.ToolCall, parent: Call | None, entry: Entry | None, now: float
    ) -> Refused:
        name, role, (user_id, level) = call.name, call.role, _user_of(caller, call, parent)
        if entry is not None and not self._policy.hides(caller.principal, entry, level):
            denial = self._policy.denial(caller.principal, entry, user_id, level)
            if denial is not None:  # otherwise the caller would retry in vain
                return Refused(Code.PERMISSION_DENIED, denial)
            why = f" ({entry.last_error})" if entry.last_error else ""
            text, hint = f"tool {name!r} is offline{why}: its plugin may reconnect", 0.0
            if any(handler.kind == "mount" for handler in entry.handlers()):  # a bus that is away, perhaps for long
                text, hint = f"tool {name!r} is offline{why}", AWAY_SECONDS
            return Refused(Code.UNAVAILABLE, text, retry_safe=True, retry_after_seconds=hint)
        source, scopes = self._policy.withdrawn_from(name), caller.principal.identity.scopes
        if source is not None and (scopes is None or scopes.reaches_name(name, source)):
            return Refused(
                Code.PERMISSION_DENIED,
                f"tool {name!r} is withdrawn: source {source!r} may not offer tools any more; an operator grants it "
                f"the permission with `toolbus access grant {source}`",
            )
        if now < self.settled_at:
            return Refused(
                Code.UNAVAILABLE,
                f"tool {quote(name)} is not registered yet: the bus has just started and plugins are reconnecting",
                retry_safe=True,
                retry_after_seconds=RETRY_SECONDS,
            )
        if name == LENT_MODEL:
            return Refused(Code.NOT_FOUND, "no host lends a model now: start one that does, with `await host.lend(…)`")
        if role not in self._view.roles(caller.principal):  # a nested call may name one that its caller does not see
            role = ""
        visible = self._view.listings(role or None, user_id, level, principal=caller.principal)
        names = list_names((listing.tool.name for listing in visible), MAX_TOOLS_SHOWN)
        where = f" in role {role!r}" if role else ""
        why = self._seams.why_absent(name.partition(":")[0]) if scopes is None else ""
        return Refused(Code.NOT_FOUND, f"there is no tool {quote(name)}{where}{why}; there are: {names}")

    def soft_deadline(
        self, caller: Caller, call: pb.ToolCall, declaration: Declaration, parent: Call | None, *, has_tasks: bool
    ) -> tuple[float, float]:
        """Returns the timeout of a call, and its soft deadline: when it becomes a task; 0: it never does.

        Raises:
            Refused: either is not a valid length of time.
        """
        background_after, timeout = call.background_after_seconds, call.timeout_seconds
        if not background_after > 0.0 or not timeout >= 0.0:
            raise Refused(
                Code.INVALID_ARGUMENTS,
                f"background_after_seconds is {background_after:g} and timeout_seconds {timeout:g}: the first must be "
                "more than 0 or left out, the second not below 0",
            )
        if not has_tasks or parent is not None or declaration.tool.no_background:
            return min(timeout or declaration.timeout, caller.longest_timeout), 0.0
        return min(timeout or TASK_SECONDS, TASK_SECONDS), min(background_after, MAX_TIMEOUT_SECONDS)


def _check_generation_depth(parent: Call) -> None:
    """Refuses a model's request within another: each may take minutes and cost money.

    Raises:
        Refused: the call is nested in one of a lent model.
    """
    outer: Call | None = parent
    while outer is not None:
        if outer.entry.name == LENT_MODEL:
            raise Refused(
                Code.PERMISSION_DENIED,
                "a tool that a lent model called may not request a lent model again: let the tool answer "
                "without a model",
                limit=("generation_depth", 1),
            )
        outer = outer.parent


class _UnattachedHost:
    """Stands for a host that is not attached."""

    may_set_context = True

    def __init__(self, principal: Principal) -> None:
        self.principal = principal
        self.allowed: set[Entry] = set()


def copy_context(context: pb.CallContext, limits: Limits) -> pb.CallContext:
    """Copies a context out of its frame, which would otherwise stay in memory as long as the call.

    Raises:
        Refused: it is larger than arguments may be.
    """
    if context.ByteSize() > limits.arguments_bytes:
        raise Refused(
            Code.INVALID_ARGUMENTS,
            f"the context has {context.ByteSize()} bytes, more than {limits.arguments_bytes}: send fewer messages",
            limit=("arguments_bytes", limits.arguments_bytes),
        )
    copy = pb.CallContext()
    copy.CopyFrom(context)
    return copy


def _check_claims(principal: Principal, entry: Entry, user_id: str, level: int) -> None:
    """Checks whether a caller may call, and on whose behalf. One that may not call may still read as its verbs allow.

    Raises:
        Refused: it may not.
    """
    identity = principal.identity
    try:
        identity.check_claims(user_id, level)
    except NotPermitted as denial:
        raise Refused(Code.PERMISSION_DENIED, str(denial)) from None
    if not identity.may_call and not only_reads(entry):
        raise Refused(
            Code.PERMISSION_DENIED,
            f"{identity.shown} may see tools, but call none: an operator of the bus has set its in_flight to 0",
        )


def _user_of(caller: PolicySubject, call: pb.ToolCall, parent: Call | None) -> tuple[str, int]:
    """Returns the user of a call and their level: a nested call has its parent's, and only hosts may set them."""
    if parent is not None:
        context = parent.context
    else:
        context = call.context if caller.may_set_context and call.HasField("context") else None
    return ("", 0) if context is None else (context.user_id, level_of(context.attributes))


# Arguments that simply pass are checked in `Dispatcher.calls` and do not come here.

log = logging.getLogger("toolbus.calls")

MAX_LOGGED = 1_000  # repairs that are logged once


class CallArguments:
    """The arguments of calls on one bus.

    Args:
        repairs: whether arguments that break their schema are repaired before they are refused.
    """

    def __init__(self, limits: Limits, seams: Seams, *, repairs: bool = True) -> None:
        self._limits = limits
        self._seams = seams
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
        if self._seams.expand is not None:
            principal = caller.principal if parent is None else parent.root.caller.principal
            text = self._seams.expand(principal, _user_of(caller, call, parent)[0], declaration, text)
        # Some models write blanks where there are no arguments, or around them such as JSON does not allow.
        if text and (not (bare := without_blanks(text)) or bare != text.strip(" \t\n\r")):
            text = RepairedArguments.of(bare, text, ())
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
            raise invalid(text, arguments, checker, declaration)
        repaired = with_whole_numbers(checker, repaired, limit)
        self._log_repairs(caller, call, repairs_of(repaired))
        return repaired

    def filled(self, declaration: Declaration, checker: ArgumentChecker, text: str, arguments: Any) -> str | None:
        """Returns arguments that lack nothing but defaults of their own properties, with them; None for others.

        What `validate` returns for these, without reading them again.
        """
        tool, defaults = declaration.tool, checker.defaults
        if defaults is None or not self._repairs or tool.no_repair or (tool.council_eligible and not arguments):
            return None
        limit = self._limits.arguments_bytes
        complete = filled(checker, defaults, text, arguments, limit - 4 * len(text))
        return complete and with_whole_numbers(checker, complete, limit)  # a default may be 1.0

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

    def replace(self, call: Call, text: str, note: str) -> None:
        """Replaces the arguments of an admitted call, after the same checks, with a note for its record.

        Raises:
            Refused: they break the schema or a limit.
        """
        message = pb.ToolCall(call_id=call.call_id, name=call.entry.name, arguments_json=text)
        text = self.validate(call.caller, message, call.parent, call.declaration.as_declared)
        must_fit(text, call.context, 0, call.entry.name, call.handler.max_item_bytes)
        call.arguments_json = noted(text, *notes_of(call.arguments_json), note)

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
