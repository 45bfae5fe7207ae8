"""A member of a council: who speaks, which tools it has, how often it takes part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

DEFAULT_GENDER_IDENTITY = 3  # 0 feminine, 1 masculine, 2 neutral, 3 any
MAX_RETENTION = 10  # earlier results of a tool that a later run is shown


@dataclass(frozen=True, slots=True)
class Member:
    """One member, as the host configured it.

    Attributes:
        id: of the row in the host's settings; unique in a council.
        name: what it is called, in texts and results.
        tools: names of the tools that it runs, in order: as listed (`source:name`), bare, or of a prompt tool.
        role: what it is there for, in words; "" for none.
        chance: how likely it takes part, in percent, 0 to 100.
        item_id, pack_id, pack_name: where its description comes from.
        avatar_url: a picture; None for none.
        definition, personality, behavior: its description.
        gender_identity: 0 feminine, 1 masculine, 2 neutral, 3 any.
        history_retention: by tool, how many of its earlier results the main model is shown, 0 to 10.
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
        """Returns the twelve fields that a tool is told, under the names that extensions know (`councilMember`)."""
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
