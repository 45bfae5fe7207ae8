"""Judges each declared tool of a session on its own: offers the good ones, refuses each of the others with a reason.

A tool that was refused for a permission, a role or a limit, or waits for an approval, is judged again when one of these
changes, and an event notifies its session. Knows no sockets: the handshake and presence pass the declarations in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from toolbus.bus.access.identity import OBSERVER, Identity, Principal
from toolbus.bus.audit import Audit
from toolbus.bus.calls.call import Seams
from toolbus.bus.calls.refusals import lacks_permission
from toolbus.bus.catalog.changes import ChangeOutcome
from toolbus.bus.catalog.entry import BUS_SOURCE, CompiledTool, declared_twice
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.streams import catalog_messages
from toolbus.bus.streams.peer import Peer
from toolbus.bus.streams.refused_tools import Cause, Refusal, SessionRefusals, to_wire
from toolbus.common.text import clean_line, list_names, quote
from toolbus.errors import (
    InvalidRequest,
    InvalidTool,
    LimitExceeded,
    NotApproved,
    NotPermitted,
    RequestError,
    UnknownRole,
)
from toolbus.protocol.session import State
from toolbus.protocol.tool import MAX_ROLE, Limits, is_role
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.sessions")


def notify_owners(outcome: ChangeOutcome, except_for: Peer | None = None) -> None:
    """Notifies sessions which of their tools others withdrew or overwrote, and logs every such loss."""
    for lost in outcome.lost:
        owner = lost.handler
        if owner is except_for:
            continue
        log.info("lost tool=%r source=%r to=%r", lost.name, owner.source, lost.by_source)
        if not isinstance(owner, Peer):
            continue
        event = wire.Event()
        if lost.by_source is not None:
            event.tool_overwritten.name, event.tool_overwritten.by_source = lost.name, lost.by_source
            event.tool_overwritten.roles.extend(lost.roles)
        else:
            event.tool_removed.name = lost.name
            event.tool_removed.roles.extend(lost.roles)
        owner.send_event(event)


EVENT_NAMES = 1_000  # of tools in one event
_CHANGED = {  # why refused tools are judged again
    Cause.PERMISSION: "a permission changed",
    Cause.ROLE: "a role changed",
    Cause.LIMIT: "a limit changed",
    Cause.APPROVAL: "they were approved",
}
_CAUSES = {  # of refusals, the first that fits
    NotApproved: Cause.APPROVAL,
    NotPermitted: Cause.PERMISSION,
    LimitExceeded: Cause.LIMIT,
    UnknownRole: Cause.ROLE,
}
DEAR, DEAR_PATTERNS = 10_000, 1_000_000  # `compile_cost`: of a tool that counts, and of all such in a request
_TOO_DEAR = (
    f"the tools before it in this request have patterns that took {DEAR_PATTERNS} characters to compile, the most for "
    "one request: repeat classes with * or + and bound the text with maxLength, or register it in a request of its own"
)
NOT_ALONE = "it is refused because another tool of the request is, and the request says all_or_none: fix that one"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on declared tools: those to offer, and the refusals of the others, in the order of the request.

    Refusals of tools that wait for an approval come last.
    """

    tools: list[CompiledTool] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)


