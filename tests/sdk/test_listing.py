"""Tests how changes of the catalog are joined: one change has to do what several do one after the other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from toolbus.sdk import CatalogChange, ListedTool
from toolbus.sdk.listing import ToolRef
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

Catalog = dict[str, str]  # the schema hash of each tool, by its name

NAMES = st.sampled_from(["add", "draw", "find", "say"])
CATALOGS = st.dictionaries(NAMES, st.sampled_from(["h1", "h2", "h3"]))


def _listed(name: str, schema_hash: str) -> ListedTool:
    return ListedTool.from_wire(wire.ListedTool(tool=pb.Tool(name=name), source="calc", schema_hash=schema_hash))


def _change(revision: int, before: Catalog, after: Catalog, full: bool) -> CatalogChange:
    """Returns the change that a bus sends to a watcher that knows one catalog and should know another."""
    if full:
        return CatalogChange(revision, True, tuple(_listed(*each) for each in after.items()))
    return CatalogChange(
        revision,
        False,
        tuple(_listed(name, value) for name, value in after.items() if name not in before),
        tuple(_listed(name, value) for name, value in after.items() if before.get(name, value) != value),
        tuple(ToolRef(name, "calc") for name in before if name not in after),
    )


def _applied(catalog: Catalog, change: CatalogChange) -> Catalog:
    """Does what a change says, and checks that it is about this catalog."""
    known = {} if change.full else dict(catalog)
    for ref in change.removed:
        del known[ref.name]
    assert not [each.name for each in change.added if each.name in known]
    assert change.full or all(each.name in known for each in change.changed)
    return known | {each.name: each.schema_hash for each in (*change.added, *change.changed)}


@given(CATALOGS, st.lists(st.tuples(CATALOGS, st.booleans()), min_size=1, max_size=6))
def test_joined_changes_do_what_they_do_one_after_the_other(first: Catalog, later: list[tuple[Catalog, bool]]) -> None:
    changes: list[CatalogChange] = []
    before = first
    for revision, (after, full) in enumerate(later, 1):
        changes.append(_change(revision, before, after, full))
        before = after
    joined = changes[0]
    for change in changes[1:]:
        joined = joined.followed_by(change)
    assert joined.revision == len(later)
    assert joined.full == any(full for _, full in later)
    assert _applied(first, joined) == before
