"""Tests what `/metrics` tells of a bus: how calls, tools, sessions and keys are, and nothing of arguments and users."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.bus.keys.keys_directory import KeysDirectory
from tests.support.waiting import WAIT_SECONDS, until
from toolbus import Host, Plugin
from toolbus.bus import Bus, Config
from toolbus.bus.access.identity import Scopes
from toolbus.bus.metrics.call_counts import MAX_COUNTED
from toolbus.functions.call_context import CallContext
from toolbus.parts.identity.scope_texts import template
from toolbus.parts.observability.exposition import OPENMETRICS, TEXT, write
from toolbus.parts.observability.metrics_room import BusMetrics
from toolbus.testing import running_bus

Values = dict[tuple[str, ...], float]
CANARY = "canary-5d1f"


async def scrape(bus: Bus, accept: str = OPENMETRICS) -> httpx.Response:
    async with httpx.AsyncClient(
        base_url=f"http://{bus.http_address}", verify=False, trust_env=False, timeout=WAIT_SECONDS
    ) as http:
        return await http.get("/metrics", headers={"accept": accept})


def read(text: str) -> dict[str, Values]:
    """Returns the samples by name, and by the values of their labels."""
    found: dict[str, Values] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


async def test_a_scrape_shows_the_calls_that_ended() -> None:
    async with running_bus(http="127.0.0.1:0", grace_seconds=0.0) as bus:
        plugin = Plugin("p", address=bus.grpc_addresses[0])

        @plugin.tool
        def add(a: int, b: int) -> int:
            return a + b

        @plugin.tool
        def fail() -> None:
            raise ValueError("no")

        async with plugin, Host(bus.grpc_addresses[0]) as host:
            await plugin.ready()
            for _ in range(3):
                assert (await host.call("add", {"a": 1, "b": 2})).output == 3
            await host.call("fail")
            await host.call("add", {"a": "x"})
            await host.call("no-such-tool")
            answer = await scrape(bus)
            assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
            values = read(answer.text)
    calls = values["toolbus_calls_total"]
    assert calls["p", "add", "OK"] == 3
    assert calls["p", "add", "INVALID_ARGUMENTS"] == 1
    assert calls["p", "fail", "TOOL"] == 1
    assert calls["", "unknown", "NOT_FOUND"] == 1
    assert values["toolbus_call_duration_seconds_count"]["p", "add"] == 3
    assert values["toolbus_call_duration_seconds_bucket"]["p", "add", "128.0"] == 3
    assert 0 < values["toolbus_call_duration_seconds_sum"]["p", "add"] < 60
    assert values["toolbus_refused_total"] == {("INVALID_ARGUMENTS",): 1, ("NOT_FOUND",): 1}
    assert values["toolbus_sessions"]["attached",] == 2
    assert values["toolbus_source_up"]["p",] == 1
    assert values["toolbus_tools"]["offered",] > 2
    assert values["toolbus_frames_total"]["in",] >= 6
    assert values["toolbus_frame_items_total"]["out",] >= 8
    assert values["process_resident_memory_bytes"][()] > 1e6
    assert abs(values["process_start_time_seconds"][()] - time.time()) < 1e6


async def test_text_is_written_for_who_prefers_it() -> None:
    async with running_bus(http="127.0.0.1:0") as bus:
        answer = await scrape(bus, "text/plain")
        assert answer.headers["content-type"] == TEXT
        assert "# EOF" not in answer.text
        async with httpx.AsyncClient(
            base_url=f"http://{bus.http_address}", trust_env=False, verify=False, timeout=WAIT_SECONDS
        ) as http:
            head = await http.head("/metrics")
            assert (head.status_code, head.content, int(head.headers["content-length"]) > 1_000) == (200, b"", True)
            assert (await http.post("/metrics")).status_code == 405
            assert (await http.get("/metrics/x")).status_code == 404


async def test_without_metrics_there_is_no_path() -> None:
    async with running_bus(http="127.0.0.1:0", metrics=False) as bus:
        assert (await scrape(bus)).status_code == 404


async def test_metrics_show_no_arguments_outputs_and_users() -> None:
    async with (
        running_bus(http="127.0.0.1:0", record_contents=True, grace_seconds=0.0) as bus,
        Host(bus.grpc_addresses[0]) as host,
    ):

        @bus.tool
        def echo(text: str) -> str:
            if text.endswith("!"):
                raise ValueError(text)
            return text

        context = CallContext(user_id=CANARY, attributes={"note": CANARY})
        for text in (CANARY, f"{CANARY}!"):
            await host.call("echo", {"text": text}, context=context)
        await host.call("echo", {CANARY: 1}, context=context)
        await host.call(CANARY, {}, context=context)
        assert bus.records.ended >= 4
        for accept in (OPENMETRICS, TEXT):
            assert CANARY not in (await scrape(bus, accept)).text


def _with_one_tool(bus: Bus) -> Plugin:
    plugin = Plugin("p", address=bus.grpc_addresses[0])
    plugin.add_tool(abs_of)
    return plugin


def abs_of(number: int) -> int:
    return abs(number)


async def test_metrics_show_neither_sources_that_drained_nor_hosts() -> None:
    async with running_bus(http="127.0.0.1:0") as bus, Host(bus.grpc_addresses[0]):
        async with _with_one_tool(bus) as plugin:
            await plugin.ready()
            assert set(read((await scrape(bus)).text)["toolbus_source_up"]) == {("p",), ("toolbus",)}
        await until(lambda: "p" not in bus.core.sessions.presence.by_source, "the end of the session")
        assert ("p",) not in read((await scrape(bus)).text)["toolbus_source_up"]


async def test_a_source_that_was_lost_is_down_until_it_is_back() -> None:
    async with running_bus(http="127.0.0.1:0", grace_seconds=0.0) as bus:
        presence = bus.core.sessions.presence
        async with _with_one_tool(bus) as plugin:
            await plugin.ready()
            presence.draining = True  # no session can attach
            presence.end(next(iter(presence.by_source["p"].values())), "it is lost", time.monotonic())
            await until(lambda: "p" in presence.lost, "the end of the grace period")
            assert read((await scrape(bus)).text)["toolbus_source_up"]["p",] == 0
            presence.draining = False
            await until(lambda: "p" in presence.by_source, "the plugin to come back")
            assert read((await scrape(bus)).text)["toolbus_source_up"]["p",] == 1


async def test_metrics_show_the_calls_of_identities_and_when_their_keys_end(tmp_path: Path) -> None:
    keys = KeysDirectory(tmp_path, time.time())
    chat = keys.add("chat", template("host", "chat"))
    reader = keys.add("prometheus", Scopes(administer=frozenset({"metrics"})))
    config = Config(grpc=("127.0.0.1:0",), http="off", https="127.0.0.1:0", keys=keys.path)
    async with Bus(config) as bus:

        @bus.tool
        def add(a: int, b: int) -> int:
            return a + b

        async with httpx.AsyncClient(
            base_url=f"https://{bus.https_address}", verify=False, trust_env=False, timeout=WAIT_SECONDS
        ) as http:
            body = {"name": "add", "arguments": {"a": 1, "b": 2}}
            for _ in range(2):
                answer = await http.post("/api/tools/invoke", json=body, headers=bearer(chat))
                assert answer.status_code == 200
            assert (await http.get("/metrics", headers=bearer(chat))).status_code == 403
            assert (await http.get("/metrics")).status_code == 401
            values = read((await http.get("/metrics", headers=bearer(reader))).text)
    assert values["toolbus_identity_calls_total"] == {("chat",): 2}
    assert values["toolbus_identity_limited_total"] == {("chat",): 0}
    assert 0 < values["toolbus_key_expires_seconds"]["chat",] < 400 * 86_400


def bearer(credential: dict[str, Any]) -> dict[str, str]:
    return {"authorization": f"Bearer {credential['token']}"}


# -- how much it may cost --------------------------------------------------------------------------------------------


def _least(bus: Bus, times: int = 7) -> tuple[float, bytes]:
    """Returns the least CPU time of this thread that a scrape takes, and what it gives."""
    metrics, body, least = BusMetrics(bus.core, lambda: 0), b"", 1e9
    for _ in range(times):
        began = time.thread_time()
        body = write(metrics.families(), OPENMETRICS)
        least = min(least, time.thread_time() - began)
    return least, body


def _called(bus: Bus, tools: int) -> None:
    for number in range(tools):
        counts = bus.core.calls.metrics.take("p", f"tool-with-a-name-{number}")
        counts.add_run([0.001 * number, 0.5, 0.9], 1.0 + 0.01 * number)
        counts.add(8, 1.0, 0.5)


def test_a_hundred_thousand_tools_are_scraped_in_a_megabyte_at_most() -> None:
    bus = Bus(Config(grpc=("127.0.0.1:0",), http="off"))
    _called(bus, 100_000)
    assert len(bus.core.calls.metrics) == MAX_COUNTED
    seconds, body = _least(bus)
    assert len(body) <= 1_000_000
    assert seconds <= 0.2  # 20 ms on a quiet machine, see lab/results
    values = read(body.decode())["toolbus_calls_total"]
    assert len({labels[:2] for labels in values}) == 201
    assert sum(values.values()) == 400_000


def test_every_tool_that_a_plugin_may_name_reads_back() -> None:
    bus = Bus(Config(grpc=("127.0.0.1:0",), http="off"))
    names = ['"} 1\n# EOF', "a\\", "# TYPE x counter", 'x{y="z"}', "é\u2028"]
    for name in names:
        bus.core.calls.metrics.take("p", name).add_one(0.0, 1.0)
    values = read(_least(bus, 1)[1].decode())["toolbus_calls_total"]
    assert values == {("p", name, "OK"): 1 for name in names}


# -- the page --------------------------------------------------------------------------------------------------------

ROW = re.compile(r"^- `(\w+)` \((\w+)[;)]", re.MULTILINE)


@pytest.fixture(scope="module")
def page() -> str:
    return (Path(__file__).parents[3] / "docs/start/metrics.md").read_text("utf-8")


def test_the_page_has_every_metric_with_its_kind(page: str) -> None:
    bus = Bus(Config(grpc=("127.0.0.1:0",), http="off", issuers=()))
    bus.core.calls.metrics.take("p", "t").add_one(0.0, 1.0)
    suffixes = {"counter": "_total", "info": "_info"}
    families = {
        each.name + suffixes.get(each.kind, ""): each.kind for each in BusMetrics(bus.core, lambda: 0).families()
    }
    rows = dict(ROW.findall(page))
    # Of a bus with keys, and of one that shares its settings.
    assert rows == families | dict.fromkeys(("toolbus_key_expires_seconds", "toolbus_settings_age_seconds"), "gauge")
