"""Decides who may call a tool and who may offer tools: the authorization of the bus.

Listings and calls ask the same function with the same principal and user: what is listed can be called, and what can be
called is listed. Nothing here knows calls, streams or files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeGuard

from toolbus.bus.access.identity import Principal
from toolbus.bus.catalog.entry import BUS_SOURCE, LENT_MODEL, Entry, is_operators
from toolbus.common.text import is_utf8, quote, shorten
from toolbus.errors import InvalidRequest, NotPermitted
from toolbus.protocol.tool import Tool

Key = tuple[str, str]  # a tool's name and its role; "" is every role


class Pinning:
    """Compares the tools of pinned sources with those that are trusted; this one pins none."""

    def pin_of(self, source: str) -> str | None:
        """Returns what happens to a source's changes, `warn` or `block`; None where it is not pinned."""
        return None

    def review(self, source: str, declared: Collection[Tool], *, accepted: bool = False) -> dict[Key, str]:
        """Compares declarations with the trusted ones, and stores those that are new.

        Args:
            accepted: whether the bus took them earlier.

        Returns:
            The tools that wait for an approval, with the reason.
        """
        return {}

    def warnings(self, source: str, tools: Iterable[Key]) -> Mapping[Key, str]:
        """Returns the warnings about tools that a source offers although they changed."""
        return {}


EVERYONE = "*"
TOOLS, GENERATION = "tools", "generation"  # the permissions of a source: to offer tools, to use models that hosts lend
EVERYTHING = "*"  # the verb of what no other verb covers
# The bus's own tools that show each caller only its own data: every caller may call them.
PUBLIC_TOOLS = frozenset({"check_task", "await_task", "list_tasks", "cancel_task", "search_tools", "this_bus"})
PUBLIC_TOOLS |= {"notify", "read_result", "mount_login"}
# The verb that the scope `administer` of an identity needs for each of the others; a tool without one needs EVERYTHING.
VERBS_OF_TOOLS: Mapping[str, str] = {
    **dict.fromkeys(("drain", "cancel_call", "plugin_stop"), "drain"),
    **dict.fromkeys(("calls", "digest", "all_tasks"), "calls"),
    "stats": "metrics",
    **dict.fromkeys(("held_calls", "decide_call"), "permit"),
    "role_add": "roles",
    "role_remove": "roles",
    **dict.fromkeys(
        ("permit", "permissions", "grant", "revoke", "explain", "confirm", "approvals", "approve"), "permit"
    ),
    **dict.fromkeys(("dropin_address", "mounts", "mount_restart", "mount_logs", "mount_logins"), "catalog"),
    **dict.fromkeys(("keys", "key_revoke"), "keys"),
    "audit_head": "audit",
    **dict.fromkeys(("plugin_logs", "log_level", "slow_calls"), "logs"),
    "plugin_restart": "catalog",
}
# The same for the tools of supervisors, sources `run.HOST.PID-ID`.
VERBS_OF_RUNS: Mapping[str, str] = {"plugins": "logs", "tail": "logs", "restart": "catalog", "stop": "drain"}
MAX_USER = 256  # characters of a user's id in a rule
MAX_RULES = 10_000  # in one table

