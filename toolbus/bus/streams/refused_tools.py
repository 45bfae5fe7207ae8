"""Stores which tools of attached sessions the bus refused and why, within bounds, and writes them as messages.

A *refusal* has a copy of the declaration only where a change elsewhere can fix it: of a permission, a role, a limit or
an approval. It lives as long as its session.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TypeVar

from toolbus.bus.access.identity import Identity
from toolbus.bus.streams.peer import Peer
from toolbus.common.text import shorten
from toolbus.protocol.limits import KIB, MIB
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

MAX_NAME, MAX_ERROR = 128, 1_000  # characters that are stored and shown: a refused name may be of any length
MAX_SHOWN, TEXT_BYTES = 1_000, 64 * KIB  # refusals of one message, and their texts in all
LISTED_BYTES = 512 * KIB  # refusals of one listing: the tools of its page have 3 MiB, and a default client receives 4
DEFAULT_RECEIVE_BYTES = 4 * MIB  # of a gRPC client that does not say otherwise
MAX_OF_SESSION, SESSION_BYTES = 1_000, 1 * MIB  # refusals that are stored, and their declarations
MAX_OF_BUS, BUS_BYTES = 20_000, 32 * MIB


class Cause(Enum):
    """What has to change before a refused tool can be offered: its declaration, or something of the bus."""

    DECLARATION = auto()
    PERMISSION = auto()
    ROLE = auto()
    LIMIT = auto()
    APPROVAL = auto()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A declared tool that was refused.

    Attributes:
        role: that the declaration is for; "" is every role.
        error: the value, the rule and how to fix it.
        declaration: to be judged again; None where the declaration itself is at fault, or did not fit.
    """

    name: str
    role: str
    error: str
    cause: Cause
    declaration: pb.Tool | None = None

    @classmethod
    def of(cls, declared: pb.Tool, error: str, cause: Cause) -> Refusal:
        """Returns the refusal of a declaration, copied out of its frame."""
        copy = None
        if cause is not Cause.DECLARATION:
            copy = pb.Tool()
            copy.CopyFrom(declared)
        return cls(
            shorten(declared.name, MAX_NAME), shorten(declared.role, MAX_NAME), shorten(error, MAX_ERROR), cause, copy
        )

    @property
    def key(self) -> tuple[str, str]:
        """Names the declaration within its session."""
        return self.name, self.role

    @property
    def size(self) -> int:
        """The bytes of the stored declaration."""
        return 0 if self.declaration is None else self.declaration.ByteSize()


class SessionRefusals:
    """The refusals of the attached sessions of one bus, at most `MAX_OF_SESSION` of each and `MAX_OF_BUS` of all.

    Changed on the bus's loop alone; `listed` and `find` may be called from any thread.
    """

    def __init__(self) -> None:
        self._by_peer: dict[Peer, tuple[Refusal, ...]] = {}
        self._count = 0
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<SessionRefusals {self._count} of {len(self._by_peer)} sessions, {self._bytes} bytes>"

    def __len__(self) -> int:
        return self._count

    @property
    def peers(self) -> list[Peer]:
        """The sessions that have refusals."""
        return list(self._by_peer)

    def of(self, peer: Peer) -> tuple[Refusal, ...]:
        """Returns the refusals of a session."""
        return self._by_peer.get(peer, ())

    def set(self, peer: Peer, refusals: Iterable[Refusal]) -> None:
        """Replaces the refusals of a session; what does not fit is left out, declarations before their refusals."""
        self.drop(peer)
        room, space = min(MAX_OF_SESSION, MAX_OF_BUS - self._count), min(SESSION_BYTES, BUS_BYTES - self._bytes)
        stored: list[Refusal] = []
        for refusal in refusals:
            if len(stored) >= room:
                break
            if refusal.size > space:
                refusal = replace(refusal, declaration=None)
            space -= refusal.size
            stored.append(refusal)
        if stored:
            self._by_peer[peer] = tuple(stored)
            self._count += len(stored)
            self._bytes += sum(each.size for each in stored)

    def drop(self, peer: Peer) -> None:
        """Forgets the refusals of a session."""
        stored = self._by_peer.pop(peer, ())
        self._count -= len(stored)
        self._bytes -= sum(each.size for each in stored)

    def listed(self, request: wire.ListRequest, identity: Identity) -> list[tuple[str, Refusal]]:
        """Returns the refusals that a request selects and an identity may see, each with its source."""
        every = identity.administers("catalog")
        return [
            (peer.source, each)
            for peer, refusals in list(self._by_peer.items())
            if request.source in ("", peer.source) and (every or identity.may_attach(peer.source))
            for each in refusals
            if (not request.role or each.role in ("", request.role))
            and (not request.names or each.name in request.names)
        ]

    def find(self, name: str) -> tuple[str, str] | None:
        """Returns the source and the reason of a refused tool, by its name as declared or as `source:name`."""
        matches = (
            (peer.source, each.error)
            for peer, refusals in list(self._by_peer.items())
            for each in refusals
            if name in (each.name, f"{peer.source}:{each.name}")
        )
        return next(matches, None)

    def forget(self, name: str, role: str = "", source: str = "") -> int:
        """Forgets refusals by name (as listed or as declared), role and source, "" being any. Returns how many."""
        before = self._count
        for peer in self.peers:
            if source in ("", peer.source):
                rest = [
                    each
                    for each in self.of(peer)
                    if name not in ("", each.name, f"{peer.source}:{each.name}") or role not in ("", each.role)
                ]
                if len(rest) < len(self.of(peer)):
                    self.set(peer, rest)
        return before - self._count


Item = TypeVar("Item", wire.RefusedTool, wire.WaitingTool)


def fitting(messages: Iterable[Item], space: int) -> list[Item]:
    """Returns the first messages that have room in so many bytes of another message."""
    sizes, taken = 0, list[Item]()
    for message in messages:
        sizes += message.ByteSize() + 8
        if sizes > space:
            break
        taken.append(message)
    return taken


def to_wire(refusals: Sequence[Refusal], receives_bytes: int) -> list[wire.RefusedTool]:
    """Returns refusals for one message to their session, as many as it may name.

    Args:
        receives_bytes: the largest message that the session takes; a quarter of it is used at most.
    """

    def messages() -> Iterator[wire.RefusedTool]:
        texts = TEXT_BYTES
        for refusal in refusals[:MAX_SHOWN]:
            error = refusal.error if len(refusal.error.encode()) <= texts else refusal.error[: texts // 4]
            texts -= len(error.encode())
            yield wire.RefusedTool(name=refusal.name, error=error, role=refusal.role or None)

    return fitting(messages(), receives_bytes // 4)


def add_refused(
    response: wire.RegisterResponse, refusals: Sequence[Refusal], receives_bytes: int = DEFAULT_RECEIVE_BYTES
) -> None:
    """Adds refusals to the response of Register."""
    response.refused.extend(to_wire(refusals, receives_bytes))
    response.refused_total = len(refusals)
    response.ok = response.ok and not refusals


def to_listing(refusals: Iterable[tuple[str, Refusal]]) -> list[wire.RefusedTool]:
    """Returns refusals, each with its source, for one page of a listing: as many as fit."""
    messages = (
        wire.RefusedTool(name=refusal.name, error=refusal.error, source=source, role=refusal.role or None)
        for source, refusal in refusals
    )
    return fitting(messages, LISTED_BYTES)
