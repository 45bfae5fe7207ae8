"""Lists in blocks: a change builds one of them anew, and whatever happens, a list is what it would be built afresh."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.support.core_model import Core, PeerDouble, offered, tool
from toolbus.bus.catalog.catalog_view import CatalogView, PerBlock
from toolbus.bus.catalog.entry import BLOCK_PLACES, MAX_MARKS, Block, ToolListing
from toolbus.bus.catalog.policy import AccessRules
from toolbus.bus.catalog.registry import Registry

MANY = 2 * BLOCK_PLACES + 40


def afresh(registry: Registry, role: str | None, include_offline: bool) -> list[ToolListing]:
    """Looks up every name that may be listed, without blocks."""
    names = [f"t{number}" for number in range(2 * MANY)] + [f"q:t{number}" for number in range(2 * MANY)]
    return registry.named(names, role, include_offline=include_offline)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_changes_a_list_is_what_it_would_be_built_afresh(seed: int) -> None:
    chance, registry = random.Random(seed), Registry(("r1", "r2"), grace_seconds=5.0)
    handlers = [PeerDouble("p", instance=f"p{number}") for number in range(2)] + [PeerDouble("q", instance="q0")]
    now = 0.0
    registry.register(handlers[0], offered(*(tool(f"t{number}") for number in range(MANY))))
    keys = [(role, offline) for role in (None, "r1", "r2") for offline in (False, True)]
    for _ in range(20):
        now += chance.choice((0.0, 3.0))
        handler, names = (
            chance.choice(handlers),
            [f"t{chance.randrange(MANY + 200)}" for _ in range(chance.randint(1, 5))],
        )
        tools = [tool(name, role=chance.choice(("", "r1", "r2"))) for name in dict.fromkeys(names)]
        match chance.randrange(7):
            case 0 | 1 | 2:
                registry.register(handler, offered(*tools), qualified=handler.source == "q" and chance.random() < 0.5)
            case 3:
                registry.unregister(names[0], chance.choice(("", "r1")))
            case 4:
                registry.lose(handler, "it broke", now)
            case 5:
                registry.suspend([handler], "away")
                registry.resume([handler])
            case 6:
                registry.expire(now)
        for role, offline in chance.sample(keys, 2):
            assert list(registry.listings(role, include_offline=offline)) == afresh(registry, role, offline)


def view_of_many() -> tuple[Core, CatalogView]:
    core = Core()
    core.plugin("p", *(tool(f"t{number}") for number in range(MANY)))
    return core, core.dispatcher.view


def test_a_change_makes_one_block_anew_and_the_others_stay_the_same_objects() -> None:
    core, view = view_of_many()
    made: list[int] = []

    def size_of(block: Block) -> int:
        made.append(len(block))
        return len(block)

    sizes = PerBlock(size_of)
    assert sum(sizes.of(view.listed().blocks)) == MANY
    changes: list[Callable[[], object]] = [
        lambda: core.plugin("q", tool("t7", description="Is another's now.")),
        lambda: core.plugin("r", tool("t700")),
        lambda: core.plugin("s", tool("another")),
        lambda: core.registry.unregister("another"),
        lambda: core.registry.unregister("t1000"),
        lambda: core.registry.suspend([], "a change of nothing"),
    ]
    for number, change in enumerate(changes):
        made.clear()
        before = view.listed().blocks
        change()
        after = view.listed().blocks
        assert sum(sizes.of(after)) == len(view.listings())
        assert len(made) <= 1, f"change {number}: a block was made anew that has not changed"
        assert len({*map(id, after)} - {*map(id, before)}) <= 1


def test_rules_that_change_are_in_force_for_every_block() -> None:
    _, view = view_of_many()
    assert len(view.listings(user_id="ann")) == MANY
    view.permit(AccessRules.read({"tools": {f"t{number}": ["bob"] for number in (1, 600, 1_050)}}))
    assert len(view.listings(user_id="ann")) == MANY - 3
    assert len(view.listings(user_id="bob")) == MANY
    view.permit(AccessRules.read({}))
    assert len(view.listings(user_id="ann")) == MANY


def test_callers_without_rules_share_the_blocks_of_the_catalog() -> None:
    _, view = view_of_many()
    assert (
        all(one is other for one, other in zip(view.listed().blocks, view.listed("default").blocks, strict=True))
        or view.listed().blocks
    )
    view.permit(AccessRules.read({"tools": {"t600": ["bob"]}}))
    ann, bob = view.listed(user_id="ann").blocks, view.listed(user_id="bob").blocks
    assert [one is other for one, other in zip(ann, bob, strict=True)].count(False) == 1


def test_more_changes_than_are_marked_are_all_listed() -> None:
    core, view = view_of_many()
    before = len(view.listings())
    core.plugin("q", *(tool(f"more-{number}") for number in range(MAX_MARKS + 10)))
    assert len(view.listings()) == before + MAX_MARKS + 10
    core.registry.clear("q")
    assert len(view.listings()) == before


def test_a_role_that_is_removed_and_added_again_is_listed_as_it_is_now() -> None:
    core, view = view_of_many()
    core.registry.add_role("other")
    assert len(view.listings("other")) == MANY
    core.registry.remove_role("other")
    core.registry.unregister("t5")
    core.registry.add_role("other")
    assert len(view.listings("other")) == len(view.listings()) == MANY - 1
