"""Holds the entries of each role by name, with their declarations and the handlers that offer them.

An *entry* belongs to one role table and one source. Its *declarations* are the ways in which sessions of that source
declare the tool; the newest that has a handler is offered. The entry keeps older declarations for CATALOG_STALE. A
*role table* has the entries of one role, and a *listing* shows one tool of a source with the roles that have it.
"""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from toolbus.bus.catalog.schema import ArgumentChecker, SchemaFault, compile_output_schema, compile_schema
from toolbus.bus.metrics.call_counts import CallCounts
from toolbus.common.text import quote
from toolbus.errors import InvalidTool
from toolbus.protocol.tool import DEFAULT_TIMEOUT_SECONDS, USER_KEYS, Limits, Tool
from toolbus.v1 import tool_pb2 as pb

# What a tool takes in memory, about, in bytes, measured with its compiled schemas: so much, each character of a text
# and of a schema, each object in a schema, each pattern, and what that compiles to (`ArgumentChecker.compile_cost`).
TOOL_BYTES, TEXT_BYTES, SCHEMA_BYTES, NODE_BYTES, PATTERN_BYTES, COST_BYTES = 6 * 1024, 4, 10, 500, 20 * 1024, 120


def memory_of(tool: Tool | pb.Tool, compile_cost: int = 0) -> int:
    """Returns how much memory a tool takes, about, in bytes; less for one that is not compiled yet."""
    schemas = tool.parameters_json + tool.output_schema_json
    texts = TEXT_BYTES * (len(tool.description) + len(tool.metadata_json)) + SCHEMA_BYTES * len(schemas)
    nodes, patterns = NODE_BYTES * schemas.count("{"), PATTERN_BYTES * schemas.count('"pattern')
    return TOOL_BYTES + texts + nodes + patterns + COST_BYTES * compile_cost


# A *compiled tool* becomes a declaration when a handler registers it. Here, and nowhere else, a tool gets the schema
# that is listed, exported, hashed and checked: the normal form of what its author declared.
@dataclass(frozen=True, slots=True)
class CompiledTool:
    """A tool that was checked and compiled, ready to be registered."""

    tool: Tool  # with the normal form of its schema
    checker: ArgumentChecker | None  # None: arguments are not validated
    strips: frozenset[str]  # keys that are taken out of the arguments
    declared: Tool  # as its author declared it
    warnings: tuple[str, ...] = ()  # what the normal form reads otherwise than it is declared
    output_checker: ArgumentChecker | None = None  # None: results are not checked
    original: CompiledTool | None = None  # what the operator's overlay changes; None: it changes nothing

    @property
    def compile_cost(self) -> int:
        """What the patterns of its schemas took to compile, see `ArgumentChecker`."""
        return _compile_cost(self)


def _compile_cost(tool: CompiledTool | Declaration) -> int:
    return sum(each.compile_cost for each in (tool.checker, tool.output_checker) if each is not None)


def compile_tool(tool: Tool, limits: Limits, *, qualified: bool = False) -> CompiledTool:
    """Compiles one tool.

    Args:
        qualified: whether it belongs to an extension: `USER_KEYS` never reach it then, even if its schema declares
            them.

    Raises:
        InvalidTool: its schema breaks a rule.
    """
    try:
        checker = compile_schema(tool.parameters_json, limits, fills_defaults=not tool.no_defaults)
    except SchemaFault as fault:
        raise InvalidTool([f"tool {tool.name!r}: {fault}"]) from None
    try:
        output = compile_output_schema(tool.output_schema_json, limits) if tool.output_schema_json else None
    except SchemaFault as fault:
        raise InvalidTool([f"tool {tool.name!r}: output {fault}"]) from None
    declared, tool = tool, _normal(tool, checker, output)
    warnings = checker.warnings
    if output is not None:
        warnings = (*warnings, *(f"output {warning}" for warning in output.warnings))
    is_extension = qualified or tool.council_eligible or tool.inline_available
    properties = None if is_extension else tool.parameters.get("properties")
    strips = USER_KEYS - set(properties) if isinstance(properties, dict) else USER_KEYS
    validates_output = output if tool.validate_output else None
    checker_of_calls = None if tool.validate is False else checker
    return CompiledTool(tool, checker_of_calls, strips, declared, warnings, validates_output)


