"""The contract's own cases over a running bus: one scenario a line, steps in order, state carries over.

They cover what no other file cites: the answers of unregister (REST-6) and of clear (REST-7).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.waiting import WAIT_SECONDS
from toolbus.testing import running_bus

VECTORS = Path(__file__).parents[2] / "vectors" / "rest.jsonl"
SCENARIOS = [json.loads(line) for line in VECTORS.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each["scenario"])
async def test_every_step_of_the_contract_is_answered_as_written(scenario: dict[str, Any]) -> None:
    async with (
        running_bus(http="127.0.0.1:0", roles=tuple(scenario["roles"])) as bus,
        httpx.AsyncClient(
            base_url=f"http://{bus.http_address}", verify=False, trust_env=False, timeout=WAIT_SECONDS
        ) as client,
    ):
        for step in scenario["steps"]:
            headers = {"Content-Type": step["content_type"]} if step["content_type"] else {}
            answer = await client.request(step["method"], step["path"], content=step["body"].encode(), headers=headers)
            assert answer.status_code == step["status"], (step["id"], answer.text)
            assert answer.headers["content-type"] == "application/json"  # REST-1
            if "response" in step:
                assert answer.json() == step["response"], step["id"]
            if "errors" in step:
                found = answer.json()["detail"]
                places = [error["loc"] for error in found]
                if step.get("match") == "prefix":
                    places = [place[: len(wanted)] for place, wanted in zip(places, step["errors"], strict=True)]
                assert places == step["errors"], step["id"]
                assert "types" not in step or [error["type"] for error in found] == step["types"], step["id"]
