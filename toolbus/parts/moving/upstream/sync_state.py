"""Decides which registrations to send to a main server, from what it lists and how it responded before.

Pure: a plan and a listing in, steps out; `sync` takes the steps and reports how each ended. A restarted server, one
that lost registrations and a role that was added later all look alike here: something is missing, so it is registered
again. Tools of other owners are never touched: two programs would replace each other's tool every two seconds. The
source of a tool does not show its owner: `ownership` remembers our registrations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from toolbus.parts.moving.upstream.ownership import Ownership, Registration
from toolbus.parts.moving.upstream.plan import Fingerprint, Key, PlannedTool, UpstreamPlan
from toolbus.parts.moving.upstream.upstream_responses import UpstreamListing, UpstreamTool, clean


@dataclass(frozen=True, slots=True)
class UpstreamTimings:
    """How long the upstream waits. Tests give tiny values.

    Attributes:
        poll_seconds: between two listings of a quiet server: lost registrations are repeated then.
        debounce_seconds: after a change, so that a plugin that registers its tools one by one causes few listings.
        first_backoff_seconds, max_backoff_seconds: before the retry of an unreachable server; doubles in between.
        request_seconds: timeout of a whole exchange; REST-11 says that a server responds well within it.
        retry_seconds: until a refused registration is retried unchanged.
        first_retry_seconds: the same after a request without a response; doubles up to ``retry_seconds``.
    """

    poll_seconds: float = 2.0
    debounce_seconds: float = 0.05
    first_backoff_seconds: float = 0.25
    max_backoff_seconds: float = 5.0
    request_seconds: float = 5.0
    retry_seconds: float = 60.0
    first_retry_seconds: float = 2.0


DEFAULT_TIMINGS = UpstreamTimings()


_HOW_TO_RESOLVE = (
    "stop that program, unregister its tool there, or rename one of the tools; the bus registers its own when the name "
    "is free"
)
MAX_TRIES = 2  # registrations of a tool that a role accepts and does not list; a restart in between is not a refusal


@dataclass(frozen=True, slots=True)
class RegisterStep:
    """Registers a tool; ``role`` may be narrower than the planned one."""

    planned: PlannedTool
    role: str | None


@dataclass(frozen=True, slots=True)
class UnregisterStep:
    """Withdraws a name, in one role or in all."""

    name: str
    role: str | None


@dataclass(frozen=True, slots=True)
class ClearStep:
    """Withdraws all tools of a source."""

    source: str


Step = RegisterStep | UnregisterStep


@dataclass(slots=True, eq=False)
class _Accepted:
    """A registration that the main server accepted, as it was then.

    Attributes:
        tries: by role, how often it was registered since the role last listed the tool.
        failed: roles that refused it, or accepted and never listed it.
    """

    fingerprint: Fingerprint
    tries: dict[str, int] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A failed step: not to be retried before its time, unless the roles change."""

    text: str
    retry_at: float
    fingerprint: Fingerprint | None = None
    roles: tuple[str, ...] = ()
    count: int = 1