def declared_twice(name: str) -> InvalidTool:
    """Returns the fault of the second of two tools with one name and role."""
    return InvalidTool([f"tool {name!r} is declared twice: drop one of them"])


def read_tool(message: pb.Tool, limits: Limits, *, qualified: bool = False, hints_trusted: bool = True) -> CompiledTool:
    """Reads, checks and compiles a tool that a session declares, and copies it out of its frame.

    Raises:
        InvalidTool: naming each fault.
    """
    if message.callback_url:
        raise InvalidTool(
            [
                f"tool {quote(message.name)} has a callback_url, but it belongs to a session and is called over its "
                "stream: leave callback_url empty, or register without session_id"
            ]
        )
    tool = Tool.from_wire(message, limits)
    if not hints_trusted:
        tool = replace(tool, hints_trusted=False)
    return compile_tool(tool, limits, qualified=qualified)


def unchecked(tool: Tool, limits: Limits) -> CompiledTool:
    """Returns a tool whose arguments are not checked: a tool that came by REST gets them as they are (REST-40).

    Whatever its schema is, the tool is taken; models are offered the normal form, where there is one. A schema of its
    output that breaks a rule is left out.
    """
    output: ArgumentChecker | None = None
    warnings: tuple[str, ...] = ()
    if tool.output_schema_json:
        try:
            output = compile_output_schema(tool.output_schema_json, limits)
            warnings = tuple(f"output {warning}" for warning in output.warnings)
        except SchemaFault as fault:
            tool, warnings = replace(tool, output_schema_json=""), (f"output {fault}; it is left out",)
    validates_output = output if tool.validate_output else None
    strips = USER_KEYS if tool.council_eligible or tool.inline_available else frozenset()
    try:
        checker = compile_schema(tool.parameters_json, limits)
    except SchemaFault as fault:
        warnings = (f"{fault}; models are offered what is left of it", *warnings)
        return CompiledTool(tool, None, strips, tool, warnings, validates_output)
    warnings = (*checker.warnings, *warnings)
    return CompiledTool(_normal(tool, checker, output), None, strips, tool, warnings, validates_output)


def _normal(tool: Tool, checker: ArgumentChecker, output: ArgumentChecker | None) -> Tool:
    output_schema_json = output.text if output is not None else ""
    if checker.text == tool.parameters_json and output_schema_json == tool.output_schema_json:
        return tool
    return replace(tool, parameters_json=checker.text, output_schema_json=output_schema_json)


# A handler has as many slots as calls that it takes at once (`max_in_flight`). The bus has no queue, so without a
# rule a caller that calls a hundred times as often gets nearly all of them. The rule bounds what a caller holds by
# what is free, so that a few slots stay free for other callers, whatever the others want: A. K. Choudhury and E. L.
# Hahne, "Dynamic queue length thresholds for shared-memory packet switches", IEEE/ACM Transactions on Networking
# 6(2), 1998.

# A caller may hold THRESHOLD / n times as many slots as are free, where n callers hold some. So the greedy ones among
# them leave about one slot of 33 free, however many they are, and a tool with up to 32 slots keeps none free. A fixed
# factor would leave the more unused the fewer callers there are: 8, which three greedy callers ask for, a ninth of the
# slots beside one.
THRESHOLD = 32
SHARED_SECONDS = 60.0  # how long a handler counts as shared after two callers met there


