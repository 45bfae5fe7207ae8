"""What we told a main server, what it answered, and what there is to do about the difference.

Pure: a plan and a listing in, steps out; the shell takes the steps and reports how each ended. A restart, a forgetful
server and a role that came later all look alike here: something is missing that was there, so it is registered again.
What others own is never touched: two programs that each put their tool back every two seconds would be a war.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from toolbus.bus.upstream.plan import CALLBACK_PATH, PREFIX, Key, Print, UpstreamPlan, WantedTool
from toolbus.bus.upstream.upstream_answers import Held, Theirs, clean

RETRY_SECONDS = 60.0  # until a refused registration is tried again as it is
FIRST_RETRY_SECONDS = 2.0  # the same after a request that broke off; doubled each time
TRIES = 2  # times that one role is told a tool that it took and does not list; a restart in between is no refusal


@dataclass(frozen=True, slots=True)
class Register:
    """To register a tool; ``role`` may be narrower than the one wanted."""

    wanted: WantedTool
    role: str | None


@dataclass(frozen=True, slots=True)
class Unregister:
    """To withdraw a name, in one role or in all."""

    name: str
    role: str | None


Step = Register | Unregister


@dataclass(slots=True, eq=False)
class _Sent:
    """A registration that was taken, as it was then.

    Attributes:
        tries: by role, how often it was told since it was last seen to have the tool.
        failed: roles that said no, or said yes and never listed it.
    """

    print: Print
    tries: dict[str, int] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Something that did not work: not to be tried again before its time, unless the roles change."""

    text: str
    retry_at: float
    print: Print | None = None
    roles: tuple[str, ...] = ()
    count: int = 1


