"""Who may call what, and who may offer. Pure questions that the dispatcher and every listing ask.

A listing and a call ask the same function with the same caller and user: what is listed can be called, what can be
called is listed (design.md 6). Nothing here knows calls, streams or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeGuard

from toolbus.bus.catalog.entry import BUS_SOURCE, Entry
from toolbus.errors import InvalidRequest

EVERYONE = "*"
# Of the bus's own tools those that answer each caller with its own: everybody may call them.
FOR_EVERYONE = frozenset({"check_task", "await_task", "list_tasks", "cancel_task", "search_tools", "this_bus"})
MAX_USER = 256  # characters of a user's id in a rule
MAX_RULES = 10_000

Kind = Literal["tools", "roles", "sources"]
KINDS: tuple[Kind, ...] = ("tools", "roles", "sources")


class Caller(Protocol):
    """What a policy may know about who asks."""

    @property
    def source(self) -> str:
        """Whose calls they are."""

    @property
    def is_admin(self) -> bool:
        """Whether it may call the bus's own tools."""

    @property
    def may_omit_user(self) -> bool:
        """Whether its calls without a user pass where users are named: Stargazer's rule for ""."""


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Which users may call what. A name that is not in a table is open to everyone.

    Attributes:
        tools: users by tool; a rule for a bare name also holds for the tool's qualified name.
        roles: users by role.
        sources: users by the source that offers.
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
            InvalidRequest: a table or rule is none.
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
            users: who may; `*` is everyone, nobody where it is empty. None takes the rule away.

        Raises:
            InvalidRequest: naming what breaks a rule.
        """
        table: dict[str, frozenset[str]] = dict(getattr(self, _kind(kind)))
        table.pop(_name(kind, name), None)
        if users is not None:
            table[name] = _users(kind, name, users)
        return replace(self, **{kind: _fits(kind, table)})

    def rules_for(self, entry: Entry) -> list[tuple[str, str, frozenset[str]]]:
        """Returns the rules that a call of a tool has to pass, all of them: (table, name, users)."""
        if not self:
            return []
        names = (entry.name,) if entry.name == entry.bare_name else (entry.name, entry.bare_name)
        role = entry.table.role or ""
        found = [("tools", name, self.tools.get(name)) for name in names]
        found += [("roles", role, self.roles.get(role)), ("sources", entry.source, self.sources.get(entry.source))]
        return [(kind, name, users) for kind, name, users in found if users is not None]

    def as_tables(self) -> dict[str, dict[str, list[str]]]:
        """Returns the rules as JSON can hold them."""
        return {kind: {name: sorted(users) for name, users in getattr(self, kind).items()} for kind in KINDS}


class Policy:
    """The rules in force. An instance belongs to one bus; every method may be called from any thread.

    Args:
        silenced: sources that may attach and call but not offer tools.
        guarded: sources that are trusted less: their results may hold no secrets, and they may not administer the bus.
            One that ends with ``*`` stands for all that begin so.
    """

    def __init__(
        self,
        silenced: frozenset[str] = frozenset(),
        permissions: AccessRules | None = None,
        guarded: Iterable[str] = (),
    ) -> None:
        self._silenced = silenced  # replaced in one step by `silence`
        self._withdrawn: dict[str, frozenset[str]] = {}  # by source without the right, the names that it had
        self._guarded = frozenset(guarded)
        self._guarded_beginnings = tuple(source[:-1] for source in self._guarded if source.endswith("*"))
        self.permissions = permissions or AccessRules()  # replaced in one step by View.permit

    def may_offer(self, source: str) -> bool:
        """Whether a source has the right ``tools``."""
        return source not in self._silenced

    @property
    def silenced(self) -> frozenset[str]:
        """The sources that lack the right ``tools``."""
        return self._silenced

    def silence(self, source: str, silenced: bool, names: Iterable[str] = ()) -> bool:
        """Takes the right ``tools`` from a source, or gives it back. Returns whether that changed anything.

        To be called from one thread; others may read meanwhile.

        Args:
            names: under which it offers tools that nobody is hidden from, for `withdrawn_from`.
        """
        if (source in self._silenced) is silenced:
            return False
        self._silenced = self._silenced | {source} if silenced else self._silenced - {source}
        others = {each: had for each, had in self._withdrawn.items() if each != source}
        self._withdrawn = others | ({source: frozenset(names)} if silenced else {})
        return True

    def withdrawn_from(self, name: str) -> str | None:
        """Returns the source that lost a tool of a name together with the right to offer it; None where none did."""
        return next((source for source, names in self._withdrawn.items() if name in names), None)

    def is_untrusted(self, source: str) -> bool:
        """Whether a source is trusted less than others."""
        return source in self._guarded or source.startswith(self._guarded_beginnings)

    @staticmethod
    def hides(entry: Entry, level: int) -> bool:
        """Whether a tool is above a user's access level: then it is as if there were none."""
        return level < entry.min_level

    def refusal(self, caller: Caller, entry: Entry, user_id: str = "", level: int = 0) -> str | None:
        """Why a caller may not call a tool on behalf of a user, as a sentence; None where it may.

        Args:
            user_id: "" where the caller did not say, or may not say.
            level: the user's access level, by the host; the lowest where it did not say.
        """
        if entry.source == BUS_SOURCE:
            may = entry.bare_name in FOR_EVERYONE or (caller.is_admin and not self.is_untrusted(caller.source))
            return None if may else f"{entry.name!r} administers the bus; {caller.source!r} has no right to"
        if self.hides(entry, level):
            return f"there is no tool {entry.name!r} for this caller"
        if not user_id and caller.may_omit_user:
            return None
        for kind, name, users in self.permissions.rules_for(entry):
            if EVERYONE not in users and user_id not in users:
                who = f"user {user_id[:80]!r}" if user_id else "a call that names no user (context.user_id)"
                whom = "certain users only" if users else "nobody"
                rule = f"{kind[:-1]} {name!r} is open to {whom}, an operator adds them"
                return f"{who} may not call {entry.name!r}: {rule}"
        return None

    def asks_for_user(self, entry: Entry) -> bool:
        """Whether the answer depends on the user, so that it must not be kept for a caller."""
        return entry.min_level > 0 or any(EVERYONE not in users for _, _, users in self.permissions.rules_for(entry))


