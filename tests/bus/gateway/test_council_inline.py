"""Inline councils over HTTP: a main model is offered the members' tools, and calls them on behalf of a member."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.bus.gateway.calling import client
from toolbus.bus import Bus
from toolbus.dialects import find_dialect
from toolbus.sdk import Extension, ToolScope
from toolbus.testing import running_bus

ADA = {"id": "m1", "name": "Ada", "tools": ["ext:look", "ext:gone"], "role": "Archivist"}
BOB = {"id": "m2", "name": "Bob", "tools": ["ext:look"]}
MESSAGES = [{"role": "user", "content": "Who is there?"}]


@pytest_asyncio.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with running_bus(http="127.0.0.1:0") as bus, _extension(bus) as extension, client(bus) as http:
        await extension.ready()
        yield http


def _extension(bus: Bus) -> Extension:
    extension = Extension("ext", address=bus.grpc_addresses[0])

    @extension.tool(council_eligible=True)
    def look(where: str, scope: ToolScope) -> dict[str, Any]:
        """Looks somewhere."""
        member: Any = scope.context.member
        return {"where": where, "member": member and member["name"], "said": scope.context.messages[-1].content}

    @extension.tool(inline_available=True)
    def wave() -> str:
        """Waves."""
        return ""

    return extension


async def post(http: httpx.AsyncClient, path: str = "inline", **body: Any) -> dict[str, Any]:
    answer = await http.post(f"/api/council/{path}", json={"members": [ADA, BOB], "messages": MESSAGES, **body})
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


async def test_each_tool_is_offered_once_for_each_member_and_called_on_its_behalf(http: httpx.AsyncClient) -> None:
    offer = await post(http)
    of = {(target["tool"], target["member_name"]): name for name, target in offer["names"].items()}
    assert set(of) == {("ext:look", "Ada"), ("ext:look", "Bob"), ("ext:wave", "")}
    assert [tool["function"]["name"] for tool in offer["tools"]] == list(offer["names"])
    assert offer["missing"] == [{"memberId": "m1", "toolName": "ext:gone"}]
    for member in ("Ada", "Bob"):
        name = of["ext:look", member]
        hashed = offer["names"][name]["schema_hash"]
        result = await post(http, "inline/invoke", name=name, arguments='{"where": "door"}', schema_hash=hashed)
        assert result["output"] == {"where": "door", "member": member, "said": "Who is there?"}
    assert (await post(http, "inline/invoke", name=of["ext:wave", ""]))["output"] == "(empty result)"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"name": "m1_ext_look", "arguments": {"where": 5}}, "NOT_FOUND"),
        ({"name": "wrong", "arguments": {}}, "NOT_FOUND"),
        ({"name": "NAME", "arguments": {"what": 5}}, "INVALID_ARGUMENTS"),
        ({"name": "NAME", "arguments": {"where": "x"}, "schema_hash": "0" * 16}, "CATALOG_STALE"),
    ],
)
async def test_an_error_of_a_call_is_an_answer(http: httpx.AsyncClient, body: dict[str, Any], code: str) -> None:
    if body["name"] == "NAME":
        names = (await post(http))["names"]
        body = {**body, "name": next(name for name, target in names.items() if target["member_id"] == "m1")}
    elif body["name"] == "m1_ext_look":
        body = {**body, "members": []}  # it was offered with other members
    result = await post(http, "inline/invoke", **body)
    assert result["is_error"]
    assert result["error"]["code"] == code


@pytest.mark.parametrize("name", ["openai", "openai-responses", "anthropic", "gemini", "ollama"])
async def test_names_are_those_that_the_dialect_accepts(http: httpx.AsyncClient, name: str) -> None:
    offer = await post(http, dialect=name)
    accepts = find_dialect(name).name_rule.accepts
    assert len(offer["tools"]) == 3
    assert all(map(accepts, offer["names"]))


@pytest.mark.parametrize(
    ("body", "loc"),
    [
        ({"dialect": "mcp"}, ["body", "dialect"]),
        ({"members": [ADA, ADA]}, ["body", "members"]),
        ({"settings": {"timeoutMs": "soon"}}, ["body", "settings"]),
    ],
)
async def test_a_body_that_breaks_a_rule_is_refused_with_its_place(
    http: httpx.AsyncClient, body: dict[str, Any], loc: list[str]
) -> None:
    answer = await http.post("/api/council/inline", json=body)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"][: len(loc)] == loc