class SyncState:
    """The state of our tools at one main server.

    Args:
        ownership: our registrations there.
        settled_at: until then tools of unknown sources are left alone: after a restart of ours their plugins may be
            about to reconnect, and would lose their place.
    """

    def __init__(
        self, ownership: Ownership, settled_at: float = 0.0, timings: UpstreamTimings = DEFAULT_TIMINGS
    ) -> None:
        self.plan = UpstreamPlan()
        self.problems: dict[Key, str] = {}  # with planned tools, as of the last decision
        self.ownership = ownership
        self._settled_at = settled_at
        self._timings = timings
        self._accepted: dict[Key, _Accepted] = {}
        self._refusals: dict[Key, _Refusal] = {}
        self._withdrawing: dict[str, _Refusal] = {}  # names for which an unregister was sent, still listed

    def __repr__(self) -> str:
        return f"<SyncState planned={len(self.plan.tools)} accepted={self.registered} refused={len(self._refusals)}>"

    @property
    def registered(self) -> int:
        """How many registrations were accepted."""
        return len(self._accepted)

    # -- deciding ------------------------------------------------------------------------------------------------

    def decide(self, listing: UpstreamListing, now: float) -> list[Step]:
        """Returns the steps, in order, that make a listing match the plan. None of them counts as done yet."""
        self.problems = {}
        steps: list[Step] = []
        for name, holders in listing.names.items():
            steps += self._withdrawals(name, holders, now)
        for by_role in self.plan.by_name.values():
            steps += self._registrations(by_role.values(), listing, now)
        self._forget(listing, now)
        return steps

    def closing(self, listing: UpstreamListing) -> list[UnregisterStep | ClearStep]:
        """Returns the steps that withdraw our tools: a whole source at once where all its listed tools are ours."""
        shared: set[str] = set()
        ours: dict[str, dict[str, UpstreamTool]] = {}
        for name, holders in listing.names.items():
            for role, held in holders.items():
                if self._is_ours(name, role, held):
                    ours.setdefault(name, {})[role] = held
                else:
                    shared.add(held.source)
        sources = {held.source for holders in ours.values() for held in holders.values()}
        steps: list[UnregisterStep | ClearStep] = [ClearStep(source) for source in sorted(sources - shared) if source]
        cleared = {step.source for step in steps if isinstance(step, ClearStep)}
        for name, holders in ours.items():
            left = [role for role, held in holders.items() if held.source not in cleared]
            if left and len(left) == len(listing.holders(name)):
                steps.append(UnregisterStep(name, None))
            else:
                steps += [UnregisterStep(name, role) for role in left]
        return steps

    def unknown_callbacks(self, listing: UpstreamListing, callback_prefix: str, now: float) -> list[str]:
        """Returns the names that are listed with a callback URL of ours although we did not register them."""
        if now < self._settled_at:
            return []
        return [
            name
            for name, holders in listing.names.items()
            if any(
                held.callback_url.startswith(callback_prefix) and not self._is_ours(name, role, held)
                for role, held in holders.items()
            )
        ]

    def _registrations(self, of_name: Iterable[PlannedTool], listing: UpstreamListing, now: float) -> list[Step]:
        steps: list[Step] = []
        overwrites = False  # a registration for all roles replaces those for one role, which then follow it
        for planned in of_name:
            own = self._needed(planned, listing, now)
            if overwrites and not own and planned.key not in self._refusals:
                own = [RegisterStep(planned, planned.role)]
            overwrites = overwrites or any(step.role is None for step in own)
            steps += own
        return steps

    def _needed(self, planned: PlannedTool, listing: UpstreamListing, now: float) -> list[Step]:
        key, roles, holders = planned.key, self._roles_of(planned, listing), listing.holders(planned.name)
        refusal = self._refusals.get(key)
        if refusal is not None and refusal.fingerprint != planned.fingerprint:
            refusal = None
            del self._refusals[key]
        waits = refusal is not None and now < refusal.retry_at and refusal.roles == listing.roles
        if refusal is not None:
            self.problems[key] = refusal.text
        accepted = self._accepted.get(key)
        if accepted is None or accepted.fingerprint != planned.fingerprint:
            return [] if waits else self._first_time(planned, roles, holders)
        due = [role for role in roles if self._is_due(planned, accepted, role, holders.get(role))]
        if not waits:
            due += [role for role in roles if role in accepted.failed]
        self._update_problem(planned, accepted, roles, listing, now)
        return self._steps(planned, due, holders) if due else []

    def _first_time(self, planned: PlannedTool, roles: Sequence[str], holders: dict[str, UpstreamTool]) -> list[Step]:
        """Registers in every role; where others own the name in some roles, in the remaining ones."""
        taken = self._others(planned.name, roles, holders)
        if taken:
            self.problems[planned.key] = (
                f"the name is taken there by {_owners(taken, planned)} ({_roles(list(taken))}): {_HOW_TO_RESOLVE}"
            )
        return self._steps(planned, [role for role in roles if role not in taken], holders)

    def _steps(self, planned: PlannedTool, roles: Sequence[str], holders: dict[str, UpstreamTool]) -> list[Step]:
        """Registers for all roles at once where that replaces no tool of another owner, else role by role."""
        if planned.role is None and not self._others(planned.name, holders, holders):
            return [RegisterStep(planned, None)]
        return [RegisterStep(planned, role) for role in roles]

    def _others(self, name: str, roles: Iterable[str], holders: dict[str, UpstreamTool]) -> dict[str, UpstreamTool]:
        """Returns the tools of other owners that some roles list under a name."""
        listed = {role: holders[role] for role in roles if role in holders}
        return {role: held for role, held in listed.items() if not self._is_ours(name, role, held)}

    def _is_due(self, planned: PlannedTool, accepted: _Accepted, role: str, held: UpstreamTool | None) -> bool:
        """Notes what one role lists; returns whether the tool should be registered again."""
        if held is not None and (
            not self._is_ours(planned.name, role, held)  # a retry would replace another owner's tool
            or (planned.registration(None).made(held) and held.description == planned.tool.description)
        ):
            accepted.tries[role] = 0
            accepted.failed.discard(role)
            return False
        return role not in accepted.failed and accepted.tries.get(role, 0) < MAX_TRIES

    def _update_problem(
        self, planned: PlannedTool, accepted: _Accepted, roles: Sequence[str], listing: UpstreamListing, now: float
    ) -> None:
        """Sets the problem of a registration that was accepted."""
        key = planned.key
        never = [role for role in roles if role not in accepted.failed and accepted.tries.get(role, 0) >= MAX_TRIES]
        if never:
            accepted.failed.update(never)
            text = f"accepted the tool and does not list it as it was sent: {_roles(never)}"
            retry_at = now + self._timings.retry_seconds
            self._refusals[key] = _Refusal(text, retry_at, planned.fingerprint, listing.roles)
            self.problems[key] = text
        elif not accepted.failed and key in self._refusals:  # the role that failed lists it now
            del self._refusals[key], self.problems[key]
        lost = self._others(planned.name, roles, listing.holders(planned.name))
        if lost:
            text = f"replaced upstream by {_owners(lost, planned)} ({_roles(list(lost))}): {_HOW_TO_RESOLVE}"
            self.problems[key] = "; ".join(part for part in (self.problems.get(key), text) if part)

    def _withdrawals(self, name: str, holders: dict[str, UpstreamTool], now: float) -> list[Step]:
        leftover = [
            role
            for role, held in holders.items()
            if self._is_ours(name, role, held) and self._is_left(name, role, held)
        ]
        if not leftover:
            self._withdrawing.pop(name, None)
            return []
        known = self.ownership.sources | self.plan.sources
        if now < self._settled_at and not any(holders[role].source in known for role in leftover):
            return []
        earlier = self._withdrawing.get(name)
        if earlier is not None and now < earlier.retry_at:
            return []
        if len(leftover) == len(holders) and not any((name, role) in self._accepted for role in leftover):
            return [UnregisterStep(name, None)]
        return [UnregisterStep(name, role) for role in leftover]

    def _is_left(self, name: str, role: str, held: UpstreamTool) -> bool:
        """Returns whether a tool of ours is listed without a plan for it, and no registration will replace it."""
        planned = self._planned(name, role)
        return planned is None or (planned.key in self._refusals and not planned.registration(None).made(held))

    def _is_ours(self, name: str, role: str, held: UpstreamTool) -> bool:
        """Returns whether we have registered a tool, or would register the very same one."""
        planned = self._planned(name, role)
        return (planned is not None and planned.registration(None).made(held)) or self.ownership.owns(name, role, held)

    def _planned(self, name: str, role: str | None) -> PlannedTool | None:
        return self.plan.tools.get((name, role)) or self.plan.tools.get((name, None))

    def _is_planned(self, registration: Registration) -> bool:
        planned = self._planned(registration.name, registration.role)
        return planned is not None and planned.registration(registration.role) == registration

    def _roles_of(self, planned: PlannedTool, listing: UpstreamListing) -> list[str]:
        """The roles that a registration is responsible for."""
        if planned.role is not None:
            return [planned.role]
        return [role for role in listing.roles if (planned.name, role) not in self.plan.tools]

    def _forget(self, listing: UpstreamListing, now: float) -> None:
        for key in (self._accepted.keys() | self._refusals.keys()) - self.plan.tools.keys():
            self._accepted.pop(key, None)
            self._refusals.pop(key, None)
        for name in self._withdrawing.keys() - listing.names.keys():
            del self._withdrawing[name]
        self.ownership.forget(listing, self._is_planned, now)

    # -- results -------------------------------------------------------------------------------------------------

    def note_sending(self, steps: Iterable[Step], now: float) -> None:
        """Notes registrations before they are sent."""
        for step in steps:
            if isinstance(step, RegisterStep):
                self.ownership.add(step.planned.registration(step.role), now)

    def note_accepted(
        self, step: RegisterStep, listing: UpstreamListing, failed: frozenset[str], problem: str, now: float
    ) -> None:
        """Notes that a registration was accepted, at least in some roles."""
        planned = step.planned
        accepted = self._accepted.get(planned.key)
        if accepted is None or accepted.fingerprint != planned.fingerprint:
            accepted = self._accepted[planned.key] = _Accepted(planned.fingerprint)
        for role in self._roles_of(planned, listing) if step.role is None else [step.role]:
            accepted.tries[role] = accepted.tries.get(role, 0) + 1
            (accepted.failed.add if role in failed else accepted.failed.discard)(role)
        if failed:
            retry_at = now + self._timings.retry_seconds
            self._refusals[planned.key] = _Refusal(problem, retry_at, planned.fingerprint, listing.roles)
        elif not accepted.failed:
            self._refusals.pop(planned.key, None)

    def note_refused(
        self, step: RegisterStep, listing: UpstreamListing, problem: str, now: float, *, no_response: bool = False
    ) -> None:
        """Notes that a registration was not accepted.

        Args:
            no_response: no response came, so it is retried soon.
        """
        planned = step.planned
        before = self._refusals.get(planned.key)
        count = before.count + 1 if before is not None and before.fingerprint == planned.fingerprint else 1
        wait = self._backoff(count) if no_response else self._timings.retry_seconds
        self._refusals[planned.key] = _Refusal(problem, now + wait, planned.fingerprint, listing.roles, count)
        accepted = self._accepted.get(planned.key)
        if accepted is not None and step.role != planned.role and step.role is not None:
            accepted.failed.add(step.role)
        else:
            self._accepted.pop(planned.key, None)

    def note_unregister(self, step: UnregisterStep, now: float) -> bool:
        """Notes that an unregister is sent. Returns whether it is the first one for this name."""
        before = self._withdrawing.get(step.name)
        count = before.count + 1 if before is not None else 1
        self._withdrawing[step.name] = _Refusal("", now + self._backoff(count), count=count)
        return before is None

    def retry_all(self) -> None:
        """Retries all refusals at once: the main server was unreachable, and may accept now what it refused before."""
        self._refusals = {key: replace(refusal, retry_at=0.0, count=1) for key, refusal in self._refusals.items()}
        self._withdrawing = {name: replace(each, retry_at=0.0) for name, each in self._withdrawing.items()}

    def _backoff(self, count: int) -> float:
        return min(self._timings.retry_seconds, self._timings.first_retry_seconds * 2.0 ** (min(count, 10) - 1))


def _owners(held: dict[str, UpstreamTool], planned: PlannedTool) -> str:
    """Returns the sources of others' tools; the callback URLs too where a source is called like ours."""
    owners = {
        f"source {each.source!r}" + (f" at {each.callback_url!r}" if each.source == planned.source else "")
        for each in held.values()
    }
    return clean(", ".join(sorted(owners)))


def _roles(roles: Sequence[str]) -> str:
    return f"role{'s' if len(roles) > 1 else ''} {clean(', '.join(map(repr, roles)))}"