Kind = Literal["tools", "roles", "sources"]
KINDS: tuple[Kind, ...] = ("tools", "roles", "sources")


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Which users may call which tools. A name without a rule is open to everyone.

    Attributes:
        tools: users by tool; a rule for a bare name also holds for the tool's qualified name.
        roles: users by role.
        sources: users by the source that offers the tool.
    """

    tools: Mapping[str, frozenset[str]] = field(default_factory=dict)
    roles: Mapping[str, frozenset[str]] = field(default_factory=dict)
    sources: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tools or self.roles or self.sources)

    @classmethod
    def read(cls, tables: object) -> AccessRules:
        """Reads tables of users by name, as configuration and data directory hold them.

        Raises:
            InvalidRequest: naming the table or rule that is invalid.
        """
        if not isinstance(tables, Mapping):
            raise InvalidRequest(
                f"permissions are {tables!r:.80}: give tables {', '.join(KINDS)}, names to lists of users"
            )
        rules = {}
        for kind, table in tables.items():
            if not isinstance(table, Mapping) and _kind(kind):
                raise InvalidRequest(f"permissions.{kind} is {table!r:.80}: give a table of names to lists of users")
            rules[_kind(kind)] = _fits(kind, {_name(kind, name): _users(kind, name, table[name]) for name in table})
        return cls(**rules)

    def changed(self, kind: str, name: str, users: object) -> AccessRules:
        """Returns these rules with one more, or with one changed.

        Args:
            users: who may call; `*` is everyone, an empty list no user. None removes the rule.

        Raises:
            InvalidRequest: naming what breaks a rule.
        """
        table: dict[str, frozenset[str]] = dict(getattr(self, _kind(kind)))
        table.pop(_name(kind, name), None)
        if users is not None:
            table[name] = _users(kind, name, users)
        return replace(self, **{kind: _fits(kind, table)})

    def rules_for(self, entry: Entry) -> list[tuple[str, str, frozenset[str]]]:
        """Returns all rules that a call of a tool has to pass: (table, name, users) of each."""
        return self.rules_of(entry.name, entry.bare_name, entry.source, entry.table.role or "")

    def rules_of(self, name: str, bare_name: str, source: str, role: str) -> list[tuple[str, str, frozenset[str]]]:
        """Returns the same for names that need not be those of a tool."""
        if not self:
            return []
        names = (name,) if name == bare_name else (name, bare_name)
        rules = [("tools", each, self.tools.get(each)) for each in names]
        rules += [("roles", role, self.roles.get(role)), ("sources", source, self.sources.get(source))]
        return [(kind, name, users) for kind, name, users in rules if users is not None]

    def as_tables(self) -> dict[str, dict[str, list[str]]]:
        """Returns the rules as JSON can represent them."""
        return {kind: {name: sorted(users) for name, users in getattr(self, kind).items()} for kind in KINDS}


class Policy:
    """Grants and denies. An instance belongs to one bus; every method may be called from any thread.

    Args:
        denied: sources that may attach and call but not offer tools (the config key ``silenced``).
        untrusted: sources whose results may hold no secrets and who may not administer the bus (the config key
            ``guarded``). One that ends with ``*`` stands for all sources that begin so.
        generators: sources that may use the models that hosts lend (the config key ``generation``); ``*`` as above.
    """

    def __init__(
        self,
        denied: frozenset[str] = frozenset(),
        permissions: AccessRules | None = None,
        untrusted: Iterable[str] = (),
        generators: Iterable[str] = (),
    ) -> None:
        self.denied = denied  # sources that may not offer tools; replaced in one step by `grant` and `deny`
        self._withdrawn: dict[str, frozenset[str]] = {}  # by denied source, the names of the tools that it had
        self._untrusted = frozenset(untrusted)
        self._untrusted_prefixes = tuple(source[:-1] for source in self._untrusted if source.endswith("*"))
        self._generators = tuple(generators)
        self._generation: dict[str, bool] = {}  # by source, the decisions of operators, which win; replaced as one
        self.permissions = permissions or AccessRules()  # replaced in one step by CatalogView.permit

    def may_offer(self, source: str) -> bool:
        """Tells whether a source may offer tools: whether it has the permission ``tools``."""
        return source not in self.denied

    def grant(self, source: str) -> bool:
        """Lets a source offer tools. Returns whether it could not before. To be called from one thread."""
        if source not in self.denied:
            return False
        self.denied = self.denied - {source}
        self._withdrawn = {each: names for each, names in self._withdrawn.items() if each != source}
        return True

    def deny(self, source: str, names: Iterable[str] = ()) -> bool:
        """Forbids a source to offer tools. Returns whether it could before. To be called from one thread.

        Args:
            names: of the tools that it offers, without those that are hidden from some users, for `withdrawn_from`.
        """
        if source in self.denied:
            return False
        self.denied = self.denied | {source}
        self._withdrawn = self._withdrawn | {source: frozenset(names)}
        return True

    def may_generate(self, source: str) -> bool:
        """Tells whether a source may use the models that hosts lend: whether it has the permission ``generation``."""
        decided = self._generation.get(source)
        return _matches(source, self._generators) if decided is None else decided

    @property
    def generators(self) -> dict[str, bool]:
        """Returns who may use the models that hosts lend, by source; a name with ``*`` stands for all that begin so."""
        return dict.fromkeys(self._generators, True) | self._generation

    def decide_generation(self, source: str, granted: bool) -> bool:
        """Grants or denies a source the permission ``generation``. Returns whether that is a change."""
        changed = self.may_generate(source) is not granted
        self._generation = self._generation | {source: granted}
        return changed

    def permissions_of(self, source: str) -> list[str]:
        """Returns the permissions that a source has."""
        return [TOOLS] * self.may_offer(source) + [GENERATION] * self.may_generate(source)

    def withdrawn_from(self, name: str) -> str | None:
        """Returns the denied source whose tool of this name was withdrawn; None where there was none."""
        return next((source for source, names in self._withdrawn.items() if name in names), None)

    def is_untrusted(self, source: str) -> bool:
        """Tells whether a source is untrusted."""
        return source in self._untrusted or source.startswith(self._untrusted_prefixes)

    @staticmethod
    def hides(principal: Principal, entry: Entry, level: int) -> bool:
        """Tells whether a tool does not exist for a caller: it is above the user's access level, or out of scope."""
        if level < entry.min_level:
            return True
        scopes = principal.identity.scopes
        if scopes is None or is_operators(entry.source):
            return False
        return not scopes.reaches(entry.name, entry.bare_name, entry.source, entry.table.role)

    def denial(self, principal: Principal, entry: Entry, user_id: str = "", level: int = 0) -> str | None:
        """Returns why a principal may not call a tool on behalf of a user, as a sentence; None where it may.

        Args:
            user_id: "" where the caller names no user, or may not name one.
            level: the user's access level, set by the host; the lowest where it sets none.
        """
        if is_operators(entry.source):
            return self._denial_of_own(principal, entry)
        if entry.name == LENT_MODEL and not self.may_generate(principal.source):
            return lacks_generation(principal.source, entry.name)
        if self.hides(principal, entry, level):
            return f"there is no tool {entry.name!r} for this caller"
        if not user_id and principal.may_omit_user:
            return None
        for kind, name, users in self.permissions.rules_for(entry):
            if EVERYONE not in users and user_id not in users:
                who = f"user {quote(user_id)}" if user_id else "a call that names no user (context.user_id)"
                whom = "certain users only" if users else "no user"
                rule = f"{kind[:-1]} {name!r} is open to {whom}, an operator adds them"
                return f"{who} may not call {entry.name!r}: {rule}"
        return None

    def _denial_of_own(self, principal: Principal, entry: Entry) -> str | None:
        own = entry.source == BUS_SOURCE
        if own and entry.bare_name in PUBLIC_TOOLS:
            return None
        if not principal.is_admin or self.is_untrusted(principal.source):
            return f"{entry.name!r} administers the bus, and {principal.source!r} is not an administrator of it"
        try:
            verbs = VERBS_OF_TOOLS if own else VERBS_OF_RUNS
            principal.identity.check_verb(verbs.get(entry.bare_name, EVERYTHING), entry.name)
        except NotPermitted as denial:
            return str(denial)
        return None

    @staticmethod
    def admits(rules: Iterable[tuple[str, str, frozenset[str]]], user_id: str) -> bool:
        """Tells whether a user passes all of some rules."""
        return all(EVERYONE in users or user_id in users for _, _, users in rules)

    def depends_on_user(self, entry: Entry) -> bool:
        """Tells whether the decision depends on the user, so that it must not be cached for a caller."""
        if entry.name == LENT_MODEL:  # and on how deep a generation is nested
            return True
        return entry.min_level > 0 or any(EVERYONE not in users for _, _, users in self.permissions.rules_for(entry))


