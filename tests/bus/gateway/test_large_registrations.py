"""Tools with a callback URL whose schemas are large: they are compiled on a thread, and judged as any other."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from toolbus.bus import Bus, Config
from toolbus.bus.catalog.entry import CompiledTool
from toolbus.bus.gateway import gateway_parts, registrations, tool_routes
from toolbus.bus.gateway.registrations import compile_by_rest
from toolbus.protocol.limits import Limits
from toolbus.protocol.tool import Tool


def body(properties: int, **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(properties)}}
    url = "http://127.0.0.1:9/call"
    return {"name": "t", "description": "-", "parameters": schema, "callback_url": url, "source": "p", **more}


@pytest.mark.parametrize(("properties", "beside"), [(3, False), (600, True)])
async def test_a_large_schema_is_compiled_on_a_thread(
    properties: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []

    def compiled(tool: Tool, limits: Limits) -> CompiledTool:
        threads.append(threading.current_thread() is not threading.main_thread())
        return compile_by_rest(tool, limits)

    def made(**fields: Any) -> Tool:
        threads.append(threading.current_thread() is not threading.main_thread())
        return Tool(**fields)

    monkeypatch.setattr(tool_routes, "Tool", made)
    for module in (registrations, gateway_parts):
        monkeypatch.setattr(module, "compile_by_rest", compiled)
    async with (
        Bus(Config(grpc=("127.0.0.1:0",), http="127.0.0.1:0")) as bus,
        httpx.AsyncClient(base_url=f"http://{bus.http_address}") as web,
    ):
        answers = await asyncio.gather(*(web.post("/api/tools/register", json=body(properties)) for _ in range(3)))
        assert [answer.json()["ok"] for answer in answers] == [True] * 3
        wrong = await web.post("/api/tools/register", json=body(properties, role="nobody"))
        assert wrong.status_code == 404
        assert [each.entry.name for each in bus.list()] == ["t"]
    assert set(threads) == {beside}