class Slots:
    """Counts how many slots of a handler each caller holds, and decides how many more it may take.

    A caller that has met no other there lately may take all slots. The dispatcher counts runs of calls, not each call,
    and keeps account of a run that it has not counted here yet.

    Attributes:
        held: slots by caller, without those that hold none. Their sum is the number of the handler's pending calls.
    """

    __slots__ = ("_shared_until", "held")

    def __init__(self) -> None:
        self.held: dict[object, int] = {}
        self._shared_until = 0.0  # until when a caller leaves some slots for others

    def __repr__(self) -> str:
        return f"<Slots held={sum(self.held.values())} callers={len(self.held)}>"

    def offer(self, caller: object, free: int, now: float) -> int:
        """Returns how many of the free slots a caller may take now; where one is free, a caller that holds none may."""
        held = self.held.get(caller, 0)
        callers = len(self.held) + (not held)
        if callers > 1:
            self._shared_until = now + SHARED_SECONDS
        elif now >= self._shared_until:
            return free
        left = THRESHOLD * free - callers * held
        return -(-left // (THRESHOLD + callers)) if left > 0 else 0

    def take(self, caller: object, count: int) -> None:
        """Counts slots that a caller has taken."""
        self.held[caller] = self.held.get(caller, 0) + count

    def release(self, caller: object, count: int) -> None:
        """Counts slots that a caller has given back."""
        left = self.held[caller] - count
        if left:
            self.held[caller] = left
        else:
            del self.held[caller]


# A stream, a local function and a callback URL are handlers alike. A handler offers tools (see entry.py) and holds the
# calls that it runs; nothing here knows how it runs them.

BUS_SOURCE = "toolbus"  # the bus's own tools: listed only for requests that name the source, never by a bare name
RUN_SOURCES = "run."  # how the sources of supervisors begin, `run.HOST.PID-ID`: their tools are hidden as the bus's own
HOST_SOURCE = "host"  # of hosts that lend their model, as other programs of that name
LENT_MODEL = f"{HOST_SOURCE}:generate"  # the tool that calls it: needs a permission, listed to administrators only


def is_operators(source: str) -> bool:
    """Tells whether the tools of a source are for operators only: the bus's own, and those of supervisors."""
    return source == BUS_SOURCE or source.startswith(RUN_SOURCES)


class Trust(enum.IntEnum):
    """How far a source is trusted: a listed name is never taken from a source that is trusted more."""

    SANDBOXED = 0  # see `Policy.is_untrusted`
    MOUNT = 1  # a server of others
    KEY = 2  # a peer with scopes
    OWN = 3  # a program of this machine's user, or of the operator


class Handler(Protocol):
    """Runs tools: a stream, a local function or a callback URL."""

    kind: str  # what it is, for operators: peer, callback, function or mount
    source: str
    instance: str
    max_in_flight: int
    pending: dict[str, Any]  # calls that it has not answered, by the bus's id; stuck ones included
    slots: Slots  # how many of them each caller has
    stuck: int  # how many of them have ended for their caller, but the handler has not confirmed it
    shares: (
        bool  # whether other handlers of the source may offer the same tool beside it; else the newest replaces them
    )
    awaits_roles: bool  # whether its tools wait for a role that does not exist; else such a tool is refused
    max_item_bytes: int  # the largest call that it can receive
    remote: bool  # whether the tool runs outside the bus's process
    persisted: bool  # whether its offers outlive the bus: the registry collects changes of them for a store

    @property
    def trust(self) -> Trust:
        """How far its source is trusted."""

    @property
    def takes_calls(self) -> bool:
        """Whether a new call may be sent now."""

    @property
    def session_state(self) -> int:
        """The state that listings show: a ``SessionState`` of the wire."""

    def send(self, calls: Sequence[Any], now: float) -> None:
        """Starts calls that are in ``pending`` already. Their results go to ``Dispatcher.results``."""

    def cancel(self, call: Any, reason: str) -> bool:
        """Cancels a call. Returns whether it was never sent, so that the handler will not confirm it."""

    def stage(self, call: Any) -> Any:
        """Returns how far a call has got: a `Stage`."""


def has_room(handler: Handler) -> bool:
    """Tells whether a handler takes one more call now."""
    return handler.takes_calls and len(handler.pending) < handler.max_in_flight


def share_of(handler: Handler, caller: object, now: float) -> int:
    """Returns how many more calls a handler takes from a caller now, so that some room stays for others."""
    free = handler.max_in_flight - len(handler.pending) if handler.takes_calls else 0
    return handler.slots.offer(caller, max(free, 0), now)


def in_flight(handler: Handler) -> int:
    """Returns how many calls a handler has, stuck ones included."""
    return len(handler.pending)


MAX_EARLIER = 7  # owners that a name had before its present one, and may have again
MAX_FORMER = 4  # older declarations of a tool that CATALOG_STALE can still compare with
CHOICE_OF_TWO = 16  # handlers; among more of them the better of two at random is as good as the best


class Declaration:
    """One way in which a source declares a tool, with the handlers that offer it so."""

    __slots__ = (
        *("checker", "handlers", "is_special", "original", "output_checker", "strips", "timeout", "tool", "warnings"),
    )

    def __init__(
        self,
        tool: Tool,
        checker: ArgumentChecker | None,
        strips: frozenset[str],
        warnings: tuple[str, ...] = (),
        output_checker: ArgumentChecker | None = None,
        original: CompiledTool | None = None,
    ) -> None:
        self._set_tool(tool)
        self.checker = checker  # None: arguments are not validated
        self.strips = strips  # keys that are taken out of the arguments
        self.warnings = warnings  # about its schema, for operators
        self.output_checker = output_checker  # None: results are not checked
        self.original = original  # see CompiledTool
        self.handlers: list[Handler] = []

    def _set_tool(self, tool: Tool) -> None:
        self.tool = tool
        self.timeout = tool.timeout_seconds or DEFAULT_TIMEOUT_SECONDS  # of calls that do not set one
        self.is_special = bool(tool.idle_timeout_seconds or tool.needs)  # whether its calls need more than most

    def take_over(self, other: Declaration) -> None:
        """Takes the other fields of a declaration of the same name, description and parameters."""
        self._set_tool(other.tool)
        self.checker, self.warnings, self.output_checker = other.checker, other.warnings, other.output_checker
        self.original = other.original

    def __repr__(self) -> str:
        return f"<Declaration {self.tool.name} {self.tool.schema_hash[:8]} handlers={len(self.handlers)}>"

    @property
    def as_declared(self) -> Declaration:
        """The declaration without the operator's overlay: what a handler's calls have to fit."""
        original = self.original
        return self if original is None else Declaration(original.tool, original.checker, original.strips)

    def for_handler(self, *handlers: Handler) -> Declaration:
        """Returns a copy of the declaration with these handlers instead."""
        other = Declaration(self.tool, self.checker, self.strips, self.warnings, self.output_checker, self.original)
        other.handlers.extend(handlers)
        return other

    def pick(self) -> Handler | None:
        """Returns the handler with the fewest calls in flight that takes another; None: all are full (backpressure)."""
        handlers = self.handlers
        if len(handlers) == 1:
            handler = handlers[0]
            return handler if handler.takes_calls and len(handler.pending) < handler.max_in_flight else None
        if len(handlers) > CHOICE_OF_TWO:
            free = [handler for handler in random.sample(handlers, 2) if has_room(handler)]
            if free:
                return min(free, key=in_flight)
        return min(filter(has_room, handlers), key=in_flight, default=None)

    def pick_for(self, caller: object, now: float) -> Handler | None:
        """Returns the handler with the fewest calls in flight that takes another from a caller; None: none does."""
        return min((one for one in self.handlers if share_of(one, caller, now)), key=in_flight, default=None)


class Entry:
    """The tool that one role has under one listed name."""

    __slots__ = (
        *("bare_name", "counts", "current", "declarations", "displaced", "former", "last_error", "levels", "name"),
        *("place", "source", "suspended", "table", "trust", "warnings"),
    )

    def __init__(self, table: RoleTable, name: str, bare_name: str, source: str, place: int) -> None:
        self.table = table
        self.trust = Trust.SANDBOXED  # of its source, as of the newest handler
        self.place = place  # its position in listings: names stand in the order in which they came
        self.name = name
        self.bare_name = bare_name
        self.source = source
        self.declarations: dict[str, Declaration] = {}  # by schema_hash, newest last
        self.current: Declaration | None = None  # the newest that has a handler; None while offline
        self.former: dict[str, Tool] = {}  # declarations that are no longer offered, oldest first
        self.levels: dict[Handler, int] = {}  # the access level that a handler requires, where it requires one
        self.counts: CallCounts | None = None  # of its calls; None before the first
        self.last_error = ""  # why the tool went offline the last time
        self.displaced = False  # whether another source has the name now, see `RoleTable.displace`
        self.suspended: Declaration | None = None  # its handler is unreachable; not offered until that resumes
        self.warnings: dict[str, str] = {}  # for operators, in addition to those about its schema, by topic

    def __repr__(self) -> str:
        return f"<Entry {self.name} of {self.source} role={self.table.role} {self.current!r}>"

    @property
    def memory(self) -> int:
        """How much memory the tool takes, about, in bytes."""
        offered = self.current or self.suspended
        return memory_of(self.tool, _compile_cost(offered) if offered is not None else 0)

    @property
    def tool(self) -> Tool:
        """The tool as it is offered, or as it was offered last."""
        declaration = self.current or self.suspended or next(reversed(self.declarations.values()), None)
        if declaration is not None:
            return declaration.tool
        return next(reversed(self.former.values()))

    @property
    def all_warnings(self) -> tuple[str, ...]:
        """The warnings about the tool for operators, one sentence each."""
        declaration = self.current or self.suspended
        earlier = ", ".join(repr(each.source) for each in self.table.earlier.get(self.name, ()))
        contested = [f"contested: {earlier} also offers it, and has the name again when {self.source!r} withdraws it"]
        own = declaration.warnings if declaration is not None else ()
        return (*(contested if earlier and not self.displaced else ()), *self.warnings.values(), *own)

    @property
    def min_level(self) -> int:
        """The access level that a call needs: the highest of all handlers, whichever would take the call."""
        return max((self.tool.min_level, *self.levels.values()))

    def add(self, declaration: Declaration, handler: Handler) -> bool:
        """Adds a handler with its declaration. Returns whether the offered tool has changed."""
        self.table.mark(self)
        key = declaration.tool.schema_hash
        before, min_level = self.current, declaration.tool.min_level
        same = self.declarations.get(key)
        if same is not None and handler in same.handlers:
            changed = same.tool != declaration.tool or same.warnings != declaration.warnings
            same.take_over(declaration)
            self._set_level(handler, min_level)
            return changed
        for other in list(self.declarations.values()):
            for old in [old for old in other.handlers if not (old.shares and handler.shares)]:
                self._drop(other, old)
        self._drop_handler(handler)
        same = self.declarations.pop(key, None)
        if same is not None:
            declaration.handlers = same.handlers
        declaration.handlers.append(handler)
        self._set_level(handler, min_level)
        self.declarations[key] = declaration
        self.former.pop(key, None)
        self.current = declaration
        return before is None or before.tool != declaration.tool

    def remove(self, handler: Handler) -> bool:
        """Removes a handler. Returns whether the offered tool has changed."""
        self.table.mark(self)
        before = self.current
        self._drop_handler(handler)
        if self.suspended is not None and handler in self.suspended.handlers:
            self.suspended = None
        self.current = next(reversed(self.declarations.values()), None)
        return self.current is not before

    def suspend(self, handler: Handler) -> bool:
        """Stops offering a handler's declaration until it resumes. Returns whether the offered tool has changed."""
        for declaration in self.declarations.values():
            if handler in declaration.handlers:
                changed = self.remove(handler)
                self.suspended = declaration.for_handler(handler)
                return changed
        return False

    def resume(self) -> bool:
        """Offers the suspended declaration again. Returns whether the offered tool has changed."""
        suspended, self.suspended = self.suspended, None
        return suspended is not None and self.add(suspended.for_handler(), suspended.handlers[0])

    def handlers(self) -> list[Handler]:
        """Returns all handlers of the tool, of every declaration and of the suspended one."""
        declarations = [*self.declarations.values(), *([self.suspended] if self.suspended is not None else ())]
        return [handler for declaration in declarations for handler in declaration.handlers]

    def roles_of(self, handler: Handler) -> set[str | None]:
        """Returns the roles that the declarations of a handler name; None stands for all roles."""
        declarations = [*self.declarations.values(), *([self.suspended] if self.suspended is not None else ())]
        return {each.tool.role or None for each in declarations if handler in each.handlers}

    def _set_level(self, handler: Handler, min_level: int) -> None:
        self.levels.pop(handler, None)
        if min_level:
            self.levels[handler] = min_level

    def _drop_handler(self, handler: Handler) -> None:
        for declaration in list(self.declarations.values()):
            if handler in declaration.handlers:
                self._drop(declaration, handler)

    def _drop(self, declaration: Declaration, handler: Handler) -> None:
        declaration.handlers.remove(handler)
        self.levels.pop(handler, None)
        if not declaration.handlers:
            key = declaration.tool.schema_hash
            del self.declarations[key]
            self.former.pop(key, None)
            self.former[key] = declaration.tool
            while len(self.former) > MAX_FORMER:
                del self.former[next(iter(self.former))]


BLOCK_PLACES = 512  # a change builds the listings of one block anew; 100,000 tools have 200 blocks
MAX_MARKS = 5_000  # a list that misses more is built as a whole


class RoleTable:
    """Holds the entries of one role, in the order in which their names came.

    It answers to listed names, and to the bare names of qualified tools where no listed name matches. The registry has
    one for each role, and one for roles that are added later.

    Attributes:
        earlier: by listed name, the entries of sources that had the name before its present one, the newest last. They
            are displaced: never listed and not called. The newest has the name again when the present one leaves.
        marks: what changed last, as the number of its block (see `BLOCK_PLACES`) and its listed name.
        marked: how many marks there were.
    """

    __slots__ = ("aliases", "earlier", "entries", "marked", "marks", "role")

    def __init__(self, role: str | None) -> None:
        self.role = role  # None: the table for roles that are added later
        self.entries: dict[str, Entry] = {}
        self.earlier: dict[str, list[Entry]] = {}
        self.aliases: dict[str, dict[str, Entry]] = {}  # bare name → qualified entries, first registered first
        self.marks: deque[tuple[int, str]] = deque(maxlen=MAX_MARKS)
        self.marked = 0

    def mark(self, entry: Entry) -> None:
        """Notes that the listing of an entry is to be built anew."""
        self.marks.append((entry.place // BLOCK_PLACES, entry.name))
        self.marked += 1

    def get(self, name: str) -> Entry | None:
        """Returns the entry of a listed name, or of a bare name that no listed name hides."""
        entry = self.entries.get(name)
        aliases = self.aliases.get(name) if entry is None else None
        if aliases:
            # The first registered keeps the name while it is offline: a call must not reach another's tool meanwhile.
            entry = next(iter(list(aliases.values())), None)  # copied in one step: another thread may write
        return entry

    def put(self, entry: Entry) -> None:
        """Adds an entry; it replaces the one with its name, in place."""
        before = self.entries.get(entry.name)
        if before is not None and before is not entry:
            self._forget(before)
        self.entries[entry.name] = entry
        if entry.name != entry.bare_name and entry.name != LENT_MODEL and not is_operators(entry.source):
            self.aliases.setdefault(entry.bare_name, {})[entry.name] = entry

    def drop(self, entry: Entry) -> Entry | None:
        """Removes an entry. Returns the one of an earlier owner that has the name again: the newest that is offered."""
        self.mark(entry)
        earlier = self.earlier.get(entry.name, [])
        back = None
        if entry.displaced:
            earlier.remove(entry)
        elif earlier:
            back = next((each for each in reversed(earlier) if each.current is not None), earlier[-1])
            earlier.remove(back)
            back.displaced = False
            self.mark(back)
            self.put(back)
        else:
            del self.entries[entry.name]
            self._forget(entry)
        if not earlier:
            self.earlier.pop(entry.name, None)
        return back

    def displace(self, entry: Entry, source: str) -> Entry | None:
        """Keeps an entry behind that of another source, which takes the name. Returns what that source has there."""
        earlier = self.earlier.setdefault(entry.name, [])
        own = next((each for each in earlier if each.source == source), None)
        if own is not None:
            earlier.remove(own)
            own.displaced = False
        entry.displaced = True
        earlier.append(entry)
        return own

    def _forget(self, entry: Entry) -> None:
        alias = self.aliases.get(entry.bare_name)
        if alias is not None:
            alias.pop(entry.name, None)
            if not alias:
                del self.aliases[entry.bare_name]


def displaced_place(entry: Entry) -> int:
    """Returns the place of a displaced entry as it is persisted: below that of every entry that is listed."""
    return -2 - entry.place * (MAX_EARLIER + 1) - entry.table.earlier[entry.name].index(entry)


def place_and_turn(place: int) -> tuple[int, int]:
    """Returns a persisted place, and when the tool had the name there: in the order of its owners."""
    return divmod(-2 - place, MAX_EARLIER + 1) if place < 0 else (place, MAX_EARLIER + 1)


@dataclass(frozen=True, slots=True)
class ToolListing:
    """One line of the catalog: a tool of a source and the roles that have it."""

    tool: Tool  # under its listed name
    source: str
    roles: tuple[str, ...]
    entries: tuple[Entry, ...]  # live, one for each role

    @property
    def entry(self) -> Entry:
        """The first role's entry, for states and counts."""
        return self.entries[0]

    @property
    def place(self) -> int:
        """Its position among others: the earliest of its entries."""
        return min(entry.place for entry in self.entries)


# The listings of `BLOCK_PLACES` places. A list is a tuple of blocks; one whose tools have not changed stays the same
# object, so what was made of it still holds (`PerBlock`).
Block: TypeAlias = tuple[ToolListing, ...]
