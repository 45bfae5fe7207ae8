"""Counts what a change costs the sessions that watch the catalog, and those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.core_model import Core, StreamDouble, offered, tool
from toolbus.bus.catalog.entry import ToolListing
from toolbus.bus.streams import catalog_messages
from toolbus.bus.streams.peer import Peer
from toolbus.v1 import tool_bus_service_pb2 as wire

CATALOG = [wire.SUBSCRIPTION_CATALOG]


class Unread(dict[str, Peer]):
    """The sessions of a bus; going through all of them is an error."""

    def _refused(self) -> Any:
        raise AssertionError("every session was looked at")

    __iter__ = keys = values = items = _refused


@pytest.fixture
def listed_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tools that were put into words for watchers, in order."""
    names: list[str] = []
    listed = catalog_messages.listed

    def counted(listing: ToolListing) -> wire.ListedTool:
        names.append(listing.tool.name)
        return listed(listing)

    monkeypatch.setattr(catalog_messages, "listed", counted)
    return names


def names_of(watcher: StreamDouble) -> list[str]:
    """Returns the tools that a watcher was sent since the last time."""
    return [item.tool.name for event in watcher.read("events") for item in event.catalog.added]


def test_watchers_are_notified_without_looking_at_sessions_that_do_not_watch() -> None:
    core = Core()
    watcher, deaf = core.attached("watcher", subscribe=CATALOG), core.attached("deaf")
    watcher.written(), deaf.written()
    core.presence.sessions = Unread(core.presence.sessions)
    core.registry.register(core.peer("p"), offered(tool("t")))
    core.presence.watchers.notify()
    assert (names_of(watcher), names_of(deaf)) == (["t"], [])


def test_the_events_of_a_change_are_built_once_for_all_watchers(listed_names: list[str]) -> None:
    core = Core()
    watchers = [core.attached(f"watcher-{number}", subscribe=CATALOG) for number in range(10)]
    core.registry.register(core.peer("p"), offered(tool("t")))
    core.presence.watchers.notify()
    assert listed_names == ["t"]
    assert [names_of(watcher) for watcher in watchers] == [["t"]] * 10


def test_watchers_that_attach_together_share_the_events_of_one_list(listed_names: list[str]) -> None:
    core = Core()
    core.attached("plugin", tool("a"), tool("b"))
    first = [core.attached(f"watcher-{number}", subscribe=CATALOG) for number in range(10)]
    core.presence.watchers.notify()
    last = core.attached("watcher-last", subscribe=CATALOG)
    assert listed_names == ["a", "b"]
    assert [names_of(watcher) for watcher in (*first, last)] == [["a", "b"]] * 11


def test_a_list_is_built_again_after_a_tick_since_its_counts_are_old(listed_names: list[str]) -> None:
    core = Core()
    core.attached("plugin", tool("a"))
    core.attached("first", subscribe=CATALOG)
    core.presence.tick(core.now + 0.5)
    core.attached("second", subscribe=CATALOG)
    assert listed_names == ["a", "a"]


def test_a_list_is_built_again_after_a_change(listed_names: list[str]) -> None:
    core = Core()
    plugin = core.attached("plugin", tool("a"))
    core.attached("first", subscribe=CATALOG)
    plugin.attach("plugin", tool("b"))
    assert names_of(core.attached("second", subscribe=CATALOG)) == ["b"]
    assert listed_names == ["a", "b"]


def test_a_session_that_ended_or_stopped_watching_is_not_notified() -> None:
    core = Core()
    ended, tired = core.attached("ended", subscribe=CATALOG), core.attached("tired", subscribe=CATALOG)
    ended.end()
    tired.attach("tired")
    tired.written()
    core.registry.register(core.peer("p"), offered(tool("t")))
    core.presence.watchers.notify()
    assert (names_of(ended), names_of(tired)) == ([], [])
    assert repr(core.presence.watchers).startswith("<CatalogWatchers 0 ")
