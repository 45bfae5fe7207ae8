"""Tests what MCP clients of other machines are told about the issuers of their tokens."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from toolbus.bus.access.neighbours import Neighbours
from toolbus.bus.audit import Audit
from toolbus.bus.calls.call import Seams
from toolbus.bus.gateway.access import AccessGuard
from toolbus.bus.gateway.remote_access import WELL_KNOWN, RemoteAccess, ResourceMetadata
from toolbus.bus.keys.doorman import Doorman
from toolbus.bus.web_paths import WebPaths

LOGIN = "https://login.example"


async def _application(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("no request without a key reaches an application")


def _client(issuers: list[str]) -> httpx.AsyncClient:
    remote = RemoteAccess(Doorman(None), ResourceMetadata(issuers), WebPaths())
    guard: Any = AccessGuard(_application, 1024, Neighbours(), remote, Audit(), Seams())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=guard), base_url="https://bus.example:48912")


@pytest.fixture
def client() -> httpx.AsyncClient:
    return _client([LOGIN, "machine-made"])


@pytest.mark.parametrize("path", ["/mcp", "/mcp/work"])
async def test_an_mcp_client_without_a_token_gets_the_names_of_the_issuers(
    client: httpx.AsyncClient, path: str
) -> None:
    refused = await client.post(path, json={})
    assert refused.status_code == 401
    url = f"https://bus.example:48912{WELL_KNOWN}{path}"
    assert refused.headers["www-authenticate"] == f'Bearer resource_metadata="{url}"'
    document = (await client.get(url)).json()
    assert document["resource"] == f"https://bus.example:48912{path}"
    assert document["authorization_servers"] == [LOGIN]
    assert document["bearer_methods_supported"] == ["header"]


async def test_other_paths_are_refused_as_before(client: httpx.AsyncClient) -> None:
    for path in ("/api/tools", "/mcpx", '/mcp/a"b', "/mcp/a/b"):
        assert (await client.get(path)).headers["www-authenticate"] == "Bearer"
        assert (await client.get(WELL_KNOWN + path)).status_code == 401
    assert (await client.post(f"{WELL_KNOWN}/mcp")).status_code == 401


async def test_a_host_that_is_not_an_address_is_not_repeated(client: httpx.AsyncClient) -> None:
    for host in ('a"b', "a b", "a/b", "a@b"):
        refused = await client.post("/mcp", headers={"Host": host})
        assert refused.headers["www-authenticate"] == "Bearer"


async def test_without_an_issuer_there_is_nothing_to_tell() -> None:
    client = _client(["machine-made"])
    assert (await client.post("/mcp")).headers["www-authenticate"] == "Bearer"
    assert (await client.get(f"{WELL_KNOWN}/mcp")).status_code == 401
