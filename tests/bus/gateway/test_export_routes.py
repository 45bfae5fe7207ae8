"""GET /api/tools/export and /api/tools/search: the catalog for a model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.bus.gateway.calling import client, invoke
from tests.support.search_catalog import concepts
from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus
from toolbus.dialects import DIALECTS, find_dialect
from toolbus.parts.models import export_routes
from toolbus.parts.models.dialects.token_usage import estimate_tokens
from toolbus.parts.models.embeddings import EmbedderChoice
from toolbus.parts.models.export_routes import Exported, FoundTools
from toolbus.parts.models.search import MODES
from toolbus.protocol.tool import Tool
from toolbus.testing import running_bus

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/api/tools/export"
CALLBACK = "http://127.0.0.1:9/"
KEYS = ["ok", "dialect", "revision", "tools", "names", "hashes", "losses", "left_out", "tokens"]
NAMES = ["add", "weather.now", "天気", "a,b"]


@pytest_asyncio.fixture(loop_scope="module")
async def bus() -> AsyncIterator[Bus]:
    async with running_bus(http="127.0.0.1:0", grace_seconds=0.0, roles=("default", "other")) as bus:

        @bus.tool
        def add(a: int, b: int = 0) -> int:
            """Adds numbers."""
            return a + b

        @bus.tool(name="weather.now")  # type: ignore[untyped-decorator]
        def weather(city: str) -> str:
            """Tells the weather."""
            return city

        async with client(bus) as http:
            for name, role in (("天気", None), ("a,b", "other")):
                body = {"name": name, "role": role, "description": "Is named oddly.", "callback_url": CALLBACK}
                assert (await http.post("/api/tools/register", json=body)).json()["ok"]
        yield bus


@pytest_asyncio.fixture(loop_scope="module")
async def http(bus: Bus) -> AsyncIterator[httpx.AsyncClient]:
    async with client(bus) as http:
        yield http


async def exported(http: httpx.AsyncClient, dialect: str = "openai", **query: Any) -> dict[str, Any]:
    answer = await http.get(PATH, params={"dialect": dialect, **query})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    said: dict[str, Any] = answer.json()
    Exported.model_validate(said)
    assert list(said) == KEYS
    return said


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_dialect_writes_the_catalog_as_it_does_in_a_program(
    bus: Bus, http: httpx.AsyncClient, dialect: str
) -> None:
    here = find_dialect(dialect).export(listing.tool for listing in bus.list())
    said = await exported(http, dialect)
    assert said["dialect"] == dialect
    assert said["revision"] == bus.registry.revision
    assert said["tools"] == json.loads(json.dumps(here.tools))
    assert said["names"] == here.names.to_bus
    assert list(said["names"].values()) == NAMES
    assert said["hashes"] == {listing.tool.name: listing.tool.schema_hash for listing in bus.list()}
    assert said["tokens"] == estimate_tokens(here) > 0
    assert said["left_out"] == []


async def test_a_model_s_call_goes_back_by_name_and_hash(bus: Bus, http: httpx.AsyncClient) -> None:
    said = await exported(http)
    (wire,) = (wire for wire, name in said["names"].items() if name == "weather.now")
    assert wire == "weather_now"
    name = said["names"][wire]
    called = await invoke(http, name, {"city": "Oslo"}, schema_hash=said["hashes"][name])
    assert called["output"] == "Oslo"

    @bus.tool(name="weather.now")  # type: ignore[untyped-decorator]
    def weather(city: str, day: str) -> str:
        """Tells the weather of a day."""
        return city + day

    called = await invoke(http, name, {"city": "Oslo"}, schema_hash=said["hashes"][name])
    assert called["error"]["code"] == "CATALOG_STALE"
    assert (await exported(http))["hashes"][name] != said["hashes"][name]


async def test_names_select_tools_and_unknown_names_are_listed(http: httpx.AsyncClient) -> None:
    for names in ("weather.now,add", ["add", "weather.now"], "add,,weather.now,"):
        said = await exported(http, names=names)
        assert list(said["hashes"]) == ["add", "weather.now"]  # in the order of the catalog
    assert list((await exported(http, names="a,b"))["hashes"]) == ["a,b"]  # a name that holds a comma
    assert list((await exported(http, names=""))["hashes"]) == NAMES
    said = await exported(http, names="add,missing")
    assert list(said["hashes"]) == ["add"]
    assert said["left_out"] == [{"tool": "missing", "why": "no tool of this name is offered to this user"}]


async def test_what_cannot_be_expressed_is_left_out_and_losses_are_listed(bus: Bus, http: httpx.AsyncClient) -> None:
    body = {"name": "deep", "callback_url": CALLBACK, "parameters": {"$ref": "#/$defs/gone"}}
    await http.post("/api/tools/register", json=body)
    schema = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 3}}}
    await http.post("/api/tools/register", json={**body, "name": "lossy", "parameters": schema})
    said = await exported(http, "gemini-live")
    here = find_dialect("gemini-live").export(listing.tool for listing in bus.list())
    assert [each["tool"] for each in said["left_out"]] == [each.tool for each in here.left_out]
    assert [(each["tool"], each["keyword"]) for each in said["losses"]] == [
        (each.tool, each.keyword) for each in here.losses
    ]
    assert ("lossy", "multipleOf") in [(each["tool"], each["keyword"]) for each in said["losses"]]


async def test_only_a_configured_role_can_be_exported(http: httpx.AsyncClient) -> None:
    assert list((await exported(http, role="default"))["hashes"]) == ["add", "weather.now", "天気"]
    answer = await http.get(PATH, params={"dialect": "openai", "role": "nobody"})
    assert (answer.status_code, answer.json()) == (404, {"detail": "unknown role: nobody"})


async def test_an_unknown_dialect_is_refused_with_a_list_of_dialects(http: httpx.AsyncClient) -> None:
    answer = await http.get(PATH, params={"dialect": "klingon"})
    assert answer.status_code == 422
    (problem,) = answer.json()["detail"]
    assert problem["loc"] == ["query", "dialect"]
    assert problem["input"] == "klingon"
    assert all(name in problem["msg"] for name in ("'klingon'", *DIALECTS))
    answer = await http.get(PATH)
    assert (answer.status_code, answer.json()["detail"][0]["type"]) == (422, "missing")


async def test_what_is_known_is_not_sent_again_until_it_changes(bus: Bus, http: httpx.AsyncClient) -> None:
    async def status(known: str, **query: str) -> int:
        answer = await http.get(PATH, params={"dialect": "openai", **query}, headers={"If-None-Match": known})
        assert (answer.content == b"") == (answer.status_code == 304)
        assert answer.headers["cache-control"] == "no-cache"
        return answer.status_code

    etag = (await http.get(PATH, params={"dialect": "openai"})).headers["etag"]
    assert etag == (await http.get(PATH, params={"dialect": "openai"})).headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        assert await status(known) == 304
    assert await status('"other"') == 200
    for query in ({"dialect": "mcp"}, {"role": "default"}, {"user_id": "ann"}, {"names": "add"}):
        assert await status(etag, **query) == 200
    bus.permit("tools", "add", ["ann"])
    assert await status(etag) == 200


async def test_an_export_is_written_once_per_revision_and_few_are_cached(
    bus: Bus, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = export_routes._Writer.write

    def noting(writer: Any, view: Any, revision: int) -> bytes:
        written.append(revision)
        return write(writer, view, revision)

    monkeypatch.setattr(export_routes._Writer, "write", noting)
    for _ in range(3):
        await exported(http)
    assert len(written) == 1
    bus.remove_tool("add")
    assert "add" not in (await exported(http))["hashes"]
    assert len(written) == 2
    for number in range(export_routes.MAX_EXPORTS):
        await exported(http, names=f"n{number}")
    before = len(written)
    await exported(http)  # made way for newer ones
    await exported(http, names=f"n{export_routes.MAX_EXPORTS - 1}")  # did not
    assert len(written) == before + 1


async def test_a_change_of_one_tool_converts_one_tool(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[str] = []
    kind = type(find_dialect("openai"))
    convert = kind._convert

    def noting(self: Any, tool: Tool) -> Any:
        converted.append(tool.name)
        return convert(self, tool)

    monkeypatch.setattr(kind, "_convert", noting)
    async with client(bus) as http:
        await exported(http)
        assert converted == NAMES
        bus.remove_tool("add")
        await exported(http)
        assert converted == NAMES


# -- search ----------------------------------------------------------------------------------------------------------


async def found(http: httpx.AsyncClient, q: str, **query: Any) -> dict[str, Any]:
    answer = await http.get("/api/tools/search", params={"q": q, **query})
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    FoundTools.model_validate(said)
    return said


async def test_search_answers_as_the_index_does(bus: Bus, http: httpx.AsyncClient) -> None:
    said = await found(http, "numbers", mode="bm25")
    assert list(said) == ["success", "mode", "fallback", "query", "result_count", "results"]
    (tool,) = said["results"]
    assert list(tool) == ["name", "description", "score"]
    assert (said["mode"], tool["name"]) == ("bm25", "add")
    (tool,) = (await found(http, "numbers", mode="bm25", include_parameters="true"))["results"]
    assert list(tool["parameters"]["properties"]) == ["a", "b"]
    assert (await found(http, "a", mode="keyword", top_k=1))["result_count"] == 1
    assert (await found(http, "oddly", mode="bm25", role="default"))["result_count"] == 1
    bus.remove_tool("add")
    assert (await found(http, "numbers", mode="bm25"))["results"] == []


@pytest.mark.parametrize(("embedder", "default"), [(concepts, "hybrid"), (False, "bm25")])
async def test_http_and_the_tool_of_the_bus_search_in_the_same_modes(embedder: EmbedderChoice, default: str) -> None:
    async with running_bus(http="127.0.0.1:0", offered=("search",), embedder=embedder) as bus:
        bus.tool(lambda: 1, name="get_weather", description="Current conditions at a place.")
        (listed,) = (each.tool for each in bus.list() if each.tool.name == "search_tools")
        assert listed.parameters["properties"]["mode"]["default"] == default
        async with httpx.AsyncClient(base_url=f"http://{bus.http_address}", verify=False, timeout=WAIT_SECONDS) as http:
            for mode in ("", *MODES):
                arguments = {"query": "umbrella", "mode": mode}
                over_http = await found(http, "umbrella", mode=mode)
                assert (await bus.call("search_tools", arguments)).unwrap() == over_http
                assert over_http["success"] == (mode in ("", *listed.parameters["properties"]["mode"]["enum"]))
                assert over_http["mode"] == (mode if over_http["success"] and mode else default if not mode else "bm25")
                by_meaning = embedder and mode in ("", "semantic", "hybrid")
                assert [each["name"] for each in over_http["results"]][:1] == (["get_weather"] if by_meaning else [])


async def test_the_search_of_the_bus_refuses_what_it_cannot_read_with_the_rule() -> None:
    async with running_bus() as bus:
        for arguments, rule in (({"query": 5}, "be a string"), ({"query": "a", "top_k": "x"}, "be an integer")):
            result = await bus.call("toolbus:search_tools", arguments)
            assert result.error is not None
            assert rule in result.error.message


async def test_an_unknown_mode_is_an_error_with_a_list_of_modes(http: httpx.AsyncClient) -> None:
    said = await found(http, "a", mode="magic")
    assert (said["success"], said["results"]) == (False, [])
    assert "'magic'" in said["error"]
    assert "bm25, keyword, semantic" in said["error"]


async def test_search_needs_a_query_and_a_configured_role(http: httpx.AsyncClient) -> None:
    assert (await http.get("/api/tools/search")).status_code == 422
    assert (await http.get("/api/tools/search", params={"q": "a", "role": "x"})).status_code == 404
