"""Declares identities, which prove who a peer is, and their scopes: what each may do.

Pure matching and the texts of refusals. It does not know what proves an identity (the kernel, a token, a certificate,
a JWT), nor calls, streams or files. A scope is a list of globs that allow; only ``never`` denies, and it wins.
An empty list allows nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Literal

from toolbus.common.reader import Keys, Reader
from toolbus.common.text import list_names, quote
from toolbus.errors import NotPermitted, SetupError
from toolbus.functions.scope import ToolScope
from toolbus.protocol.tool import MAX_LEVEL

How = Literal["uid", "token", "cert", "jwt"]
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
VERBS = ("drain", "permit", "roles", "catalog", "calls", "metrics", "keys", "audit", "logs", "council", "reflect")
ALL = "*"
MAX_PATTERN = 256  # characters
MAX_PATTERNS = 1_000  # of one scope
MAX_SHOWN = 5  # patterns that a refusal names


class Globs:
    """Patterns of names: ``*`` stands for any characters, ``?`` for one; capitals count."""

    __slots__ = ("_match", "patterns")

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self.patterns = tuple(patterns)
        parts = (re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".") for pattern in self.patterns)
        self._match = re.compile("|".join(parts) if self.patterns else r"(?!)", re.DOTALL).fullmatch

    def __repr__(self) -> str:
        return f"<Globs {' '.join(self.patterns)}>"

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def __str__(self) -> str:
        return list_names(self.patterns, MAX_SHOWN) if self.patterns else "nothing"

    def match(self, *names: str) -> bool:
        """Tells whether one of some names fits one of the patterns."""
        return any(self._match(name) is not None for name in names)

    @property
    def all(self) -> bool:
        """Whether every name fits."""
        return ALL in self.patterns


_NONE = Globs()
_EVERY = Globs([ALL])


@dataclass(frozen=True, slots=True, eq=False)
class Scopes:
    """What an identity may do. Two of them are equal only if they are the same object, so they can be keys of caches.

    Attributes:
        attach: sources as which it may attach.
        offer: names of tools that it may offer there.
        call: tools that it sees and may call: ``NAME`` or ``SOURCE:NAME``.
        never: tools that it does not see although ``call`` allows them.
        roles: roles in which it sees and may call tools.
        users: users on whose behalf it may call; another user is refused.
        level: the highest access level that it may state for a user.
        administer: what it may do to the bus: of `VERBS`, or ``*``.
        rate: calls a second, in bursts of twice as many; None: no limit.
        in_flight: calls at the same time, over all its sessions; 0: it sees tools and calls none; None: no limit of its
            own.
        sessions: streams at the same time; None: no limit of its own.
    """

    attach: Globs = _NONE
    offer: Globs = _NONE
    call: Globs = _NONE
    never: Globs = _NONE
    roles: Globs = _EVERY
    users: Globs = _NONE
    level: int = 0
    administer: frozenset[str] = frozenset()
    rate: float | None = None
    in_flight: int | None = None
    sessions: int | None = None

    @classmethod
    def read(cls, reader: Reader) -> Scopes:
        """Reads the table of an identity.

        Raises:
            SetupError: naming the place, the value, the rule and how to fix it.
        """
        return cls(**reader.record(_KEYS))

    def as_table(self) -> dict[str, object]:
        """Returns the scopes as a file holds them; what has its default is left out."""
        table: dict[str, object] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Globs):
                value, default = list(value.patterns), list(getattr(_NOTHING, each.name).patterns)
            elif isinstance(value, frozenset):
                value, default = sorted(value), []
            else:
                default = getattr(_NOTHING, each.name)
            if value != default:
                table[each.name] = value
        return table

    def reaches(self, name: str, bare_name: str, source: str, role: str | None) -> bool:
        """Tells whether a tool exists for the identity: whether it sees it in listings and may call it."""
        names = (name, bare_name, f"{source}:{bare_name}")
        if not self.call.match(*names) or self.never.match(*names):
            return False
        return self.has_role(role or "")

    def has_role(self, role: str) -> bool:
        """Tells whether a role exists for the identity."""
        return self.roles.all or self.roles.match(role)

    def reaches_name(self, name: str, source: str) -> bool:
        """Tells whether a tool exists for the identity in some role, by the name of listings and records."""
        return (
            self.reaches(name, name.removeprefix(f"{source}:"), source, None)
            if self.roles.all
            else (self.call.match(name, f"{source}:{name}") and not self.never.match(name, f"{source}:{name}"))
        )

    def administers(self, verb: str) -> bool:
        """Tells whether it may do something to the bus.

        Args:
            verb: one of `VERBS`.
        """
        return verb in self.administer or ALL in self.administer


_NOTHING = Scopes()


@dataclass(frozen=True, slots=True, eq=False)
class Identity:
    """Who a peer is.

    Attributes:
        name: of the identity; "" for the programs of this machine that the bus trusts, see `LOCAL`.
        scopes: what it may do; None: everything, as the programs of this machine may.
        key: the id of the key that proved it; "" where the kernel did.
        how: what proved it.
        expires: when its key ends, in seconds since the epoch.
        proof: distinguishes keys of one id: the SHA-256 of the key; for a JWT the id of the key that signed it.
    """

    name: str
    scopes: Scopes | None
    key: str = ""
    how: How = "uid"
    expires: float = math.inf
    proof: str = ""

    def __repr__(self) -> str:
        return f"<Identity {self.name or 'local'} key={self.key or '-'} how={self.how}>"

    @property
    def shown(self) -> str:
        """The identity and its key, for messages."""
        return f"identity {self.name!r} (key {self.key})" if self.key else f"identity {self.name or 'local'!r}"

    def administers(self, verb: str) -> bool:
        """Tells whether it may do something to the bus."""
        return self.scopes is None or self.scopes.administers(verb)

    def may_attach(self, source: str) -> bool:
        """Tells whether it may attach as a source."""
        return self.scopes is None or self.scopes.attach.match(source)

    def check_attach(self, source: str) -> None:
        """Checks the source of an attach.

        Raises:
            NotPermitted: the identity may not attach as that source.
        """
        if self.scopes is not None and not self.may_attach(source):
            raise NotPermitted(
                f"{self.shown} may not attach as source {quote(source)}: it may attach as {self.scopes.attach} (its "
                "scope attach, which an operator of the bus sets)"
            )

    def refused_offers(self, names: Iterable[str]) -> list[str]:
        """Returns the names of tools that it may not offer, out of some."""
        return [] if self.scopes is None else [name for name in names if not self.scopes.offer.match(name)]

    def check_offers(self, names: Iterable[str]) -> None:
        """Checks names of tools.

        Raises:
            NotPermitted: the identity may not offer one of them.
        """
        refused = self.refused_offers(names)
        if refused and self.scopes is not None:
            raise NotPermitted(
                f"{self.shown} may not offer {list_names(map(quote, refused), MAX_SHOWN)}: it may offer "
                f"{self.scopes.offer} (its scope offer, which an operator of the bus sets)"
            )

    def check_verb(self, verb: str, action: str) -> None:
        """Checks an action on the bus.

        Args:
            verb: one of `VERBS`.
            action: as the error names it: ``DELETE /api/tasks``.

        Raises:
            NotPermitted: the identity may not.
        """
        if not self.administers(verb):
            raise NotPermitted(
                f"{self.shown} may not use {action}: that needs {verb!r} in its scope administer, which an operator "
                "of the bus sets"
            )

    def check_claims(self, user_id: str, level: int) -> None:
        """Checks on whose behalf it acts.

        Raises:
            NotPermitted: it may not speak for this user, or not state this level.
        """
        scopes = self.scopes
        if scopes is None:
            return
        if user_id and not scopes.users.match(user_id):
            raise NotPermitted(
                f"{self.shown} may not act for user {quote(user_id)}: it may act for {scopes.users} (its scope users, "
                "which an operator of the bus sets)"
            )
        if level > scopes.level:
            raise NotPermitted(
                f"{self.shown} may not state level {level}: {scopes.level} is the highest (its scope level, which an "
                "operator of the bus sets)"
            )

    @property
    def may_call(self) -> bool:
        """Whether it may call anything at all."""
        return self.scopes is None or self.scopes.in_flight != 0

    @property
    def claims_matter(self) -> bool:
        """Whether each of its calls has to be checked for its user and level."""
        scopes = self.scopes
        return scopes is not None and not (scopes.users.all and scopes.level >= MAX_LEVEL and self.may_call)

    def has_expired(self, now: float) -> bool:
        """Tells whether its key has ended, at a time in seconds since the epoch."""
        return now >= self.expires


# A program of this machine whose user the bus trusts: it may do everything.
LOCAL = Identity("", None)
# A client without a key: may read the paths that need no key.
ANONYMOUS = Identity("nobody", _NOTHING)


def day_of(moment: float) -> str:
    """Returns the day of a time in seconds since the epoch, as messages show it (UTC)."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d") if math.isfinite(moment) else "never"


