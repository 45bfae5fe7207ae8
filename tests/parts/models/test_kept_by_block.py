"""What is kept of each block of a large catalog, search, export and MCP list, is what it would be made afresh."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from tests.support.core_model import Core, PeerDouble, offered, tool
from tests.support.search_catalog import concepts
from toolbus.bus import Bus, Config
from toolbus.bus.access.identity import LOCAL, OBSERVER
from toolbus.bus.catalog.entry import BLOCK_PLACES
from toolbus.bus.keys.seal import Sealer
from toolbus.dialects import find_dialect
from toolbus.parts.mcp.server.mcp_listing import Listings, ToolNames
from toolbus.parts.mcp.settings import Profile
from toolbus.parts.models.embeddings import Embeddings
from toolbus.parts.models.export_routes import _ExportQuery, _Writer
from toolbus.parts.models.search import IndexCache, ToolIndex

MANY = BLOCK_PLACES + 40
TEXTS = ("Tells the weather.", "Sends an email.", "Reads a note.", "Finds a flight.")
# Names that no provider takes as they are, and that would be the same on the wire as others.
ODD = ("t.5", "t_5", "t:5", "t 700", "天", "t_700")


def changes(core: Core, chance: random.Random) -> Callable[[], object]:
    """Returns one change of the catalog."""
    name = chance.choice((*ODD, *(f"t{chance.randrange(MANY + 20)}" for _ in range(12))))
    other = tool(name, chance.choice(TEXTS), min_level=chance.choice((0, 0, 1)))
    return chance.choice(
        [
            lambda: core.plugin(chance.choice("pqr"), other),
            lambda: core.plugin("s", other),
            lambda: core.registry.unregister(name),
            lambda: core.registry.clear("s"),
        ]
    )


def filled() -> Core:
    core = Core()
    core.plugin("p", *(tool(f"t{number}", TEXTS[number % 4]) for number in range(MANY)))
    return core


@pytest.mark.parametrize("seed", range(3))
def test_a_search_finds_what_an_index_of_the_catalog_as_it_is_finds(seed: int) -> None:
    chance, core = random.Random(seed), filled()
    view, cache = core.dispatcher.view, IndexCache(concepts)
    for _ in range(12):
        changes(core, chance)()
        fresh = ToolIndex((each.tool for each in view.listings()), embeddings=Embeddings(concepts))
        kept = cache.index_of_blocks("all", view.listed().blocks)
        assert len(kept) == len(fresh)
        for mode in ("bm25", "keyword", "semantic", "hybrid"):
            query = chance.choice(("weather", "email to my boss", "t7", "a flight"))
            found, expected = (index.search(query, mode=mode, top_k=50)["results"] for index in (kept, fresh))
            assert [each["score"] for each in found] == pytest.approx([each["score"] for each in expected], rel=1e-3)
            if mode in ("keyword", "semantic"):  # ties keep the order of the catalog
                assert [each["name"] for each in found] == [each["name"] for each in expected]


@pytest.mark.parametrize("dialect", ["openai", "gemini"])
def test_an_export_is_that_of_the_whole_catalog_also_where_names_of_blocks_meet(dialect: str) -> None:
    chance, core = random.Random(7), filled()
    view = core.dispatcher.view
    writer = _Writer(_ExportQuery(dialect, "", "", 0, (), OBSERVER))
    for _ in range(15):
        changes(core, chance)()
        said = json.loads(writer.write(view, view.revision))
        whole = find_dialect(dialect).export(each.tool for each in view.listings())
        assert said["tools"] == json.loads(json.dumps(whole.tools))
        assert said["names"] == whole.names.to_bus
        assert said["hashes"] == whole.hashes


async def test_a_list_for_mcp_is_what_it_would_be_built_afresh() -> None:
    async with Bus(Config(grpc=("127.0.0.1:0",), http="off")) as bus:
        chance, registry = random.Random(3), bus.core.catalog.registry
        handlers = [PeerDouble(source, qualified=source == "q") for source in "pqr"]
        registry.register(handlers[0], offered(*(tool(f"t{number}") for number in range(MANY))))
        names, profile, seen = ToolNames(), Profile(bare=("p",)), set()
        kept = Listings(bus.core, names, Sealer(b"k" * 32))
        for number in range(40):
            handler = chance.choice(handlers)
            name = chance.choice((*ODD, f"t{chance.randrange(MANY + 20)}", f"new{number}"))
            match chance.randrange(4):
                case 0 | 1:
                    registry.register(handler, offered(tool(name, str(number))), qualified=handler.qualified)
                case 2:
                    registry.unregister(name)
                case 3:
                    registry.suspend([handlers[2]], "away")
                    registry.resume([handlers[2]] if chance.random() < 0.5 else [])
            found = kept.catalog(profile, LOCAL, modern=True)
            afresh = Listings(bus.core, names, Sealer(b"k" * 32)).catalog(profile, LOCAL, modern=True)
            assert [*found.listings] == [*afresh.listings]
            assert found.listings == afresh.listings
            assert found.pages.texts == afresh.pages.texts
            assert found.pages.names == afresh.pages.names
            assert found.digest == afresh.digest
            seen.add(found.digest)
        assert len(seen) > 10