class SyncState:
    """The state of one main server, as far as our tools go.

    Args:
        callback_base: scheme and authority of our own gateway.
        settled_at: until then tools of unknown sources are left alone: after a restart of ours their plugins may
            be on their way back, and would lose their place.
    """

    def __init__(self, callback_base: str, settled_at: float = 0.0) -> None:
        self.plan = UpstreamPlan()
        self.problems: dict[Key, str] = {}  # what is wrong with what is wanted, as of the last decision
        self.sources: set[str] = set()  # that we have, or may have, something there of
        self._prefix = callback_base.rstrip("/") + CALLBACK_PATH
        self._settled_at = settled_at
        self._sent: dict[Key, _Sent] = {}
        self._refusals: dict[Key, _Refusal] = {}
        self._stuck: dict[str, _Refusal] = {}  # names that should be withdrawn, and were asked to be

    def __repr__(self) -> str:
        return f"<SyncState wanted={len(self.plan.wanted)} sent={len(self._sent)} refused={len(self._refusals)}>"

    @property
    def registered(self) -> int:
        """How many registrations were taken."""
        return len(self._sent)

    # -- deciding ------------------------------------------------------------------------------------------------

    def decide(self, theirs: Theirs, now: float) -> list[Step]:
        """Returns what to do, in order, to make a listing what it should be. None of it is noted as done."""
        self.problems = {}
        steps: list[Step] = []
        for name, holders in (theirs.names or {}).items():
            steps += self._withdrawals(name, holders, now)
        for by_role in self.plan.by_name.values():
            steps += self._registrations(by_role.values(), theirs, now)
        self._forget(theirs)
        return steps

    def _registrations(self, of_name: Iterable[WantedTool], theirs: Theirs, now: float) -> list[Step]:
        steps: list[Step] = []
        overwrites = False  # a registration for all roles takes the place of those for one, which then follow it
        for wanted in of_name:
            own = self._needed(wanted, theirs, now)
            if overwrites and not own and wanted.key not in self._refusals:
                own = [Register(wanted, wanted.role)]
            overwrites = overwrites or any(step.role is None for step in own)
            steps += own
        return steps

    def _needed(self, wanted: WantedTool, theirs: Theirs, now: float) -> list[Step]:
        key, roles, holders = wanted.key, self._roles_of(wanted, theirs), theirs.holders(wanted.name)
        refusal = self._refusals.get(key)
        if refusal is not None and refusal.print != wanted.print:
            refusal = None
            del self._refusals[key]
        waits = refusal is not None and now < refusal.retry_at and refusal.roles == theirs.roles
        if refusal is not None:
            self.problems[key] = refusal.text
        sent = self._sent.get(key)
        if sent is None or sent.print != wanted.print:
            return [] if waits else self._first_time(wanted, roles, holders)
        due = [role for role in roles if self._is_due(wanted, sent, role, holders.get(role))]
        if not waits:
            due += [role for role in roles if role in sent.failed]
        self._judge(wanted, sent, roles, theirs, now)
        if due and any(not self._is_ours(held) for held in holders.values()):
            return [Register(wanted, role) for role in due]  # for all roles, it would overwrite what others own
        return [Register(wanted, wanted.role)] if due else []

    def _first_time(self, wanted: WantedTool, roles: Sequence[str], holders: dict[str, Held]) -> list[Step]:
        """Registers in every role, or where a name is taken in those that are free.

        What has our source is ours, from an earlier life at another port perhaps.
        """
        foreign = {role: held for role in roles if (held := holders.get(role)) and held.source != wanted.source}
        taken = {role: held.source for role, held in foreign.items() if not self._is_ours(held)}
        if not taken:
            return [Register(wanted, wanted.role)]
        by = clean(", ".join(sorted({repr(source) for source in taken.values()})))
        self.problems[wanted.key] = (
            f"the name is taken there by source {by} ({_roles(list(taken))}): rename one of the tools"
        )
        return [Register(wanted, role) for role in roles if role not in taken]

    def _is_due(self, wanted: WantedTool, sent: _Sent, role: str, held: Held | None) -> bool:
        """Notes what one role has; returns whether it should be told again."""
        if held is not None and not self._is_ours(held):
            sent.tries[role] = 0
            sent.failed.discard(role)  # or it would be tried again, over what others own
            return False
        if held is not None and _is(held, wanted) and held.description == wanted.tool.description:
            sent.tries[role] = 0
            sent.failed.discard(role)
            return False
        return role not in sent.failed and sent.tries.get(role, 0) < TRIES

    def _judge(self, wanted: WantedTool, sent: _Sent, roles: Sequence[str], theirs: Theirs, now: float) -> None:
        """Says what is wrong with a registration that was taken."""
        key, holders = wanted.key, theirs.holders(wanted.name)
        never = [role for role in roles if role not in sent.failed and sent.tries.get(role, 0) >= TRIES]
        if never:
            sent.failed.update(never)
            text = f"took the tool and does not list it as it was sent: {_roles(never)}"
            self._refusals[key] = _Refusal(text, now + RETRY_SECONDS, wanted.print, theirs.roles)
            self.problems[key] = text
        elif not sent.failed and key in self._refusals:  # the role that failed has it now
            del self._refusals[key], self.problems[key]
        lost = {role: held.source for role in roles if (held := holders.get(role)) and not self._is_ours(held)}
        if lost:
            by = clean(", ".join(sorted({repr(source) for source in lost.values()})))
            text = f"replaced upstream by source {by} ({_roles(list(lost))}): rename one of the tools"
            self.problems[key] = "; ".join(part for part in (self.problems.get(key), text) if part)

    def _withdrawals(self, name: str, holders: dict[str, Held], now: float) -> list[Step]:
        unwanted = [role for role, held in holders.items() if self._is_ours(held) and self._is_left(name, role, held)]
        if not unwanted:
            self._stuck.pop(name, None)
            return []
        known = self.sources | self.plan.sources
        if now < self._settled_at and not any(holders[role].source in known for role in unwanted):
            return []
        stuck = self._stuck.get(name)
        if stuck is not None and now < stuck.retry_at:
            return []
        if len(unwanted) == len(holders) and not any((name, role) in self._sent for role in unwanted):
            return [Unregister(name, None)]
        return [Unregister(name, role) for role in unwanted]

    def _is_left(self, name: str, role: str, held: Held) -> bool:
        """Whether something of ours is there that should not be, and that no registration will replace."""
        wanted = self.plan.wanted.get((name, role)) or self.plan.wanted.get((name, None))
        return wanted is None or (held.source != wanted.source and wanted.key in self._refusals)

    def _is_ours(self, held: Held) -> bool:
        return held.source.startswith(PREFIX) and held.callback_url.startswith(self._prefix)

    def _roles_of(self, wanted: WantedTool, theirs: Theirs) -> list[str]:
        """The roles that a registration is responsible for."""
        if wanted.role is not None:
            return [wanted.role]
        return [role for role in theirs.roles if (wanted.name, role) not in self.plan.wanted]

    def _forget(self, theirs: Theirs) -> None:
        for key in (self._sent.keys() | self._refusals.keys()) - self.plan.wanted.keys():
            self._sent.pop(key, None)
            self._refusals.pop(key, None)
        for name in self._stuck.keys() - (theirs.names or {}).keys():
            del self._stuck[name]
        holds = {held.source for held_by in (theirs.names or {}).values() for held in held_by.values()}
        self.sources &= self.plan.sources | holds

    # -- noting --------------------------------------------------------------------------------------------------

    def took(self, step: Register, theirs: Theirs, failed: frozenset[str], problem: str, now: float) -> None:
        """A registration was taken, at least in part."""
        wanted = step.wanted
        sent = self._sent.get(wanted.key)
        if sent is None or sent.print != wanted.print:
            sent = self._sent[wanted.key] = _Sent(wanted.print)
        for role in self._roles_of(wanted, theirs) if step.role is None else [step.role]:
            sent.tries[role] = sent.tries.get(role, 0) + 1
            (sent.failed.add if role in failed else sent.failed.discard)(role)
        if failed:
            self._refusals[wanted.key] = _Refusal(problem, now + RETRY_SECONDS, wanted.print, theirs.roles)
        elif not sent.failed:
            self._refusals.pop(wanted.key, None)

    def refused(self, step: Register, theirs: Theirs, problem: str, now: float, *, broke_off: bool = False) -> None:
        """A registration was not taken.

        Args:
            broke_off: no answer came, so it may be worth another try soon.
        """
        wanted = step.wanted
        before = self._refusals.get(wanted.key)
        count = before.count + 1 if before is not None and before.print == wanted.print else 1
        wait = min(RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** (min(count, 10) - 1)) if broke_off else RETRY_SECONDS
        self._refusals[wanted.key] = _Refusal(problem, now + wait, wanted.print, theirs.roles, count)
        sent = self._sent.get(wanted.key)
        if sent is not None and step.role != wanted.role and step.role is not None:
            sent.failed.add(step.role)
        else:
            self._sent.pop(wanted.key, None)

    def asked_to_withdraw(self, step: Unregister, now: float) -> bool:
        """A withdrawal was asked for. Returns whether it is the first time."""
        before = self._stuck.get(step.name)
        count = before.count + 1 if before is not None else 1
        wait = min(RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** (min(count, 10) - 1))
        self._stuck[step.name] = _Refusal("", now + wait, count=count)
        return before is None

    def start_anew(self) -> None:
        """The other side was away: whatever it refused before, it may take now."""
        self._refusals = {key: replace(refusal, retry_at=0.0, count=1) for key, refusal in self._refusals.items()}
        self._stuck = {name: replace(stuck, retry_at=0.0) for name, stuck in self._stuck.items()}


def _is(held: Held, wanted: WantedTool) -> bool:
    return held.source == wanted.source and held.callback_url == wanted.callback_url


def _roles(roles: Sequence[str]) -> str:
    return f"role{'s' if len(roles) > 1 else ''} {clean(', '.join(map(repr, roles)))}"