def _globs(reader: Reader) -> Globs:
    readers = [reader] if isinstance(reader.value, str) else reader.items()
    if len(readers) > MAX_PATTERNS:
        raise reader.error(f"it has more than {MAX_PATTERNS} patterns", "use * in fewer")
    for each in readers:
        pattern = each.text()
        if not pattern or len(pattern) > MAX_PATTERN:
            raise each.error(f"a pattern has 1 to {MAX_PATTERN} characters")
    return Globs(each.text() for each in readers)


def _verbs(reader: Reader) -> frozenset[str]:
    readers = [reader] if isinstance(reader.value, str) else reader.items()
    return frozenset(each.choice((*VERBS, ALL)) for each in readers)


def _count(reader: Reader) -> int:
    return reader.whole(0, 1_000_000)


_KEYS: Keys = {
    **{name: (name, _globs) for name in ("attach", "offer", "call", "never", "roles", "users")},
    "level": ("level", lambda reader: reader.whole(0, MAX_LEVEL)),
    "administer": ("administer", _verbs),
    "rate": ("rate", lambda reader: reader.number(0.001, 1e9)),
    "in_flight": ("in_flight", _count),
    "sessions": ("sessions", _count),
}


def read_identities(reader: Reader) -> Mapping[str, Scopes]:
    """Reads a table of identities: the scopes of each by its name.

    Raises:
        SetupError: naming the place, the value, the rule and how to fix it.
    """
    scopes: dict[str, Scopes] = {}
    for name, table in reader.entries().items():
        if not NAME.fullmatch(name):
            raise SetupError(f"{table.place}: the name {quote(name)} breaks the rule {NAME.pattern}: choose another")
        scopes[name] = Scopes.read(table)
    return scopes


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls or lists; by default a program of this machine.

    Attributes:
        source: the source that calls or lists; "" for one that only lists.
        is_admin: whether it may call the bus's own tools.
        may_omit_user: whether its calls without a user pass rules that name users, as Stargazer treats the user "".
        identity: who the peer is, once proven.
    """

    source: str = ""
    is_admin: bool = True
    may_omit_user: bool = False
    identity: Identity = LOCAL

    @property
    def account(self) -> str:
        """The account that its calls count for: its identity, or its source where it is a program of this machine."""
        return f"identity {self.identity.name}" if self.identity.scopes is not None else self.source

    def of_source(self, source: str) -> Principal:
        """Returns the same peer as a source."""
        return replace(self, source=source)


OBSERVER = Principal()
PROGRAM = Principal("local")  # this process itself
_UNKNOWN = Principal(is_admin=False, identity=Identity("unknown", Scopes()))


def principal_of(scope: ToolScope) -> Principal:
    """Returns who made the outermost call that a function of the bus answers; one without scopes if unknown."""
    return scope.principal if isinstance(scope.principal, Principal) else _UNKNOWN