def _kind(kind: str) -> str:
    if kind not in KINDS:
        raise InvalidRequest(f"permissions have no table {str(kind)[:80]!r}: there are {', '.join(KINDS)}")
    return kind


def _name(kind: str, name: object) -> str:
    if not _is_text(name) or not name:
        raise InvalidRequest(f"permissions.{kind} has a rule for {name!r:.80}: name what it is for")
    return name


def _users(kind: str, name: str, users: object) -> frozenset[str]:
    where = f"permissions.{kind}.{name[:80]}"
    if isinstance(users, str | bytes | Mapping) or not isinstance(users, Iterable):
        raise InvalidRequest(f"{where} is {users!r:.80}: give a list of user ids, [{EVERYONE!r}] for everyone")
    found = list(users)
    for user in found:
        if not _is_text(user) or len(user) > MAX_USER:
            raise InvalidRequest(f"{where} names {user!r:.80}: a user id is a text of at most {MAX_USER} characters")
    return frozenset(found)


def _fits(kind: str, table: dict[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    if len(table) > MAX_RULES:
        raise InvalidRequest(f"permissions.{kind} has more than {MAX_RULES} rules: use a rule for a role or a source")
    return table


def _is_text(value: object) -> TypeGuard[str]:
    """Whether a value is a text that can be written down: JSON can also spell half of a surrogate pair."""
    return isinstance(value, str) and value.encode("utf-8", "replace").decode() == value
