"""Declares the principal: who calls or lists, as the policy and the listings of the catalog see it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from toolbus.bus.access.identity import LOCAL, Identity, Scopes
from toolbus.functions.scope import ToolScope


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
