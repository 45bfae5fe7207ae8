"""Declares the guards of a bus and which calls need an approval, as the configuration names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolbus.bus.access.identity import Globs
from toolbus.common.reader import Keys, Reader
from toolbus.common.setting import CheckedRecord, setting, table
from toolbus.common.text import quote
from toolbus.errors import SetupError

MAX_GUARDS = 100
MAX_BUDGET_MS = 60_000.0
BEFORE, AFTER, BOTH = "before", "after", "both"
REFUSE, ALLOW = "refuse", "allow"
OPERATOR, USER, EITHER = "operator", "user", "either"
MAX_EXPIRE_SECONDS = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class GuardRule:
    """Which calls a guard sees.

    Attributes:
        guard: the tool that decides, by its listed name.
        on_failure: what happens to a call that the guard does not decide: ``refuse`` or ``allow``.
        tools: patterns of the tools, ``NAME`` or ``SOURCE:NAME``.
        sources, roles: patterns of the sources and roles of tools; a call is seen if any pattern of the three fits.
        when: ``before`` a call is sent, ``after`` its result came, or ``both``.
        budget_ms: how long the guard has for each look, in milliseconds.

    Raises:
        SetupError: from the constructor; a value breaks a rule.
    """

    guard: str
    on_failure: str
    tools: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    when: str = BEFORE
    budget_ms: float = 1000.0

    def __post_init__(self) -> None:
        if not self.guard:
            raise SetupError("guard is missing: name the tool that decides")
        if self.on_failure not in (REFUSE, ALLOW):
            raise SetupError(
                f"on_failure is {quote(self.on_failure)}, it must be refuse or allow: say whether calls run that "
                f"{quote(self.guard)} does not decide, since it hangs, fails or is gone"
            )
        if not (self.tools or self.sources or self.roles):
            raise SetupError(
                f"the guard {quote(self.guard)} names neither tools, sources nor roles, so it sees no call: "
                'write tools = ["*"] for all of them'
            )

    def sees(self, when: str, name: str, bare_name: str, source: str, role: str | None) -> bool:
        """Tells whether calls of a tool pass the guard."""
        return self.when in (when, BOTH) and fits(self, name, bare_name, source, role)


@dataclass(frozen=True, slots=True)
class ApprovalRule:
    """Which calls need somebody's approval.

    Attributes:
        tools, sources, roles: as in `GuardRule`.
        destructive: whether the rule is for all tools that are marked destructive.
        ask: ``operator``, ``user`` (the caller's, who is asked as tools ask), or ``either``: the user where the caller
            can ask, else an operator.
        expire_seconds: how long a call can be allowed, and an approval be used.

    Raises:
        SetupError: from the constructor; a value breaks a rule.
    """

    tools: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    destructive: bool = False
    ask: str = OPERATOR
    expire_seconds: float = 3600.0

    def __post_init__(self) -> None:
        if not (self.tools or self.sources or self.roles or self.destructive):
            raise SetupError(
                "an approval names neither tools, sources nor roles, so no call needs it: write tools = [...], or "
                "destructive = true"
            )


def fits(rule: GuardRule | ApprovalRule, name: str, bare_name: str, source: str, role: str | None) -> bool:
    """Tells whether a rule names a tool, its source or its role."""
    return (
        Globs(rule.tools).match(name, bare_name, f"{source}:{bare_name}")
        or Globs(rule.sources).match(source)
        or (role is not None and Globs(rule.roles).match(role))
    )


_WHICH: Keys = {name: (name, Reader.names) for name in ("tools", "sources", "roles")}
_KEYS: Keys = {
    "guard": ("guard", Reader.text),
    "on_failure": ("on_failure", Reader.text),
    **_WHICH,
    "when": ("when", lambda reader: reader.choice((BEFORE, AFTER, BOTH))),
    "budget_ms": ("budget_ms", lambda reader: reader.number(1, MAX_BUDGET_MS)),
}
_APPROVAL_KEYS: Keys = {
    **_WHICH,
    "destructive": ("destructive", Reader.flag),
    "ask": ("ask", lambda reader: reader.choice((OPERATOR, USER, EITHER))),
    "expire_seconds": ("expire_seconds", lambda reader: reader.number(1, MAX_EXPIRE_SECONDS)),
}


def _check(name: str, rules: tuple[Any, ...]) -> None:
    if len(rules) > MAX_GUARDS:
        raise SetupError(f"{name} has {len(rules)} records, at most {MAX_GUARDS} are possible: let one be for more")


@dataclass(frozen=True, slots=True)
class GuardSettings(CheckedRecord):
    """The guards of a bus, in the order in which they see a call, and which calls need an approval."""

    guards: tuple[GuardRule, ...] = setting(
        (), table(lambda each: each.records(GuardRule, _KEYS, guard="", on_failure="")), check=_check
    )
    approvals: tuple[ApprovalRule, ...] = setting(
        (), table(lambda each: each.records(ApprovalRule, _APPROVAL_KEYS)), check=_check
    )

    @property
    def needed_room(self) -> str:
        """The room that asks the guards and people; "" where there is nobody to ask."""
        return "GuardsRoom" if self.guards or self.approvals else ""