class ToolReview:
    """Judges the declarations of the sessions of one bus, and holds the refusals.

    Args:
        on_change: called after tools were withdrawn on request.
        adopt: adds a role that a tool of a principal names, where the configuration says so; returns whether it exists
            now.

    Attributes:
        refused: the refusals of attached sessions.
    """

    def __init__(
        self,
        registry: Registry,
        policy: Policy,
        limits: Limits,
        audit: Audit,
        seams: Seams,
        on_change: Callable[[], None],
        adopt: Callable[[str, Principal], bool] = lambda role, principal: False,
    ) -> None:
        self.refused = SessionRefusals()
        self._adopt = adopt
        self._registry = registry
        self._policy = policy
        self._limits = limits
        self._audit = audit
        self._seams = seams
        self._on_change = on_change
        self._roles = registry.roles  # as of the last review of tools that were refused for a role
        self._revision = 0  # of the catalog at the last review of tools that were refused for a limit

    def __repr__(self) -> str:
        return f"<ToolReview {self.refused!r}>"

    # -- judging -----------------------------------------------------------------------------------------------------

    def judge(
        self,
        identity: Identity,
        source: str,
        declared: Sequence[pb.Tool],
        *,
        qualified: bool,
        all_or_none: bool = False,
        offered: Collection[object] = (),
    ) -> Judgement:
        """Judges tools of a session; changes nothing but adopted roles and first pins.

        Args:
            offered: what counts against the limit `tools` in addition to these: `Registry.counted`.

        Raises:
            RequestError: with all_or_none, the fault of a tool; of bad declarations all faults.
        """
        judgement, faults = Judgement(), []
        names, seen, new_roles = set(offered), set[tuple[str, str]](), set[str]()
        may_offer, believed = self._policy.may_offer(source), not self._policy.is_untrusted(source)
        beyond = set(identity.refused_offers(tool.name for tool in declared))
        dear = 0
        for message in declared:
            try:
                if dear > DEAR_PATTERNS:
                    raise InvalidTool([f"tool {quote(message.name)}: {_TOO_DEAR}"])
                _check_permission(identity, source, message.name, may_offer=may_offer, beyond=beyond)
                if (key := (message.name, message.role)) in seen:
                    raise declared_twice(message.name)
                seen.add(key)
                tool = self._seams.read(message, self._limits, qualified=qualified, hints_trusted=believed)
                principal = Principal(source, identity=identity)
                self.check_role(principal, message.role, all_or_none=all_or_none, new=new_roles)
                waits = message.role and message.role not in self._registry.roles
                counted = (message.name, message.role) if waits else message.name
                if counted not in names and len(names) >= self._limits.tools:
                    what = f"tool {message.name!r} is one too many for its session"
                    raise LimitExceeded("tools", self._limits.tools, what)
            except RequestError as fault:
                if all_or_none:
                    faults.append(fault)
                judgement.refused.append(refusal(message, fault))
            else:
                names.add(counted)
                judgement.tools.append(tool)
                dear += tool.compile_cost if tool.compile_cost > DEAR else 0
        if not (all_or_none and faults):
            faults += self._hold(source, declared, judgement)
        if not all_or_none:
            return judgement
        if faults:
            return _all_refused(declared, judgement, faults)
        self._registry.check_room(judgement.tools, source, qualified=qualified)
        return judgement

    def _hold(self, source: str, declared: Sequence[pb.Tool], judgement: Judgement) -> list[RequestError]:
        """Refuses the tools that wait for an approval, where the source is pinned. Returns the faults."""
        waiting = self._seams.pins.review(source, [item.declared for item in judgement.tools])
        if not waiting:
            return []
        judgement.tools[:] = [it for it in judgement.tools if (it.tool.name, it.tool.role or "") not in waiting]
        faults: list[RequestError] = []
        for message in declared:
            why = waiting.pop((message.name, message.role), "")
            if why:
                faults.append(NotApproved(why))
                judgement.refused.append(refusal(message, faults[-1]))
        return faults

    def judge_more(self, peer: Peer, declared: Sequence[pb.Tool], *, all_or_none: bool) -> Judgement:
        """Judges tools that a live session adds to those that it offers; raises as `judge`."""
        return self.judge(
            peer.principal.identity,
            peer.source,
            declared,
            qualified=peer.qualified,
            all_or_none=all_or_none,
            offered=() if self._has_room(peer, len(declared)) else self._registry.counted(peer),
        )

    def check_role(self, principal: Principal, role: str, *, all_or_none: bool, new: set[str]) -> None:
        """Checks that a tool of a principal may be for a role, which need not exist: then the tool waits for it.

        Args:
            role: "" is all roles.
            new: roles that do not exist and that nothing waits for but tools of the same request; this one is added.

        Raises:
            RequestError: it may not.
        """
        if not role or role in self._registry.roles:
            return
        identity = principal.identity
        if identity.scopes is not None and not identity.scopes.has_role(role):
            raise NotPermitted(_beyond_scope(identity, role))
        if self._adopt(role, principal):
            return
        if all_or_none:
            raise UnknownRole(role)
        if not is_role(role):
            raise InvalidTool(
                [
                    f"role {quote(role)} is not the name of a role: give it 1 to {MAX_ROLE} printable characters, "
                    "without blanks at its ends"
                ]
            )
        if not self._registry.tables.may_wait(role, len(new - {role})):
            limit = self._limits.unconfigured_roles
            what = f"tools wait for {limit} roles that do not exist, so none waits for {quote(role)} too"
            raise LimitExceeded("unconfigured_roles", limit, what)
        new.add(role)

    # -- offering ----------------------------------------------------------------------------------------------------

    def offer(self, peer: Peer, judgement: Judgement, *, whole: bool) -> tuple[ChangeOutcome, list[Refusal]]:
        """Puts judged tools into the catalog, and stores the refusals.

        Args:
            whole: whether they replace everything that the session, and those of its instance, offered before. Else a
                refused declaration takes the place of what the session offered under that name and role.

        Returns:
            What changed, and all refusals: a role may have no room.
        """
        outcome = self._registry.register(peer, judgement.tools, qualified=peer.qualified, declare=whole)
        refused = [*judgement.refused, *(self._full(item) for item in outcome.refused)]
        stored: tuple[Refusal, ...] = ()
        if not whole:
            declared = {
                *(each.key for each in refused),
                *((it.tool.name, it.tool.role or "") for it in judgement.tools),
            }
            stored = tuple(each for each in self.refused.of(peer) if each.key not in declared)
            self._withdraw(peer, judgement.refused, judgement.tools)
        self.refused.set(peer, (*stored, *refused))
        self.mark(peer.source)
        if judgement.tools:
            peer.offers_tools = True
        notify_owners(outcome)
        if outcome.waiting:
            name, role = outcome.waiting[0]
            log.warning(
                "waiting source=%s tools=%d for roles that do not exist, the first: tool=%r role=%r; add a role with "
                "`toolbus call toolbus:role_add`", peer.source, len(outcome.waiting), name, role,
            )  # fmt: skip
        if refused:
            first = clean_line(refused[0].error)
            log.warning("refused source=%s tools=%d, the first: %s", peer.source, len(refused), first)
        return outcome, refused

    def mark(self, source: str) -> None:
        """Sets a warning for operators at each changed tool of a pinned source, and clears those at trusted ones."""
        if not self._seams.pins.pin_of(source):
            return
        offered = {entry: (entry.bare_name, entry.tool.role or "") for entry in self._registry.offered_by(source)}
        warnings = self._seams.pins.warnings(source, offered.values())
        for entry, key in offered.items():
            self._registry.warn(entry, "pin", warnings.get(key, ""))

    def _withdraw(self, peer: Peer, refused: Sequence[Refusal], offered: Sequence[CompiledTool]) -> None:
        keys = {each.key for each in refused} - {(item.tool.name, item.tool.role or "") for item in offered}
        if not keys:
            return
        self._registry.withdraw(
            peer,
            lambda entry: not keys.isdisjoint([(entry.bare_name, ""), (entry.bare_name, entry.table.role or "")]),
            names={name for name, _ in keys},
        )

    def _full(self, item: CompiledTool) -> Refusal:
        tables = self._registry.tables
        fault = LimitExceeded("tools_per_role", tables.tools_per_role, tables.explain_full(item.tool))
        return Refusal.of(item.declared.to_wire(), str(fault), Cause.LIMIT)

    # -- judging again ----------------------------------------------------------------------------------------------

    def catalog_changed(self) -> bool:
        """Notifies sessions of tools whose role came or went, and judges tools again that were refused for a role.

        Returns:
            Whether the catalog changed.
        """
        for peer, tools in self._registry.take_reviewed().items():
            if isinstance(peer, Peer) and peer.state is State.LIVE:
                offered = list(dict.fromkeys(name for (name, _), is_offered in tools.items() if is_offered))
                self._notify(peer, offered, {name for name, _ in tools})
                log.info(
                    "roles changed source=%s offered=%d waiting=%d",
                    peer.source,
                    len(offered),
                    len(tools) - len(offered),
                )
        roles = self._registry.roles
        if self._roles == roles:
            return False
        self._roles = roles
        return self.review(self.refused.peers, Cause.ROLE)

    def room_changed(self) -> bool:
        """Judges tools again that a limit refused, if the catalog changed since. Returns whether it changed again."""
        if not self.refused or self._revision == self._registry.revision:
            return False
        changed = self.review(self.refused.peers, Cause.LIMIT)
        self._revision = self._registry.revision
        return changed

    def review(self, peers: Collection[Peer], cause: Cause) -> bool:
        """Judges the refused tools of sessions again; an event notifies each session of what changed.

        Returns:
            Whether the catalog changed.
        """
        changed = [self._review(peer, cause) for peer in peers if peer.state is State.LIVE]
        return any(changed)

    def _review(self, peer: Peer, cause: Cause) -> bool:
        before = self.refused.of(peer)
        due = [each for each in before if each.cause is cause and self._may_pass(peer, each)]
        declared = [each.declaration for each in due if each.declaration is not None]
        if not declared:
            return False
        judgement = self.judge_more(peer, declared, all_or_none=False)
        outcome, _ = self.offer(peer, judgement, whole=False)
        former = {each.key: each.error for each in before}
        news = {each.name for each in self.refused.of(peer) if former.get(each.key) != each.error}
        if outcome.names:
            names = list_names(outcome.names)
            why = f"tried again: {_CHANGED[cause]}"
            self._audit.record("register", peer.principal, target=names, why=why, peer=peer.session_id)
            log.info("offered source=%s tools=%d that were refused before", peer.source, len(outcome.names))
        self._notify(peer, outcome.names, {*outcome.names, *news, *(name for name, _ in outcome.waiting)})
        return bool(outcome.names)

    def _notify(self, peer: Peer, offered: Sequence[str], moved: Collection[str]) -> None:
        """Sends a session the state of some names: the event replaces all that it knew of them, in every role."""
        refused = [each for each in self.refused.of(peer) if each.name in moved]
        notify_reviewed(peer, offered, refused, [key for key in self._registry.waits(peer) if key[0] in moved])

    def _may_pass(self, peer: Peer, refusal: Refusal) -> bool:
        """Tells cheaply whether a tool that a limit refused may fit now; all others are judged."""
        if refusal.cause is not Cause.LIMIT:
            return True
        return self._registry.tables.has_room(refusal.role, peer.source) and self._has_room(peer, 1)

    def _has_room(self, peer: Peer, more: int) -> bool:
        """Tells whether a session may offer so many more names; the first test costs the same at any size."""
        limit = self._limits.tools
        if self._registry.max_offers(peer) + more <= limit:
            return True
        return len(self._registry.counted(peer)) + more <= limit

    def revoke(self, source: str, peers: Collection[Peer], withdraw: Callable[[], ChangeOutcome]) -> ChangeOutcome:
        """Withdraws the tools of a source that lost the permission to offer any, and stores them as refused.

        Args:
            withdraw: withdraws every tool of the source.
        """
        declared = {peer: self._registry.declared_by(peer) for peer in peers}
        outcome = withdraw()
        why = lacks_permission(source)
        for peer, tools in declared.items():
            self._refuse(peer, [Refusal.of(tool.to_wire(), why, Cause.PERMISSION) for tool in tools])
        return outcome

    def scopes_changed(self, peer: Peer) -> None:
        """Refuses tools that wait for a role which their session's identity may no longer offer tools for."""
        scopes = peer.principal.identity.scopes
        beyond = {key for key in self._registry.waits(peer) if scopes is not None and not scopes.has_role(key[1])}
        if not beyond:
            return
        declared = [tool for tool in self._registry.declared_by(peer) if (tool.name, tool.role) in beyond]
        self._registry.withdraw(peer, lambda entry: (entry.bare_name, entry.table.role) in beyond)
        identity = peer.principal.identity
        whys = (_beyond_scope(identity, tool.role or "") for tool in declared)
        self._refuse(
            peer, [Refusal.of(tool.to_wire(), why, Cause.PERMISSION) for tool, why in zip(declared, whys, strict=True)]
        )

    def _refuse(self, peer: Peer, refused: Sequence[Refusal]) -> None:
        """Stores refusals of tools that a session offered, and notifies it."""
        self.refused.set(peer, (*self.refused.of(peer), *refused))
        notify_reviewed(peer, (), refused)

    # -- withdrawing -------------------------------------------------------------------------------------------------

    def unregister(
        self,
        name: str,
        role: str = "",
        owner: Peer | None = None,
        principal: Principal = OBSERVER,
        *,
        hidden: bool = False,
    ) -> ChangeOutcome:
        """Withdraws one tool, in one role or in all, and forgets refused declarations of the name.

        Args:
            owner: the session that requests it: only a tool of its source is withdrawn. None: a tool of any source is.
            principal: who requests it, for the audit.
            hidden: whether the role may be one that does not exist, for which tools wait or were refused.

        Raises:
            UnknownRole: the role does not exist.
            InvalidRequest: the name is empty.
            NotPermitted: the tool belongs to the bus itself.
        """
        if not name:
            raise InvalidRequest("name is empty: give the name of the tool to unregister")
        known = not role or role in self._registry.roles
        if not known and not hidden:
            raise UnknownRole(role)
        entry = self._registry.find(name, role) if known else None
        if entry is not None and entry.source == BUS_SOURCE:
            raise NotPermitted("the bus's own tools cannot be unregistered")
        self._audit.check()
        source = owner.source if owner else ""
        forgotten = self.refused.forget(name, role, source)
        if known or not forgotten:
            outcome = replace(self._registry.unregister(name, role, source, hidden=hidden), forgotten=forgotten)
        else:  # the tool was refused because its role does not exist
            outcome = ChangeOutcome(forgotten=forgotten)
        if outcome.names:
            principal = owner.principal if owner is not None else principal
            self._audit.record("withdraw", principal, target=name, peer=owner.session_id if owner is not None else "")
        notify_owners(outcome, except_for=owner)
        self._on_change()
        return outcome

    def clear(self, source: str, role: str = "", principal: Principal = OBSERVER) -> ChangeOutcome:
        """Withdraws every tool of a source, in one role or in all.

        Args:
            principal: who requests it, for the audit.

        Raises:
            UnknownRole: the role is not configured.
            InvalidRequest: the source is empty.
            NotPermitted: the source is the bus itself.
        """
        if not source:
            raise InvalidRequest("source is empty: give the source whose tools to clear")
        if source == BUS_SOURCE:
            raise NotPermitted("the bus's own tools cannot be cleared")
        self._audit.check()
        self.refused.forget("", role, source)
        outcome = self._registry.clear(source, role)
        if outcome.count:
            count = outcome.count
            self._audit.record("withdraw", principal, target=source, why="every tool of the source", tools=count)
        notify_owners(outcome)
        log.info("cleared source=%r tools=%d", source, outcome.count)
        self._on_change()
        return outcome


