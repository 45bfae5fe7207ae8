"""How old the settings are, as operators see it: in `toolbus buses`, at /metrics and in health."""

from __future__ import annotations

import asyncio
import json

import httpx

from tests.support.processes import toolbus
from tests.support.waiting import WAIT_SECONDS
from toolbus.testing import running_bus


async def test_buses_metrics_and_health_tell_the_age(url: str) -> None:
    async with running_bus(unix=True, storage=url, http="127.0.0.1:0") as bus, running_bus(unix=True) as alone:
        addresses = f"{bus.grpc_addresses[0]},{alone.grpc_addresses[0]}"
        ended = await asyncio.to_thread(toolbus, "buses", "--bus", addresses, "--json")
        ages = [row["settings_age"] for row in json.loads(ended.stdout)["buses"]]
        assert isinstance(ages[0], float)
        assert ages[1] is None
        shown = (await asyncio.to_thread(toolbus, "buses", "--bus", addresses)).stdout.splitlines()
        assert "SETTINGS" in shown[0]
        assert "s old" in shown[1]
        assert "own" in shown[2]
        async with httpx.AsyncClient(timeout=WAIT_SECONDS) as web:
            text = (await web.get(f"http://{bus.http_address}/metrics")).text
        assert "\ntoolbus_settings_age_seconds " in text
