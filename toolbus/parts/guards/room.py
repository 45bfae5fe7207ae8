"""Puts the guards of the configuration around the calls of a bus, and has operators allow calls that wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from toolbus.bus.access.identity import principal_of
from toolbus.bus.catalog.entry import Entry
from toolbus.bus.core import Core, Room
from toolbus.common.text import list_names, quote
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import llm_tool
from toolbus.parts.guards.approvals import Approvals, may_ask
from toolbus.parts.guards.guards import Guards
from toolbus.parts.guards.settings import AFTER, BEFORE, GuardSettings


class GuardsRoom(Room):
    """The guards of one bus; without any, calls do not come here."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        settings, dispatcher = core.config.part(GuardSettings), core.calls.dispatcher
        self._approvals = Approvals(settings.approvals)
        self._guards = Guards(settings.guards, self._approvals, core.catalog.registry, dispatcher)
        if settings.guards or settings.approvals:
            dispatcher.seams.interceptors = (*dispatcher.seams.interceptors, self._guards)

    def tools(self) -> Iterable[Callable[..., Any]]:
        return [self.held_calls, self.decide_call]

    @llm_tool(description="Shows the calls that wait for an operator's approval.", read_only=True, allow_repeat=True)
    async def held_calls(self) -> list[dict[str, Any]]:
        """Shows the calls, the oldest first.

        Each has `id`, `tool`, `source`, `caller`, `user_id`, `role`, `arguments` (text, without what is named like a
        secret), `waiting` (how many calls wait now; 0: the caller makes it again), `asked` and `expires_in` (seconds).
        """
        return [each.described() for each in self._approvals.waiting()]

    @llm_tool(description="Allows a call that waits, once, or denies it.")
    async def decide_call(self, scope: ToolScope, id: str, allow: bool, reason: str = "") -> dict[str, Any]:
        """Decides a call of `held_calls`.

        Args:
            reason: of a denial; the caller's model reads it.
        """
        request, principal = self._approvals.find(id), principal_of(scope)
        what = f"{request.subject.tool} for {request.subject.caller} {request.subject.user_id}".strip()
        why = "allowed once" if allow else f"denied: {reason}"
        with self.core.audit.operation("approve", principal, target=what, why=why):
            self._approvals.settle(request, f"operator {principal.account}", None if allow else reason)
        return {**request.described(), "allowed": allow}

    async def stop(self) -> None:
        """Ends the looks of guards."""
        self._guards.close()

    def provides(self) -> Iterable[object]:
        """Returns itself, for explanations and metrics."""
        return [self]

    def explain(self, entry: Entry) -> Iterator[tuple[str, bool | None, str]]:
        """Yields the steps of a call that guards add."""
        before, after, approval = self._guards.rules_of(entry)
        if approval is not None:
            until = f"expires after {approval.expire_seconds:g} s"
            yield "approval", None, f"each call needs the approval of {may_ask(approval)}, and it {until}"
        for when, rules in ((BEFORE, before), (AFTER, after)):
            if rules:
                names = (f"{quote(rule.guard)} ({rule.budget_ms:g} ms, else {rule.on_failure})" for rule in rules)
                yield f"guards {when}", None, list_names(names)

    def counters(self) -> Iterator[tuple[str, str, list[tuple[dict[str, str], int]]]]:
        """Yields counters for the metrics: name, help, and the number by labels."""
        counts = [
            ({"guard": guard, "when": when, "verdict": verdict}, number)
            for (guard, when, verdict), number in sorted(self._guards.verdicts.items())
        ]
        yield "toolbus_guard_verdicts", "What guards decided, by guard and by when they looked.", counts
        decided = [({"what": what}, number) for what, number in sorted(self._approvals.counts.items())]
        yield "toolbus_approvals", "Calls that asked for an approval, and what was decided.", decided
