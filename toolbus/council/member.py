"""Defines a member of a council: its description, its tools, and its chance of taking part in a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

DEFAULT_GENDER_IDENTITY = 3  # 0 feminine, 1 masculine, 2 neutral, 3 any
MAX_RETENTION = 10  # earlier results of a tool that the main model gets


@dataclass(frozen=True, slots=True)
class Member:
    """One member, as the host configured it.

    Attributes:
        id: of the row in the host's settings; unique in a council.
        name: as texts and results show it.
        tools: names of the tools that it runs, in order: as listed (`source:name`), bare, or of a prompt tool.
        role: its part in the council, in words; may be "".
        chance: of taking part in a run, in percent, 0 to 100.
        item_id, pack_id, pack_name: where its description comes from.
        avatar_url: a picture, or None.
        definition, personality, behavior: its description.
        gender_identity: 0 feminine, 1 masculine, 2 neutral, 3 any.
        history_retention: by tool, how many of its earlier results the main model gets, 0 to 10.
    """

    id: str
    name: str
    tools: tuple[str, ...] = ()
    role: str = ""
    chance: float = 100.0
    item_id: str = ""
    pack_id: str = ""
    pack_name: str = ""
    avatar_url: str | None = None
    definition: str = ""
    personality: str = ""
    behavior: str = ""
    gender_identity: int = DEFAULT_GENDER_IDENTITY
    history_retention: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def described(self) -> dict[str, Any]:
        """Returns the twelve fields that a tool gets, under the names that extensions know (`councilMember`)."""
        return {
            "memberId": self.id,
            "itemId": self.item_id,
            "packId": self.pack_id,
            "packName": self.pack_name,
            "name": self.name,
            "role": self.role,
            "chance": self.chance,
            "avatarUrl": self.avatar_url,
            "definition": self.definition,
            "personality": self.personality,
            "behavior": self.behavior,
            "genderIdentity": self.gender_identity,
        }


class Randomness(Protocol):
    """A source of random numbers: `random.Random`, or a fixed sequence in a test."""

    def random(self) -> float:
        """Returns a number from 0 up to, but not including, 1."""


def participants(members: Iterable[Member], randomness: Randomness) -> tuple[Member, ...]:
    """Rolls the dice for each member with tools; returns those that take part in a run, in their order."""
    return tuple(member for member in members if takes_part(member, randomness))


def takes_part(member: Member, randomness: Randomness) -> bool:
    """Rolls the dice for one member; a chance of 0 or 100 draws no number."""
    if not member.tools or member.chance <= 0:
        return False
    return member.chance >= 100 or randomness.random() * 100 < member.chance