def lacks_generation(source: str, name: str) -> str:
    """Returns why a source may not use what a host lends, as a sentence."""
    return (
        f"source {source!r} may not call {name!r}: it lacks the permission {GENERATION!r}; an operator grants it with "
        f"`toolbus access grant {source} {GENERATION}`"
    )


def _matches(source: str, patterns: Iterable[str]) -> bool:
    """Tells whether a source is one of some; one that ends with ``*`` stands for all that begin so."""
    return any(source.startswith(each[:-1]) if each.endswith("*") else source == each for each in patterns)


def _kind(kind: str) -> str:
    if kind not in KINDS:
        raise InvalidRequest(f"permissions have no table {quote(str(kind))}: use one of {', '.join(KINDS)}")
    return kind


def _name(kind: str, name: object) -> str:
    if not _is_text(name) or not name:
        raise InvalidRequest(f"permissions.{kind} has a rule for {name!r:.80}: use the name of a tool, role or source")
    return name


def _users(kind: str, name: str, users: object) -> frozenset[str]:
    where = f"permissions.{kind}.{shorten(name)}"
    if isinstance(users, str | bytes | Mapping) or not isinstance(users, Iterable):
        raise InvalidRequest(f"{where} is {users!r:.80}: give a list of user ids, [{EVERYONE!r}] for everyone")
    ids = list(users)
    for user in ids:
        if not _is_text(user) or len(user) > MAX_USER:
            raise InvalidRequest(f"{where} names {user!r:.80}: a user id is a text of at most {MAX_USER} characters")
    return frozenset(ids)


def _fits(kind: str, table: dict[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    if len(table) > MAX_RULES:
        raise InvalidRequest(f"permissions.{kind} has more than {MAX_RULES} rules: write rules for roles or sources")
    return table


def _is_text(value: object) -> TypeGuard[str]:
    """Tells whether a value is a text that can be stored."""
    return isinstance(value, str) and is_utf8(value)
