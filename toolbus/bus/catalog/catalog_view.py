"""Shows a caller the catalog: the listings of the registry that the policy lets it call.

Calls ask the same policy, so what is listed can be called, and what can be called is listed. The view changes nothing
but the access rules, which it puts into force.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from toolbus.bus.access.identity import OBSERVER, Principal, Scopes
from toolbus.bus.catalog.changes import CatalogChanges
from toolbus.bus.catalog.entry import BUS_SOURCE, LENT_MODEL, Block, Entry, ToolListing
from toolbus.bus.catalog.policy import MAX_USER, AccessRules, Policy
from toolbus.bus.catalog.registry import Registry, is_public, listing_of
from toolbus.common.newest import NewestCache
from toolbus.errors import UnknownRole

MAX_CACHED = 256  # lists of listings, by last use
MAX_BEHIND = 100  # revisions; an older list would hold removed tools in memory

Made = TypeVar("Made")


class PerBlock(Generic[Made]):
    """What is made of each block of a list; made anew only of blocks that have changed. Safe from any thread."""

    def __init__(self, make: Callable[[Block], Made]) -> None:
        self._make = make
        self._made: dict[int, tuple[Block, Made]] = {}  # by the identity of the block, of the list that came last

    def of(self, blocks: Iterable[Block]) -> list[Made]:
        """Returns what is made of each of some blocks."""
        before = self._made
        self._made = made = {id(block): before.get(id(block)) or (block, self._make(block)) for block in blocks}
        return [each for _, each in made.values()]


class VisibleList(NamedTuple):
    """What a caller sees at a revision, while some rules are in force."""

    revision: int
    permissions: AccessRules
    visible: PerBlock[Block]
    blocks: tuple[Block, ...]
    listings: tuple[ToolListing, ...]


class CatalogView:
    """Listings and changes, filtered by the policy. Safe from any thread."""

    def __init__(self, registry: Registry, policy: Policy) -> None:
        self._registry = registry
        self._policy = policy
        self._revising = threading.Lock()  # one change of the rules at a time
        registry.shows = lambda entry: policy.denial(OBSERVER, entry) is None
        self._cache: NewestCache[_CacheKey, VisibleList] = NewestCache(MAX_CACHED)

    def __repr__(self) -> str:
        return f"<CatalogView revision={self.revision} cached={self.cached}>"

    @property
    def cached(self) -> int:
        """How many lists of listings are cached."""
        return len(self._cache)

    @property
    def revision(self) -> int:
        """The catalog's revision; it rises with changed access rules too."""
        return self._registry.revision

    def roles(self, principal: Principal = OBSERVER) -> tuple[str, ...]:
        """Returns the configured roles that exist for a caller."""
        scopes = principal.identity.scopes
        return tuple(role for role in self._registry.roles if scopes is None or scopes.has_role(role))

    def listings(
        self,
        role: str | None = None,
        user_id: str = "",
        level: int = 0,
        *,
        principal: Principal = OBSERVER,
        include_offline: bool = False,
        names: Iterable[str] | None = None,
    ) -> tuple[ToolListing, ...]:
        """Returns the tools that a caller could call, without the bus's own, in the order in which names came.

        Args:
            names: only those; they are looked up, however large the catalog is.

        Raises:
            UnknownRole: the role is not configured, or out of the caller's scope.
        """
        if names is None:
            return self.listed(role, user_id, level, principal=principal, include_offline=include_offline).listings
        self._check_role(role, principal)
        found = tuple(self._registry.named(names, role, include_offline=include_offline))
        return self._visible_of(found, user_id, level, principal)

    def listed(
        self,
        role: str | None = None,
        user_id: str = "",
        level: int = 0,
        *,
        principal: Principal = OBSERVER,
        include_offline: bool = False,
    ) -> VisibleList:
        """Returns the same listings, in blocks too; a block that shows what it showed before is the same object.

        Raises:
            UnknownRole: the role is not configured, or out of the caller's scope.
        """
        self._check_role(role, principal)
        scopes = principal.identity.scopes
        revision, permissions = self._registry.revision, self._policy.permissions  # first: changed rules raise it
        user = user_id if permissions else ""  # else it is the same list for everyone
        key = (role, include_offline, user, level, principal.may_omit_user, scopes)
        cached = self._cache.get(key)
        if cached is None or cached.revision != revision:
            if cached is None or cached.permissions is not permissions:
                visible = PerBlock[Block](lambda block: self._visible_of(block, user_id, level, principal))
            else:
                visible = cached.visible
            blocks = tuple(filter(None, visible.of(self._registry.blocks(role, include_offline=include_offline))))
            listings = tuple(itertools.chain.from_iterable(blocks))
            if any(first[-1].place > then[0].place for first, then in itertools.pairwise(blocks)):
                # A name came later to the roles that remain in a listing.
                listings = tuple(sorted(listings, key=lambda listing: listing.place))
                blocks = (listings,)
            cached = VisibleList(revision, permissions, visible, blocks, listings)
            for other, each in [*self._cache.items()]:
                if revision - each.revision > MAX_BEHIND:
                    self._cache.pop(other, None)
        if len(user) <= MAX_USER:  # no rule can name a longer one, and it may be of any size
            self._cache[key] = cached
        return cached

    @staticmethod
    def _check_role(role: str | None, principal: Principal) -> None:
        scopes = principal.identity.scopes
        if role and scopes is not None and not scopes.has_role(role):
            raise UnknownRole(role)

    def _visible_of(self, block: Block, user_id: str, level: int, principal: Principal) -> Block:
        """Returns the visible listings of a block: the block itself where those are all."""
        visible = [(each, self.visible(each, user_id, level, principal)) for each in block if is_public(each)]
        if len(visible) == len(block) and all(before is each for before, each in visible):
            return block
        return tuple(sorted((each for _, each in visible if each is not None), key=lambda listing: listing.place))

    def waiting(
        self, role: str | None = None, user_id: str = "", level: int = 0, *, principal: Principal = OBSERVER
    ) -> tuple[ToolListing, ...]:
        """Returns the tools that wait for a role that does not exist, as far as a caller could call them in it.

        Args:
            role: that they wait for; None is any.
        """
        visible = (self.visible(each, user_id, level, principal) for each in self._registry.waiting(role))
        return tuple(each for each in visible if each is not None)

    def own(self, principal: Principal = OBSERVER, source: str = BUS_SOURCE) -> tuple[ToolListing, ...]:
        """Returns those of the bus's own tools that the caller may use; none where it is not an administrator.

        Args:
            source: another source of tools for operators.
        """
        if not principal.is_admin:
            return ()
        own = (listing for listing in self._registry.listings(None) if listing.source == source)
        return tuple(each for each in own if self._policy.denial(principal, each.entry) is None)

    def lent(self, principal: Principal = OBSERVER) -> tuple[ToolListing, ...]:
        """Returns the model that hosts lend, for an administrator; other listings never have it."""
        if not principal.is_admin:
            return ()
        lent = (each for each in self._registry.listings(None) if each.tool.name == LENT_MODEL)
        return tuple(each for each in lent if not self._policy.hides(principal, each.entry, 0))

    def visible(
        self, listing: ToolListing, user_id: str = "", level: int = 0, principal: Principal = OBSERVER
    ) -> ToolListing | None:
        """Returns a listing with only the roles in which the caller may call the tool; None where it may in none."""
        if (
            not self._policy.permissions
            and principal.identity.scopes is None
            and is_public(listing)
            and level >= _highest_level(listing)
        ):
            return listing
        entries = tuple(
            entry for entry in listing.entries if self._policy.denial(principal, entry, user_id, level) is None
        )
        if not entries or len(entries) == len(listing.entries):
            return listing if entries else None
        return listing_of(entries)

    def hides_source(self, source: str, level: int, principal: Principal = OBSERVER) -> bool:
        """Tells whether a caller sees no tool of a source that has some: the source is then hidden too.

        A source without tools is shown to callers that may see everything.
        """
        entries = self._registry.offered_by(source)
        if not entries:
            return principal.identity.scopes is not None
        return all(self._policy.hides(principal, entry, level) for entry in entries)

    def since(self, revision: int, principal: Principal = OBSERVER, *, before: Scopes | None = None) -> CatalogChanges:
        """Returns the changes that a watcher which knows a revision has missed.

        A watch has no user: it sees what a call without a user could reach, and every revision.

        Args:
            before: the scopes under which the watcher saw that revision, where they are others now.
        """
        changes = self._registry.since(revision)
        listings = (*changes.added, *changes.changed)
        scopes = principal.identity.scopes
        if scopes is None and not self._policy.permissions and not any(map(_highest_level, listings)):
            return changes

        def seen(listings: Iterable[ToolListing]) -> tuple[ToolListing, ...]:
            visible = (self.visible(each, principal=principal) for each in listings)
            return tuple(each for each in visible if each is not None)

        changed = seen(changes.changed)
        remaining = {(each.tool.name, each.source) for each in changed}  # a name of a source may have several listings
        others = dict.fromkeys((each.tool.name, each.source) for each in changes.changed)
        removed = (*changes.removed, *(each for each in others if each not in remaining))
        if scopes is not None:  # a tool that it could not see is not removed for it
            former = before or scopes
            removed = tuple((name, source) for name, source in removed if former.reaches_name(name, source))
        return replace(changes, added=seen(changes.added), changed=changed, removed=removed)

    @property
    def permissions(self) -> AccessRules:
        """The access rules in force."""
        return self._policy.permissions

    def permit(self, permissions: AccessRules) -> None:
        """Puts access rules into force, at once, for calls and listings. The bus notifies watchers."""
        self.revise(lambda _: permissions)

    def scopes_changed(self, changes: Sequence[tuple[Scopes, Scopes]]) -> None:
        """Announces the tools that identities see from now on, or no longer see.

        Args:
            changes: the scopes of each before and after.
        """

        def is_affected(entry: Entry) -> bool:
            names = entry.name, entry.bare_name, entry.source, entry.table.role
            return any(before.reaches(*names) != after.reaches(*names) for before, after in changes)

        self._registry.change_view(lambda: None, is_affected)

    def generation_changed(self) -> None:
        """Announces that other sources may use what hosts lend."""
        self._registry.change_view(lambda: None, lambda entry: False)

    def revise(self, change: Callable[[AccessRules], AccessRules]) -> None:
        """Changes the access rules in one step, so that changes by other threads at the same time are not lost."""
        with self._revising:
            before = self._policy.permissions
            permissions = change(before)

            def put_in_force() -> None:
                self._policy.permissions = permissions

            def is_affected(entry: Entry) -> bool:
                return before.rules_for(entry) != permissions.rules_for(entry)

            self._registry.change_view(put_in_force, is_affected)


# Role, whether offline tools are included, user, level, may_omit_user, scopes.
_CacheKey = tuple[str | None, bool, str, int, bool, Scopes | None]


def _highest_level(listing: ToolListing) -> int:
    """Returns the highest level that the tool of a listing needs in any of its roles."""
    return max(entry.min_level for entry in listing.entries)
