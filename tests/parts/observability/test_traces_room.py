"""Tests of a running bus that exports spans: which calls, what they say, and what never leaves it."""

from __future__ import annotations

import builtins
import importlib.util
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.collector import collector
from toolbus import Host, Plugin
from toolbus.bus.config import Config
from toolbus.bus.serve_settings import settle
from toolbus.errors import SetupError
from toolbus.functions.call_context import CallContext
from toolbus.parts.observability.settings import TraceSettings
from toolbus.protocol.limits import Timings
from toolbus.testing import running_bus

QUICK = Timings(span_seconds=0.01)
CANARY = "canary-5f3a"


async def test_arguments_outputs_errors_and_users_are_in_no_span() -> None:
    def buy(card: str, fails: bool = False) -> str:
        if fails:
            raise ValueError(f"no card {card}")
        return card

    with collector() as seen:
        async with running_bus(traces=seen.url, trace_ratio=1.0, timings=QUICK) as bus:
            address, context = bus.grpc_addresses[0], CallContext(user_id=CANARY, attributes={"a": CANARY})
            async with Plugin("shop", address=address) as plugin, Host(address) as host:
                plugin.tool(buy)
                await plugin.ready()
                await host.call("buy", {"card": CANARY}, context=context)
                await host.call("buy", {"card": CANARY, "fails": True})
                await host.call("buy", {"card": [CANARY]})
            spans = await seen.wait(3)
    assert [span.attributes.get("error.type") for span in spans] == [None, "TOOL", "INVALID_ARGUMENTS"]
    assert CANARY.encode() not in b"".join(seen.raw)


async def test_a_bus_without_a_collector_traces_nothing_and_says_that_a_ratio_is_idle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_bus(trace_ratio=1.0) as bus:
        assert repr(bus.dispatcher.traces).endswith("off>")
    assert "trace_ratio has no effect" in caplog.text


async def test_calls_go_on_while_the_collector_stands_still() -> None:
    with collector() as seen:
        seen.held.clear()
        async with running_bus(traces=seen.url, trace_ratio=1.0, trace_most=100_000, timings=QUICK) as bus:

            @bus.tool
            def add(a: int, b: int) -> int:
                return a + b

            async with Host(bus.grpc_addresses[0]) as host:
                results = [await host.call_many([("add", {"a": 1, "b": 2})] * 100) for _ in range(20)]
                assert {result.output for batch in results for result in batch} == {3}
                assert (seen.spans, bus.dispatcher.traces.refused) == ([], 0)
            seen.held.set()


async def test_the_spans_of_the_last_calls_are_exported_when_the_bus_stops() -> None:
    with collector() as seen:
        async with running_bus(traces=seen.url, trace_ratio=1.0) as bus:

            @bus.tool
            def add(a: int, b: int) -> int:
                return a + b

            await bus.call("add", {"a": 1, "b": 2})
        assert [(span.name, span.attributes["toolbus.source"]) for span in seen.spans] == [("dispatch add", "local")]


async def test_without_the_extra_a_bus_that_is_to_trace_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *more: Any, **named: Any) -> Any:
        if name.startswith(("opentelemetry", "toolbus.parts.observability.span_export")):
            raise ModuleNotFoundError(f"No module named {name!r}", name="opentelemetry.sdk")
        return real(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(SetupError, match=r"opentelemetry.sdk is not installed: install 'toolbus\[otel\]'"):
        async with running_bus(traces="http://127.0.0.1:1"):
            pass


# -- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("traces", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("https://otel.example/", "https://otel.example/v1/traces"),
        ("http://127.0.0.1:4318/otlp/traces", "http://127.0.0.1:4318/otlp/traces"),
    ],
)
def test_the_path_of_a_collector_is_added_where_its_address_has_none(traces: str, url: str) -> None:
    assert Config(traces=traces).part(TraceSettings).url == url


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, "http://c:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/otlp/"}, "http://c:4318/otlp/v1/traces"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:2/x"},
            "http://t:2/x",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "TOOLBUS_TRACES": "off"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "TOOLBUS_TRACES": "http://d:1"}, "http://d:1/v1/traces"),
    ],
)
def test_variables_of_opentelemetry_name_the_collector_where_ours_do_not(environ: Mapping[str, str], url: str) -> None:
    assert settle({}, environ).config.part(TraceSettings).url == url


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, "OTEL_EXPORTER_OTLP_ENDPOINT is 'collector:4317'"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "grpc://c:1"}, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is 'grpc://c:1'"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://u:hunter2@h:99999"}, r"'http://u:***@h:99999'"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'",
        ),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
            },
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'grpc'",
        ),
        ({"MAIN_SERVER_PORT": "tcp://10.0.0.1:80"}, "MAIN_SERVER_PORT: port 'tcp://10.0.0.1:80'"),
    ],
)
def test_a_variable_of_other_programs_that_the_bus_cannot_use_is_named_and_ignored(
    environ: Mapping[str, str], says: str
) -> None:
    settings = settle({}, environ)
    assert settings.config.part(TraceSettings).traces is None
    assert len(settings.ignored) == 1
    assert says in settings.ignored[0]


def test_without_the_extra_a_variable_of_other_programs_starts_a_bus_that_does_not_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec

    def missing(name: str, package: str | None = None) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="opentelemetry")
        return find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", missing)
    settings = settle({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"})
    assert settings.config.part(TraceSettings).traces is None
    assert "install 'toolbus[otel]'" in settings.ignored[0]
    assert (
        settle({}, {"TOOLBUS_TRACES": "http://c:4318"}).config.part(TraceSettings).traces == "http://c:4318"
    )  # refused when it starts


async def test_other_variables_of_opentelemetry_that_are_wrong_do_not_stop_the_bus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "nobody")
    async with running_bus(traces="http://127.0.0.1:1") as bus:
        assert repr(bus.dispatcher.traces).endswith("off>")
    assert "the exporter does not start with OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER" in caplog.text


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"traces": "127.0.0.1:4318"}, "is not http://HOST:PORT"),
        ({"traces": "ftp://h:1"}, "is not http://HOST:PORT"),
        ({"traces": "http://u:hunter2@h:99999"}, r"http://u:\*\*\*@h"),
        ({"traces": "http://h:1/?q=1"}, "is not http://HOST:PORT"),
        ({"trace_ratio": 1.5}, "trace_ratio is 1.5, it must be from 0"),
        ({"trace_ratio": float("nan")}, "trace_ratio is nan"),
        ({"trace_most": 0}, "trace_most is 0, it must be at least 1"),
    ],
)
def test_settings_of_traces_that_break_a_rule_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SetupError, match=says):
        Config(**settings)
