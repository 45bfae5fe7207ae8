"""Shows a caller the catalog: the listings of the registry that the policy lets it call.

Calls ask the same policy, so what is listed can be called, and what can be called is listed. The view changes nothing
but the access rules, which it puts into force.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from toolbus.bus.access.identity import OBSERVER, Principal, Scopes
from toolbus.bus.catalog.changes import CatalogChanges
from toolbus.bus.catalog.entry import BUS_SOURCE, LENT_MODEL, Entry, ToolListing
from toolbus.bus.catalog.policy import MAX_USER, AccessRules, Policy
from toolbus.bus.catalog.registry import Registry, is_public, listing_of
from toolbus.errors import UnknownRole

MAX_CACHED = 256  # lists of listings that are cached per revision


class CatalogView:
    """Listings and changes, filtered by the policy. Safe from any thread."""

    def __init__(self, registry: Registry, policy: Policy) -> None:
        self._registry = registry
        self._policy = policy
        self._revising = threading.Lock()  # one change of the rules at a time
        # The listings that `named` looked at last, and an index of them by name.
        self._index: tuple[tuple[ToolListing, ...], dict[str, list[ToolListing]]] = ((), {})
        registry.shows = lambda entry: policy.denial(OBSERVER, entry) is None
        self._cache: dict[_CacheKey, tuple[int, tuple[ToolListing, ...]]] = {}  # revision and listings
        self._cached_at = 0  # the revision of the cache: older listings would hold removed tools in memory

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
    ) -> tuple[ToolListing, ...]:
        """Returns the tools that a caller could call, without the bus's own, in the order in which names came.

        Raises:
            UnknownRole: the role is not configured, or out of the caller's scope.
        """
        scopes = principal.identity.scopes
        if role and scopes is not None and not scopes.has_role(role):
            raise UnknownRole(role)
        revision = self._registry.revision  # first: rules that change meanwhile raise it
        user = user_id if self._policy.permissions else ""  # else it is the same list for everyone
        key = (role, include_offline, user, level, principal.may_omit_user, scopes)
        cached = self._cache.get(key)
        if cached is None or cached[0] != revision:
            listings = self._registry.listings(role, include_offline=include_offline)
            visible = (self.visible(each, user_id, level, principal) for each in listings if is_public(each))
            # Sorted again: a name may have come later to the roles that remain in a listing.
            ordered = sorted((listing for listing in visible if listing is not None), key=lambda listing: listing.place)
            cached = (revision, tuple(ordered))
            if len(self._cache) >= MAX_CACHED or self._cached_at != revision:
                self._cache.clear()
                self._cached_at = revision
            if len(user) <= MAX_USER:  # no rule can name a longer one, and it may be of any size
                self._cache[key] = cached
        return cached[1]

    def waiting(
        self, role: str | None = None, user_id: str = "", level: int = 0, *, principal: Principal = OBSERVER
    ) -> tuple[ToolListing, ...]:
        """Returns the tools that wait for a role that does not exist, as far as a caller could call them in it.

        Args:
            role: that they wait for; None is any.
        """
        visible = (self.visible(each, user_id, level, principal) for each in self._registry.waiting(role))
        return tuple(each for each in visible if each is not None)

    def named(self, names: Iterable[str], listings: tuple[ToolListing, ...]) -> list[ToolListing]:
        """Returns the listings of some names out of the result of `listings`, in its order, without a search."""
        indexed = self._index
        if indexed[0] is not listings:
            by_name: dict[str, list[ToolListing]] = {}
            for listing in listings:
                by_name.setdefault(listing.tool.name, []).append(listing)
            self._index = indexed = (listings, by_name)
        matches = [listing for name in dict.fromkeys(names) for listing in indexed[1].get(name, ())]
        return sorted(matches, key=lambda listing: listing.place)

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