def _check_permission(identity: Identity, source: str, name: str, *, may_offer: bool, beyond: Collection[str]) -> None:
    if not may_offer:
        raise NotPermitted(lacks_permission(source))
    if name in beyond:
        raise NotPermitted(
            f"{identity.shown} may not offer this tool: an operator of the bus adds it to the scope offer"
        )


def notify_reviewed(
    peer: Peer, offered: Sequence[str], refused: Sequence[Refusal], waiting: Sequence[tuple[str, str]] = ()
) -> None:
    """Notifies a session of its tools whose state changed; sends nothing where none did.

    Args:
        waiting: (name, role) of those that wait for a role now.
    """
    for start in range(0, max(len(offered), len(waiting), bool(refused)), EVENT_NAMES):
        part = slice(start, start + EVENT_NAMES)
        reviewed = wire.ToolsReviewed(
            registered=offered[part], waiting=catalog_messages.waiting_to_wire(waiting[part], peer.max_item_bytes)
        )
        if start == 0:
            reviewed.refused.extend(to_wire(refused, peer.max_item_bytes))
            reviewed.refused_total = len(refused)
        peer.send_event(wire.Event(tools_reviewed=reviewed))


def _beyond_scope(identity: Identity, role: str) -> str:
    return f"{identity.shown} may not offer tools for role {quote(role)}: an operator adds it to the scope roles"


