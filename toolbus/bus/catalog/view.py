"""The catalog as somebody sees it: what a call of theirs could reach.

Stands between the registry, which knows what is offered, and everybody who shows it. Calls ask the same policy, so
what is listed can be called and what can be called is listed (design.md 6).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from toolbus.bus.catalog.entry import BUS_SOURCE, CatalogChanges, Entry, ToolListing
from toolbus.bus.catalog.listings import line_of
from toolbus.bus.catalog.policy import MAX_USER, AccessRules, Caller, Policy
from toolbus.bus.catalog.registry import Registry

USERS_KEPT = 256  # views that are kept per revision


@dataclass(frozen=True, slots=True)
class Observer:
    """Somebody who looks and does not call: what a plain call over the wire could reach."""

    source: str = ""
    is_admin: bool = True
    may_omit_user: bool = False


ONLOOKER = Observer()


class View:
    """Listings and changes, filtered by the policy. Safe from any thread."""

    def __init__(self, registry: Registry, policy: Policy) -> None:
        self._registry = registry
        self._policy = policy
        self._revising = threading.Lock()  # one change of the rules at a time
        self._index: tuple[tuple[ToolListing, ...], dict[str, list[ToolListing]]] = (
            (),
            {},
        )  # of the list that was asked last
        registry.shows = lambda entry: policy.refusal(ONLOOKER, entry) is None
        # by role, whether offline tools are in it, user, level and rights, with the revision that it shows
        self._kept: dict[tuple[str | None, bool, str, int, bool, bool], tuple[int, tuple[ToolListing, ...]]] = {}
        self._kept_since = 0  # the revision of what was kept last: older views would hold on to tools that have gone

    @property
    def revision(self) -> int:
        """The catalog's; it rises with permissions too."""
        return self._registry.revision

    def listings(
        self,
        role: str | None = None,
        user_id: str = "",
        level: int = 0,
        *,
        caller: Caller = ONLOOKER,
        include_offline: bool = False,
    ) -> tuple[ToolListing, ...]:
        """Returns what somebody could call, without the bus's own tools, in the order in which names came.

        Raises:
            UnknownRole: the role is not configured.
        """
        revision = self._registry.revision  # first: rules that change meanwhile raise it
        user = user_id if self._policy.permissions else ""  # else it is the same list for everyone
        key = (role, include_offline, user, level, caller.is_admin, caller.may_omit_user)
        kept = self._kept.get(key)
        if kept is None or kept[0] != revision:
            found = self._registry.listings(role, include_offline=include_offline)
            seen = (self.line(listing, user_id, level, caller) for listing in found if listing.source != BUS_SOURCE)
            # Once more in order: a name may have come later to the roles that are left of a line.
            shown = sorted((listing for listing in seen if listing is not None), key=lambda listing: listing.place)
            kept = (revision, tuple(shown))
            if len(self._kept) >= USERS_KEPT or self._kept_since != revision:
                self._kept.clear()
                self._kept_since = revision
            if len(user) <= MAX_USER:  # a longer one is nobody whom a rule can name, and may be of any size
                self._kept[key] = kept
        return kept[1]

    def named(self, names: Iterable[str], listings: tuple[ToolListing, ...]) -> list[ToolListing]:
        """Returns the lines of some names out of what `listings` returned, in its order, and looks at no others."""
        indexed = self._index
        if indexed[0] is not listings:
            by_name: dict[str, list[ToolListing]] = {}
            for listing in listings:
                by_name.setdefault(listing.tool.name, []).append(listing)
            self._index = indexed = (listings, by_name)
        found = [listing for name in dict.fromkeys(names) for listing in indexed[1].get(name, ())]
        return sorted(found, key=lambda listing: listing.place)

    def own(self, caller: Caller = ONLOOKER) -> tuple[ToolListing, ...]:
        """Returns the bus's own tools, where the caller may use them."""
        if not caller.is_admin:
            return ()
        return tuple(listing for listing in self._registry.listings(None) if listing.source == BUS_SOURCE)

    def line(
        self, listing: ToolListing, user_id: str = "", level: int = 0, caller: Caller = ONLOOKER
    ) -> ToolListing | None:
        """Returns a line of the catalog with the roles in which the caller may call the tool; None: in none."""
        if not self._policy.permissions and listing.source != BUS_SOURCE and level >= _most_asked(listing):
            return listing
        entries = tuple(
            entry for entry in listing.entries if self._policy.refusal(caller, entry, user_id, level) is None
        )
        if not entries or len(entries) == len(listing.entries):
            return listing if entries else None
        return line_of(entries)

    def hides_source(self, source: str, level: int) -> bool:
        """Whether all that a source offers is above an access level, so that it is not told of either."""
        entries = self._registry.offered_by(source)
        return bool(entries) and all(self._policy.hides(entry, level) for entry in entries)

    def since(self, revision: int) -> CatalogChanges:
        """Returns what a watcher that knows a revision has to learn.

        A watch has no user: it sees what a call could reach that names none, and every revision.
        """
        changes = self._registry.since(revision)
        told = (*changes.added, *changes.changed)
        if not self._policy.permissions and not any(map(_most_asked, told)):
            return changes
        changed = tuple(seen for each in changes.changed if (seen := self.line(each)) is not None)
        left = {(seen.tool.name, seen.source) for seen in changed}  # one name of one source may have several lines
        gone = dict.fromkeys((each.tool.name, each.source) for each in changes.changed)
        return replace(
            changes,
            added=tuple(seen for each in changes.added if (seen := self.line(each)) is not None),
            changed=changed,
            removed=(*changes.removed, *(each for each in gone if each not in left)),
        )

    @property
    def permissions(self) -> AccessRules:
        """The rules in force."""
        return self._policy.permissions

    def permit(self, permissions: AccessRules) -> None:
        """Puts rules in force, at once, for calls and listings. Whoever wires the bus has watchers told."""
        self.revise(lambda _: permissions)

    def revise(self, change: Callable[[AccessRules], AccessRules]) -> None:
        """Puts in force what is made of the rules of now, in one step: others' changes at the same time are kept."""
        with self._revising:
            before = self._policy.permissions
            permissions = change(before)

            def put_in_force() -> None:
                self._policy.permissions = permissions

            def concerns(entry: Entry) -> bool:
                return before.rules_for(entry) != permissions.rules_for(entry)

            self._registry.change_view(put_in_force, concerns)


def _most_asked(listing: ToolListing) -> int:
    """Returns the highest level that a tool asks for in any of the line's roles."""
    return max(entry.min_level for entry in listing.entries)
