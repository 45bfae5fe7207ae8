"""Counts what lists and changes of a large catalog look at, since times fail on busy machines."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.core_model import Core, PeerDouble, offered, tool
from toolbus.bus.catalog.changes import Journal
from toolbus.bus.catalog.entry import ToolListing
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.streams import catalog_messages
from toolbus.v1 import tool_bus_service_pb2 as wire

MANY = 200


class Counted(deque[Any]):
    """A deque that says how many of its items were read."""

    read = 0

    def __iter__(self) -> Iterator[Any]:
        return self._counted(super().__iter__())

    def __reversed__(self) -> Iterator[Any]:
        return self._counted(super().__reversed__())

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.read += 1
            yield item


def _filled(*roles: str) -> tuple[Registry, PeerDouble]:
    registry, plugin = Registry(roles or ("default",)), PeerDouble("plugin")
    registry.register(plugin, offered(*(tool(f"t{number}") for number in range(MANY))))
    return registry, plugin


def test_what_changed_last_is_found_without_reading_what_changed_before() -> None:
    journal = Journal(0)
    journal._changes = changes = Counted()
    for revision in range(1, MANY):
        journal.note(revision, f"t{revision % 7}", "s", existed=revision > 7)
    assert journal.since(MANY - 3) == {(f"t{revision % 7}", "s"): True for revision in (MANY - 2, MANY - 1)}
    assert changes.read <= 3  # the two and the first that is too old


def test_the_first_of_several_changes_says_whether_a_tool_was_listed() -> None:
    journal = Journal(0)
    for revision, existed in enumerate((False, True, False), 1):
        journal.note(revision, "t", "s", existed)
    assert [journal.since(revision) for revision in range(4)] == [
        {("t", "s"): False},
        {("t", "s"): True},
        {("t", "s"): False},
        {},
    ]


@pytest.mark.parametrize("roles", [("default",), ("one", "two")])
def test_after_one_change_one_listing_is_new(roles: tuple[str, ...]) -> None:
    registry, plugin = _filled(*roles)
    before = registry.listings()
    registry.register(plugin, offered(tool("t7", "changed")))
    after = registry.listings()
    assert [listing.tool.name for listing, old in zip(after, before, strict=True) if listing is not old] == ["t7"]
    assert after[7].tool.description == "changed"


def test_listings_of_one_role_and_of_all_roles_are_cached_side_by_side() -> None:
    registry, plugin = _filled("one", "two")
    before = [registry.listings(role) for role in (None, "one", "two")]
    registry.register(plugin, offered(tool("t7", "changed")))
    for role, old in zip((None, "one", "two"), before, strict=True):
        pairs = zip(registry.listings(role), old, strict=True)
        new = [listing.tool.name for listing, before_it in pairs if listing is not before_it]
        assert new == ["t7"], role


def test_a_listing_is_new_once_a_tool_is_in_fewer_roles() -> None:
    registry, _ = _filled("one", "two")
    registry.listings()
    registry.unregister("t7", "two")
    registry.unregister("t8", "one")
    roles = {listing.tool.name: listing.roles for listing in registry.listings()}
    assert (roles["t7"], roles["t8"], roles["t9"]) == (("one",), ("two",), ("one", "two"))


def test_withdrawn_and_replaced_tools_leave_nothing_to_the_garbage_collector() -> None:
    registry, plugin = _filled()
    gc.collect()
    gc.disable()
    try:
        registry.listings()
        registry.unregister("t1")
        registry.register(PeerDouble("other"), offered(tool("t2")))
        registry.withdraw(plugin)
        registry.listings()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_page_of_a_list_does_not_look_at_the_pages_before(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    place = ToolListing.place.fget  # type: ignore[attr-defined]  # a property

    def counted(listing: ToolListing) -> int:
        looked.append(listing.tool.name)
        return int(place(listing))

    core = Core()
    plugin = core.attached("plugin", *(tool(f"t{number}") for number in range(MANY)))
    view, caller = core.dispatcher.view, plugin.peer
    view.listings(principal=caller.principal)
    monkeypatch.setattr(ToolListing, "place", property(counted))
    request, pages, most = wire.ListRequest(), 0, 0
    while True:
        looked.clear()
        answer = catalog_messages.list_tools(request, view, caller.principal, page_bytes=1_000)
        pages, most = pages + 1, max(most, len(looked))
        if not answer.next_page_token:
            break
        request.page_token = answer.next_page_token
    assert pages > 10
    assert most < 20  # a few to find its beginning