def refusal(message: pb.Tool, fault: RequestError) -> Refusal:
    """Returns the refusal of a declared tool for a fault."""
    cause, why = next((cause for kind, cause in _CAUSES.items() if isinstance(fault, kind)), None), str(fault)
    if cause is Cause.ROLE:
        why = (
            f"tool {quote(message.name)} is for an {fault}: an operator adds the role with "
            "`toolbus call toolbus:role_add role=NAME`, or the tool names another"
        )
    return Refusal.of(message, why, cause or Cause.DECLARATION)


def first_fault(faults: Sequence[RequestError]) -> RequestError:
    """Returns the error of an all_or_none request: every fault of bad declarations, else the first."""
    invalid = [text for fault in faults if isinstance(fault, InvalidTool) for text in fault.faults]
    return InvalidTool(invalid) if invalid else faults[0]


def _all_refused(declared: Sequence[pb.Tool], judgement: Judgement, faults: Sequence[RequestError]) -> Judgement:
    """Refuses all tools because one is refused.

    Raises:
        RequestError: a declaration is bad; where only a permission is missing, tools are refused by name instead.
    """
    bad = [fault for fault in faults if not isinstance(fault, NotPermitted)]
    if bad:
        raise first_fault(bad)
    reasons = {each.key: each.error for each in judgement.refused}
    cause = Cause.APPROVAL if any(isinstance(fault, NotApproved) for fault in faults) else Cause.PERMISSION
    refusals = (Refusal.of(tool, reasons.get((tool.name, tool.role), NOT_ALONE), cause) for tool in declared)
    return Judgement([], list(refusals))
